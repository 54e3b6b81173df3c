"""From an experiment to a problem, and from a solution to a plan: the only place where planning meets plugins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from rpeg_core.accuracy.intervals import plan_intervals
from rpeg_core.costing.book import ActiveTerm
from rpeg_core.errors import ExperimentError, UnknownKeyError, UsageError, suggest
from rpeg_core.ir import Role, Rpeg, to_text
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.planning.axes import AXES, Axes
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.plan import Plan, PluginUse, summarize
from rpeg_core.planning.problem import Problem, StructureProblem, build_structure
from rpeg_core.planning.search import Progress, SearchBudget, SearchResult
from rpeg_core.planning.space import axes_of, without_peak
from rpeg_core.planning.structures import STRUCTURAL_OPTIONS, Structure, enumerate_structures
from rpeg_core.plugins.loading import LoadedRecord
from rpeg_core.plugins.registry import Registry
from rpeg_core.records import AlgorithmTemplate, HardwareProfile, SearchStrategy, Target
from rpeg_core.settings import Override, build_settings
from rpeg_core.spec.experiment import Experiment
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.spec.models import Head, ModelSpec

__all__ = ["DEFAULT_SECONDS", "Planner"]

DEFAULT_SECONDS = 10.0
"""Search budget when the experiment states none."""

LONG_RESPONSE_TOKENS = 1024
"""From this limit on a plan without response lengths is worth a warning **[choice]**; see docs/experiment-file.md."""


class Planner:
    """An experiment with its plugins resolved.

    Args:
        experiment: what to plan.
        registry: where plugins come from.
        overrides: ``--set`` values, on top of the experiment's ``settings:``.

    Raises:
        MissingPluginError, PluginError: a named plugin is not installed or not usable.
        ExperimentError, UnknownKeyError: the experiment does not fit its algorithm or hardware.
        SettingsError: a setting does not exist or has a value that is not allowed.

    Attributes:
        remarks: what the user should know about the selection, a sentence each.
    """

    def __init__(self, experiment: Experiment, registry: Registry, overrides: Sequence[Override] = ()) -> None:
        self.experiment, self._registry, self._overrides = experiment, registry, tuple(overrides)
        self._settings_read: set[str] = set()
        hardware = registry.get("hardware", experiment.cluster.hardware)
        algorithm = registry.get("algorithm", experiment.algorithm)
        self.hardware = _hardware(hardware.record, experiment)
        self.machine = DeviceSpace(
            racks=experiment.cluster.racks,
            nodes_per_rack=experiment.cluster.nodes_per_rack,
            gpus_per_node=experiment.cluster.gpus_per_node or self.hardware.gpus_per_node,
        )
        self.template: AlgorithmTemplate = algorithm.record
        self._template_settings = self._settings(self.template.name, self.template.settings)
        terms = registry.cost_terms(experiment.costs or self.hardware.default_costs)
        self.terms = tuple(
            ActiveTerm(
                term=loaded.record,
                settings=self._settings(loaded.record.name, loaded.record.settings),
                distribution=loaded.distribution,
                version=loaded.version,
            )
            for loaded in terms
        )
        _check_terms(self.terms)
        self.models = _models(self.template, experiment)
        self.remarks = tuple(self._remarks())
        self.options = EvaluationOptions(steps=experiment.horizon_steps, split_lengths=experiment.split_lengths)
        self._uses = [
            _use("algorithm", algorithm),
            _use("hardware", hardware),
            *(_use("cost", loaded) for loaded in terms),
        ]

    def strategy(self, name: str | None = None) -> tuple[SearchStrategy, Any]:
        """A search strategy (the experiment's by default) and its settings; its ``seed`` is the experiment's."""
        loaded = self._registry.get("search", name or self.experiment.search.strategy)
        record: SearchStrategy = loaded.record
        seeded = {"seed": self.experiment.search.seed} if "seed" in attrs.fields_dict(record.settings) else {}
        return record, self._settings(record.name, record.settings, seeded)

    def structures(self) -> tuple[Structure, ...]:
        """Every structure that the experiment allows and the template offers.

        Raises:
            ExperimentError: an option is asked for that the template does not offer, or options exclude each other.
        """
        choices = self.experiment.structure
        for option in STRUCTURAL_OPTIONS:
            if option not in self.template.structures and any(getattr(choices, option)):
                offered = ", ".join(self.template.structures) or "none"
                raise ExperimentError(
                    f"structure.{option} is {list(getattr(choices, option))}",
                    facts=[f"allowed: [False]; algorithm {self.template.name!r} offers: {offered}"],
                    hint=f"remove structure.{option}",
                )
        shared = None
        if any(choices.actor_critic_sharing):
            shared = tuple(self.graph(Structure(staleness=(), actor_critic_sharing=True)).staleness)
        separate = tuple(self.graph(Structure(staleness=())).staleness)
        found = enumerate_structures(choices, separate, shared)
        if not found:
            raise ExperimentError(
                "structure.actor_critic_sharing and structure.fusion are both [True]",
                facts=[
                    "a shared backbone has one training, which fuses with nothing",
                    "allowed: one of them at a time",
                ],
                hint="set structure.fusion: [false]",
            )
        return found

    def graph(self, structure: Structure) -> Rpeg:
        """The graph that the algorithm template builds for a structure."""
        return self.template.build(self.experiment.workload, self.models, structure, self._template_settings)

    def problem(self, pins: Mapping[str, Pin] | None = None) -> Problem:
        """The problem to search; ``pins`` replaces the experiment's.

        Raises:
            PinError: a pin cannot be met.
            CostTermError: a cost term fails.
            UnknownKeyError: a pin or a setting names nothing that exists.
            UsageError: an override does.
        """
        pins = self.experiment.pins if pins is None else pins
        graphs = [(structure, self.graph(structure)) for structure in self.structures()]
        self._check_space([graph for _, graph in graphs])
        self._check_pins(pins, [graph for _, graph in graphs])
        built: dict[str, StructureProblem] = {}  # graphs that differ in staleness only share candidates and costs
        problems = []
        for structure, graph in graphs:
            if not set(pins) <= {op.name for op in graph.operators}:
                continue
            key = to_text(attrs.evolve(graph, models=tuple(attrs.evolve(m, staleness=0) for m in graph.models)))
            if key not in built:
                built[key] = build_structure(
                    structure=structure,
                    rpeg=graph,
                    machine=self.machine,
                    hardware=self.hardware,
                    workload=self.experiment.workload,
                    terms=self.terms,
                    options=self.options,
                    pins=pins,
                    axes=self.axes(graph),
                )
            problems.append(attrs.evolve(built[key], structure=structure, rpeg=graph))
        self._check_settings()
        return Problem(
            workload=self.experiment.workload,
            machine=self.machine,
            hardware=self.hardware,
            objective=self.experiment.objective,
            options=self.options,
            structures=tuple(problems),
        )

    def structure_problem(self, plan: Plan) -> StructureProblem:
        """The structure of an existing plan, every operator pinned to it."""
        pins = {name: Pin.of(assignment) for name, assignment in plan.assignments.items()}
        frameworks = {name: Axes(framework=own.framework) for name, own in self.axes(plan.rpeg).items()}
        return build_structure(
            structure=plan.structure,
            rpeg=plan.rpeg,
            machine=self.machine,
            hardware=self.hardware,
            workload=self.experiment.workload,
            terms=self.terms,
            options=self.options,
            pins=pins,
            axes=frameworks,
        )

    def axes(self, graph: Rpeg) -> dict[str, Axes]:
        """What the search may choose for each operator beyond the paper's plan space.

        Raises:
            ExperimentError: ``space:`` leaves an operator no value of an axis.
        """
        space, found = self.experiment.space, {}
        for op in graph.operators:
            models = [model.spec for model in graph.models_of(op.name)]
            found[op.name] = axes_of(space, op.name, op.role, models, self.hardware)
        return found

    def search(self, problem: Problem, progress: Progress, strategy: str | None = None) -> SearchResult:
        """Run a strategy with the experiment's budget.

        Raises:
            KeyboardInterrupt: cancelled by a signal while kernels are compiled, before the search.
        """
        record, settings = self.strategy(strategy)
        choice = self.experiment.search
        seconds = choice.seconds
        if seconds is None and choice.evaluations is None:
            seconds = DEFAULT_SECONDS
        with progress.preparing():
            problem.prepare()
            if record.prepare is not None:
                record.prepare(problem)
        return record.run(problem, SearchBudget(seconds=seconds, evaluations=choice.evaluations), settings, progress)

    def plan(
        self,
        problem: StructureProblem,
        assignments: ExecutionPlan,
        search: Mapping[str, Any],
        strategy: str | None = None,
    ) -> Plan:
        """The artifact of one configuration; ``strategy`` is who found it, None when nobody searched."""
        uses, prediction = list(self._uses), problem.predict(assignments)
        if strategy is not None:
            uses.append(_use("search", self._registry.get("search", strategy)))
        return Plan(
            experiment=self._with_overrides(),
            structure=problem.structure,
            rpeg=problem.rpeg,
            assignments=dict(assignments),
            machine=self.machine,
            options=self.options,
            prediction=summarize(prediction, self.options, self.hardware.device.memory_bytes),
            plugins=tuple(dict.fromkeys(uses)),
            search=dict(search),
            intervals=plan_intervals(problem.book, assignments, prediction),
        )

    def _with_overrides(self) -> Experiment:
        """The experiment as planned: ``--set`` values are part of it, so that a plan can be evaluated again."""
        settings = {name: dict(values) for name, values in self.experiment.settings.items()}
        for override in self._overrides:
            settings.setdefault(override.target, {})[override.name] = override.text
        return attrs.evolve(self.experiment, settings=settings)

    def _settings(self, name: str, cls: type, defaults: Mapping[str, Any] | None = None) -> Any:
        self._settings_read.add(name)
        values: dict[str, Any] = {**(defaults or {}), **self.experiment.settings.get(name, {})}
        origins = dict.fromkeys(self.experiment.settings.get(name, {}), f"settings.{name}")
        for override in self._overrides:
            if override.target == name:
                values[override.name] = override.text
                origins[override.name] = override.origin
        return build_settings(cls, values, where=f"settings.{name}", origins=origins)

    def _remarks(self) -> Iterator[str]:
        if not any(active.term.target is Target.MEMORY for active in self.terms):
            names = ", ".join(active.term.name for active in self.terms)
            yield f"no selected cost term prices memory ({names}): every plan counts as one that fits"
        if not any(active.term.target is Target.TRANSFER for active in self.terms):
            yield "no selected cost term prices transfers: they count as taking no time"
        yield from without_peak(self.experiment.space, self.hardware)
        workload = self.experiment.workload
        if not workload.response_lengths and workload.response_tokens >= LONG_RESPONSE_TOKENS and self._generates():
            yield (
                f"workload.response_lengths is missing and responses have {LONG_RESPONSE_TOKENS:,} tokens or more; all "
                "count as equally long and none is assessed while others are decoded; see `rpeg profile-lengths`"
            )

    def _generates(self) -> bool:
        """Whether the algorithm makes the responses itself."""
        choices = self.experiment.structure
        structure = Structure(staleness=(), actor_critic_sharing=choices.actor_critic_sharing == (True,))
        return any(operator.role is Role.GENERATION for operator in self.graph(structure).operators)

    def _check_settings(self) -> None:
        """Settings must name a record that exists; those of records that are installed but unused are harmless."""
        asked: dict[str, str | None] = dict.fromkeys(self.experiment.settings)
        for override in self._overrides:
            asked.setdefault(override.target, override.origin)
        for name in sorted(set(asked) - self._settings_read):
            kinds = ("algorithm", "cost", "search", "backend")
            known = sorted({record.name for kind in kinds for record in self._registry.records(kind)})
            if name not in known:
                origin, allowed, hint = asked[name], [f"allowed: {', '.join(known)}"], suggest(name, known)
                if origin is not None:
                    raise UsageError(f"{origin} names no plugin", facts=allowed, hint=hint)
                raise UnknownKeyError(f"settings.{name} names no plugin", facts=allowed, hint=hint)

    def _check_space(self, graphs: Sequence[Rpeg]) -> None:
        """Entries must name roles or operators, and the selected cost terms must know what they ask for."""
        roles = {role.value for role in Role}
        operators = {op.name: op.role.value for graph in graphs for op in graph.operators}
        known = [*sorted(roles), *sorted(operators)]
        functions = {op.name for graph in graphs for op in graph.operators if not graph.models_of(op.name)}
        for name, entry in self.experiment.space.items():
            if name not in known:
                raise UnknownKeyError(
                    f"space.{name} names no role and no operator of {self.template.name!r}",
                    facts=[f"allowed: {', '.join(known)}"],
                    hint=suggest(name, known),
                )
            if name in functions and entry.document():
                raise ExperimentError(
                    f"space.{name}: {name} is a function without a model",
                    facts=["it has no axis, and no framework prices it", f"in the file: {', '.join(entry.document())}"],
                    hint=f"remove space.{name}",
                )
            if entry.framework is not None:
                _check_framework(name, entry.framework, operators.get(name, name), self.terms)
        for axis, attribute in AXES.items():
            default = getattr(Axes(), attribute)
            asked = [value for entry in self.experiment.space.values() for value in entry.axis(axis) or ()]
            pinned = [getattr(pin, attribute) for pin in self.experiment.pins.values()]
            for where, values in (("space", asked), ("pin", pinned)):
                if {*values, *default, None} != {*default, None}:
                    _check_axis(axis, where, self.terms)

    def _check_pins(self, pins: Mapping[str, Pin], graphs: Sequence[Rpeg]) -> None:
        names = [{op.name for op in graph.operators} for graph in graphs]
        every = sorted(set().union(*names))
        for name in pins:
            if name not in every:
                raise UnknownKeyError(
                    f"pin.{name} names no operator of {self.template.name!r}",
                    facts=[f"allowed: {', '.join(every)}"],
                    hint=suggest(name, every),
                )
        if not any(set(pins) <= operators for operators in names):
            raise ExperimentError(
                "pin names operators that no single structure has together",
                facts=[f"structure {i}: {', '.join(sorted(operators))}" for i, operators in enumerate(names)],
                hint="pin operators of one structure only",
            )


def _use(kind: str, loaded: LoadedRecord) -> PluginUse:
    return PluginUse(kind=kind, name=loaded.record.name, distribution=loaded.distribution, version=loaded.version)


def _hardware(profile: HardwareProfile, experiment: Experiment) -> HardwareProfile:
    if experiment.cluster.memory_gb is None:
        return profile
    device = attrs.evolve(profile.device, memory_bytes=round(experiment.cluster.memory_gb * 1e9))
    return attrs.evolve(profile, device=device)


def _check_terms(terms: Sequence[ActiveTerm]) -> None:
    """Two models that price the same are alternatives; their sum means nothing."""
    first: dict[tuple[Target, str], str] = {}
    for active in terms:
        term = active.term
        other = first.setdefault((term.target, term.quantity), term.name)
        if other.partition(".")[0] != term.name.partition(".")[0]:
            raise ExperimentError(
                f"costs counts {term.quantity} twice",
                facts=[f"{other} and {term.name} are both selected"],
                hint=f"name one of {other.partition('.')[0]} and {term.name.partition('.')[0]}, or single terms",
            )


def _check_axis(axis: str, where: str, terms: Sequence[ActiveTerm]) -> None:
    priced = [active.term for active in terms if active.term.target is not Target.TRANSFER]
    without = [term.name for term in priced if axis not in term.axes]
    if without:
        raise ExperimentError(
            f"{where} names {axis}, which some of the selected cost terms do not know",
            facts=[f"they would give every value the same price: {', '.join(without)}"],
            hint=f"leave {axis} out of {where}:, or select a cost model that knows it, e.g. costs: [analytical]",
        )


def _check_framework(name: str, framework: str, role: str, terms: Sequence[ActiveTerm]) -> None:
    offered = sorted({known for active in terms for known in active.term.frameworks.get(role, ())})
    if framework not in offered:
        raise ExperimentError(
            f"space.{name}.framework is {framework!r}",
            facts=[f"allowed for {role} with the selected cost terms: {', '.join(offered) or 'none'}"],
            hint=suggest(framework, offered),
        )


def _models(template: AlgorithmTemplate, experiment: Experiment) -> dict[str, ModelSpec]:
    roles = {role.name: role for role in template.roles}
    for name in experiment.models:
        if name not in roles:
            raise UnknownKeyError(
                f"models.{name} is no model of algorithm {template.name!r}",
                facts=[f"allowed: {', '.join(roles)}"],
                hint=suggest(name, roles),
            )
    for name in experiment.heads_given:
        if roles[name].head == Head.LM.value and experiment.models[name].head is not Head.LM:
            raise ExperimentError(
                f"models.{name}.head is {experiment.models[name].head.value!r}",
                facts=[f"allowed: lm; algorithm {template.name!r} needs the probabilities of its tokens"],
            )
    missing = [role.name for role in template.roles if not role.optional and role.name not in experiment.models]
    if missing:
        raise ExperimentError(
            f"models.{missing[0]} is missing",
            facts=[f"algorithm {template.name!r} needs: {', '.join(r.name for r in template.roles if not r.optional)}"],
        )
    return {
        name: spec if name in experiment.heads_given else spec.with_head(Head(roles[name].head))
        for name, spec in experiment.models.items()
    }
