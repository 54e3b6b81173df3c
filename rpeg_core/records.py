"""The records that plugin hooks return; one per plugin kind (architecture.md, "Distributions and folders")."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.machine import HardwareProfile, MeasuredHardware

if TYPE_CHECKING:
    import numpy as np

    from rpeg_core.calibration.measurements import CalibrationRequest, Measurements
    from rpeg_core.costing.batches import FusedBatch, MemoryBatch, OperatorBatch, TransferBatch
    from rpeg_core.ir import Rpeg
    from rpeg_core.planning.plan import Plan
    from rpeg_core.planning.problem import Problem
    from rpeg_core.planning.search import Progress, SearchBudget, SearchResult
    from rpeg_core.planning.structures import Structure
    from rpeg_core.runtime.lengths import LengthsRequest
    from rpeg_core.runtime.session import Session
    from rpeg_core.spec.models import ModelSpec
    from rpeg_core.spec.workload import Workload

__all__ = [
    "AlgorithmTemplate",
    "BackendSpec",
    "CostTerm",
    "HardwareProfile",
    "MeasuredHardware",
    "MemoryKind",
    "ModelRole",
    "NoSettings",
    "SearchStrategy",
    "Target",
    "TermError",
]


@attrs.frozen
class NoSettings:
    """The settings class of a plugin that has none."""


@attrs.frozen(kw_only=True)
class ModelRole:
    """One model that an algorithm needs: the key under ``models:`` in the experiment file.

    Attributes:
        name: e.g. ``actor``.
        trainable: True when the algorithm updates its weights (such models carry a staleness budget).
        head: the default head, ``lm`` or ``scalar``.
        optional: True when the experiment may leave it out (e.g. GRPO's reward model).
    """

    name: str
    trainable: bool
    head: str
    optional: bool = False


@attrs.frozen(kw_only=True)
class AlgorithmTemplate:
    """A recipe that builds the graph of one RL step.

    Attributes:
        name: what ``algorithm:`` names.
        summary: one line.
        roles: the models it needs.
        build: ``build(workload, models, structure, settings) -> Rpeg``; ``models`` maps role name to ModelSpec.
        structures: the structural options it offers beside staleness, e.g. ``("actor_critic_sharing",)``.
        semantics: dotted name ``pkg.module:obj`` of the run-time losses, imported by backends only.
        settings: attrs class of its settings.
    """

    name: str
    summary: str
    roles: tuple[ModelRole, ...]
    build: Callable[[Workload, Mapping[str, ModelSpec], Structure, Any], Rpeg]
    structures: tuple[str, ...] = ()
    semantics: str | None = None
    settings: type = NoSettings


class Target(enum.Enum):
    """What a cost term prices."""

    OPERATOR = "operator"  # seconds of an OP node
    TRANSFER = "transfer"  # seconds of a COMM or RESHARD node
    MEMORY = "memory"  # bytes on each GPU of an operator


class MemoryKind(enum.Enum):
    """When bytes are held (model.md, section 4). Core decides from the placement which ones count where."""

    TRAINING_STATE = "training state"  # persistent on the GPUs that train the model
    WEIGHTS = "weights"  # persistent for frozen models and with staleness, else while the operator runs
    GRADIENTS = "gradients"  # while the operator runs, its optimizer step included
    TRANSIENT = "transient"  # while the operator runs, but not in its optimizer step


@attrs.frozen(kw_only=True)
class CostTerm:
    """One additive term of a cost model.

    Attributes:
        name: ``model.term``, e.g. ``analytical.gemm``; ``costs: [analytical]`` selects all terms of a model.
        summary: one line, with the equation it stands for.
        target: what it prices.
        quantity: the label in reports, e.g. ``gemm`` or ``KV cache``.
        function: pure and vectorised, called once per problem and operator, never in the search loop:
            ``OperatorBatch -> seconds``, ``TransferBatch -> seconds`` or ``MemoryBatch -> bytes``, each a
            float64 array with one value per layout (or per transfer), finite and >= 0.
        memory: for ``Target.MEMORY``, when the bytes are held.
        settings: attrs class of its settings; the instance reaches the function as ``batch.settings``.
        fused: ``FusedBatch -> seconds`` or ``bytes`` of an operator that trains several models in one schedule of
            microtasks; without it the values of its trainings are added up, as if they ran one after another.

            .. versionadded:: 0.1
        errors: how wrong its seconds were where they were measured, for the intervals of predicted times; the first
            whose conditions hold counts. Empty: never validated, which reports say.
        first_step: for ``MemoryKind.TRAINING_STATE``: the bytes that are there before the first optimizer step;
            None: all of them. Only reports ask; what must fit is ``function``.
        host: for ``MemoryKind.TRAINING_STATE``: the bytes of host memory that each GPU's process would hold if this
            state were kept there; None: nothing is known. Only reports ask.
        axes: the axes beyond the paper's plan space (names as in the experiment's ``space:``) whose effect on what it
            prices the function knows from ``batch.execution``; on an axis that it does not know it cannot be searched.

            .. versionadded:: 0.1
        frameworks: role (``training``, ``inference``, ``generation``) -> the names of ``batch.execution.framework``
            whose coefficients the function has.

            .. versionadded:: 0.1
    """

    name: str
    summary: str
    target: Target
    quantity: str
    function: (
        Callable[[OperatorBatch], np.ndarray]
        | Callable[[TransferBatch], np.ndarray]
        | Callable[[MemoryBatch], np.ndarray]
    )
    memory: MemoryKind | None = None
    settings: type = NoSettings
    fused: Callable[[FusedBatch], np.ndarray] | None = None
    errors: tuple[TermError, ...] = ()
    first_step: Callable[[MemoryBatch], np.ndarray] | None = None
    host: Callable[[MemoryBatch], np.ndarray] | None = None
    axes: frozenset[str] = frozenset()
    frameworks: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SearchStrategy:
    """A way to look for the best configuration.

    Attributes:
        name: what ``search.strategy`` names.
        summary: one line.
        guarantee: ``heuristic``, ``baseline`` or ``optimal``.
        run: ``run(problem, budget, settings, progress) -> SearchResult``; must return the best plan found so
            far when ``progress.cancelled`` turns true.
        prepare: ``prepare(problem)``, called before the clock of ``run`` starts, e.g. to compile kernels.
        settings: attrs class of its settings.
    """

    name: str
    summary: str
    guarantee: str
    run: Callable[[Problem, SearchBudget, Any, Progress], SearchResult]
    prepare: Callable[[Problem], None] | None = None
    settings: type = NoSettings


@attrs.frozen(kw_only=True)
class BackendSpec:
    """Something that executes a plan or exports it to another framework.

    Attributes:
        name: what ``rpeg run --backend`` or ``rpeg export --to`` names.
        summary: one line.
        can: subset of ``{"execute", "export"}``.
        probe: ``() -> str | None``: why this machine cannot use it, or None.
        open: ``open(plan, settings) -> session`` for ``execute``: a context manager whose ``run(request)`` executes
            the plan's graph and returns a :class:`rpeg_core.runtime.trace.Trace`; the contract is
            :class:`rpeg_core.runtime.session.Session`.
        render: ``render(plan, settings) -> Mapping[str, str]`` for ``export``: file name to content.
        calibrate: ``calibrate(request) -> Measurements`` of this machine with the backend's own operations, for
            ``rpeg calibrate``; tells ``request.progress`` how far it is and ends its processes when it is interrupted.

            .. versionadded:: 0.1
        profile: ``profile(request, settings)`` for ``rpeg profile-lengths``: generate responses and tell their lengths;
            the contract is :class:`rpeg_core.runtime.lengths.LengthsRequest`. None when it cannot.
        settings: attrs class of its settings.
    """

    name: str
    summary: str
    can: frozenset[str]
    probe: Callable[[], str | None]
    open: Callable[[Plan, Any], Session] | None = None
    render: Callable[[Plan, Any], Mapping[str, str]] | None = None
    calibrate: Callable[[CalibrationRequest], Measurements] | None = None
    profile: Callable[[LengthsRequest, Any], None] | None = None
    settings: type = NoSettings
