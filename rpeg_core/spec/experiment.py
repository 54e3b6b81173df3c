"""The experiment file: what the user wants to run, on what, and what may be chosen.

Every error names the key path, what was found, and what is allowed. :meth:`Experiment.document` is the resolved form
(models as dimensions, lengths as numbers) that a plan keeps; it parses back to an equal experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rpeg_core.errors import ExperimentError
from rpeg_core.passes.score import Objective
from rpeg_core.planning.axes import AXES
from rpeg_core.planning.pins import Pin, parse_gpus
from rpeg_core.planning.space import Space, flag, member, read_space
from rpeg_core.planning.structures import StructureChoices
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.lengths import read_lengths
from rpeg_core.spec.machine import is_profile_file
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.roles import read_roles
from rpeg_core.spec.sections import Section, read_yaml
from rpeg_core.spec.workload import Workload

__all__ = ["Cluster", "Experiment", "SearchChoice", "load_experiment", "parse_experiment"]


MOST_STEPS = 100
"""K_eval of the paper is 8; evaluating takes time in proportion to it."""

MEMORY_GB = (0.001, 100_000.0)
"""Least and most memory of a GPU in GB that an experiment may state **[choice]**; the largest GPU has 0.3 % of it."""


@attrs.frozen(kw_only=True)
class Cluster:
    """``cluster:``. ``hardware`` is the name of a profile or the absolute path of a file with one.

    ``gpus_per_node`` None takes the profile's; ``memory_gb`` overrides its GPU memory (10^9 B).

    ``price_per_gpu_hour`` (US dollars) overrides the profile's price. ``host_memory_gb`` is that of a node (10^9 B).
    """

    hardware: str
    racks: int = 1
    nodes_per_rack: int = 1
    gpus_per_node: int | None = None
    memory_gb: float | None = None
    price_per_gpu_hour: float | None = None
    host_memory_gb: float | None = None


@attrs.frozen(kw_only=True)
class SearchChoice:
    """``search:``. With neither limit given the search has 10 seconds."""

    strategy: str = "annealing"
    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0


@attrs.frozen(kw_only=True)
class Experiment:
    """A parsed experiment file.

    Attributes:
        algorithm: name of an algorithm template.
        models: role -> architecture, heads applied.
        heads_given: roles whose head the user stated.
        workload, cluster, structure, objective, search: the sections of the file.
        horizon_steps: K_eval.
        split_lengths: whether length-quantile splitting is allowed.
        pins: operator -> what the user fixes.
        space: role or operator -> what may be chosen beyond the paper's plan space.
        costs: cost models or terms, None for the hardware profile's default.
        settings: plugin record -> values.
        weights: role -> absolute path of the folder with its first weights; a role that is not here has none.
        same_as: role -> the role whose architecture, and weights unless it has its own, it repeats.
    """

    algorithm: str
    models: Mapping[str, ModelSpec]
    heads_given: frozenset[str]
    workload: Workload
    cluster: Cluster
    structure: StructureChoices
    objective: Objective
    horizon_steps: int
    split_lengths: bool
    search: SearchChoice
    pins: Mapping[str, Pin]
    costs: tuple[str, ...] | None
    settings: Mapping[str, Mapping[str, Any]]
    weights: Mapping[str, str] = attrs.field(factory=dict)
    same_as: Mapping[str, str] = attrs.field(factory=dict)
    space: Space = attrs.field(factory=dict)

    def document(self) -> dict[str, Any]:
        """The resolved experiment as a JSON-ready mapping that :func:`parse_experiment` reads."""
        lengths = [[q.fraction, q.tokens] for q in self.workload.response_lengths]
        cache = self.workload.cache_bytes_per_element
        return {
            "algorithm": self.algorithm,
            "models": {
                role: {
                    **({"same_as": self.same_as[role]} if role in self.same_as else {}),
                    "spec": spec.to_dict(),
                    **({"head": spec.head.value} if role in self.heads_given else {}),
                    **({"weights": self.weights[role]} if role in self.weights else {}),
                }
                for role, spec in self.models.items()
            },
            "workload": {
                "prompts": self.workload.prompts,
                "rollouts_per_prompt": self.workload.rollouts_per_prompt,
                "prompt_tokens": self.workload.prompt_tokens,
                "response_tokens": self.workload.response_tokens,
                **({"response_lengths": lengths} if lengths else {}),
                "bytes_per_element": self.workload.bytes_per_element,
                **({} if cache is None else {"cache_bytes_per_element": cache}),
                "shared_prefix": self.workload.shared_prefix,
            },
            "cluster": attrs.asdict(self.cluster, filter=lambda _, value: value is not None),
            "structure": {key: list(value) for key, value in attrs.asdict(self.structure).items()},
            "objective": {
                "kind": self.objective.kind,
                "max_throughput_loss": self.objective.max_throughput_loss,
                "horizon_steps": self.horizon_steps,
                "split_lengths": self.split_lengths,
            },
            "search": attrs.asdict(self.search, filter=lambda _, value: value is not None),
            "pin": {operator: pin.document() for operator, pin in self.pins.items()},
            **({"space": {name: entry.document() for name, entry in self.space.items()}} if self.space else {}),
            **({} if self.costs is None else {"costs": list(self.costs)}),
            "settings": {name: dict(values) for name, values in self.settings.items()},
        }


def load_experiment(path: Path | str) -> Experiment:
    """Read an experiment file (YAML).

    Raises:
        ExperimentError: the file cannot be read, or a value is not allowed.
        UnknownKeyError: a key does not exist.
        ModelConfigError, UnknownModelError: a model cannot be resolved.
    """
    path = Path(path)
    return parse_experiment(read_yaml(path), base_dir=path.parent)


def parse_experiment(document: object, *, base_dir: Path = Path()) -> Experiment:
    """An experiment from a mapping; relative paths are taken from ``base_dir``. Raises as :func:`load_experiment`."""
    root = Section(document, "")
    root.only(
        "algorithm",
        "models",
        "workload",
        "cluster",
        "structure",
        "objective",
        "search",
        "pin",
        "space",
        "costs",
        "settings",
    )
    roles = read_roles(root.section("models"), base_dir)
    objective = root.section("objective", optional=True)
    objective.only("kind", "max_throughput_loss", "horizon_steps", "split_lengths")
    costs = root.get("costs")
    if costs is not None:
        costs = tuple(root.sequence("costs", str, "names of cost models or terms"))
    settings = root.section("settings", optional=True)
    return Experiment(
        algorithm=root.text("algorithm"),
        models={name: role.spec for name, role in roles.items()},
        heads_given=frozenset(name for name, role in roles.items() if role.head_given),
        weights={name: role.weights for name, role in roles.items() if role.weights is not None},
        same_as={name: role.same_as for name, role in roles.items() if role.same_as is not None},
        workload=_workload(root.section("workload"), base_dir),
        cluster=_cluster(root.section("cluster"), base_dir),
        structure=_structure(root.section("structure", optional=True)),
        objective=Objective(
            kind=objective.text("kind", Objective().kind),
            max_throughput_loss=objective.number("max_throughput_loss", Objective().max_throughput_loss),
        ),
        horizon_steps=objective.integer("horizon_steps", 8, minimum=1, maximum=MOST_STEPS),
        split_lengths=objective.boolean("split_lengths", True),
        search=_search(root.section("search", optional=True)),
        pins=_pins(root.section("pin", optional=True)),
        space=read_space(root.section("space", optional=True)),
        costs=costs,
        settings={name: dict(settings.section(name).values) for name in settings.values},
    )


def _workload(section: Section, base_dir: Path) -> Workload:
    section.only(
        "prompts",
        "rollouts_per_prompt",
        "prompt_tokens",
        "response_tokens",
        "response_lengths",
        "bytes_per_element",
        "cache_bytes_per_element",
        "shared_prefix",
    )
    cache = section.get("cache_bytes_per_element")
    return Workload(
        prompts=section.integer("prompts", minimum=1),
        rollouts_per_prompt=section.integer("rollouts_per_prompt", 1, minimum=1),
        prompt_tokens=section.integer("prompt_tokens", minimum=1),
        response_tokens=section.integer("response_tokens", minimum=1),
        response_lengths=read_lengths(section, base_dir),
        bytes_per_element=section.integer("bytes_per_element", 2),
        cache_bytes_per_element=None if cache is None else section.integer("cache_bytes_per_element"),
        shared_prefix=section.boolean("shared_prefix", False),
    )


def _cluster(section: Section, base_dir: Path) -> Cluster:
    section.only(
        "hardware", "racks", "nodes_per_rack", "gpus_per_node", "memory_gb", "price_per_gpu_hour", "host_memory_gb"
    )
    memory, price = section.get("memory_gb"), section.get("price_per_gpu_hour")
    host = section.get("host_memory_gb")
    return Cluster(
        hardware=_hardware(section.text("hardware"), base_dir),
        racks=section.integer("racks", 1, minimum=1),
        nodes_per_rack=section.integer("nodes_per_rack", 1, minimum=1),
        gpus_per_node=None if section.get("gpus_per_node") is None else section.integer("gpus_per_node", minimum=1),
        memory_gb=None if memory is None else _memory_gb(section),
        price_per_gpu_hour=None if price is None else section.number("price_per_gpu_hour", above=0.0),
        host_memory_gb=None if host is None else section.number("host_memory_gb", above=0.0),
    )


def _memory_gb(section: Section) -> float:
    """GPU memory between that of a toy and more than any machine has."""
    value, (least, most) = section.number("memory_gb", above=0.0), MEMORY_GB
    if not least <= value <= most:
        raise ExperimentError(
            f"{section.key('memory_gb')} is {value!r}",
            facts=[f"allowed: a number from {least:g} to {most:,.0f}, in GB"],
        )
    return value


def _hardware(name: str, base_dir: Path) -> str:
    """The name of a profile, or the absolute path of a file with one."""
    return str((base_dir / Path(name).expanduser()).resolve()) if is_profile_file(name) else name


def _structure(section: Section) -> StructureChoices:
    section.only("staleness", "actor_critic_sharing", "fusion")
    default = StructureChoices()
    staleness = section.sequence("staleness", int, "whole numbers >= 0", default.staleness)
    if any(tau < 0 for tau in staleness):
        raise ExperimentError(f"structure.staleness is {list(staleness)!r}", facts=["allowed: whole numbers >= 0"])
    return StructureChoices(
        staleness=tuple(staleness),
        actor_critic_sharing=tuple(
            section.sequence("actor_critic_sharing", bool, "true, false or both", default.actor_critic_sharing)
        ),
        fusion=tuple(section.sequence("fusion", bool, "true, false or both", default.fusion)),
    )


def _search(section: Section) -> SearchChoice:
    section.only("strategy", "seconds", "evaluations", "seed")
    seconds, evaluations = section.get("seconds"), section.get("evaluations")
    return SearchChoice(
        strategy=section.text("strategy", SearchChoice().strategy),
        seconds=None if seconds is None else section.number("seconds", above=0.0),
        evaluations=None if evaluations is None else section.integer("evaluations", minimum=1),
        seed=section.integer("seed", 0, minimum=0),
    )


def _pins(section: Section) -> dict[str, Pin]:
    found = {}
    for operator in section.values:
        entry = section.section(operator)
        entry.only("gpus", "dp", "pp", "tp", "microbatches", *AXES)

        def degree(key: str, entry: Section = entry) -> int | None:
            return None if entry.get(key) is None else entry.integer(key, minimum=1)

        found[operator] = Pin(
            allocation=None if entry.get("gpus") is None else parse_gpus(entry.values["gpus"], f"{entry.path}.gpus"),
            data=degree("dp"),
            pipeline=degree("pp"),
            tensor=degree("tp"),
            microbatches=degree("microbatches"),
            context=degree("cp"),
            expert=degree("ep"),
            sequence_parallel=flag(entry, "sequence_parallel"),
            recompute=member(entry, "recompute", Recompute),
            precision=member(entry, "precision", Precision),
        )
    return found
