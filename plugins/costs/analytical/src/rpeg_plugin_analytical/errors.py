"""How wrong the terms of ``analytical`` are where runs were measured (``benchmarks/derive_errors.py``).

A plan's own 3D subset is fitted to no run: its errors are those of published 16-bit runs priced with it. Executions
that name a framework have fitted coefficients: their errors are those of rows predicted without their source. Inference
has no published runs of its own; its terms are those of training's forward passes and take their errors.
"""

from __future__ import annotations

from rpeg_core import TermError
from rpeg_plugin_analytical.measured_errors import POPULATIONS, STEPS

__all__ = ["errors_of"]

_SELECTIONS = {
    "own training": (("training", "inference"), False, False),
    "own training of mixtures": (("training", "inference"), True, False),
    "own generation": (("generation",), False, False),
    "named training": (("training", "inference"), False, True),
    "named training of mixtures": (("training", "inference"), True, True),
    "named generation": (("generation",), None, True),
}
"""Population -> roles, with experts, framework named."""

_STEPS = {"own steps": (False, False), "named steps": (False, True), "named steps of mixtures": (True, True)}

STATED = TermError(log_std=0.0, rows=0, source="as the experiment states it")
"""Of a function's seconds per sample."""


def errors_of(term: str) -> tuple[TermError, ...]:
    """The errors of ``analytical.<term>``, empty where no run tells them."""
    if term == "function_reward":
        return (STATED,)
    found = [
        TermError(
            log_bias=bias,
            log_std=std,
            rows=rows,
            source=f"{population['rows']} published runs of {population['sources']} sources, benchmarks/measured",
            ranges=population["ranges"],
            hardware=population["hardware"],
            precisions=population["precisions"],
            roles=roles,
            mixture=mixture,
            named_framework=named,
        )
        for name, (roles, mixture, named) in _SELECTIONS.items()
        for population in [POPULATIONS[name]]
        if term in population["terms"]
        for bias, std, rows in [population["terms"][term]]
    ]
    if term == "loop_overhead":
        steps = sum(STEPS[name]["rows"] for name, (_, named) in _STEPS.items() if named)
        found += [
            TermError(log_std=0.0, rows=steps, source="its error is that of whole steps", named_framework=True),
            *(
                TermError(
                    log_bias=step["bias"],
                    log_std=step["std"],
                    rows=step["rows"],
                    roles=("generation",),
                    source=f"{step['rows']} published GRPO steps of NeMo-RL",
                    mixture=mixture,
                    named_framework=named,
                    of_step=True,
                )
                for name, (mixture, named) in _STEPS.items()
                for step in [STEPS[name]]
            ),
        ]
    return tuple(found)
