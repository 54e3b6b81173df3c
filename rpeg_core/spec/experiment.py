"""The experiment file: what the user wants to run, on what, and what may be chosen.

Every error names the key path, what was found, and what is allowed. :meth:`Experiment.document` is the resolved form
(models as dimensions, lengths as numbers) that a plan keeps; it parses back to an equal experiment.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from rpeg_core.errors import ExperimentError, UnknownKeyError, suggest
from rpeg_core.passes.score import Objective
from rpeg_core.planning.pins import Pin, parse_gpus
from rpeg_core.planning.structures import StructureChoices
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_core.spec.public_models import load_model
from rpeg_core.spec.workload import LengthQuantile, Workload

__all__ = ["Cluster", "Experiment", "SearchChoice", "load_experiment", "parse_experiment"]


MOST_STEPS = 100
"""K_eval of the paper is 8; evaluating takes time in proportion to it."""


@attrs.frozen(kw_only=True)
class Cluster:
    """``cluster:``. ``gpus_per_node`` None takes the profile's; ``memory_gb`` overrides its GPU memory (10^9 B).

    ``price_per_gpu_hour`` (US dollars) overrides the profile's price.
    """

    hardware: str
    racks: int = 1
    nodes_per_rack: int = 1
    gpus_per_node: int | None = None
    memory_gb: float | None = None
    price_per_gpu_hour: float | None = None


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
        costs: cost models or terms, None for the hardware profile's default.
        settings: plugin record -> values.
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

    def document(self) -> dict[str, Any]:
        """The resolved experiment as a JSON-ready mapping that :func:`parse_experiment` reads."""
        return {
            "algorithm": self.algorithm,
            "models": {
                role: {
                    "spec": spec.to_dict(),
                    **({"head": spec.head.value} if role in self.heads_given else {}),
                }
                for role, spec in self.models.items()
            },
            "workload": {
                "prompts": self.workload.prompts,
                "rollouts_per_prompt": self.workload.rollouts_per_prompt,
                "prompt_tokens": self.workload.prompt_tokens,
                "response_tokens": self.workload.response_tokens,
                "response_lengths": [[q.fraction, q.tokens] for q in self.workload.response_lengths],
                "bytes_per_element": self.workload.bytes_per_element,
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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(
            f"cannot read {path}",
            facts=[getattr(error, "strerror", None) or str(error)],
            hint="`rpeg init` writes a commented experiment file",
        ) from error
    try:
        document = yaml.safe_load(text)
    except RecursionError:
        raise ExperimentError(f"{path} is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ExperimentError(f"{path} is not valid YAML", facts=[_yaml_problem(error)]) from error
    return parse_experiment(document, base_dir=path.parent)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def parse_experiment(document: object, *, base_dir: Path = Path()) -> Experiment:
    """An experiment from a mapping; relative paths are taken from ``base_dir``. Raises as :func:`load_experiment`."""
    root = _Section(document, "")
    root.only(
        "algorithm",
        "models",
        "workload",
        "cluster",
        "structure",
        "objective",
        "search",
        "pin",
        "costs",
        "settings",
    )
    models, heads_given = _models(root.section("models"), base_dir)
    objective = root.section("objective", optional=True)
    objective.only("kind", "max_throughput_loss", "horizon_steps", "split_lengths")
    costs = root.get("costs")
    if costs is not None:
        costs = tuple(root.sequence("costs", str, "names of cost models or terms"))
    settings = root.section("settings", optional=True)
    return Experiment(
        algorithm=root.text("algorithm"),
        models=models,
        heads_given=heads_given,
        workload=_workload(root.section("workload"), base_dir),
        cluster=_cluster(root.section("cluster")),
        structure=_structure(root.section("structure", optional=True)),
        objective=Objective(
            kind=objective.text("kind", Objective().kind),
            max_throughput_loss=objective.number("max_throughput_loss", Objective().max_throughput_loss),
        ),
        horizon_steps=objective.integer("horizon_steps", 8, minimum=1, maximum=MOST_STEPS),
        split_lengths=objective.boolean("split_lengths", True),
        search=_search(root.section("search", optional=True)),
        pins=_pins(root.section("pin", optional=True)),
        costs=costs,
        settings={name: dict(settings.section(name).values) for name in settings.values},
    )


def _models(section: _Section, base_dir: Path) -> tuple[dict[str, ModelSpec], frozenset[str]]:
    found: dict[str, ModelSpec] = {}
    heads: set[str] = set()
    pending = dict.fromkeys(section.values)
    for role in [*pending, *pending]:  # a second round resolves same_as that points forward
        entry = section.section(role)
        entry.only("config", "same_as", "head", "spec")
        given = [key for key in ("config", "same_as", "spec") if entry.get(key) is not None]
        if len(given) != 1:
            raise ExperimentError(
                f"{entry.path} has {', '.join(given) or 'no architecture'}",
                facts=[
                    "allowed: exactly one of config (a public name, a path or dimensions) and same_as (another role)"
                ],
            )
        if given == ["same_as"]:
            target = entry.text("same_as")
            if target not in section.values or target == role or "same_as" in section.section(target).values:
                allowed = [r for r in section.values if r != role and "same_as" not in section.section(r).values]
                raise ExperimentError(
                    f"{entry.path}.same_as is {target!r}",
                    facts=[f"allowed: {', '.join(allowed) or 'no role here'}"],
                )
            if target not in found:
                continue
            spec = found[target]
        elif given == ["spec"]:
            spec = ModelSpec.from_dict(entry.section("spec").values)
        else:
            spec = load_model(entry.architecture("config"), base_dir=base_dir, name=role)
        if entry.get("head") is not None:
            spec = spec.with_head(Head(entry.choice("head", [head.value for head in Head])))
            heads.add(role)
        found[role] = spec
    return {role: found[role] for role in section.values}, frozenset(heads)


def _workload(section: _Section, base_dir: Path) -> Workload:
    section.only(
        "prompts",
        "rollouts_per_prompt",
        "prompt_tokens",
        "response_tokens",
        "response_lengths",
        "bytes_per_element",
        "shared_prefix",
    )
    return Workload(
        prompts=section.integer("prompts", minimum=1),
        rollouts_per_prompt=section.integer("rollouts_per_prompt", 1, minimum=1),
        prompt_tokens=section.integer("prompt_tokens", minimum=1),
        response_tokens=section.integer("response_tokens", minimum=1),
        response_lengths=_lengths(section, base_dir),
        bytes_per_element=section.integer("bytes_per_element", 2),
        shared_prefix=section.boolean("shared_prefix", False),
    )


def _lengths(section: _Section, base_dir: Path) -> tuple[LengthQuantile, ...]:
    value, where = section.get("response_lengths"), f"{section.path}.response_lengths"
    if value is None:
        return ()
    allowed = "allowed: a list of [fraction, tokens] pairs, or a CSV file with the columns fraction,tokens"
    rows: Sequence[Any]
    if isinstance(value, str):
        path = base_dir / value
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = [(row["fraction"], row["tokens"]) for row in csv.DictReader(file)]
        except (OSError, KeyError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise ExperimentError(f"{where}: cannot read {path}", facts=[str(reason), allowed]) from error
    elif isinstance(value, Sequence):
        rows = value
    else:
        raise ExperimentError(f"{where} is {value!r}", facts=[allowed])
    found = []
    for i, row in enumerate(rows):
        try:
            fraction, tokens = row
            if isinstance(tokens, float) or isinstance(fraction, bool) or isinstance(tokens, bool):
                raise ValueError
            found.append(LengthQuantile(float(fraction), int(tokens)))
        except (TypeError, ValueError):
            raise ExperimentError(f"{where}[{i}] is {row!r}", facts=[allowed]) from None
    return tuple(found)


def _cluster(section: _Section) -> Cluster:
    section.only("hardware", "racks", "nodes_per_rack", "gpus_per_node", "memory_gb", "price_per_gpu_hour")
    memory, price = section.get("memory_gb"), section.get("price_per_gpu_hour")
    return Cluster(
        hardware=section.text("hardware"),
        racks=section.integer("racks", 1, minimum=1),
        nodes_per_rack=section.integer("nodes_per_rack", 1, minimum=1),
        gpus_per_node=None if section.get("gpus_per_node") is None else section.integer("gpus_per_node", minimum=1),
        memory_gb=None if memory is None else section.number("memory_gb", above=0.0),
        price_per_gpu_hour=None if price is None else section.number("price_per_gpu_hour", above=0.0),
    )


def _structure(section: _Section) -> StructureChoices:
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


def _search(section: _Section) -> SearchChoice:
    section.only("strategy", "seconds", "evaluations", "seed")
    seconds, evaluations = section.get("seconds"), section.get("evaluations")
    return SearchChoice(
        strategy=section.text("strategy", SearchChoice().strategy),
        seconds=None if seconds is None else section.number("seconds", above=0.0),
        evaluations=None if evaluations is None else section.integer("evaluations", minimum=1),
        seed=section.integer("seed", 0, minimum=0),
    )


def _pins(section: _Section) -> dict[str, Pin]:
    found = {}
    for operator in section.values:
        entry = section.section(operator)
        entry.only("gpus", "dp", "pp", "tp", "microbatches")

        def degree(key: str, entry: _Section = entry) -> int | None:
            return None if entry.get(key) is None else entry.integer(key, minimum=1)

        found[operator] = Pin(
            allocation=None if entry.get("gpus") is None else parse_gpus(entry.values["gpus"], f"{entry.path}.gpus"),
            data=degree("dp"),
            pipeline=degree("pp"),
            tensor=degree("tp"),
            microbatches=degree("microbatches"),
        )
    return found


class _Section:
    """A mapping of the file with its key path; reads typed values or raises."""

    def __init__(self, values: object, path: str) -> None:
        if not isinstance(values, Mapping):
            name = path or "the experiment"
            raise ExperimentError(f"{name} is {_show(values)}", facts=["allowed: a mapping of keys to values"])
        self.values: Mapping[str, Any] = values
        self.path = path

    def only(self, *keys: str) -> None:
        for key in self.values:
            if key not in keys:
                where = f"in {self.path}" if self.path else "at the top level"
                raise UnknownKeyError(
                    f"unknown key {key!r} {where}",
                    facts=[f"allowed: {', '.join(keys)}"],
                    hint=suggest(str(key), keys),
                )

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def section(self, name: str, *, optional: bool = False) -> _Section:
        if self.get(name) is None:
            if optional:
                return _Section({}, self.key(name))
            raise ExperimentError(f"{self.key(name)} is missing", hint="`rpeg init` writes a commented experiment file")
        return _Section(self.values[name], self.key(name))

    def text(self, name: str, default: str | None = None) -> str:
        return self._value(name, default, lambda v: isinstance(v, str) and v, "a name")

    def architecture(self, name: str) -> str | Mapping[str, Any]:
        allowed = "a public name, a path or dimensions"
        return self._value(name, None, lambda v: isinstance(v, Mapping) or (isinstance(v, str) and v), allowed)

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        return self._value(name, None, lambda v: v in allowed, ", ".join(allowed))

    def boolean(self, name: str, default: bool) -> bool:
        return self._value(name, default, lambda v: isinstance(v, bool), "true or false")

    def integer(
        self, name: str, default: int | None = None, *, minimum: int | None = None, maximum: int | None = None
    ) -> int:
        allowed = "a whole number" + ("" if minimum is None else f" >= {minimum}")
        allowed += "" if maximum is None else f" and <= {maximum}"

        def fits(value: object) -> bool:
            if not isinstance(value, int) or isinstance(value, bool):
                return False
            return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)

        return self._value(name, default, fits, allowed)

    def number(self, name: str, default: float | None = None, *, above: float | None = None) -> float:
        allowed = "a number" + ("" if above is None else f" > {above:g}")

        def fits(value: object) -> bool:
            return (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and value == value  # not NaN
                and abs(value) != float("inf")
                and (above is None or value > above)
            )

        return float(self._value(name, default, fits, allowed))

    def sequence(self, name: str, kind: type, allowed: str, default: Sequence[Any] = ()) -> Sequence[Any]:
        """A list of ``kind``; a single value is a list of one."""
        value = self.get(name)
        if value is None:
            return default
        items = value if isinstance(value, list | tuple) else [value]
        if not items or any(type(item) is not kind for item in items):
            raise ExperimentError(f"{self.key(name)} is {_show(value)}", facts=[f"allowed: {allowed}"])
        return items

    def _value(self, name: str, default: Any, fits: Callable[[Any], Any], allowed: str) -> Any:
        value = self.get(name)
        if value is None:
            if default is None:
                raise ExperimentError(f"{self.key(name)} is missing", facts=[f"allowed: {allowed}"])
            return default
        if not fits(value):
            raise ExperimentError(f"{self.key(name)} is {_show(value)}", facts=[f"allowed: {allowed}"])
        return value


def _show(value: object) -> str:
    return "empty" if value is None else repr(value)
