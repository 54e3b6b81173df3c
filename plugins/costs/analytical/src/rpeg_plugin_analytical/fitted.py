"""Numbers that ``benchmarks/derive_frameworks.py --write`` found; its ``--check`` keeps them. Do not edit."""

from __future__ import annotations

NEMO_RL_LOOP_SHARE = 0.46

FITTED: dict[str, dict[str, float]] = {}
