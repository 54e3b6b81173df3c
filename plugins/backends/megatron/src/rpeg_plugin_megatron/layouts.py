"""Which models this backend can run, and in which layouts and modes. No torch in this module: plan checks call it."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from rpeg_core.errors import BackendError
from rpeg_core.planning.assignment import Assignment, ExecutionPlan, Layout
from rpeg_core.planning.plan import Plan
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.models import ModelSpec, Norm
from rpeg_core.spec.workload import Workload

__all__ = ["FAMILIES", "Refusal", "check_axes", "check_layout", "check_model", "check_workload", "refusals"]

RECOMPUTE = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)

FAMILIES = ("inline", "llama", "mistral", "qwen2", "qwen3")
"""Gated decoders with RMSNorm and rotary positions; ``inline`` stands for dimensions written in the experiment."""


ELSEWHERE = "run the plan with another backend"


def check_model(spec: ModelSpec) -> str | None:
    """Why this backend cannot run a model in any layout, as a sentence, or None when it can."""
    problem = _model_problem(spec)
    return None if problem is None else f"model {spec.name} has {problem}"


def _model_problem(spec: ModelSpec) -> str | None:
    """What a model has that this backend cannot run, without its name."""
    if spec.family not in FAMILIES:
        return f"family {spec.family!r}, which is not one of {', '.join(FAMILIES)}"
    unsupported = {
        "a mixture of experts": spec.moe is not None,
        "latent attention": spec.latent_attention is not None,
        "learned positions": spec.learned_positions > 0,
        "a feed-forward network without gate": not spec.gated_ffn,
        "LayerNorm": spec.norm is not Norm.RMS,
        f"{spec.norms_per_layer} norms per layer": spec.norms_per_layer != 2,
    }
    for what, found in unsupported.items():
        if found:
            return what
    # Megatron-Core has biases on all projections, on none, or on q, k and v alone.
    biases = (spec.qkv_bias, spec.output_bias, spec.ffn_bias)
    if biases not in ((False, False, False), (True, False, False), (True, True, True)):
        stated = f"qkv_bias {spec.qkv_bias}, output_bias {spec.output_bias}, ffn_bias {spec.ffn_bias}"
        return f"{stated}: biases are on all projections, on q, k and v, or on none"
    return None


def check_layout(spec: ModelSpec, layout: Layout) -> str | None:
    """Why this backend cannot run a model in a layout, as a sentence, or None when it can.

    Stricter than the planner's rules P1 and P2 in two points: KV heads are divided and never replicated, and so is the
    vocabulary, which is not padded: parameters are exactly those that `ModelSpec` counts.
    """
    problem = check_model(spec)
    if problem is not None:
        return problem
    found = _undivided(spec, layout)
    return None if found is None else f"{found[1]} of {spec.name}"


def _undivided(spec: ModelSpec, layout: Layout) -> tuple[str, str] | None:
    """(degree, what of the model it does not divide), None when it divides everything."""
    divided = {
        "attention heads": spec.heads,
        "KV heads": spec.kv_heads,
        "feed-forward columns": spec.ffn,
        "rows of the embedding": spec.vocab,
    }
    for what, count in divided.items():
        if count % layout.tensor:
            return "tp", f"tp={layout.tensor} does not divide the {count} {what}"
    if spec.layers % layout.pipeline:
        return "pp", f"pp={layout.pipeline} does not divide the {spec.layers} layers"
    return None


def check_workload(workload: Workload) -> str | None:
    """Why this backend cannot run a workload, as a sentence, or None when it can."""
    cache = workload.cache_bytes_per_element
    if cache is not None and cache != workload.bytes_per_element:
        return (
            f"workload.cache_bytes_per_element is {cache}; its KV cache has {workload.bytes_per_element}, like the rest"
        )
    return None


@attrs.frozen
class Refusal:
    """One thing in a plan that this backend cannot run: of which operators, why, and the next step."""

    operators: str
    reason: str
    hint: str


def refusals(plan: Plan) -> Iterator[Refusal]:
    """Everything in a plan that this backend cannot run; what several operators or models share is said once."""
    of_models: dict[str, tuple[list[str], list[str]]] = {}
    of_layouts: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    of_axes: dict[tuple[str, str], list[str]] = {}
    for operator in plan.rpeg.operators:
        name, assignment = operator.name, plan.assignments[operator.name]
        for spec in (model.spec for model in plan.rpeg.models_of(name)):
            problem, undivided = _model_problem(spec), _undivided(spec, assignment.layout)
            if problem is not None:
                _note(of_models.setdefault(problem, ([], [])), name, spec)
            elif undivided is not None:
                _note(of_layouts.setdefault(undivided, ([], [])), name, spec)
        for found in _axis_problems(assignment):
            of_axes.setdefault(found, []).append(name)
    for problem, (operators, models) in of_models.items():
        subject = f"model {models[0]} has" if len(models) == 1 else f"models {', '.join(models)} have"
        yield Refusal(", ".join(operators), f"{subject} {problem}", f"plan for other models, or {ELSEWHERE}")
    for (degree, problem), (operators, models) in of_layouts.items():
        reason, hint = f"{problem} of {', '.join(models)}", f"pin another {degree}, or {ELSEWHERE}"
        yield Refusal(", ".join(operators), reason, hint)
    for (axis, problem), operators in of_axes.items():
        yield Refusal(", ".join(operators), problem, f"leave {axis} out of space: and pin:, or {ELSEWHERE}")
    reason = check_workload(plan.workload)
    if reason is not None:
        yield Refusal("this plan", reason, f"leave workload.cache_bytes_per_element out, or {ELSEWHERE}")


def _note(found: tuple[list[str], list[str]], operator: str, spec: ModelSpec) -> None:
    for names, name in zip(found, (operator, spec.name), strict=True):
        if name not in names:
            names.append(name)


def check_axes(plan: ExecutionPlan) -> None:
    """Refuse what a plan chooses beyond the degrees and microbatches that this backend executes.

    Raises:
        BackendError: an operator has context, expert or sequence parallelism, another precision than that of the
            weights, or a recomputation that there is not.
    """
    facts = [f"{name} has {problem}" for name, assignment in plan.items() for _, problem in _axis_problems(assignment)]
    if facts:
        raise BackendError(
            "backend megatron cannot execute this plan",
            facts=facts,
            hint="plan without these in space: and pin:, or use --backend simulator",
        )


def _axis_problems(assignment: Assignment) -> Iterator[tuple[str, str]]:
    """(axis, what it is and may be)."""
    layout, mode = assignment.layout, assignment.mode
    if layout.context > 1:
        yield "cp", f"cp={layout.context}; allowed: 1"
    if layout.expert > 1:
        yield "ep", f"ep={layout.expert}; allowed: 1"
    if mode.sequence_parallel:
        yield "sequence_parallel", "sequence_parallel: true; allowed: false"
    if mode.precision is not Precision.BF16:
        yield "precision", f"precision {mode.precision.value}; allowed: {Precision.BF16.value}"
    if mode.recompute not in (None, *RECOMPUTE):
        allowed = ", ".join(value.value for value in RECOMPUTE)
        yield "recompute", f"recompute {mode.recompute.value}; allowed: {allowed}"
