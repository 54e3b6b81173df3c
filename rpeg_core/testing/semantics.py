"""Run the semantics of an algorithm without a model: on given outputs, split over ranks and microbatches.

What a training operator computes must not depend on the split. In the tests of a plugin::

    whole = train_once(SEMANTICS, "actor_training", rows, mask, outputs, settings, workload)
    split = train_once(SEMANTICS, "actor_training", rows, mask, outputs, settings, workload, ranks=2, microbatches=4)

Both must have the same loss, gradients and metrics. Needs torch.

.. versionadded:: 0.1
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from rpeg_core.runtime.semantics import Counts, ModelOutputs, Prepared, Semantics, minibatch_rows

if TYPE_CHECKING:
    import torch

    from rpeg_core.spec.workload import Workload

__all__ = ["Trained", "on_ranks", "train_once"]

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Trained:
    """What came out.

    Attributes:
        prepared: of the whole step: tensors of all rows, and metrics.
        losses: of each minibatch.
        gradients: of the sum of the losses, by name of the output (``logprobs``, ``values``, ``entropy``).
        metrics: of the losses, of each minibatch.
    """

    prepared: Prepared
    losses: tuple[float, ...]
    gradients: Mapping[str, torch.Tensor]
    metrics: tuple[Mapping[str, float], ...]


def train_once(
    semantics: Semantics,
    operator: str,
    rows: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    outputs: ModelOutputs,
    settings: Any,
    workload: Workload,
    *,
    ranks: int = 1,
    microbatches: int = 1,
) -> Trained:
    """One pass of a training operator over the rows of a step, with the model's outputs as given.

    Args:
        semantics, operator, settings, workload: of the algorithm.
        rows: data containers that the operator reads, all rows of the step.
        mask: bool [rows, Lr].
        outputs: of the model, for all rows; its tensors need no gradient.
        ranks: data-parallel degree; divides the prompts.
        microbatches: of each minibatch on each rank.
    """
    prompts, rollouts = workload.prompts // ranks, workload.rollouts_per_prompt
    of_rank = [slice(rank * prompts * rollouts, (rank + 1) * prompts * rollouts) for rank in range(ranks)]
    prepared = on_ranks(
        ranks,
        lambda rank, total: semantics.prepare(
            operator, {k: v[of_rank[rank]] for k, v in rows.items()}, mask[of_rank[rank]], total, settings, workload
        ),
    )
    joined = {k: _joined([part.rows[k] for part in prepared]) for k in prepared[0].rows}
    given = {**rows, **joined}
    leaves = {
        field.name: value.detach().clone().requires_grad_()
        for field in attrs.fields(ModelOutputs)
        if (value := getattr(outputs, field.name)) is not None
    }
    losses, metrics = [], []
    for number in range(semantics.recipe(operator, settings).minibatches):
        members = [
            [
                rank * prompts * rollouts + row
                for row in minibatch_rows(
                    prompts, rollouts, semantics.recipe(operator, settings).minibatches, first_prompt=rank * prompts
                )[number]
            ]
            for rank in range(ranks)
        ]
        counts = Counts(rows=sum(map(len, members)), tokens=sum(int(mask[chosen].sum()) for chosen in members))
        loss, sums = 0.0, {}
        for chosen in members:
            size = len(chosen) // microbatches
            for first in range(0, len(chosen), size):
                index = chosen[first : first + size]
                part = semantics.loss(
                    operator,
                    ModelOutputs(**{k: v[index] for k, v in leaves.items()}),
                    {k: v[index] for k, v in given.items()},
                    mask[index],
                    counts,
                    settings,
                )
                part.loss.backward()
                loss += float(part.loss.detach())
                for name, value in part.metrics.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        losses.append(loss)
        metrics.append(sums)
    return Trained(
        prepared=Prepared(rows=joined, metrics=prepared[0].metrics),
        losses=tuple(losses),
        gradients={k: v.grad for k, v in leaves.items() if v.grad is not None},
        metrics=tuple(metrics),
    )


def on_ranks(ranks: int, function: Callable[[int, Callable[[torch.Tensor], torch.Tensor]], T]) -> list[T]:
    """``function(rank, total)`` on every rank, each in a thread; ``total`` sums over them as a backend's would."""
    barrier = threading.Barrier(ranks)
    parts: dict[int, torch.Tensor] = {}

    def run(rank: int) -> T:
        def total(x: torch.Tensor) -> torch.Tensor:
            parts[rank] = x
            barrier.wait()
            found = sum(parts[other] for other in range(ranks))
            barrier.wait()
            return found

        try:
            return function(rank, total)
        except BaseException:
            barrier.abort()  # the others must not wait for this rank
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    whole = parts[0].new_empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
    start = 0
    for part in parts:
        whole[start : start + part.shape[0]] = part
        start += part.shape[0]
    return whole
