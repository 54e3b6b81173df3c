"""Branch and bound over all plans: proves the optimum, or says how far from it the best plan can be at most."""

from __future__ import annotations

from rpeg_core import SearchStrategy, hookimpl
from rpeg_plugin_exhaustive.settings import Settings
from rpeg_plugin_exhaustive.strategy import prepare, run

__all__ = ["EXHAUSTIVE", "Settings", "rpeg_search_strategies"]

EXHAUSTIVE = SearchStrategy(
    name="exhaustive",
    summary="Branch and bound over all plans: proves the optimum, or how far from it the best plan can be.",
    guarantee="optimal",
    run=run,
    prepare=prepare,
    settings=Settings,
)


@hookimpl
def rpeg_search_strategies() -> tuple[SearchStrategy, ...]:
    """The strategy of this distribution."""
    return (EXHAUSTIVE,)
