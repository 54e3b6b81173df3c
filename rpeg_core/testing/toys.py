"""Toy models, graphs, plans and cost terms whose every number can be checked by hand.

Core has no real cost terms; tests of core, and of plugins that only need *some* costs, use these. A toy
model has exactly the number of parameters asked for, a toy operator takes exactly the seconds asked for::

    graph = toy_ppo(tau=1)
    plan = toy_plan(actor_generation=on(0, 2), reference_inference=on(2), reward_inference=on(3),
                    critic_inference=on(2), actor_training=on(0, 2), critic_training=on(2, 4))
    book = toy_book(graph, DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4), toy_workload(),
                    seconds={("actor", "generation"): 4.0, ("actor", "training"): 2.0})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rpeg_core.costing.batches import Floats, Layouts, MemoryBatch, OperatorBatch, TransferBatch
from rpeg_core.costing.book import ActiveTerm, CostBook
from rpeg_core.ir import Role, Rpeg, RpegBuilder
from rpeg_core.planning.assignment import Assignment, ExecutionPlan, Layout
from rpeg_core.planning.axes import Axes
from rpeg_core.planning.candidates import PAPER, legal_candidates
from rpeg_core.planning.problem import model_specs
from rpeg_core.records import CostTerm, MemoryKind, NoSettings, Target
from rpeg_core.spec.machine import (
    Allocation,
    AlphaBeta,
    Device,
    DeviceSpace,
    GemmEfficiency,
    HardwareProfile,
    LinkTier,
)
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import LengthQuantile, Workload

__all__ = [
    "SKEWED",
    "active",
    "on",
    "toy_actor_critic",
    "toy_book",
    "toy_hardware",
    "toy_memory_terms",
    "toy_mini",
    "toy_model",
    "toy_plan",
    "toy_ppo",
    "toy_seconds_term",
    "toy_transfer_term",
    "toy_workload",
]

SKEWED = (LengthQuantile(0.5, 25), LengthQuantile(0.75, 50), LengthQuantile(1.0, 100))
"""Three phases for 100 response tokens: 1/2, 1/4 and 1/4 of the sequences finish after 25, 50 and 100."""

_WIDTH = 8  # hidden size, heads and FFN width: tensor parallelism up to 8 is possible


def toy_model(name: str, *, layers: int = 4, parameters: int = 20_000, kv_heads: int = 8) -> ModelSpec:
    """A model of exactly ``parameters`` parameters (with 8 KV heads); they are made up for in the vocabulary.

    ``parameters`` must be a multiple of 8 and above ``384 * layers + 8``.
    """
    layer = 4 * _WIDTH * _WIDTH + 2 * _WIDTH * _WIDTH
    return ModelSpec(
        name=name,
        family="toy",
        layers=layers,
        hidden=_WIDTH,
        heads=_WIDTH,
        kv_heads=kv_heads,
        head_dim=1,
        ffn=_WIDTH,
        gated_ffn=False,
        vocab=(parameters - _WIDTH - layers * layer) // _WIDTH,
        tied_embeddings=True,
        norms_per_layer=0,
        source="made up",
    )


def toy_workload(
    *,
    prompts: int = 16,
    rollouts_per_prompt: int = 1,
    prompt_tokens: int = 100,
    response_tokens: int = 100,
    response_lengths: tuple[LengthQuantile, ...] = (),
) -> Workload:
    """16 sequences of 100 + 100 tokens, 3200 tokens per step, unless told otherwise."""
    return Workload(
        prompts=prompts,
        rollouts_per_prompt=rollouts_per_prompt,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        response_lengths=response_lengths,
    )


def toy_hardware(*, memory_bytes: int = 1000) -> HardwareProfile:
    """A GPU of 1000 bytes, 900 of them usable; every link at 1 byte/s."""
    link = LinkTier(collective=AlphaBeta(0.0, 1.0), p2p=AlphaBeta(0.0, 1.0))
    return HardwareProfile(
        name="toy",
        summary="made up",
        gpus_per_node=4,
        device=Device(memory_bytes=memory_bytes, memory_bandwidth_bytes_per_s=1.0, peak_flops_per_s=1.0),
        tiers=(link, link, link),
        efficiency=GemmEfficiency(gamma_m_rows=1.0, gamma_k_columns=1.0),
        non_gemm_layer_s=0.0,
        non_gemm_reference_batch=1,
    )


def on(
    start: int,
    stop: int | None = None,
    *,
    data: int | None = None,
    pipeline: int = 1,
    tensor: int = 1,
    microbatches: int = 1,
) -> Assignment:
    """GPUs ``start .. stop - 1`` (one GPU without ``stop``); data parallel as far as nothing else is said."""
    stop = start + 1 if stop is None else stop
    data = (stop - start) // (pipeline * tensor) if data is None else data
    return Assignment(Allocation(start, stop), Layout(data, pipeline, tensor), microbatches)


def toy_plan(**assignments: Assignment) -> ExecutionPlan:
    """Operator name -> assignment, by keyword."""
    return assignments


def toy_mini(*, tau: int = 0, model: ModelSpec | None = None) -> Rpeg:
    """One trainable model: ``actor_generation -completions-> actor_training``, weights published back."""
    b = RpegBuilder("mini")
    b.model("actor", model or toy_model("actor"), trainable=True, staleness=tau)
    prompts = b.data("prompts", elements=1600, bytes_per_element=2)
    completions = b.data("completions", elements=3200, bytes_per_element=2)
    b.generation("actor_generation", "actor", reads=[prompts], writes=[completions])
    b.training("actor_training", "actor", reads=[completions])
    b.connect("actor_generation", completions, "actor_training")
    b.publish("actor_training", "actor_generation")
    return b.build()


def toy_ppo(*, tau: int = 0, critic_tau: int | None = None, fused: bool = False) -> Rpeg:
    """The six operators of PPO on four toy models; completions have 6400 bytes, rewards 32, the rest 3200.

    With ``fused`` both trainings are one operator ``fused_training``.
    """
    critic_tau = tau if critic_tau is None else critic_tau
    b = RpegBuilder("ppo")
    b.model("actor", toy_model("actor"), trainable=True, staleness=tau)
    b.model("reference", toy_model("reference"), trainable=False)
    b.model("reward", toy_model("reward"), trainable=False)
    b.model("critic", toy_model("critic"), trainable=True, staleness=critic_tau)
    prompts = b.data("prompts", elements=1600, bytes_per_element=2)
    completions = b.data("completions", elements=3200, bytes_per_element=2)
    logprobs = b.data("reference_logprobs", elements=1600, bytes_per_element=2)
    rewards = b.data("rewards", elements=16, bytes_per_element=2)
    values = b.data("values", elements=1600, bytes_per_element=2)
    b.generation("actor_generation", "actor", reads=[prompts], writes=[completions])
    b.inference("reference_inference", "reference", reads=[completions], writes=[logprobs])
    b.inference("reward_inference", "reward", reads=[completions], writes=[rewards])
    b.inference("critic_inference", "critic", reads=[completions], writes=[values])
    signals, trained = (
        [completions, logprobs, rewards, values],
        {"actor_training": "actor", "critic_training": "critic"},
    )
    if fused:
        trainings = [b.fused_training("fused_training", trained, reads=signals)]
    else:
        trainings = [b.training(name, model, reads=signals) for name, model in trained.items()]
    b.connect("actor_generation", completions, "reference_inference", "reward_inference", "critic_inference")
    b.connect("reference_inference", logprobs, *trainings)
    b.connect("reward_inference", rewards, *trainings)
    b.connect("critic_inference", values, *trainings)
    b.publish(trainings[0], "actor_generation")
    b.publish(trainings[-1], "critic_inference")
    return b.build()


def toy_actor_critic(*, tau: int = 0) -> Rpeg:
    """One trainable model served twice: ``generation -> value_inference -> training``, both publications."""
    b = RpegBuilder("actor-critic")
    b.model("shared", toy_model("shared"), trainable=True, staleness=tau)
    prompts = b.data("prompts", elements=1600, bytes_per_element=2)
    completions = b.data("completions", elements=3200, bytes_per_element=2)
    values = b.data("values", elements=1600, bytes_per_element=2)
    b.generation("generation", "shared", reads=[prompts], writes=[completions])
    b.inference("value_inference", "shared", reads=[completions], writes=[values])
    b.training("training", "shared", reads=[values])
    b.connect("generation", completions, "value_inference")
    b.connect("value_inference", values, "training")
    b.publish("training", "generation", "value_inference")
    return b.build()


def active(term: CostTerm, settings: object = None) -> ActiveTerm:
    """The term as a problem uses it, from the distribution ``toys 1``."""
    return ActiveTerm(
        term=term, settings=NoSettings() if settings is None else settings, distribution="toys", version="1"
    )


def toy_seconds_term(seconds: Mapping[tuple[str, str], float], *, name: str = "toy.seconds") -> CostTerm:
    """``seconds[model, role]`` for a whole operator at any layout, 0 when absent.

    A function takes its ``seconds_per_sample`` for every sample, on however many GPUs.
    A length phase takes its share: of the decode steps for generation, of the sequences for inference.
    """

    def function(batch: OperatorBatch) -> Floats:
        sequences = batch.sequences / batch.workload.sequences
        if batch.model is None:
            whole, share = (batch.seconds_per_sample or 0.0) * batch.workload.sequences, sequences
        else:
            whole = seconds.get((batch.model.name, batch.role.value), 0.0)
            steps = sum(phase.tokens for phase in batch.phases) / batch.workload.response_tokens
            share = steps if batch.role is Role.GENERATION else sequences
        return np.full(len(batch.layouts), whole * share)

    return CostTerm(name=name, summary="constant", target=Target.OPERATOR, quantity="work", function=function)


def toy_transfer_term(*, latency_s: float = 0.0, bytes_per_s: float = 100.0) -> CostTerm:
    """``latency_s + bytes / bytes_per_s`` for COMM, twice that for RESHARD, whatever the tier."""

    def function(batch: TransferBatch) -> Floats:
        return (latency_s + batch.bytes / bytes_per_s) * (2.0 if batch.reshard else 1.0)

    return CostTerm(
        name="toy.transfer", summary="linear", target=Target.TRANSFER, quantity="transfer", function=function
    )


def toy_memory_terms(
    *,
    training_state: Mapping[tuple[str, str], float] | None = None,
    weights: Mapping[tuple[str, str], float] | None = None,
    gradients: Mapping[tuple[str, str], float] | None = None,
    transient: Mapping[tuple[str, str], float] | None = None,
) -> tuple[CostTerm, ...]:
    """Bytes by (model, role) in each :class:`MemoryKind`, divided by the GPUs of the layout; absent is 0.

    A function has the model name ``""``.
    """

    def term(kind: MemoryKind, table: Mapping[tuple[str, str], float]) -> CostTerm:
        def function(batch: MemoryBatch) -> Floats:
            model = "" if batch.model is None else batch.model.name
            return table.get((model, batch.role.value), 0.0) / batch.layouts.gpus

        return CostTerm(
            name=f"toy.{kind.name.lower()}",
            summary="constant over the GPUs",
            target=Target.MEMORY,
            quantity=kind.value,
            function=function,
            memory=kind,
        )

    tables = {
        MemoryKind.TRAINING_STATE: training_state or {},
        MemoryKind.WEIGHTS: weights or {},
        MemoryKind.GRADIENTS: gradients or {},
        MemoryKind.TRANSIENT: transient or {},
    }
    return tuple(term(kind, table) for kind, table in tables.items())


def toy_book(
    graph: Rpeg,
    machine: DeviceSpace,
    workload: Workload | None = None,
    *,
    seconds: Mapping[tuple[str, str], float] | None = None,
    memory: Sequence[CostTerm] = (),
    transfer: CostTerm | None = None,
    extra: Sequence[CostTerm] = (),
    hardware: HardwareProfile | None = None,
    axes: Mapping[str, Axes] | None = None,
) -> CostBook:
    """The cost book of ``graph`` over all legal layouts, with toy terms.

    Args:
        graph, machine, workload: of the problem.
        seconds: see :func:`toy_seconds_term`.
        memory: see :func:`toy_memory_terms`.
        transfer: 100 bytes/s when absent.
        extra: further terms.
        hardware: :func:`toy_hardware` when absent.
        axes: of operators that have more than the paper's plan space.
    """
    workload = workload or toy_workload()

    def layouts(operator: str) -> Layouts:
        own = (axes or {}).get(operator, PAPER)
        return legal_candidates(operator, machine, workload, *model_specs(graph, operator), axes=own).layouts

    terms = [toy_seconds_term(seconds or {}), transfer or toy_transfer_term(), *memory, *extra]
    return CostBook(
        rpeg=graph,
        machine=machine,
        hardware=hardware or toy_hardware(),
        workload=workload,
        layouts={operator.name: layouts(operator.name) for operator in graph.operators},
        terms=[active(term) for term in terms],
    )
