"""The incumbent: best feasible and least infeasible configuration, under each objective."""

from __future__ import annotations

import threading

import attrs
import numpy as np
import pytest

from rpeg_core.passes.score import Evaluation, Objective
from rpeg_core.planning.search import Incumbent, Progress, Solution

FIELDS = tuple(field.name for field in attrs.fields(Evaluation))


def evaluation(
    tokens_per_s: float, *, peak_ratio: float = 0.5, utilization: float = 0.5, used_gpus: int = 4
) -> Evaluation:
    return Evaluation(
        makespan_s=1.0,
        tokens_per_s=tokens_per_s,
        peak_ratio=peak_ratio,
        utilization=utilization,
        used_gpus=used_gpus,
    )


def solution(number: int) -> Solution:
    return Solution(0, (number,))


def offer_all(incumbent: Incumbent, *evaluations: Evaluation) -> list[bool]:
    return [incumbent.offer(solution(i), item, i + 1) for i, item in enumerate(evaluations)]


def test_the_fastest_feasible_one_wins() -> None:
    incumbent = Incumbent(Objective())
    taken = offer_all(
        incumbent, evaluation(10), evaluation(30, peak_ratio=1.001), evaluation(20, peak_ratio=1.0), evaluation(15)
    )
    assert taken == [True, False, True, False]
    assert incumbent.best == solution(2)
    assert incumbent.value == 20.0


def test_the_first_of_equals_stays() -> None:
    incumbent = Incumbent(Objective())
    assert offer_all(incumbent, evaluation(10), evaluation(10)) == [True, False]
    assert incumbent.best == solution(0)


def test_nothing_feasible() -> None:
    incumbent = Incumbent(Objective())
    ratios = (3.0, 1.5, 2.0)
    assert not any(offer_all(incumbent, *(evaluation(10, peak_ratio=ratio) for ratio in ratios)))
    result = incumbent.result(3, "budget")
    assert (result.best, result.evaluation, incumbent.value) == (None, None, 0.0)
    assert result.nearest == solution(1)
    assert result.improvements == ()


def test_nearest_is_the_smallest_peak_even_when_feasible() -> None:
    incumbent = Incumbent(Objective())
    offer_all(incumbent, evaluation(10, peak_ratio=0.9), evaluation(5, peak_ratio=0.2))
    assert (incumbent.best, incumbent.nearest) == (solution(0), solution(1))


def test_the_convergence_curve() -> None:
    incumbent = Incumbent(Objective())
    offer_all(incumbent, evaluation(10), evaluation(5), evaluation(30))
    result = incumbent.result(3, "finished", gap=0.25)
    assert [(p.evaluations, p.value, p.tokens_per_s) for p in result.improvements] == [(1, 10.0, 10.0), (3, 30.0, 30.0)]
    seconds = [point.seconds for point in result.improvements]
    assert seconds == sorted(seconds)
    assert result.seconds >= seconds[-1] >= 0.0
    assert (result.evaluations, result.stopped, result.gap) == (3, "finished", 0.25)


def test_utilization_is_traded_within_the_throughput_floor() -> None:
    """Floor 90 of 100: 95 at full use beats 100 at half use; 80 does not, however busy."""
    incumbent = Incumbent(Objective(kind="throughput_x_utilization", max_throughput_loss=0.1))
    taken = offer_all(
        incumbent, evaluation(100, utilization=0.5), evaluation(80, utilization=1.0), evaluation(95, utilization=0.9)
    )
    assert taken == [True, False, True]
    assert incumbent.best_tokens_per_s == 100.0
    assert incumbent.value == pytest.approx(95 * 0.9)


def test_a_faster_one_lifts_the_floor_over_the_incumbent() -> None:
    """50 at full use is worth 50; 100 at 0.3 only 30, but 50 is now below the floor of 90."""
    incumbent = Incumbent(Objective(kind="throughput_x_utilization", max_throughput_loss=0.1))
    assert offer_all(incumbent, evaluation(50, utilization=1.0), evaluation(100, utilization=0.3)) == [True, True]
    assert incumbent.best == solution(1)
    assert incumbent.value == pytest.approx(30.0)


