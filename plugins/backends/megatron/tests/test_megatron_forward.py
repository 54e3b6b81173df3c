"""Log-probabilities over a divided vocabulary, how rows are cut, and what stands in for CUDA on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron_world import run_world
from rpeg_plugin_megatron.cpu import as_if_cuda
from rpeg_plugin_megatron.device import choose_device
from rpeg_plugin_megatron.forward import Rows, microbatches_of, trimmed
from rpeg_plugin_megatron.logprobs import token_logprobs

from rpeg_core.errors import BackendError, ExecutionError

VOCABULARY, TEMPERATURE = 12, 0.6


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 4, VOCABULARY, generator=generator, dtype=torch.float64) + 100
    targets = torch.randint(0, VOCABULARY, (3, 4), generator=generator)
    weights = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    return logits, targets, weights[0], weights[1]


def _divided(rank: int, world: int) -> tuple[torch.Tensor, ...]:
    logits, targets, of_logprobs, of_entropy = _inputs()
    share = VOCABULARY // world
    ours = logits[..., rank * share : (rank + 1) * share].float().requires_grad_()
    logprobs, entropy = token_logprobs(ours, targets, dist.group.WORLD, temperature=TEMPERATURE, entropy=True)
    assert entropy is not None
    ((logprobs * of_logprobs.float()).sum() + (entropy * of_entropy.float()).sum()).backward()
    assert ours.grad is not None
    alone, none = token_logprobs(ours, targets, dist.group.WORLD, temperature=TEMPERATURE)
    assert none is None
    (gradient,) = torch.autograd.grad(alone.sum(), ours)
    return logprobs.detach(), entropy.detach(), ours.grad, gradient


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_logprobs_entropies_and_gradients_equal_those_of_torch(ranks: int) -> None:
    logits, targets, of_logprobs, of_entropy = _inputs()
    logits.requires_grad_()
    log_softmax = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    logprobs = log_softmax.gather(-1, targets[..., None]).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    (gradient,) = torch.autograd.grad(
        (logprobs * of_logprobs).sum() + (entropy * of_entropy).sum(), logits, retain_graph=True
    )
    (of_sum,) = torch.autograd.grad(logprobs.sum(), logits)
    results = run_world(_divided, ranks)
    for result in results:
        torch.testing.assert_close(result[0].double(), logprobs.detach(), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(result[1].double(), entropy.detach(), atol=1e-4, rtol=1e-5)
    for index, expected in ((2, gradient), (3, of_sum)):
        found = torch.cat([result[index] for result in results], dim=-1)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_rows_are_cut_into_equal_microbatches() -> None:
    tokens = torch.arange(12).reshape(6, 2)
    rows = Rows(tokens, tokens > 3, prompt_tokens=1)
    assert [batch.tokens[:, 0].tolist() for batch in microbatches_of(rows, 3)] == [[0, 2], [4, 6], [8, 10]]
    assert rows[torch.tensor([0, 5])].response_mask.tolist() == [[False], [True]]
    for count in (0, 4):
        with pytest.raises(ExecutionError, match=f"6 rows of a replica in {count} microbatches"):
            microbatches_of(rows, count)


def test_cuda_means_the_cpu_only_while_it_should() -> None:
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    tensor = torch.ones(2)
    with as_if_cuda():
        made = [
            torch.zeros(2, device="cuda"),
            torch.empty(2, device=torch.cuda.current_device()),
            torch.tensor([1.0], device=torch.device("cuda", 0)),
            torch.ones(1, device=0),
            tensor.cuda(),
        ]
        assert {t.device.type for t in made} == {"cpu"}
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert tensor.type(torch.float64).dtype is torch.float64
        torch.cuda.synchronize()
    assert tensor.type() == "torch.FloatTensor"
    assert (torch.cuda.current_device, torch.cuda.synchronize) == (current_device, synchronize)
    with pytest.raises(ZeroDivisionError), as_if_cuda():
        _ = 1 / 0
    assert torch.cuda.current_device is current_device


def test_devices() -> None:
    cpu = choose_device("cpu")
    assert (cpu.backend, cpu.dtype, cpu.bytes_per_element) == ("gloo", torch.float32, 4)
    assert choose_device("cpu", "bf16").bytes_per_element == 2
    with pytest.raises(BackendError, match="device is 'tpu'"):
        choose_device("tpu")
    with pytest.raises(BackendError, match="precision is 'fp8'"):
        choose_device("cpu", "fp8")
    with pytest.raises(BackendError, match="this worker needs GPU 64"):
        choose_device("cuda", local_rank=64)


def test_columns_without_tokens_are_left_out() -> None:
    tokens = torch.arange(24).reshape(2, 12)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[0, 3:8] = True
    mask[1, 4:9] = True
    first, second = trimmed([Rows(tokens[:1], mask[:1], 6), Rows(tokens[1:], mask[1:], 6)])
    assert first.tokens.tolist() == [[3, 4, 5, 6, 7, 8]]
    assert second.tokens.tolist() == [[15, 16, 17, 18, 19, 20]]
    assert (first.prompt_tokens, first.response_tokens) == (3, 3)
    assert second.mask.tolist() == [[False, True, True, True, True, True]]
    (nothing,) = trimmed([Rows(tokens, mask & False, 6)])
    assert nothing.tokens.tolist() == [[5, 6], [17, 18]]
