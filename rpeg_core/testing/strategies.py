"""Hypothesis strategies: random well-formed graphs, machines, workloads and legal plans.

Needs ``hypothesis``. A property of a pass is stated over :func:`configurations`::

    @given(configurations())
    def test_lowered_graphs_are_acyclic(configuration):
        ...

Graphs are random within what makes sense in RL: every operator that serves a trainable model gets its
weights published and comes before the model's training; a container that reaches an operator without an edge
of its own was written by one of its data ancestors. Names and the operators' order are unrelated to the data
flow, so that a pass which confuses them fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from hypothesis import strategies as st

from rpeg_core.ir import Role, Rpeg, RpegBuilder
from rpeg_core.planning.assignment import Assignment, ExecutionPlan
from rpeg_core.planning.axes import AXES, Axes, applies
from rpeg_core.planning.candidates import PAPER, legal_candidates
from rpeg_core.planning.problem import model_specs as specs_of
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.spec.models import Head, ModelSpec, MoE
from rpeg_core.spec.workload import LengthQuantile, Workload

__all__ = [
    "Configuration",
    "axes_of_operators",
    "configurations",
    "execution_plans",
    "machines",
    "model_specs",
    "rpegs",
    "workloads",
]

MIN_OPERATORS = 2
MAX_OPERATORS = 8


@attrs.frozen(kw_only=True)
class Configuration:
    """One configuration ``C = (G, P)`` with the machine, the workload and the axes it is legal for."""

    rpeg: Rpeg
    plan: ExecutionPlan
    machine: DeviceSpace
    workload: Workload
    axes: Mapping[str, Axes]


@st.composite
def model_specs(draw: st.DrawFn, *, name: str = "random", head: Head = Head.LM) -> ModelSpec:
    """A small model: 1 to 8 layers, 2 to 8 heads, grouped-query, gated, tied, a mixture of experts or not."""
    heads = draw(st.sampled_from((2, 4, 8)))
    head_dim = draw(st.sampled_from((4, 8)))
    return ModelSpec(
        name=name,
        family="random",
        layers=draw(st.sampled_from((1, 2, 3, 4, 6, 8))),
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=draw(st.sampled_from([kv for kv in (1, 2, 4, 8) if kv <= heads])),
        head_dim=head_dim,
        ffn=heads * head_dim * draw(st.integers(1, 4)),
        gated_ffn=draw(st.booleans()),
        vocab=draw(st.integers(8, 64)),
        tied_embeddings=draw(st.booleans()),
        moe=draw(st.none() | st.sampled_from((2, 4, 6)).map(_experts)),
        head=head,
        source="drawn at random",
    )


def _experts(count: int) -> MoE:
    return MoE(experts=count, active_experts=2, expert_ffn=8)


@st.composite
def machines(draw: st.DrawFn, *, max_gpus: int = 32) -> DeviceSpace:
    """1 or 2 racks of 1 to 4 nodes of 1 to 8 GPUs, ``max_gpus`` at most; node counts may be odd."""
    gpus = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= max_gpus]))
    nodes = draw(st.integers(1, min(4, max_gpus // gpus)))
    racks = draw(st.integers(1, min(2, max_gpus // (gpus * nodes))))
    return DeviceSpace(racks=racks, nodes_per_rack=nodes, gpus_per_node=gpus)


@st.composite
def workloads(draw: st.DrawFn, *, max_phases: int = 4) -> Workload:
    """Up to 64 prompts of 1 to 4 rollouts, with 1 to ``max_phases`` length phases."""
    response_tokens = draw(st.integers(max_phases, 200))
    cuts = st.lists(st.integers(1, response_tokens - 1), max_size=max_phases - 1, unique=True)
    tokens = [*sorted(draw(cuts)), response_tokens]
    # Eighths are exact in binary, so that sums over phases can be compared with ==.
    eighths = sorted(draw(st.lists(st.integers(1, 7), min_size=len(tokens) - 1, max_size=len(tokens) - 1, unique=True)))
    fractions = [*(n / 8 for n in eighths), 1.0]
    quantiles = tuple(map(LengthQuantile, fractions, tokens))
    return Workload(
        prompts=draw(st.sampled_from((1, 2, 3, 4, 6, 8, 16, 32, 64))),
        rollouts_per_prompt=draw(st.integers(1, 4)),
        prompt_tokens=draw(st.integers(1, 100)),
        response_tokens=response_tokens,
        response_lengths=quantiles if len(quantiles) > 1 else (),
    )


@st.composite
def rpegs(
    draw: st.DrawFn,
    *,
    min_operators: int = MIN_OPERATORS,
    max_operators: int = MAX_OPERATORS,
    max_staleness: int = 3,
) -> Rpeg:
    """A well-formed graph of ``min_operators`` to ``max_operators`` operators and one to several models.

    It has at least one trainable model and one serving operator. Models may be served more than once, or only
    trained; functions without a model occur; several containers may flow between one pair of operators.
    """
    total = draw(st.integers(min_operators, max_operators))
    trained = draw(st.integers(1, min(3, total - 1)))
    return _Drawing(draw, serving=total - trained, trained=trained, max_staleness=max_staleness).graph()


@st.composite
def axes_of_operators(draw: st.DrawFn, rpeg: Rpeg) -> dict[str, Axes]:
    """For each operator the defaults, and a further value of two axes at most that have a meaning for it."""
    further: dict[str, tuple[Any, ...]] = {
        "cp": (2, 3),
        "ep": (2, 4),
        "sequence_parallel": (True,),
        "recompute": (Recompute.NONE, Recompute.SELECTIVE),
        "precision": (Precision.FP8,),
    }
    found = {}
    for operator in rpeg.operators:
        models = [model.spec for model in rpeg.models_of(operator.name)]
        open_to = [axis for axis in AXES if applies(axis, operator.role, models) is None]
        chosen = draw(st.sets(st.sampled_from(open_to), max_size=2)) if open_to else ()
        found[operator.name] = Axes(
            **{AXES[a]: (*getattr(Axes(), AXES[a]), draw(st.sampled_from(further[a]))) for a in sorted(chosen)}
        )
    return found


@st.composite
def execution_plans(
    draw: st.DrawFn, rpeg: Rpeg, machine: DeviceSpace, workload: Workload, axes: Mapping[str, Axes] | None = None
) -> dict[str, Assignment]:
    """A legal plan. Operators often share an allocation or a whole assignment, as in good plans."""
    plan: dict[str, Assignment] = {}
    for operator in rpeg.operators:
        own = (axes or {}).get(operator.name, PAPER)
        candidates = legal_candidates(operator.name, machine, workload, *specs_of(rpeg, operator.name), axes=own)
        known = sorted({a for a in plan.values() if candidates.find(a) is not None})
        taken = {(a.allocation.start, a.allocation.stop) for a in plan.values()}
        places = zip(candidates.start.tolist(), candidates.stop.tolist(), strict=True)
        beside = [index for index, place in enumerate(places) if place in taken]
        choices = [st.integers(0, len(candidates) - 1).map(candidates.assignment)]
        if known:
            choices.append(st.sampled_from(known))
        if beside:
            choices.append(st.sampled_from(beside).map(candidates.assignment))
        plan[operator.name] = draw(st.one_of(choices))
    return plan


@st.composite
def configurations(draw: st.DrawFn, **limits: Any) -> Configuration:
    """A graph (``limits`` as for :func:`rpegs`), a machine, a workload and a plan that is legal for them."""
    rpeg, machine, workload = draw(rpegs(**limits)), draw(machines()), draw(workloads())
    axes = draw(axes_of_operators(rpeg))
    plan = draw(execution_plans(rpeg, machine, workload, axes))
    return Configuration(rpeg=rpeg, plan=plan, machine=machine, workload=workload, axes=axes)


@attrs.frozen
class _Draft:
    """An operator before it has a place in the graph's order; ``parents`` are earlier drafts."""

    name: str
    role: Role
    model: str | None
    parents: tuple[int, ...]
    writes: tuple[str, ...]
    fused: tuple[tuple[str, str | None], ...] = ()


