"""Asking RPEG: the installed plugins, the models that a table describes, and answers over what is not known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from rpeg_core.planning.planner import Planner
from rpeg_core.plugins.registry import Registry
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.public_models import load_model
from rpeg_core.validation.replay import operator_terms

__all__ = ["FITS", "FULL", "GB", "Answer", "Asker", "Facts", "Question", "with_values"]

GB = 1e9
FITS, FULL = "fits", "out of memory"

Facts = Mapping[str, Any]


@attrs.frozen
class Answer:
    """RPEG's verdict and the number behind it; of several answers the smallest and the largest ``size`` are shown."""

    verdict: str
    number: str
    size: float = 0.0


class Asker:
    """The installed plugins, and the models that a table describes.

    Args:
        registry: where plugins come from.
        models: name -> dimensions, for models that RPEG does not bundle.
        kinds: what ``ask:`` may be.
    """

    def __init__(self, registry: Registry, models: Mapping[str, Facts], kinds: Mapping[str, Question]) -> None:
        self._registry, self._models, self._kinds = registry, models, kinds
        self.terms = operator_terms(registry, ("analytical",))

    def model(self, name: str) -> ModelSpec:
        described = self._models.get(name)
        if described is None:
            return load_model(name, base_dir=Path())
        dimensions = {key: value for key, value in described.items() if key != "source"}
        return load_model(dimensions, base_dir=Path(), name=name)

    def hardware(self, name: str, memory_gb: float | None = None) -> HardwareProfile:
        record = self._registry.get("hardware", name).record
        if memory_gb is None:
            return record
        return attrs.evolve(record, device=attrs.evolve(record.device, memory_bytes=round(memory_gb * GB)))

    def planner(self, experiment: Facts, **cluster: Any) -> Planner:
        document = {**experiment, "cluster": {**experiment["cluster"], **cluster}}
        return Planner(parse_experiment(document), self._registry)

    def ask(self, question: Facts) -> Answer:
        """The answer to a question, or ``it depends`` when it differs over what is not known."""
        kind = self._kinds[question["ask"]]
        facts = {key: value for key, value in question.items() if key not in ("ask", "range", "reality")}
        ranges = question.get("range", {})
        answers = [
            kind(self, with_values(facts, dict(zip(ranges, values, strict=True))))
            for values in itertools.product(*ranges.values())
        ]
        verdicts = {answer.verdict for answer in answers}
        ends = [pick(answers, key=lambda answer: answer.size).number for pick in (min, max)]
        shown = ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
        return Answer(answers[0].verdict if len(verdicts) == 1 else "it depends", shown)


Question = Callable[[Asker, Facts], Answer]


def with_values(facts: Facts, values: Facts) -> dict[str, Any]:
    """``facts`` with values at dotted paths."""
    found = {key: dict(value) if isinstance(value, dict) else value for key, value in facts.items()}
    for path, value in values.items():
        *outer, last = path.split(".")
        place = found
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    return found
