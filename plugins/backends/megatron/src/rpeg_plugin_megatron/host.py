"""What this machine offers to workers that are started here: GPUs, cores, memory. No torch in this module."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from rpeg_core.errors import BackendError
from rpeg_core.planning.plan import Plan
from rpeg_plugin_megatron.settings import Settings

__all__ = ["available_bytes", "check_workers", "cores", "gpus", "shown_gpus"]

MOST_PER_CORE = 4
"""Workers that may share a core unasked **[choice]**: a plan for two or four GPUs can be tried on a laptop, but a plan
for a cluster, started on one by mistake, does not take the laptop down."""

PROCESS_BYTES = 0.4e9
"""Memory of a worker before it has a model: Python with torch and Megatron-Core (0.38 GB resident on Linux)."""

WIDTHS = {"fp32": 4, "bf16": 2}
"""Bytes of a weight."""


def gpus(settings: Settings) -> int:
    """GPUs that workers would use, 0 when they compute on CPUs."""
    return 0 if settings.device == "cpu" else shown_gpus()


def shown_gpus() -> int:
    """GPUs that this machine shows to processes; torch is for the workers to import."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len(glob.glob("/dev/nvidia[0-9]*"))
    return found if shown is None else min(found, len([name for name in shown.split(",") if name.strip()]))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int | None:
    """Memory that can be had without swapping, file caches included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return int(sizes["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in sizes else None


def check_workers(plan: Plan, settings: Settings) -> None:
    """Whether the workers of a plan can be started on this machine; those that others start are their business.

    Raises:
        BackendError: they need more GPUs than it has; or are more than its cores or its memory can bear and
            ``oversubscribe`` is not set; or the weights of the plan have another width than theirs.
    """
    if settings.launcher != "local":
        return
    world = max(a.allocation.stop for a in plan.assignments.values())
    found = gpus(settings)
    if settings.device == "cuda" or found:
        if world > found:
            raise BackendError(
                f"the plan needs {world} GPUs, this machine has {found}",
                hint="set megatron.device to cpu to try it without, or start workers on more machines with"
                " megatron.launcher=external",
            )
    elif not settings.oversubscribe:
        _check_cores(world)
    width = WIDTHS.get(settings.precision, WIDTHS["bf16" if found else "fp32"])
    if plan.workload.bytes_per_element != width:
        raise BackendError(
            f"the plan is for weights of {plan.workload.bytes_per_element} bytes, workers here compute with {width}",
            facts=[f"device: {'cuda' if found else 'cpu'}, megatron.precision: {settings.precision}"],
            hint=f"plan with workload.bytes_per_element: {width}",
        )


def _check_cores(world: int) -> None:
    most, free = MOST_PER_CORE * cores(), available_bytes()
    facts = [f"allowed: {most}, {MOST_PER_CORE} for each core"]
    hint = "run it where it fits, or start them all the same with --set megatron.oversubscribe=true"
    if world > most:
        what = f"the plan has {world} workers, this machine {cores()} cores and no GPU that is used"
        raise BackendError(what, facts=facts, hint=hint)
    if free is not None and world * PROCESS_BYTES > free:
        raise BackendError(
            f"{world} workers do not fit the memory of this machine",
            facts=[
                f"they need {world * PROCESS_BYTES / 1e9:.1f} GB before they have a model, {free / 1e9:.1f} GB are free"
            ],
            hint=hint,
        )