class _Drawing:
    """One graph, drawn in the order of its data flow and declared in another."""

    def __init__(self, draw: st.DrawFn, *, serving: int, trained: int, max_staleness: int) -> None:
        self.draw, self.max_staleness = draw, max_staleness
        self.trainable = [f"policy_{i}" for i in range(trained)]
        self.frozen = [f"judge_{i}" for i in range(draw(st.integers(0, 3)))]
        labels = draw(st.permutations(range(serving + trained)))
        self.names = [f"op_{label}" for label in labels]
        self.drafts: list[_Draft] = []
        for _ in range(serving):
            self.drafts.append(self.serving_operator())
        for model in self.trainable:
            self.drafts.append(self.training_operator(model))
        if trained > 1 and draw(st.booleans()):
            self.fuse(draw(st.integers(2, trained)))

    def serving_operator(self) -> _Draft:
        index = len(self.drafts)
        model = self.draw(st.sampled_from([*self.trainable, *self.frozen, None]))
        roles = [Role.INFERENCE] if model is None else [Role.GENERATION, Role.INFERENCE]
        return _Draft(
            name=self.names[index],
            role=self.draw(st.sampled_from(roles)),
            model=model,
            parents=self.some(range(index)),
            writes=tuple(f"data_{index}_{i}" for i in range(self.draw(st.integers(1, 2)))),
        )

    def training_operator(self, model: str) -> _Draft:
        serving = [i for i, draft in enumerate(self.drafts) if draft.role is not Role.TRAINING]
        own = [i for i in serving if self.drafts[i].model == model]
        parents = tuple(sorted({*own, *self.some(serving)}))
        return _Draft(self.names[len(self.drafts)], Role.TRAINING, model, parents, ())

    def fuse(self, count: int) -> None:
        """One operator of the last ``count`` trainings."""
        parts = self.drafts[-count:]
        parents = tuple(sorted({parent for part in parts for parent in part.parents}))
        fused = tuple((part.name, part.model) for part in parts)
        self.drafts[-count:] = [_Draft(parts[0].name, Role.TRAINING, parts[0].model, parents, (), fused)]

    def some(self, indices: Any) -> tuple[int, ...]:
        """A subset, ascending."""
        pool = list(indices)
        return tuple(sorted(self.draw(st.sets(st.sampled_from(pool))))) if pool else ()

    def ancestors(self, index: int) -> frozenset[int]:
        parents = self.drafts[index].parents
        return frozenset(parents).union(*(self.ancestors(parent) for parent in parents))

    def graph(self) -> Rpeg:
        builder = RpegBuilder("random")
        self.declare_models(builder)
        builder.data("prompts", elements=self.elements(), bytes_per_element=2)
        for draft in self.drafts:
            for name in draft.writes:
                builder.data(name, elements=self.elements(), bytes_per_element=self.draw(st.sampled_from((2, 4))))
        # Along every edge at least one container; one that arrives over no edge comes from an ancestor.
        carried: dict[tuple[int, int], tuple[str, ...]] = {}
        for index, draft in enumerate(self.drafts):
            for parent in draft.parents:
                writes = self.drafts[parent].writes
                carried[parent, index] = writes[: self.draw(st.integers(1, len(writes)))]
        for index in self.draw(st.permutations(range(len(self.drafts)))):
            self.declare_operator(builder, index, carried)
        for (source, target), names in sorted(carried.items()):
            for name in names:
                builder.connect(self.names[source], name, self.names[target])
        for draft in self.drafts:
            if draft.role is Role.TRAINING:
                trained = {draft.model, *(model for _, model in draft.fused)}
                served = [d.name for d in self.drafts if d.model in trained and d.role is not Role.TRAINING]
                builder.publish(draft.name, *served)
        return builder.build()

    def declare_models(self, builder: RpegBuilder) -> None:
        generating = {draft.model for draft in self.drafts if draft.role is Role.GENERATION}
        used = {*self.trainable, *(draft.model for draft in self.drafts)}
        for name in self.draw(st.permutations([*self.trainable, *self.frozen])):
            if name in used:
                head = Head.LM if name in generating else self.draw(st.sampled_from(list(Head)))
                trainable = name in self.trainable
                builder.model(
                    name,
                    self.draw(model_specs(name=name, head=head)),
                    trainable=trainable,
                    staleness=self.draw(st.integers(0, self.max_staleness)) if trainable else 0,
                )

    def declare_operator(
        self, builder: RpegBuilder, index: int, carried: dict[tuple[int, int], tuple[str, ...]]
    ) -> None:
        draft = self.drafts[index]
        over_edges = {name for parent in draft.parents for name in carried[parent, index]}
        reachable = [name for i in sorted(self.ancestors(index)) for name in self.drafts[i].writes]
        reads = over_edges | set(self.some_names(reachable)) or {"prompts"}
        if draft.fused:
            builder.fused_training(draft.name, dict(draft.fused), reads=reads)
        elif draft.role is Role.TRAINING:
            builder.training(draft.name, draft.model, reads=reads)
        elif draft.model is None:
            seconds = self.draw(st.sampled_from((0.0, 1e-3, 0.25)))
            builder.function(draft.name, reads=reads, writes=draft.writes, seconds_per_sample=seconds)
        elif draft.role is Role.GENERATION:
            builder.generation(draft.name, draft.model, reads=reads, writes=draft.writes)
        else:
            builder.inference(draft.name, draft.model, reads=reads, writes=draft.writes)

    def some_names(self, names: list[str]) -> frozenset[str]:
        return frozenset(self.draw(st.sets(st.sampled_from(names), max_size=2))) if names else frozenset()

    def elements(self) -> int:
        return self.draw(st.integers(0, 10_000))
