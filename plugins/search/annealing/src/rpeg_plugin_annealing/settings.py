"""The settings of the annealing search; the switches A3 to A9 are the paper's ablation (table XI).

A1 (length splitting) is ``problem.options.split_lengths`` and A2 (asynchrony) the experiment's staleness choices:
both change what is evaluated, not how it is searched, so they are not settings of a strategy.
"""

from __future__ import annotations

from typing import Literal

import attrs

from rpeg_core import setting

__all__ = ["Settings"]


@attrs.frozen(kw_only=True)
class Settings:
    """Defaults are the paper's (VI-D, A-J2) where it prints them; the README says how the others were found."""

    seed: int = setting(0, help="Seed of the random choices.", minimum=0)
    proposals: int = setting(6, help="Neighbours proposed per round, the best is kept (K_x).", minimum=1)
    pair_move_probability: float = setting(
        0.28, help="Share of rounds that move GPUs between two operators (p_pair).", minimum=0.0, maximum=1.0
    )
    critical_path_probability: float = setting(
        0.6,
        help="Share of single moves whose operator is drawn by time on the critical path (p_cp).",
        minimum=0.0,
        maximum=1.0,
    )
    local_move_probability: float = setting(
        0.8,
        help="Share of single moves' neighbours that keep the layout, the place or about the size (not in the paper).",
        minimum=0.0,
        maximum=1.0,
    )
    stagnation: int = setting(10, help="Rejections in a row that end a chain (w_stag).", minimum=1)
    elites: int = setting(3, help="Feasible plans kept as starts of later chains (K_elite).", minimum=1)
    temperature_initial: float = setting(
        0.02, help="Temperature of the first chain of a structure (t_init).", minimum=1e-9
    )
    temperature_warm: float = setting(
        0.08, help="Temperature of chains that start from an elite plan (t_warm).", minimum=1e-9
    )
    islands: int = setting(4, help="Chains side by side; the result depends on it, not on the cores.", minimum=1)
    allocation: Literal["even", "promising"] = setting(
        "promising", help="Structures share the budget evenly, as in the paper, or by what a first pass found."
    )
    proof_share: float = setting(
        0.3,
        help="Share of the budget that branch and bound may take first (not in the paper); 0: none, chains only.",
        minimum=0.0,
        maximum=0.9,
    )
    split_starts: bool = setting(
        True, help="Also start chains from the best splits of the cluster in two parts (not in the paper)."
    )
    polish_share: float = setting(
        0.2, help="Largest share of the budget that is kept for the polish.", minimum=0.0, maximum=0.9
    )
    microbatch_tuning: bool = setting(True, help="A3: choose microbatches; off: Pp of them, 2 Pp for training.")
    pair_moves: bool = setting(True, help="A4: moves of GPUs between two operators.")
    warm_restarts: bool = setting(True, help="A5: later chains start from an elite plan; off: at random.")
    critical_path_selection: bool = setting(True, help="A6: prefer operators on the critical path; off: all alike.")
    polish: bool = setting(True, help="A7: coordinate descent from the best plan at the end.")
    soft_memory_penalty: bool = setting(
        True, help="A8: walk through plans that exceed memory at a penalty; off: reject them."
    )
    cooling: Literal["constant", "geometric"] = setting("constant", help="A9: the temperature within a chain.")
    cooling_factor: float = setting(0.97, help="Factor per round with geometric cooling.", minimum=1e-6, maximum=1.0)
    temperature_min: float = setting(1e-4, help="Floor of geometric cooling.", minimum=1e-9)
