"""Cost terms: valid numbers for everything that can be priced, the same each time, each on its own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import attrs
import numpy as np

from rpeg_core.costing.batches import Layouts
from rpeg_core.costing.book import CostBook, TermValues
from rpeg_core.ir import Rpeg, RpegBuilder
from rpeg_core.planning.candidates import legal_candidates
from rpeg_core.planning.problem import model_specs
from rpeg_core.records import CostTerm, MemoryKind, Target
from rpeg_core.spec.machine import AlphaBeta, Device, DeviceSpace, GemmEfficiency, HardwareProfile, LinkTier, Tier
from rpeg_core.spec.models import Head
from rpeg_core.spec.public_models import public_model
from rpeg_core.spec.workload import LengthQuantile, Workload
from rpeg_core.testing.checks.accuracy import errors_of_term
from rpeg_core.testing.checks.common import defaults
from rpeg_core.testing.checks.outcome import CheckFailedError, RecordCheck, require
from rpeg_core.testing.toys import active, toy_seconds_term

__all__ = ["checks"]

MODELS = {
    "dense": "meta-llama/Llama-3.1-8B",  # grouped-query attention, untied
    "plain": "openai-community/gpt2",  # multi-head, plain feed-forward, tied
    "experts": "Qwen/Qwen1.5-MoE-A2.7B",  # shared and routed experts
    "latent": "deepseek-ai/DeepSeek-V2-Lite",  # latent attention, an odd number of layers
}
"""Public models that differ in what a term may ask about."""

MACHINES = (
    DeviceSpace(racks=2, nodes_per_rack=2, gpus_per_node=4),
    DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=1),
)

WORKLOAD = Workload(
    prompts=64,
    rollouts_per_prompt=2,
    prompt_tokens=512,
    response_tokens=1024,
    response_lengths=(LengthQuantile(0.5, 256), LengthQuantile(0.8, 640), LengthQuantile(1.0, 1024)),
)

FUNCTION = "verifier"
FUSED = "fused_training"

SAME = 1e-12
"""Relative difference that the order of vector lanes may make."""


def values(term: CostTerm) -> None:
    """Finite float64 values of at least 0 and the right shape, over all legal layouts of every role and model."""
    for machine in MACHINES:
        _tables(term, machine)


def pure(term: CostTerm) -> None:
    """Calling it twice gives the same numbers to the last bit, and its arguments stay as they were."""
    for machine in MACHINES:
        once, twice = _tables(term, machine), _tables(term, machine)
        require([f"two calls differ for {what}" for what in once if not np.array_equal(once[what], twice[what])])


def elementwise(term: CostTerm) -> None:
    """What one layout or transfer costs does not depend on the others in the batch."""
    for machine in MACHINES:
        forward, backward = _tables(term, machine), _tables(term, machine, reverse=True)
        require(
            [
                f"the order of the batch changes the result for {what}"
                for what in forward
                if not np.allclose(forward[what], backward[what][::-1], rtol=SAME, atol=0.0)
            ]
        )


def function_memory(term: CostTerm) -> None:
    """An operator without a model holds neither weights nor training state."""
    for machine in MACHINES:
        found = _tables(term, machine)[f"operator {FUNCTION!r}"]
        if np.any(found > 0):
            raise CheckFailedError(f"a function without a model holds {found.max():g} B of {term.memory.value}")


def first_step(term: CostTerm) -> None:
    """No more bytes before the first optimizer step than after it."""
    for machine in MACHINES:
        for what, costs in _book(term, machine).operators.items():
            row = list(costs.memory.terms).index(term)
            if np.any(costs.first_step[row] > costs.memory.values[row]):
                raise CheckFailedError(f"operator {what!r} holds more before the first optimizer step than after it")


def checks(term: CostTerm) -> tuple[RecordCheck, ...]:
    """The checks that apply to what ``term`` prices."""
    found: list[RecordCheck] = [
        ("values", values),
        ("pure", pure),
        ("elementwise", elementwise),
        ("errors", errors_of_term),
    ]
    if term.memory in (MemoryKind.WEIGHTS, MemoryKind.TRAINING_STATE):
        found.append(("function-memory", function_memory))
    if term.first_step is not None:
        found.append(("first-step", first_step))
    return tuple(found)


def _tables(term: CostTerm, machine: DeviceSpace, *, reverse: bool = False) -> Mapping[str, np.ndarray]:
    """What is priced -> the values of ``term``.

    Raises:
        CostTermError: it raised, or returned something that is not allowed.
    """
    book = _book(term, machine, reverse=reverse)
    tables: dict[str, TermValues] = {}
    if term.target is Target.TRANSFER:
        for reshard in (False, True):
            what = "RESHARD transfers" if reshard else "COMM transfers"
            tables[what] = book.transfer_table(reshard, *_transfers(machine, reshard, reverse))
    for name, costs in book.operators.items():
        if term.target is Target.MEMORY:
            tables[f"operator {name!r}"] = costs.memory
        elif term.target is Target.OPERATOR:
            tables[f"operator {name!r}"] = costs.whole
            tables |= {f"phase {i} of operator {name!r}": phase for i, phase in enumerate(costs.phases)}
    return {what: table.values[list(table.terms).index(term)] for what, table in tables.items()}


def _book(term: CostTerm, machine: DeviceSpace, *, reverse: bool = False) -> CostBook:
    nothing = toy_seconds_term({}, name="conformance.nothing")  # a book wants a term that prices operators
    return CostBook(
        rpeg=_graph(),
        machine=machine,
        hardware=_hardware(),
        workload=WORKLOAD,
        layouts={name: _ordered(layouts, reverse) for name, layouts in _layouts(machine).items()},
        terms=[active(nothing), active(term, defaults(term))],
    )


def _ordered(layouts: Layouts, reverse: bool) -> Layouts:
    """A read-only copy, so that a term which writes to its arguments fails."""

    copy = layouts.take(np.arange(len(layouts))[::-1] if reverse else np.arange(len(layouts)))
    for field in attrs.fields(Layouts):
        value = getattr(copy, field.name)
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return copy


def _transfers(machine: DeviceSpace, reshard: bool, reverse: bool) -> tuple[np.ndarray, ...]:
    """(bytes, source GPUs, destination GPUs, tier) of transfers that can happen on ``machine``."""
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= machine.gpus]
    rows = []
    for payload, source, destination in itertools.product((0.0, 2.0, 1e6, 2e10), sizes, sizes):
        needed = destination if reshard else max(source, destination)
        rows += [
            (payload, source, destination, int(tier))
            for tier in Tier
            if machine.tier(0, needed) <= tier <= _span(machine)
        ]
    columns = np.array(rows[::-1] if reverse else rows).T
    return columns[0], *(column.astype(np.int64) for column in columns[1:])


def _span(machine: DeviceSpace) -> Tier:
    return machine.tier(0, machine.gpus)


@functools.cache
def _graph() -> Rpeg:
    """Each model generates, infers and is trained; two are trained in one operator; a frozen scorer and a function."""
    b = RpegBuilder("conformance")
    prompts = b.data("prompts", elements=64 * 512, bytes_per_element=2)
    scores = b.data("scores", elements=128, bytes_per_element=2)
    verdicts = b.data("verdicts", elements=128, bytes_per_element=2)
    for name, public in MODELS.items():
        b.model(name, public_model(public), trainable=True)
        completions = b.data(f"{name}_completions", elements=128 * 1536, bytes_per_element=2)
        values = b.data(f"{name}_values", elements=128 * 1024, bytes_per_element=2)
        b.generation(f"{name}_generation", name, reads=[prompts], writes=[completions])
        b.inference(f"{name}_inference", name, reads=[completions], writes=[values])
        b.training(f"{name}_training", name, reads=[completions, values])
        b.connect(f"{name}_generation", completions, f"{name}_inference")
        b.connect(f"{name}_inference", values, f"{name}_training")
        b.publish(f"{name}_training", f"{name}_generation", f"{name}_inference")
    b.model("actor", public_model(MODELS["dense"]), trainable=True)
    b.model("critic", public_model(MODELS["dense"]).with_head(Head.SCALAR), trainable=True)
    b.fused_training(FUSED, {"actor_training": "actor", "critic_training": "critic"}, reads=["dense_values"])
    b.connect("dense_inference", "dense_values", FUSED)
    b.model("scorer", public_model(MODELS["dense"]).with_head(Head.SCALAR), trainable=False)
    b.inference("scorer_inference", "scorer", reads=["dense_completions"], writes=[scores])
    b.function(FUNCTION, reads=["dense_completions"], writes=[verdicts], seconds_per_sample=0.01)
    b.connect("dense_generation", "dense_completions", "scorer_inference", FUNCTION)
    return b.build()


@functools.cache
def _layouts(machine: DeviceSpace) -> Mapping[str, Layouts]:
    graph = _graph()
    by_models: dict[tuple[str, ...], Layouts] = {}
    for operator in graph.operators:
        if operator.models not in by_models:
            specs = model_specs(graph, operator.name)
            by_models[operator.models] = legal_candidates(operator.name, machine, WORKLOAD, *specs).layouts
    return {operator.name: by_models[operator.models] for operator in graph.operators}


@functools.cache
def _hardware() -> HardwareProfile:
    """Round numbers of the size of a real GPU's."""

    def tier(latency_s: float, bandwidth_bytes_per_s: float) -> LinkTier:
        link = AlphaBeta(latency_s, bandwidth_bytes_per_s)
        return LinkTier(collective=link, p2p=link)

    return HardwareProfile(
        name="conformance",
        summary="made up",
        gpus_per_node=4,
        device=Device(memory_bytes=80 * 10**9, memory_bandwidth_bytes_per_s=3e12, peak_flops_per_s=8e14),
        tiers=(tier(2e-6, 3e11), tier(4e-6, 2.5e10), tier(6e-6, 2e10)),
        efficiency=GemmEfficiency(gamma_m_rows=128.0, gamma_k_columns=256.0),
        non_gemm_layer_s=1e-4,
        non_gemm_reference_batch=8,
    )