def test_an_earlier_plan_comes_back_when_the_floor_rises() -> None:
    """81 at 0.8 was worth less than 80 at full use, which 100 at 0.3 puts below the floor of 80.5; worth 64.8 again."""
    incumbent = Incumbent(Objective(kind="throughput_x_utilization", max_throughput_loss=0.195))
    offers = (evaluation(80, utilization=1.0), evaluation(81, utilization=0.8), evaluation(100, utilization=0.3))
    assert offer_all(incumbent, *offers) == [True, False, True]
    assert incumbent.best == solution(1)
    assert incumbent.value == pytest.approx(64.8)
    assert incumbent.improvements[-1].tokens_per_s == 81.0


@pytest.mark.parametrize("kind", Objective.KINDS)
def test_rows_in_any_batches_leave_what_single_offers_in_any_order_leave(kind: str) -> None:
    """The best of all under the final floor, of which an independent search over all rows knows the value."""
    random = np.random.default_rng(5)
    for _ in range(50):
        objective = Objective(kind=kind, max_throughput_loss=0.3)
        rows = np.column_stack(
            [
                np.ones(40),
                random.uniform(50, 100, 40),
                random.uniform(0.5, 1.2, 40),
                random.random(40),
                np.arange(1, 41),
            ]
        )
        items = [Evaluation(**dict(zip(FIELDS, row, strict=True))) for row in rows.tolist()]
        fastest = max((e.tokens_per_s for e in items if e.feasible), default=0.0)
        best = max(objective.value(e, fastest) for e in items if e.feasible)
        by_rows, by_one = Incumbent(objective), Incumbent(objective)
        for part in np.array_split(np.arange(40), 4):
            by_rows.offer_rows(0, part[:, None], rows[part], 1)
        for i in random.permutation(40).tolist():
            by_one.offer(solution(i), items[i], 1)
        assert by_rows.value == by_one.value == best
        assert by_rows.nearest == by_one.nearest == solution(int(np.argmin(rows[:, 2])))


def test_infeasible_speed_does_not_lift_the_floor() -> None:
    incumbent = Incumbent(Objective(kind="throughput_x_utilization"))
    offer_all(incumbent, evaluation(1000, peak_ratio=1.2), evaluation(50, utilization=0.8))
    assert incumbent.best_tokens_per_s == 50.0
    assert incumbent.value == pytest.approx(40.0)


def test_cost_per_token_prefers_fewer_gpus() -> None:
    incumbent = Incumbent(Objective(kind="cost_per_token", max_throughput_loss=0.5))
    offer_all(incumbent, evaluation(100, used_gpus=8), evaluation(60, used_gpus=4), evaluation(40, used_gpus=1))
    assert incumbent.best == solution(1)
    assert incumbent.value == 15.0


def test_progress_reports_and_cancels() -> None:
    seen = []
    progress = Progress(lambda spent, evaluations, incumbent: seen.append((spent, evaluations, incumbent)))
    incumbent = Incumbent(Objective())
    progress.update(0.5, 7, incumbent)
    assert seen == [(0.5, 7, incumbent)]
    assert not progress.cancelled
    progress.cancel()
    assert progress.cancelled
    Progress().update(0.5, 7, incumbent)


def test_a_part_reports_its_share_and_is_cancelled_with_the_whole() -> None:
    seen = []
    whole = Progress(lambda spent, evaluations, incumbent: seen.append((spent, evaluations)))
    part = whole.part(0.25)
    part.update(0.5, 7, Incumbent(Objective()))
    assert seen == [(0.125, 7)]
    assert not part.cancelled
    whole.cancel()
    assert part.cancelled
    other = Progress()
    other.part(0.5).cancel()
    assert not other.cancelled


def test_a_signal_while_kernels_are_compiled_interrupts_at_once() -> None:
    """Cancelled by another thread, the preparation goes on."""
    progress = Progress()
    with progress.preparing():
        other = threading.Thread(target=progress.cancel)
        other.start()
        other.join()
        assert progress.cancelled
        with pytest.raises(KeyboardInterrupt):
            progress.cancel()
    progress.cancel()
