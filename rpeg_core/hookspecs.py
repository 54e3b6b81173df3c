"""Every hook of RPEG, and nothing else.

A plugin is a module named by an entry point; a function of it marked ``@rpeg_core.hookimpl`` and named
like a hook implements that hook. Each docstring below has the same parts: what the hook is for, when it
is called, what it returns, what happens when it fails, since when it exists, and an example that runs as
it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rpeg_core.diagnostics import Diagnostic
    from rpeg_core.planning.plan import Plan
    from rpeg_core.records import (
        AlgorithmTemplate,
        BackendSpec,
        CostTerm,
        HardwareProfile,
        MeasuredHardware,
        SearchStrategy,
    )
    from rpeg_core.runtime.trace import Trace

hookspec = pluggy.HookspecMarker("rpeg")


@hookspec
def rpeg_algorithms() -> Iterable[AlgorithmTemplate]:
    """Offer RL algorithms: recipes that build the graph of one step.

    Called: once per process, when a command first needs an algorithm. Entry-point group ``rpeg.algorithms``.

    Returns: one record or an iterable of records.

    On failure: the plugin is not used; a warning, or the error of the command when the user named it.

    .. versionadded:: 0.1

    Example::

        from rpeg_core import AlgorithmTemplate, ModelRole, RpegBuilder, hookimpl


        def build(workload, models, structure, settings):
            b = RpegBuilder("expert-iteration")
            b.model("actor", models["actor"], trainable=True, staleness=structure.tau("actor"))
            prompts = b.data(
                "prompts",
                elements=workload.prompts * workload.prompt_tokens,
                bytes_per_element=workload.bytes_per_element,
            )
            completions = b.data(
                "completions",
                elements=workload.tokens_per_step,
                bytes_per_element=workload.bytes_per_element,
            )
            b.generation("actor_generation", "actor", reads=[prompts], writes=[completions])
            b.training("actor_training", "actor", reads=[completions])
            b.connect("actor_generation", completions, "actor_training")
            b.publish("actor_training", "actor_generation")
            return b.build()


        @hookimpl
        def rpeg_algorithms():
            yield AlgorithmTemplate(
                name="expert-iteration",
                summary="Train the actor on its own best rollouts.",
                roles=(ModelRole(name="actor", trainable=True, head="lm"),),
                build=build,
            )
    """


@hookspec
def rpeg_hardware() -> Iterable[HardwareProfile | MeasuredHardware]:
    """Offer hardware profiles: a GPU in its machine, every number with its source.

    Called: once per process, when a command first needs hardware. Entry-point group ``rpeg.hardware``.

    Returns: one record or an iterable of records. A ``MeasuredHardware`` stands for a profile of this machine: its
    ``measure`` is called when a command names it, never to list it.

    On failure: the plugin is not used; a warning, or the error of the command when the user named it.

    .. versionadded:: 0.1

    Example::

        from rpeg_core import AlphaBeta, Device, GemmEfficiency, HardwareProfile, LinkTier, hookimpl


        MEASURED = [
            "device.memory_bandwidth_bytes_per_s",
            "device.peak_flops_per_s",
            *(
                f"tiers.{tier}.{traffic}.{number}"
                for tier in ("intra_node", "inter_node", "inter_rack")
                for traffic in ("collective", "p2p")
                for number in ("latency_s", "bandwidth_bytes_per_s")
            ),
            "efficiency.gamma_m_rows",
            "efficiency.gamma_k_columns",
            "non_gemm_layer_s",
            "non_gemm_reference_batch",
        ]


        def tier(latency_s, bandwidth_bytes_per_s):
            link = AlphaBeta(latency_s, bandwidth_bytes_per_s)
            return LinkTier(collective=link, p2p=link)


        @hookimpl
        def rpeg_hardware():
            yield HardwareProfile(
                name="acme-1",
                summary="Acme One, 8 GPUs per node.",
                gpus_per_node=8,
                device=Device(
                    memory_bytes=80 * 10**9,
                    memory_bandwidth_bytes_per_s=2.0e12,
                    peak_flops_per_s=3.0e14,
                ),
                tiers=(tier(5e-6, 2e11), tier(1e-5, 2e10), tier(2e-5, 1e10)),
                efficiency=GemmEfficiency(gamma_m_rows=512.0, gamma_k_columns=256.0),
                non_gemm_layer_s=1e-4,
                non_gemm_reference_batch=8,
                sources={
                    "gpus_per_node": "Acme One data sheet, 2025, page 2",
                    "device.memory_bytes": "Acme One data sheet, 2025, page 3",
                    **dict.fromkeys(MEASURED, "rpeg calibrate on acme-cluster, 2025-03-01"),
                },
            )
    """


@hookspec
def rpeg_cost_terms() -> Iterable[CostTerm]:
    """Offer the additive terms of a cost model.

    Called: once per process, when a command first needs costs. Entry-point group ``rpeg.costs``. A model,
    the part of the name before the dot, belongs to one distribution: no other may add terms to it. A term
    counts only when the experiment or the hardware profile selects it.

    Returns: one record or an iterable of records. Their functions are pure and vectorised, called once
    per problem and operator, and return finite float64 values of at least zero. ``errors`` says how wrong a
    term was where it was measured; predicted times that terms without it dominate have no interval, and
    reports name the term.

    On failure: the plugin is not used; a warning, or the error of the command when the user named it.

    .. versionadded:: 0.1

    Example::

        import attrs
        import numpy as np

        from rpeg_core import CostTerm, Target, TermError, hookimpl, setting


        @attrs.frozen(kw_only=True)
        class Settings:
            launch_s: float = setting(0.02, help="Time to start one operator.", unit="s", minimum=0.0)


        def launch_s(batch):
            return np.full(len(batch.layouts), batch.settings.launch_s)


        @hookimpl
        def rpeg_cost_terms():
            yield CostTerm(
                name="launch.fixed",
                summary="A fixed time to start each operator.",
                target=Target.OPERATOR,
                quantity="launch",
                function=launch_s,
                settings=Settings,
                errors=(TermError(log_std=0.2, rows=12, source="12 launches on our cluster, May 2026"),),
            )
    """


@hookspec
def rpeg_search_strategies() -> Iterable[SearchStrategy]:
    """Offer ways to look for the best configuration.

    Called: once per process, when a command first needs a search. Entry-point group ``rpeg.search``.

    Returns: one record or an iterable of records. Their ``run`` takes its seed from the settings and
    returns the best plan found so far when ``progress.cancelled`` turns true.

    On failure: the plugin is not used; a warning, or the error of the command when the user named it.

    .. versionadded:: 0.1

    Example::

        import attrs

        from rpeg_core import SearchStrategy, hookimpl, setting


        @attrs.frozen(kw_only=True)
        class Settings:
            seed: int = setting(0, help="Seed of the random choices.", minimum=0)


        def run(problem, budget, settings, progress):
            raise NotImplementedError("see rpeg-plugin-heuristics for a short one that is complete")


        @hookimpl
        def rpeg_search_strategies():
            yield SearchStrategy(
                name="random",
                summary="Legal plans at random, the best one wins.",
                guarantee="baseline",
                run=run,
                settings=Settings,
            )
    """


@hookspec
def rpeg_backends() -> Iterable[BackendSpec]:
    """Offer ways to execute a plan or to export it to another framework.

    Called: once per process, when a command first needs a backend. Entry-point group ``rpeg.backends``.
    The module must not import torch or the framework itself; ``probe`` says why this machine cannot use
    it, ``open`` imports. What ``open`` returns keeps the contract of ``rpeg_core.runtime.session.Session``.

    Returns: one record or an iterable of records.

    On failure: the plugin is not used; a warning, or the error of the command when the user named it.

    .. versionadded:: 0.1

    Example::

        import json

        from rpeg_core import BackendSpec, hookimpl


        def probe():
            return None


        def render(plan, settings):
            return {"plan.json": json.dumps(plan.document(), indent=2)}


        @hookimpl
        def rpeg_backends():
            yield BackendSpec(
                name="plain-json",
                summary="The plan as one JSON file.",
                can=frozenset({"export"}),
                probe=probe,
                render=render,
            )
    """


@hookspec
def rpeg_check_plan(plan: Plan) -> Iterable[Diagnostic]:
    """Remark on a plan, e.g. a layout that a framework does not support.

    Called: when a plan has been found, predicted or read from a file, for each plugin module loaded until
    then.

    Returns: one record, an iterable of records, or None. A diagnostic of severity ``error`` stops ``rpeg
    run`` and ``rpeg export``; the others are shown.

    On failure: reported once as a warning; the plan is used.

    .. versionadded:: 0.1

    Example::

        from rpeg_core import Diagnostic, Severity, hookimpl


        @hookimpl
        def rpeg_check_plan(plan):
            yield Diagnostic(
                severity=Severity.WARNING,
                message="operator actor_generation uses tensor parallelism across nodes",
                hint="pin {actor_generation: {tp: 4}} to stay inside a node",
            )
    """


@hookspec
def rpeg_plan_ready(plan: Plan) -> None:
    """Observe that a plan is final.

    Called: once per plan, before it is printed, for each plugin module loaded until then.

    Returns: nothing.

    On failure: reported once as a warning; the command goes on.

    .. versionadded:: 0.1

    Example::

        from rpeg_core import hookimpl

        plans = []


        @hookimpl
        def rpeg_plan_ready(plan):
            plans.append(plan)
    """


@hookspec
def rpeg_run_started(plan: Plan) -> None:
    """Observe that a backend is about to execute a plan.

    Called: once per run, before the backend starts its workers, for each plugin module loaded until then.

    Returns: nothing.

    On failure: reported once as a warning; the run goes on.

    .. versionadded:: 0.1

    Example::

        from rpeg_core import hookimpl

        started = []


        @hookimpl
        def rpeg_run_started(plan):
            started.append(plan)
    """


@hookspec
def rpeg_step_finished(plan: Plan, step: int, metrics: Mapping[str, float]) -> None:
    """Observe the end of one RL step.

    Called: once per step in order, on the controller, for each plugin module loaded until then. Keep it
    short: the controller waits. An implementation may take fewer arguments.

    Returns: nothing.

    On failure: reported once as a warning; the run goes on.

    .. versionadded:: 0.1

    Example::

        from rpeg_core import hookimpl

        history = []


        @hookimpl
        def rpeg_step_finished(step, metrics):
            history.append((step, metrics.get("reward_mean")))
    """


@hookspec
def rpeg_run_finished(plan: Plan, trace: Trace) -> None:
    """Observe the end of a run that did not fail.

    Called: once per run, when all workers have stopped, for each plugin module loaded until then; also when the user
    stopped it early, which the last record of the trace says.

    Returns: nothing.

    On failure: reported once as a warning; the exit code stays.

    .. versionadded:: 0.1

    Example::

        from rpeg_core import hookimpl

        traces = []


        @hookimpl
        def rpeg_run_finished(plan, trace):
            traces.append(trace)
    """
