"""The plan artifact ``plan.json``: what was asked, what was chosen, what is predicted, and with which plugins.

``digest`` is the SHA-256 of the canonical JSON of everything but itself, ``search`` (which holds wall-clock times) and
``intervals`` (how sure the prediction is, which better validation changes): two searches that find the same plan write
the same digest, and a changed plan is refused when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rpeg_core._version import __version__
from rpeg_core.accuracy.intervals import PlanIntervals
from rpeg_core.errors import PlanFileError, RpegError
from rpeg_core.ir import Rpeg, from_dict, to_dict
from rpeg_core.passes.evaluate import EvaluationOptions, Prediction
from rpeg_core.passes.lower import NodeKind
from rpeg_core.passes.microtasks import Microtask, microtasks
from rpeg_core.passes.score import usable_bytes
from rpeg_core.planning.assignment import Assignment, ExecutionPlan, Layout, Mode
from rpeg_core.planning.pins import parse_gpus
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.experiment import Experiment, parse_experiment
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.spec.workload import Workload

__all__ = ["NOT_DIGESTED", "SCHEMA", "Plan", "PlanPrediction", "PluginUse", "load_plan", "summarize"]

SCHEMA = 1

NOT_DIGESTED = ("search", "intervals", "digest")
"""Parts of the document that the digest leaves out."""


@attrs.frozen(kw_only=True)
class PluginUse:
    """A record that had a part in the plan, and the distribution it came from."""

    kind: str
    name: str
    distribution: str
    version: str


@attrs.frozen(kw_only=True)
class PlanPrediction:
    """What the model says about the plan; times in seconds, memory in bytes per GPU.

    ``operator_s`` has one entry per length phase of an operator, one for an unsplit operator, each for one RL step.
    ``transfers_s`` is the sum of COMM and RESHARD times of one step in steady state.
    ``memory`` lists (GPUs, peak bytes, operator at the peak).
    """

    makespan_s: float
    step_s: float
    tokens_per_s: float
    utilization: float
    used_gpus: int
    operator_s: Mapping[str, tuple[float, ...]]
    transfers_s: float
    memory: tuple[tuple[str, float, str | None], ...]
    usable_bytes: float
    capacity_bytes: float

    @property
    def feasible(self) -> bool:
        return all(peak <= self.usable_bytes for _, peak, _ in self.memory)


def summarize(prediction: Prediction, options: EvaluationOptions, capacity_bytes: float) -> PlanPrediction:
    """The part of a prediction that a plan keeps."""
    graph, last = prediction.graph, options.steps - 1
    operator_s: dict[str, tuple[float, ...]] = {op.name: () for op in graph.rpeg.operators}
    transfers = 0.0
    for node in graph.nodes:
        if node.step != last:
            continue
        if node.kind is NodeKind.OP:
            operator_s[node.operator] = (*operator_s[node.operator], prediction.seconds[node.index])
        else:
            transfers += prediction.seconds[node.index]
    return PlanPrediction(
        makespan_s=prediction.evaluation.makespan_s,
        step_s=prediction.evaluation.makespan_s / options.steps,
        tokens_per_s=prediction.evaluation.tokens_per_s,
        utilization=prediction.evaluation.utilization,
        used_gpus=prediction.evaluation.used_gpus,
        operator_s=operator_s,
        transfers_s=transfers,
        memory=tuple((str(s.gpus), s.peak_bytes, s.moment) for s in prediction.memory.segments),
        usable_bytes=usable_bytes(capacity_bytes),
        capacity_bytes=capacity_bytes,
    )


@attrs.frozen(kw_only=True)
class Plan:
    """A complete configuration with its prediction.

    Attributes:
        experiment: the resolved experiment.
        structure: the chosen structure.
        rpeg: its graph.
        assignments: operator -> assignment.
        machine: the device space.
        options: how the prediction was made.
        prediction: the model's word on it.
        plugins: every record used.
        search: how it was found (strategy, evaluations, seconds, baselines), free of promises.
        intervals: how sure the prediction is; None in files of versions that did not say.
        rpeg_version: version of rpeg-core that made it.
    """

    experiment: Experiment
    structure: Structure
    rpeg: Rpeg
    assignments: ExecutionPlan
    machine: DeviceSpace
    options: EvaluationOptions
    prediction: PlanPrediction
    plugins: tuple[PluginUse, ...]
    search: Mapping[str, Any] = attrs.field(factory=dict)
    intervals: PlanIntervals | None = None
    rpeg_version: str = __version__

    @property
    def workload(self) -> Workload:
        return self.experiment.workload

    @property
    def microtasks(self) -> dict[str, tuple[tuple[Microtask, ...], ...]]:
        """Of each fused operator, what every pipeline stage does in order for one minibatch of all its rows."""
        return {
            op.name: microtasks([training.name for training in op.fused], a.layout.pipeline, a.microbatches)
            for op in self.rpeg.operators
            if op.fused
            for a in [self.assignments[op.name]]
        }

    @property
    def digest(self) -> str:
        """``sha256:...`` over the canonical JSON of :meth:`document` without :data:`NOT_DIGESTED`."""
        return _digest(self._body())

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        body = self._body()
        intervals = {} if self.intervals is None else {"intervals": self.intervals.document()}
        return {**body, **intervals, "search": dict(self.search), "digest": _digest(body)}

    def save(self, path: Path | str) -> None:
        """Write ``plan.json``.

        Raises:
            PlanFileError: the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise PlanFileError(f"cannot write {path}", facts=[error.strerror or str(error)]) from error

    def _schedules(self) -> dict[str, list[list[str]]]:
        return {name: [[str(task) for task in stage] for stage in stages] for name, stages in self.microtasks.items()}

    def _body(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "rpeg_version": self.rpeg_version,
            "experiment": self.experiment.document(),
            "structure": {
                "staleness": dict(self.structure.staleness),
                "actor_critic_sharing": self.structure.actor_critic_sharing,
                "fusion": self.structure.fusion,
            },
            "rpeg": to_dict(self.rpeg),
            "plan": {name: a.document() for name, a in self.assignments.items()},
            **({"microtasks": schedules} if (schedules := self._schedules()) else {}),
            "machine": attrs.asdict(self.machine),
            "options": attrs.asdict(self.options),
            "prediction": attrs.asdict(self.prediction),
            "plugins": [attrs.asdict(use) for use in self.plugins],
        }


