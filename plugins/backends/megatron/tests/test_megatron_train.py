"""Training steps in every layout against `torch.optim.AdamW` on the model of `transformers`."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import attrs
import megatron_oracle as oracle
import pytest
import torch
from megatron_world import WorldError, run_world
from rpeg_plugin_megatron import rows as rows_of
from rpeg_plugin_megatron.device import choose_device
from rpeg_plugin_megatron.forward import Rows
from rpeg_plugin_megatron.groups import Place, build_groups
from rpeg_plugin_megatron.initial import fill
from rpeg_plugin_megatron.model import ModelShard, build_shard
from rpeg_plugin_megatron.train import Trainer

from rpeg_core.planning.assignment import Layout
from rpeg_core.runtime.semantics import LossParts, ModelOutputs, OptimizerSettings
from rpeg_core.spec.execution import Recompute
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.models import Head, ModelSpec

PROMPT, RESPONSE, ROWS = 6, 5, 4
STEPS = 3
SETTINGS = OptimizerSettings(
    learning_rate=1e-3, warmup_steps=2, beta2=0.95, weight_decay=0.1, clip_norm=0.5, epsilon=1e-6
)


@attrs.frozen
class Case:
    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    layout: Layout
    microbatches: int
    recompute: Recompute = Recompute.NONE
    settings: OptimizerSettings = SETTINGS


def _case(kind: str, layout: Layout, head: Head, *, tied: bool, microbatches: int, **changes: Any) -> tuple[Case, Any]:
    model = oracle.hf_model(kind, layers=2 if layout.pipeline < 4 else 4, tied=tied)
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    tokens, mask = oracle.rows(ROWS, PROMPT, RESPONSE)
    advantages = torch.randn(ROWS, RESPONSE, generator=torch.Generator().manual_seed(5))
    weights = oracle.parameters_of(model, {n: p.detach().clone() for n, p in model.named_parameters()})
    spec = oracle.spec_of(model, head)
    return Case(spec, weights, tokens, mask, advantages, layout, microbatches, **changes), model


def _loss(outputs: ModelOutputs, advantages: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """A loss that reads log-probabilities, entropies and values, whichever there are."""
    loss = torch.zeros(())
    if outputs.logprobs is not None and outputs.entropy is not None:
        loss = loss - (advantages * outputs.logprobs + 0.1 * outputs.entropy)[mask].sum() / count
    if outputs.values is not None:
        loss = loss + ((outputs.values - advantages) ** 2)[mask].sum() / count
    return loss


def _oracle(case: Case, model: Any) -> dict[str, Any]:
    """The same steps on one model with torch's AdamW and gradient clipping."""
    if case.spec.head is Head.SCALAR:
        used = [(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"]
    else:
        used = [(n, p) for n, p in model.named_parameters() if case.spec.head is not Head.LM or n != "score.weight"]
    decayed, others = [p for _, p in used if p.dim() > 1], [p for _, p in used if p.dim() == 1]
    s = case.settings
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": s.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(s.beta1, s.beta2),
        eps=s.epsilon,
    )
    mask = case.mask[:, PROMPT:]
    losses, norms = [], []
    for step in range(STEPS):
        out = model(
            input_ids=case.tokens.long(),
            attention_mask=case.mask.long(),
            position_ids=rows_of.position_ids(case.mask),
            output_hidden_states=True,
        )
        before = slice(PROMPT - 1, case.tokens.shape[1] - 1)
        log_softmax = torch.log_softmax(out.logits[:, before] / 0.7, dim=-1)
        outputs = ModelOutputs()
        if case.spec.head is not Head.SCALAR:
            logprobs = log_softmax.gather(-1, case.tokens[:, PROMPT:, None].long()).squeeze(-1)
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
            outputs = ModelOutputs(logprobs=logprobs, entropy=entropy)
        if case.spec.head is not Head.LM:
            outputs = attrs.evolve(outputs, values=model.score(out.hidden_states[-1][:, before]).squeeze(-1))
        loss = _loss(outputs, case.advantages, mask, int(mask.sum()))
        adam.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([p for _, p in used], s.clip_norm or float("inf"))))
        for group in adam.param_groups:
            group["lr"] = s.learning_rate * min(1.0, (step + 1) / max(1, s.warmup_steps))
        adam.step()
        losses.append(float(loss.detach()))
    weights = oracle.parameters_of(model, {n: p.detach() for n, p in model.named_parameters()})
    return {"losses": losses, "norms": norms, "weights": weights}


