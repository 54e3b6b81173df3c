"""RPEG: plans RL post-training of LLMs.

The public API. Names are imported when first used (PEP 562), so that importing this package, as every plugin
does for ``hookimpl``, costs no numpy, networkx or numba.
"""

from __future__ import annotations

import importlib

import pluggy

from rpeg_core._version import __version__

__all__ = [
    "AlgorithmTemplate",
    "AlphaBeta",
    "AttentionEfficiency",
    "BackendSpec",
    "CostTerm",
    "Device",
    "Diagnostic",
    "Experiment",
    "GemmEfficiency",
    "HardwareProfile",
    "LinkTier",
    "MeasuredHardware",
    "MemoryKind",
    "ModelRole",
    "NoSettings",
    "Plan",
    "Problem",
    "Registry",
    "Rpeg",
    "RpegBuilder",
    "RpegError",
    "SearchStrategy",
    "Severity",
    "Target",
    "TermError",
    "__version__",
    "hookimpl",
    "load_experiment",
    "load_plan",
    "setting",
]

hookimpl = pluggy.HookimplMarker("rpeg")
"""Marks a function of a plugin module as the implementation of the hook of the same name."""

_MODULE_OF = {
    "AlgorithmTemplate": "rpeg_core.records",
    "AlphaBeta": "rpeg_core.spec.machine",
    "AttentionEfficiency": "rpeg_core.spec.machine",
    "BackendSpec": "rpeg_core.records",
    "CostTerm": "rpeg_core.records",
    "Device": "rpeg_core.spec.machine",
    "Diagnostic": "rpeg_core.diagnostics",
    "Experiment": "rpeg_core.spec.experiment",
    "GemmEfficiency": "rpeg_core.spec.machine",
    "HardwareProfile": "rpeg_core.spec.machine",
    "LinkTier": "rpeg_core.spec.machine",
    "MeasuredHardware": "rpeg_core.spec.machine",
    "MemoryKind": "rpeg_core.records",
    "ModelRole": "rpeg_core.records",
    "NoSettings": "rpeg_core.records",
    "Plan": "rpeg_core.planning.plan",
    "Problem": "rpeg_core.planning.problem",
    "Registry": "rpeg_core.plugins.registry",
    "Rpeg": "rpeg_core.ir",
    "RpegBuilder": "rpeg_core.ir",
    "RpegError": "rpeg_core.errors",
    "SearchStrategy": "rpeg_core.records",
    "Severity": "rpeg_core.diagnostics",
    "Target": "rpeg_core.records",
    "TermError": "rpeg_core.spec.accuracy",
    "load_experiment": "rpeg_core.spec.experiment",
    "load_plan": "rpeg_core.planning.plan",
    "setting": "rpeg_core.settings",
}


def __getattr__(name: str) -> object:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
