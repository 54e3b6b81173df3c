"""The settings of the exhaustive search."""

from __future__ import annotations

import attrs

from rpeg_core import setting
from rpeg_core.planning.exact import EVALUATED_AT_ONCE, OPEN_BOXES

__all__ = ["Settings"]


@attrs.frozen(kw_only=True)
class Settings:
    """How the tree of plans is kept; neither changes the optimum."""

    open_boxes: int = setting(
        OPEN_BOXES,
        help="Sets of plans kept open at most, about 100 bytes each; when they are full the search ends with its gap.",
        minimum=10,
    )
    evaluated_at_once: int = setting(
        EVALUATED_AT_ONCE,
        help="Sets of so many plans or fewer are evaluated plan by plan instead of being split.",
        minimum=1,
    )
