"""Which models this backend can run, and in which layouts and modes. No torch in this module: plan checks call it."""

from __future__ import annotations

from collections.abc import Iterator

from rpeg_core.errors import BackendError
from rpeg_core.planning.assignment import Assignment, ExecutionPlan, Layout
from rpeg_core.planning.plan import Plan
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.models import ModelSpec, Norm
from rpeg_core.spec.workload import Workload

__all__ = ["FAMILIES", "check_axes", "check_layout", "check_model", "check_workload", "refusals"]

RECOMPUTE = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)

FAMILIES = ("inline", "llama", "mistral", "qwen2", "qwen3")
"""Gated decoders with RMSNorm and rotary positions; ``inline`` stands for dimensions written in the experiment."""


def check_model(spec: ModelSpec) -> str | None:
    """Why this backend cannot run a model in any layout, as a sentence, or None when it can."""
    if spec.family not in FAMILIES:
        return f"model {spec.name}: family {spec.family!r} is not one of {', '.join(FAMILIES)}"
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
            return f"model {spec.name} has {what}"
    # Megatron-Core has biases on all projections, on none, or on q, k and v alone.
    biases = (spec.qkv_bias, spec.output_bias, spec.ffn_bias)
    if biases not in ((False, False, False), (True, False, False), (True, True, True)):
        stated = f"qkv_bias {spec.qkv_bias}, output_bias {spec.output_bias}, ffn_bias {spec.ffn_bias}"
        return f"model {spec.name} has {stated}: biases are on all projections, on q, k and v, or on none"
    return None


def check_layout(spec: ModelSpec, layout: Layout) -> str | None:
    """Why this backend cannot run a model in a layout, as a sentence, or None when it can.

    Stricter than the planner's rules P1 and P2 in two points: KV heads are divided and never replicated, and so is the
    vocabulary, which is not padded: parameters are exactly those that `ModelSpec` counts.
    """
    problem = check_model(spec)
    if problem is not None:
        return problem
    divided = {
        "attention heads": spec.heads,
        "KV heads": spec.kv_heads,
        "feed-forward columns": spec.ffn,
        "rows of the embedding": spec.vocab,
    }
    for what, count in divided.items():
        if count % layout.tensor:
            return f"tp={layout.tensor} does not divide the {count} {what} of {spec.name}"
    if spec.layers % layout.pipeline:
        return f"pp={layout.pipeline} does not divide the {spec.layers} layers of {spec.name}"
    return None


def check_workload(workload: Workload) -> str | None:
    """Why this backend cannot run a workload, as a sentence, or None when it can."""
    cache = workload.cache_bytes_per_element
    if cache is not None and cache != workload.bytes_per_element:
        return (
            f"workload.cache_bytes_per_element is {cache}; its KV cache has {workload.bytes_per_element}, like the rest"
        )
    return None


def refusals(plan: Plan) -> Iterator[tuple[str, str]]:
    """(operators, reason) for everything in a plan that this backend cannot run."""
    reasons: dict[str, list[str]] = {}
    for operator in plan.rpeg.operators:
        assignment = plan.assignments[operator.name]
        layouts = (check_layout(model.spec, assignment.layout) for model in plan.rpeg.models_of(operator.name))
        for reason in (*layouts, *_axis_problems(assignment)):
            if reason is not None and operator.name not in reasons.setdefault(reason, []):
                reasons[reason].append(operator.name)
    for reason, operators in reasons.items():
        yield ", ".join(operators), reason
    reason = check_workload(plan.workload)
    if reason is not None:
        yield "this plan", reason


def check_axes(plan: ExecutionPlan) -> None:
    """Refuse what a plan chooses beyond the degrees and microbatches that this backend executes.

    Raises:
        BackendError: an operator has context, expert or sequence parallelism, another precision than that of the
            weights, or a recomputation that there is not.
    """
    facts = [f"{name} has {problem}" for name, assignment in plan.items() for problem in _axis_problems(assignment)]
    if facts:
        raise BackendError(
            "backend megatron cannot execute this plan",
            facts=facts,
            hint="plan without these in space: and pin:, or use --backend simulator",
        )


def _axis_problems(assignment: Assignment) -> Iterator[str]:
    layout, mode = assignment.layout, assignment.mode
    if layout.context > 1:
        yield f"cp={layout.context}; allowed: 1"
    if layout.expert > 1:
        yield f"ep={layout.expert}; allowed: 1"
    if mode.sequence_parallel:
        yield "sequence_parallel: true; allowed: false"
    if mode.precision is not Precision.BF16:
        yield f"precision {mode.precision.value}; allowed: {Precision.BF16.value}"
    if mode.recompute not in (None, *RECOMPUTE):
        allowed = ", ".join(value.value for value in RECOMPUTE)
        yield f"recompute {mode.recompute.value}; allowed: {allowed}"
