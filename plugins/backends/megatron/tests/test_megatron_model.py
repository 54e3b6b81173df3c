"""Models in every layout against `transformers` with the same weights; which models and layouts are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import attrs
import megatron_oracle as oracle
import pytest
import torch
from megatron_world import run_world
from rpeg_plugin_megatron import rows as rows_of
from rpeg_plugin_megatron.device import choose_device
from rpeg_plugin_megatron.forward import Rows, infer, score
from rpeg_plugin_megatron.groups import Place, build_groups
from rpeg_plugin_megatron.initial import fill
from rpeg_plugin_megatron.layers import KVCache, attached
from rpeg_plugin_megatron.layouts import check_layout, check_workload
from rpeg_plugin_megatron.model import build_shard

from rpeg_core.errors import BackendError
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_core.spec.public_models import public_model, public_model_names
from rpeg_core.spec.workload import Workload

PROMPT, RESPONSE, ROWS = 6, 5, 4


@attrs.frozen
class Case:
    """What every rank builds: weights by global name, rows, and how."""

    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor
    mask: torch.Tensor
    layout: Layout
    microbatches: int


def _case(kind: str, layout: Layout, head: Head, *, tied: bool, microbatches: int = 1) -> tuple[Case, Any]:
    """A case and the oracle's model, whose scalar head is ``score``."""
    model = oracle.hf_model(kind, layers=2 if layout.pipeline < 4 else 4, tied=tied)
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    spec = oracle.spec_of(model, head)
    tokens, mask = oracle.rows(ROWS, PROMPT, RESPONSE)
    weights = oracle.parameters_of(model, {n: p.detach() for n, p in model.named_parameters()})
    return Case(spec, weights, tokens, mask, layout, microbatches), model


def _expected(model: Any, tokens: torch.Tensor, mask: torch.Tensor, temperature: float) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        out = model(
            input_ids=tokens.long(),
            attention_mask=mask.long(),
            position_ids=rows_of.position_ids(mask),
            output_hidden_states=True,
        )
    response = mask[:, PROMPT:]
    log_softmax = torch.log_softmax(out.logits[:, PROMPT - 1 : -1].double() / temperature, dim=-1)
    picked = log_softmax.gather(-1, tokens[:, PROMPT:, None].long()).squeeze(-1)
    hidden = out.hidden_states[-1]
    values = model.score(hidden).squeeze(-1).detach()
    last = PROMPT + response.sum(dim=1) - 1
    return {
        "logprobs": torch.where(response, picked, 0.0).float(),
        "entropy": torch.where(response, -(log_softmax.exp() * log_softmax).sum(-1), 0.0).float(),
        "values": torch.where(response, values[:, PROMPT - 1 : -1], 0.0),
        "scores": values[torch.arange(ROWS), last],
    }


def _run(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any] | None]:
    device = choose_device("cpu")
    places = [Place(Allocation(0, case.layout.gpus), case.layout) for case in cases]
    groups = build_groups(places)
    found: list[dict[str, Any] | None] = []
    for case, place in zip(cases, places, strict=True):
        if place not in groups:
            found.append(None)
            continue
        shard = build_shard(case.spec, groups[place], device=device)
        fill(shard, oracle.reader_of(case.weights))
        size = ROWS // case.layout.data
        first = groups[place].coordinates.dp * size
        rows = Rows(case.tokens[first : first + size], case.mask[first : first + size], PROMPT)
        has_lm = case.spec.head is not Head.SCALAR
        outputs = infer(shard, rows, microbatches=case.microbatches, temperature=0.7, entropy=has_lm)
        result = {"logprobs": outputs.logprobs, "values": outputs.values, "entropy": outputs.entropy, "rows": first}
        if case.spec.head is not Head.LM:
            result["scores"] = score(shard, rows, microbatches=case.microbatches)
        result["fragments"] = [fragment for fragment, _ in shard.fragments]
        found.append(result)
    return found


def _check(results: list[Any], cases: list[tuple[Case, Any]], tolerance: float = 1e-5) -> None:
    for index, (case, model) in enumerate(cases):
        expected = _expected(model, case.tokens, case.mask, 0.7)
        for rank in range(case.layout.gpus):
            result = results[rank][index]
            rows = slice(result["rows"], result["rows"] + ROWS // case.layout.data)
            for name in ("logprobs", "entropy", "values", "scores"):
                what = f"{case.spec.family} {name}"
                if result.get(name) is not None:
                    torch.testing.assert_close(
                        result[name],
                        expected[name][rows],
                        atol=tolerance,
                        rtol=tolerance,
                        msg=lambda text, what=what: f"{what}: {text}",
                    )
        held = {fragment for rank in range(case.layout.gpus) for fragment in results[rank][index]["fragments"]}
        assert case.spec.total_parameters == sum(fragment.elements for fragment in held)


def _run_cases(cases: list[tuple[Case, Any]]) -> None:
    world = max(case.layout.gpus for case, _ in cases)
    _check(run_world(_run, world, [case for case, _ in cases]), cases)


def test_one_rank_equals_transformers_for_every_family_and_head() -> None:
    one = Layout(1, 1, 1)
    cases = [_case(kind, one, Head.LM, tied=kind == "qwen2") for kind in oracle.KINDS]
    cases += [_case("qwen3", one, head, tied=True) for head in (Head.SCALAR, Head.LM_AND_SCALAR)]
    _run_cases(cases)


@pytest.mark.parametrize("layout", [Layout(1, 1, 2), Layout(1, 2, 1), Layout(2, 1, 1)], ids=str)
def test_two_ranks_equal_transformers(layout: Layout) -> None:
    microbatches = 2 if layout.pipeline > 1 else 1
    cases = [
        _case("llama3", layout, Head.LM_AND_SCALAR, tied=True, microbatches=microbatches),
        _case("llama-bias", layout, Head.LM, tied=False, microbatches=microbatches),
        _case("qwen2", layout, Head.SCALAR, tied=False, microbatches=microbatches),
        _case("qwen3", layout, Head.LM, tied=False, microbatches=microbatches),
    ]
    _run_cases(cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(1, 2, 2), Layout(1, 4, 1), Layout(2, 1, 2), Layout(2, 2, 1), Layout(4, 1, 1)], ids=str
)
def test_four_ranks_equal_transformers(layout: Layout) -> None:
    count = 1 if layout.pipeline == 1 else ROWS // layout.data
    cases = [
        _case("llama", layout, Head.LM_AND_SCALAR, tied=True, microbatches=count),
        _case("qwen3", layout, Head.LM, tied=False, microbatches=count),
    ]
    _run_cases(cases)


