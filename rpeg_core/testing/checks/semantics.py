"""Run-time semantics of algorithm templates: they fit the graphs, as far as can be said without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rpeg_core.errors import RpegError
from rpeg_core.ir import ContainerKind, Operator, Role, Rpeg
from rpeg_core.records import AlgorithmTemplate
from rpeg_core.runtime.semantics import Content, Recipe, Semantics, load_semantics, sequences_of
from rpeg_core.testing.checks.common import defaults
from rpeg_core.testing.checks.outcome import CheckFailedError, CheckSkippedError, require

__all__ = ["fits"]

_WRITTEN = {
    Role.GENERATION: (Content.SEQUENCES, Content.LOGPROBS),
    Role.INFERENCE: (Content.LOGPROBS, Content.VALUES, Content.SCORES),
}


def fits(record: AlgorithmTemplate, graphs: Iterable[Rpeg]) -> None:
    """The named object can be imported, and says for every graph what its containers hold and how it is trained.

    Raises:
        CheckSkippedError: the template names none, or it needs a package that is not installed.
    """
    if record.semantics is None:
        raise CheckSkippedError("the template names no semantics: it can be planned, not executed")
    try:
        semantics = load_semantics(record)
    except RpegError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "torch":
            raise CheckSkippedError("it needs torch, which is not installed") from error
        raise CheckFailedError(f"{error.what}: {'; '.join(error.facts)}") from error
    problems = dict.fromkeys(problem for graph in graphs for problem in _problems(record, semantics, graph))
    require(list(problems))


def _problems(record: AlgorithmTemplate, semantics: Semantics, graph: Rpeg) -> Iterator[str]:
    data = [container.name for container in graph.containers if container.kind is ContainerKind.DATA]
    unknown = [name for name in data if not isinstance(semantics.contents.get(name), Content)]
    if unknown:
        yield f"contents does not say what {', '.join(unknown)} of {graph.name} holds"
        return
    for name in sorted(graph.inputs.intersection(data)):
        if semantics.contents[name] not in (Content.PROMPTS, Content.SEQUENCES):
            yield f"{name} comes from the dataset, but holds {semantics.contents[name].value}"
    for operator in graph.operators:
        yield from _operator_problems(record, semantics, graph, operator)


def _operator_problems(
    record: AlgorithmTemplate, semantics: Semantics, graph: Rpeg, operator: Operator
) -> Iterator[str]:
    if operator.role is not Role.GENERATION:
        try:
            sequences_of(graph, operator, semantics.contents)
        except RpegError as error:
            yield error.what
    if operator.role is Role.TRAINING:
        for training in operator.trainings:
            recipe = semantics.recipe(training.name, defaults(record))
            if not isinstance(recipe, Recipe):
                yield f"recipe({training.name!r}) returned {type(recipe).__name__}, not Recipe"
        return
    allowed = (Content.SCORES,) if operator.model is None else _WRITTEN[operator.role]
    for name in sorted(operator.outputs):
        if semantics.contents[name] not in allowed:
            yield f"{operator.name}, {operator.role.value}, writes {name}, which holds {semantics.contents[name].value}"