def load_plan(path: Path | str) -> Plan:
    """Read ``plan.json``.

    Raises:
        PlanFileError: it cannot be read, has another schema, or its digest does not match its content.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanFileError(
            f"cannot read {path}", facts=[error.strerror or str(error)], hint="`rpeg plan FILE` writes a plan"
        ) from error
    except ValueError as error:
        raise PlanFileError(
            f"{path} is not a JSON document", facts=[str(error)], hint="`rpeg plan FILE` writes a plan"
        ) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else None
        raise PlanFileError(
            f"{path} has schema {found!r}",
            facts=[f"allowed: {SCHEMA}"],
            hint="make the plan again with `rpeg plan`",
        )
    body = {key: value for key, value in document.items() if key not in NOT_DIGESTED}
    if document.get("digest") != _digest(body):
        raise PlanFileError(
            f"{path} was changed after it was written",
            facts=[
                f"digest in the file: {document.get('digest')}",
                f"digest of its content: {_digest(body)}",
            ],
            hint="change the experiment's `pin:` instead and run `rpeg predict`",
        )
    for key in ("search", "intervals"):  # outside the digest
        if not isinstance(document.get(key, {}), dict):
            raise PlanFileError(
                f"{path} is not a plan",
                facts=[f"{key} is {json.dumps(document[key])[:40]}; allowed: an object"],
                hint="make the plan again with `rpeg plan`",
            )
    try:
        plan = _plan(document)
        if document.get("microtasks", {}) != plan._schedules():
            raise PlanFileError(
                f"{path} has another schedule of microtasks than this version of rpeg-core makes",
                facts=[f"rpeg-core {document['rpeg_version']} made the plan, this is {__version__}"],
                hint="make the plan again with `rpeg plan`",
            )
        return plan
    except RpegError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanFileError(f"{path} is not a plan", facts=[f"{type(error).__name__}: {error}"]) from error


def _plan(document: Mapping[str, Any]) -> Plan:
    structure, prediction = document["structure"], document["prediction"]
    return Plan(
        experiment=parse_experiment(document["experiment"]),
        structure=Structure(
            staleness=tuple(structure["staleness"].items()),
            actor_critic_sharing=structure["actor_critic_sharing"],
            fusion=structure["fusion"],
        ),
        rpeg=from_dict(document["rpeg"]),
        assignments={name: _assignment(entry, f"plan.{name}") for name, entry in document["plan"].items()},
        machine=DeviceSpace(**document["machine"]),
        options=EvaluationOptions(**document["options"]),
        prediction=PlanPrediction(
            **{
                **prediction,
                "operator_s": {name: tuple(values) for name, values in prediction["operator_s"].items()},
                "memory": tuple((gpus, peak, moment) for gpus, peak, moment in prediction["memory"]),
            }
        ),
        plugins=tuple(PluginUse(**use) for use in document["plugins"]),
        search=document.get("search", {}),
        intervals=PlanIntervals.read(document["intervals"]) if "intervals" in document else None,
        rpeg_version=document["rpeg_version"],
    )


def _assignment(entry: Mapping[str, Any], where: str) -> Assignment:
    default = Mode()
    return Assignment(
        parse_gpus(entry["gpus"], f"{where}.gpus"),
        Layout(entry["dp"], entry["pp"], entry["tp"], entry.get("cp", 1), entry.get("ep", 1)),
        entry["microbatches"],
        Mode(
            sequence_parallel=entry.get("sequence_parallel", default.sequence_parallel),
            recompute=Recompute(entry["recompute"]) if "recompute" in entry else default.recompute,
            precision=Precision(entry.get("precision", default.precision.value)),
        ),
    )


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