def _trainer(case: Case, rank: int) -> tuple[ModelShard, Trainer, Rows, torch.Tensor] | None:
    place = Place(Allocation(0, case.layout.gpus), case.layout)
    groups = build_groups([place]).get(place)
    if groups is None:
        return None
    shard = build_shard(case.spec, groups, device=choose_device("cpu"), recompute=case.recompute)
    fill(shard, oracle.reader_of(case.weights))
    size = ROWS // case.layout.data
    mine = slice(groups.coordinates.dp * size, (groups.coordinates.dp + 1) * size)
    return shard, Trainer(shard, case.settings), Rows(case.tokens[mine], case.mask[mine], PROMPT), case.advantages[mine]


def _update(case: Case, trainer: Trainer, rows: Rows, advantages: torch.Tensor) -> Any:
    batches = [rows[part] for part in torch.arange(len(rows)).chunk(case.microbatches)]
    parts = advantages.chunk(case.microbatches)
    count = int(case.mask[:, PROMPT:].sum())

    def loss(index: int, outputs: ModelOutputs) -> LossParts:
        mask = batches[index].response_mask
        value = _loss(outputs, parts[index], mask, count)
        return LossParts(loss=value, metrics={"tokens": mask.sum()})

    return trainer.update(batches, loss, temperature=0.7, entropy=case.spec.head is not Head.SCALAR)


def _run(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        made = _trainer(case, rank)
        if made is None:
            results.append({})
            continue
        shard, trainer, rows, advantages = made
        updates = [_update(case, trainer, rows, advantages) for _ in range(STEPS)]
        results.append(
            {
                "losses": [u.loss for u in updates],
                "norms": [u.gradient_norm for u in updates],
                "tokens": [u.metrics["tokens"] for u in updates],
                "weights": [(fragment, view.clone()) for fragment, view in shard.fragments],
            }
        )
    return results


def _check(cases: list[tuple[Case, Any]]) -> None:
    world = max(case.layout.gpus for case, _ in cases)
    results = run_world(_run, world, [case for case, _ in cases])
    for index, (case, model) in enumerate(cases):
        expected = _oracle(case, model)
        for rank in range(case.layout.gpus):
            result, what = results[rank][index], f"{case.spec.family}, rank {rank}"
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6), what
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5), what
            assert result["tokens"] == [float(case.mask[:, PROMPT:].sum())] * STEPS
            for fragment, value in result["weights"]:
                torch.testing.assert_close(
                    value, expected["weights"][fragment.name][fragment.slices], atol=5e-6, rtol=1e-5
                )


def test_one_rank_equals_adamw_for_every_head() -> None:
    one = Layout(1, 1, 1)
    _check(
        [
            _case("llama", one, Head.LM, tied=True, microbatches=1),
            _case("qwen2", one, Head.SCALAR, tied=True, microbatches=2),
            _case("qwen3", one, Head.LM_AND_SCALAR, tied=False, microbatches=4, recompute=Recompute.FULL),
            _case("qwen3", one, Head.LM, tied=False, microbatches=2, recompute=Recompute.SELECTIVE),
        ]
    )


def _calls(rank: int, world: int, cases: list[Case]) -> list[tuple[int, int]]:
    """By case: how often attention and the feed-forward networks were computed in one update."""
    found = []
    attention = torch.nn.functional.scaled_dot_product_attention
    for case in cases:
        made = _trainer(case, rank)
        assert made is not None
        shard, trainer, rows, advantages = made
        inner, outer = Mock(wraps=attention), Mock(return_value=None)
        for layer in shard.module.decoder.layers:
            layer.mlp.linear_fc1.register_forward_pre_hook(outer)
        with patch.object(torch.nn.functional, "scaled_dot_product_attention", inner):
            _update(case, trainer, rows, advantages)
        found.append((inner.call_count, outer.call_count))
    return found


