"""``rpeg profile-lengths --backend megatron``: the generation operator alone, on the workers of this machine.

The workers are those of a run, on a plan that has one operator. Responses come in rounds of a few per replica; a round
is told when all of its responses are finished, so that what is known at any time is not biased to short ones.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from pathlib import Path

import attrs

from rpeg_core.errors import BackendError, ExecutionError
from rpeg_core.ir import Model
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.planning.assignment import Assignment, Layout
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.structures import Structure
from rpeg_core.runtime.lengths import LengthsRequest, Response
from rpeg_core.runtime.window import Window
from rpeg_core.spec.machine import Allocation, DeviceSpace
from rpeg_plugin_megatron import host
from rpeg_plugin_megatron.crew import Crew, Lost
from rpeg_plugin_megatron.inputs import open_inputs
from rpeg_plugin_megatron.launcher import launcher_for
from rpeg_plugin_megatron.layouts import check_layout
from rpeg_plugin_megatron.messages import Execute, Measured
from rpeg_plugin_megatron.settings import Settings

__all__ = ["WORKER", "profile_lengths", "profile_plan"]

WORKER = "rpeg_plugin_megatron.lengths_worker:LengthsWorker"

ROUND_ROWS = {"cpu": 8, "cuda": 64}
"""Responses of a replica that are decoded together: on a CPU more take longer, on a GPU they are almost free."""

MEMORY_SHARE = 0.8
"""Of the free memory of the machine, for the weights of all workers."""


def profile_lengths(request: LengthsRequest, settings: Settings) -> None:
    """Measure as many responses as are wanted, or until the user has enough.

    Raises:
        BackendError: the model cannot be laid out like that.
        ExecutionError: a worker was lost, or a round took too long.
        RpegError: what a worker raised on purpose when it was set up.
    """
    plan = profile_plan(request, settings)
    open_inputs(plan, settings)  # mistakes are found before workers are started
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpeg-logs-")))
        launcher = launcher_for(settings, logs, os.environ)
        crew = stack.enter_context(contextlib.closing(Crew(launcher, plan, settings, WORKER, time.monotonic)))
        if not crew.start(request.cancelled, request.status):
            return
        window, measured = Window(plan.rpeg, plan.assignments, plan.workload), 0
        while measured < request.responses:
            found = _round(crew, window, measured // plan.workload.prompts, settings, request)
            if found is None:
                return
            found = found[: request.responses - measured]
            measured += len(found)
            request.measured(found)
        crew.dismiss()


def _round(crew: Crew, window: Window, step: int, settings: Settings, request: LengthsRequest) -> list[Response] | None:
    """The responses of one round, in the order of their prompts; None when the user cancelled it."""
    node = window.node(step, 0)
    inputs = tuple(artifact for artifact in window.initial)
    crew.send(range(crew.world), Execute(node, inputs))
    begin_s, reports = time.monotonic(), {}
    while len(reports) < crew.world:
        if request.cancelled():
            return None
        for report in crew.receive():
            if isinstance(report, Lost):
                raise ExecutionError(
                    f"the worker of GPU {report.rank} was lost while it generated: {report.reason}",
                    facts=crew.last_words(report.rank, report.lines),
                )
            if isinstance(report, Measured):
                reports[report.rank] = report
        if time.monotonic() - begin_s > settings.node_timeout_s:
            raise ExecutionError(
                f"{node.label} did not end within {settings.node_timeout_s:g} s",
                hint="megatron.node_timeout_s is the limit",
            )
    return [response for rank in sorted(reports) for response in reports[rank].responses]


def profile_plan(request: LengthsRequest, settings: Settings) -> Plan:
    """The plan with the generation operator alone, on as many workers as are wanted or as this machine has room for.

    Raises:
        BackendError: the workers cannot be arranged like that.
    """
    (operator,), (model,) = request.graph.operators, request.graph.models
    gpus = host.gpus(settings)
    workers = request.workers or max(_room(model, gpus, request.tensor) // request.tensor, 1) * request.tensor
    if workers % request.tensor:
        raise BackendError(
            f"{workers} workers cannot be replicas of {request.tensor}", facts=["allowed: a multiple of --tp"]
        )
    replicas = min(workers // request.tensor, request.responses)
    layout = Layout(replicas, 1, request.tensor)
    problem = check_layout(model.spec, layout)
    if problem is not None:
        raise BackendError(f"model {model.name!r} cannot be laid out as {layout}", facts=[problem])
    most = ROUND_ROWS["cuda" if gpus else "cpu"] * replicas
    rounds = math.ceil(request.responses / most)
    rows = math.ceil(request.responses / (rounds * replicas))
    workload = attrs.evolve(
        request.experiment.workload, prompts=rows * replicas, rollouts_per_prompt=1, response_lengths=()
    )
    world = replicas * request.tensor
    return Plan(
        experiment=attrs.evolve(request.experiment, workload=workload, pins={}),
        structure=Structure(staleness=()),
        rpeg=request.graph,
        assignments={operator.name: Assignment(Allocation(0, world), layout, 1)},
        machine=DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=world),
        options=EvaluationOptions(steps=1, split_lengths=False),
        prediction=None,  # type: ignore[arg-type]  # nobody asks how long it takes
        plugins=(),
    )


def _room(model: Model, gpus: int, tensor: int) -> int:
    """Workers that this machine has devices for, and on CPUs memory.

    Raises:
        BackendError: the free memory does not hold the weights once.
    """
    if gpus:
        return gpus
    free, weights = host.available_bytes(), host.WIDTHS["fp32"] * model.spec.total_parameters
    if free is None:
        return host.cores()
    if weights > free:
        raise BackendError(
            f"the weights of model {model.name!r} do not fit the memory of this machine",
            facts=[f"they need {weights / 1e9:.1f} GB in FP32, {free / 1e9:.1f} GB are free, and there is no GPU"],
            hint="measure on a machine with GPUs, with --workers on how many, or with a smaller model",
        )
    return max(1, min(host.cores(), tensor * int(MEMORY_SHARE * free / weights)))