def _cached(rank: int, world: int, case: Case) -> float:
    """Largest difference between logits of one call, and of a call for the prompt and one for each later token."""
    place = Place(Allocation(0, world), case.layout)
    shard = build_shard(case.spec, build_groups([place])[place], device=choose_device("cpu"))
    fill(shard, oracle.reader_of(case.weights))
    positions, mask = rows_of.position_ids(case.mask), rows_of.attention_mask(case.mask)
    with torch.no_grad():
        whole = shard.module(case.tokens, positions, mask).logits
        pieces = []
        length = case.tokens.shape[1]
        with attached(shard.module, KVCache.of(shard, rows=ROWS, tokens=length)):
            for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, length))]:
                new = slice(start, stop)
                out = shard.module(case.tokens[:, new], positions[:, new], mask[:, :, new, :stop])
                pieces.append(out.logits)
        again = shard.module(case.tokens, positions, mask).logits
    assert torch.equal(whole, again)
    return (torch.cat(pieces, dim=1) - whole)[case.mask].abs().max().item()


def test_a_cache_gives_the_same_logits_token_by_token() -> None:
    case, _ = _case("qwen3", Layout(1, 1, 2), Head.LM, tied=False)
    assert max(run_world(_cached, 2, case)) < 1e-5


def test_every_bundled_llama_and_qwen_runs_in_some_layout() -> None:
    families = {"llama", "mistral", "qwen2", "qwen3"}
    models = [public_model(name) for name in public_model_names()]
    assert [m.name for m in models if m.family in families and check_layout(m, Layout(1, 1, 1))] == []
    assert [m.name for m in models if m.family not in families and check_layout(m, Layout(1, 1, 1)) is None] == []


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(1, 1, 7), "tp=7 does not divide the 4 KV heads of Qwen/Qwen2.5-7B"),
        (Layout(1, 1, 3), "tp=3 does not divide the 28 attention heads of Qwen/Qwen2.5-7B"),
        (Layout(1, 3, 1), "pp=3 does not divide the 28 layers of Qwen/Qwen2.5-7B"),
        (Layout(2, 4, 4), None),
    ],
)
def test_layouts_are_checked(layout: Layout, expected: str | None) -> None:
    problem = check_layout(public_model("Qwen/Qwen2.5-7B"), layout)
    assert (problem or "").startswith(expected) if expected else problem is None


def test_unsupported_models_are_refused_with_the_reason() -> None:
    model = public_model("Qwen/Qwen2.5-7B")
    assert check_layout(attrs.evolve(model, family="gemma2"), Layout(1, 1, 1)) == (
        "model Qwen/Qwen2.5-7B has family 'gemma2', which is not one of inline, llama, mistral, qwen2, qwen3"
    )
    assert check_layout(attrs.evolve(model, gated_ffn=False), Layout(1, 1, 1)) == (
        "model Qwen/Qwen2.5-7B has a feed-forward network without gate"
    )
    assert "biases are on all projections" in str(check_layout(attrs.evolve(model, output_bias=True), Layout(1, 1, 1)))


def _refused(rank: int, world: int, spec: ModelSpec) -> str:
    place = Place(Allocation(0, 1), Layout(1, 1, 1))
    with pytest.raises(BackendError) as caught:
        build_shard(spec, build_groups([place])[place], device=choose_device("cpu"))
    return str(caught.value)


def test_building_refuses_what_the_check_refuses() -> None:
    spec = attrs.evolve(public_model("Qwen/Qwen2.5-7B"), gated_ffn=False)
    assert "cannot run Qwen/Qwen2.5-7B on devices 0 as dp1 pp1 tp1" in run_world(_refused, 1, spec)[0]


def test_planning_with_this_backend_imports_no_torch() -> None:
    program = (
        "import sys; from rpeg_plugin_megatron import MEGATRON, layouts; "
        "assert MEGATRON.probe() is None; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_cache_of_another_width_is_refused() -> None:
    workload = Workload(prompts=4, prompt_tokens=4, response_tokens=4, bytes_per_element=4)
    assert check_workload(workload) is None
    assert check_workload(attrs.evolve(workload, cache_bytes_per_element=4)) is None
    assert check_workload(attrs.evolve(workload, cache_bytes_per_element=1)) == (
        "workload.cache_bytes_per_element is 1; its KV cache has 4, like the rest"
    )
