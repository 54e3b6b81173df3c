"""What ``rpeg profile-lengths`` and a backend say to each other, and what measured lengths mean for an experiment.

``BackendSpec.profile(request, settings)`` generates responses with the weights that the experiment names and tells
their lengths, a batch of whole responses at a time, so that an interrupted measurement is a smaller sample and no
biased one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from rpeg_core.errors import UsageError
from rpeg_core.ir import Role, Rpeg
from rpeg_core.spec.experiment import Experiment
from rpeg_core.spec.workload import LengthQuantile

__all__ = ["LengthsRequest", "Response", "generation_alone", "quantiles"]


@attrs.frozen
class Response:
    """The length of a response: ``tokens`` with its end token; ``cut`` when it had none before the limit."""

    tokens: int
    cut: bool


@attrs.frozen(kw_only=True)
class LengthsRequest:
    """What the user wants to know.

    Attributes:
        experiment: its workload gives the room of a prompt and the limit of a response; one response per prompt.
        graph: the generation operator alone, see :func:`generation_alone`.
        responses: how many to measure.
        workers: processes, None for the backend's choice.
        tensor: tensor-parallel degree of a replica.
        measured: to be called with the responses of every batch that is complete.
        cancelled: true once the user pressed Ctrl-C: stop at once.
        status: to be called with a few words on what happens before the first responses.
    """

    experiment: Experiment
    graph: Rpeg
    responses: int
    workers: int | None
    tensor: int
    measured: Callable[[Sequence[Response]], None]
    cancelled: Callable[[], bool]
    status: Callable[[str], None]


def generation_alone(graph: Rpeg) -> Rpeg:
    """The graph of the operator that generates, with its model frozen.

    Raises:
        UsageError: the algorithm generates nothing.
    """
    generating = [operator for operator in graph.operators if operator.role is Role.GENERATION]
    if not generating:
        raise UsageError(
            f"{graph.name!r} generates no responses",
            facts=["their lengths are those of its data"],
        )
    operator = generating[0]
    used = operator.inputs | operator.outputs
    models = [attrs.evolve(model, trainable=False, staleness=0) for model in graph.models]
    return Rpeg(
        name=graph.name,
        models=tuple(model for model in models if model.name == operator.model),
        containers=tuple(container for container in graph.containers if container.name in used),
        operators=(operator,),
        data_edges=(),
        publication_edges=(),
        inputs=operator.inputs,
        outputs=operator.outputs,
    )


def quantiles(tokens: Sequence[int], fractions: Sequence[float], limit: int) -> tuple[LengthQuantile, ...]:
    """For each fraction the least number of tokens after which that share of the responses is finished.

    Of fractions with the same number of tokens the largest stays; the last pair is (1, ``limit``), whatever the longest
    response is, since a workload generates until then (``workload.response_lengths``).

    Args:
        tokens: of every response, at least one.
        fractions: increasing, in (0, 1].
        limit: ``workload.response_tokens``.
    """
    ordered, found = sorted(tokens), {}
    for fraction in fractions:
        rank = max(1, math.ceil(fraction * len(ordered) - 1e-9))
        if fraction < 1.0 and ordered[rank - 1] < limit:
            found[ordered[rank - 1]] = fraction
    return (*(LengthQuantile(fraction, count) for count, fraction in found.items()), LengthQuantile(1.0, limit))
