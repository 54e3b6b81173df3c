"""Multi-start simulated annealing with warm restarts and a final polish: the optimizer of the paper (VI, A-J)."""

from __future__ import annotations

from rpeg_core import SearchStrategy, hookimpl
from rpeg_plugin_annealing.settings import Settings
from rpeg_plugin_annealing.strategy import prepare, run

__all__ = ["ANNEALING", "Settings", "rpeg_search_strategies"]

ANNEALING = SearchStrategy(
    name="annealing",
    summary="Simulated annealing from the concurrent baseline, warm restarts, polish; anytime.",
    guarantee="heuristic",
    run=run,
    prepare=prepare,
    settings=Settings,
)


@hookimpl
def rpeg_search_strategies() -> tuple[SearchStrategy, ...]:
    """The strategy of this distribution."""
    return (ANNEALING,)