def test_the_backward_pass_computes_again_what_the_plan_says() -> None:
    """Two layers, one microbatch."""
    one = Layout(1, 1, 1)
    modes = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    cases = [_case("llama", one, Head.LM, tied=True, microbatches=1, recompute=mode)[0] for mode in modes]
    (found,) = run_world(_calls, 1, cases)
    assert found == [(2, 2), (4, 2), (4, 4)]


@pytest.mark.parametrize("layout", [Layout(1, 1, 2), Layout(1, 2, 1), Layout(2, 1, 1)], ids=str)
def test_two_ranks_equal_adamw(layout: Layout) -> None:
    count = 4 if layout.pipeline > 1 else 1
    unclipped = attrs.evolve(SETTINGS, clip_norm=0.0)
    _check(
        [
            _case("qwen3", layout, Head.LM_AND_SCALAR, tied=True, microbatches=count),
            _case(
                "qwen2",
                layout,
                Head.LM,
                tied=False,
                microbatches=count,
                recompute=Recompute.SELECTIVE,
                settings=unclipped,
            ),
            _case("llama-bias", layout, Head.SCALAR, tied=False, microbatches=max(1, count // 2)),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(1, 2, 2), Layout(1, 4, 1), Layout(2, 1, 2), Layout(2, 2, 1), Layout(4, 1, 1)], ids=str
)
def test_four_ranks_equal_adamw(layout: Layout) -> None:
    count = 1 if layout.pipeline == 1 else ROWS // layout.data
    _check(
        [
            _case("qwen3", layout, Head.LM_AND_SCALAR, tied=True, microbatches=count),
            _case("llama", layout, Head.LM, tied=False, microbatches=count, recompute=Recompute.FULL),
        ]
    )


def _resumed(rank: int, world: int, case: Case) -> list[bool]:
    """Two steps in one go, against one step, a new trainer on other weights that takes the state, and one step."""
    made = _trainer(case, rank)
    assert made is not None
    shard, trainer, rows, advantages = made
    _update(case, trainer, rows, advantages)
    state = trainer.state()
    second = _update(case, trainer, rows, advantages)
    whole = [view.clone() for _, view in shard.fragments]

    other = attrs.evolve(case, weights={name: value * 0.5 for name, value in case.weights.items()})
    made = _trainer(other, rank)
    assert made is not None
    shard, trainer, rows, advantages = made
    trainer.restore(state)
    again = _update(case, trainer, rows, advantages)
    return [second == again, *(torch.equal(a, b) for a, (_, b) in zip(whole, shard.fragments, strict=True))]


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 2, 1)], ids=str)
def test_a_restored_trainer_goes_on_exactly(layout: Layout) -> None:
    case, _ = _case("qwen3", layout, Head.LM, tied=True, microbatches=2)
    for result in run_world(_resumed, 2, case):
        assert all(result)


def _other_layout(rank: int, world: int, case: Case) -> None:
    made = _trainer(case, rank)
    assert made is not None
    state = made[1].state()
    other = _trainer(attrs.evolve(case, layout=Layout(2, 1, 1)), rank)
    assert other is not None
    other[1].restore(state)


def test_a_state_of_another_layout_is_refused() -> None:
    case, _ = _case("llama", Layout(1, 1, 2), Head.LM, tied=True, microbatches=1)
    with pytest.raises(WorldError, match="the optimizer state is not that of tiny on devices 0-1 as dp2 pp1 tp1"):
        run_world(_other_layout, 2, case)


def _not_finite(rank: int, world: int, case: Case) -> None:
    made = _trainer(case, rank)
    assert made is not None
    _, trainer, rows, _ = made
    trainer.update([rows], lambda _, o: LossParts(loss=o.logprobs.sum() * float("nan"), metrics={}))


def test_a_gradient_that_is_not_finite_ends_the_run() -> None:
    case, _ = _case("llama", Layout(1, 1, 1), Head.LM, tied=True, microbatches=1)
    with pytest.raises(WorldError, match="the gradient of tiny has norm nan in update 0"):
        run_world(_not_finite, 1, case)
