"""Log-probabilities over a divided vocabulary, how rows are cut, and what stands in for CUDA on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron_world import run_world
from rpeg_plugin_megatron.cpu import as_if_cuda
from rpeg_plugin_megatron.device import choose_device
from rpeg_plugin_megatron.forward import Rows, by_length, trimmed
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


def _of_lengths(*responses: int, prompt_tokens: int = 3) -> Rows:
    """Prompts of 2 tokens after one column of padding, and responses of these lengths."""
    mask = torch.arange(prompt_tokens + max(responses)) < prompt_tokens + torch.tensor(responses)[:, None]
    mask[:, 0] = False
    return Rows(torch.zeros_like(mask, dtype=torch.int32), mask, prompt_tokens)


def _parts(rows: Rows, count: int, **options: int) -> list[list[int]]:
    return [part.tolist() for part in by_length(rows, count, **options)]


def test_rows_of_like_length_are_computed_together() -> None:
    # Widths with the 2 tokens of the prompt: 6, 10, 4, 8, 3, 5. Half of 10 is 5, of 4 it is 2.
    rows = _of_lengths(4, 8, 2, 6, 1, 3)
    assert _parts(rows, 1, pipeline=1) == [[1, 3, 0, 5], [2, 4]]
    assert _parts(rows, 2, pipeline=1) == [[1, 3, 0], [5, 2, 4]]
    assert _parts(rows, 3, pipeline=2) == [[1, 3], [0, 5], [2, 4]]
    assert _parts(rows, 1, pipeline=2) == [[1, 3, 0, 5, 2, 4]]
    assert [trimmed(rows[part]).tokens.shape for part in by_length(rows, 1, pipeline=1)] == [(4, 10), (2, 4)]
    for count in (0, 4):
        with pytest.raises(ExecutionError, match=f"6 rows of a replica in {count} microbatches"):
            by_length(rows, count, pipeline=1)


def test_pairs_stay_together_and_equal_rows_in_order() -> None:
    pairs = _of_lengths(1, 2, 1, 18, 9, 1)
    assert _parts(pairs, 1, pipeline=1, together=2) == [[2, 3, 4, 5], [0, 1]]
    assert _parts(pairs, 3, pipeline=2, together=2) == [[2, 3], [4, 5], [0, 1]]
    with pytest.raises(ExecutionError, match="6 rows of a replica in 2 microbatches"):
        by_length(pairs, 2, pipeline=2, together=2)
    assert _parts(_of_lengths(5, 5, 5, 5), 2, pipeline=4) == [[0, 1], [2, 3]]
    nothing = Rows(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.bool), 2)
    assert _parts(nothing, 1, pipeline=1) == [[0, 1]]


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
    short = trimmed(Rows(tokens, mask, 6))
    assert short.tokens.tolist() == [[3, 4, 5, 6, 7, 8], [15, 16, 17, 18, 19, 20]]
    assert (short.prompt_tokens, short.response_tokens) == (3, 3)
    assert short.mask[1].tolist() == [False, True, True, True, True, True]
    assert trimmed(Rows(tokens[:1], mask[:1], 6)).tokens.tolist() == [[3, 4, 5, 6, 7]]
    assert trimmed(Rows(tokens, mask & False, 6)).tokens.tolist() == [[5, 6], [17, 18]]
