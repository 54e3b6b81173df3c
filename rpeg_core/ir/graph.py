"""The values of an RPEG: containers, models, operators, edges, and the graph that holds them (paper, section IV-A).

The graph is steady-state and may be cyclic through publication edges. It is immutable; templates make it with
:class:`rpeg_core.ir.RpegBuilder`, passes read it.
"""

from __future__ import annotations

import enum
import functools

import attrs

from rpeg_core.spec.models import ModelSpec

__all__ = [
    "Container",
    "ContainerKind",
    "DataEdge",
    "Model",
    "Operator",
    "PublicationEdge",
    "Role",
    "Rpeg",
    "Training",
]


class Role(enum.Enum):
    """What an operator does with its model."""

    GENERATION = "generation"
    INFERENCE = "inference"
    TRAINING = "training"


class ContainerKind(enum.Enum):
    DATA = "data"
    WEIGHTS = "weights"


@attrs.frozen(kw_only=True)
class Container:
    """A typed bundle of elements that flows along edges: ``#a`` elements of ``s(a)`` bytes.

    ``model`` names the model whose parameters a weights container holds.
    """

    name: str
    kind: ContainerKind
    elements: int
    bytes_per_element: int
    model: str | None = None

    @property
    def bytes(self) -> int:
        """``#a * s(a)``."""
        return self.elements * self.bytes_per_element


@attrs.frozen(kw_only=True)
class Model:
    """A model of the graph. ``staleness`` is tau(m), 0 for frozen models."""

    name: str
    spec: ModelSpec
    trainable: bool
    staleness: int = 0


@attrs.frozen
class Training:
    """One of the trainings that a fused operator interleaves: its own name, and the model that it updates."""

    name: str
    model: str


@attrs.frozen(kw_only=True)
class Operator:
    """One model invocation, or a function when ``model`` is None.

    A *fused* operator is one invocation that trains several models, each with parameters and an optimizer of its own,
    in one schedule of microtasks (:mod:`rpeg_core.passes.microtasks`).

    Attributes:
        name: unique, e.g. ``actor_generation``.
        role: generation, inference or training.
        model: the invoked model's name; of a fused operator the first one's.
        inputs, outputs: container names, I(v) and O(v).
        seconds_per_sample: for a function without a model, its stated cost on one worker process per GPU.
        fused: what a fused operator interleaves, in the order of its microtasks; empty for all others.
    """

    name: str
    role: Role
    model: str | None
    inputs: frozenset[str]
    outputs: frozenset[str]
    seconds_per_sample: float | None = None
    fused: tuple[Training, ...] = ()

    @property
    def trainings(self) -> tuple[Training, ...]:
        """The trainings that it does: itself, those that it fuses, or none when it serves."""
        if self.fused or self.role is not Role.TRAINING or self.model is None:
            return self.fused
        return (Training(self.name, self.model),)

    @property
    def models(self) -> tuple[str, ...]:
        """The models that it invokes: one, none for a function, several when it is fused."""
        if self.fused:
            return tuple(training.model for training in self.fused)
        return () if self.model is None else (self.model,)


@attrs.frozen(order=True)
class DataEdge:
    """``source -container-> target`` within one step."""

    source: str
    target: str
    container: str


@attrs.frozen(order=True)
class PublicationEdge:
    """Weights made by training ``source`` become visible to ``target`` in a later step."""

    source: str
    target: str
    container: str


@attrs.frozen(kw_only=True, slots=False)  # cached properties need a __dict__
class Rpeg:
    """``G = (V, E_data, E_pub, A, M, tau)`` of one steady-state RL step.

    The order of ``operators`` is the graph's own: schedules break ties by it. ``inputs`` and ``outputs`` are the
    declared boundary containers.
    """

    name: str
    models: tuple[Model, ...]
    containers: tuple[Container, ...]
    operators: tuple[Operator, ...]
    data_edges: tuple[DataEdge, ...]
    publication_edges: tuple[PublicationEdge, ...]
    inputs: frozenset[str]
    outputs: frozenset[str]

    @functools.cached_property
    def _operators(self) -> dict[str, Operator]:
        return {operator.name: operator for operator in self.operators}

    @functools.cached_property
    def _models(self) -> dict[str, Model]:
        return {model.name: model for model in self.models}

    @functools.cached_property
    def _containers(self) -> dict[str, Container]:
        return {container.name: container for container in self.containers}

    @functools.cached_property
    def _indices(self) -> dict[str, int]:
        return {operator.name: index for index, operator in enumerate(self.operators)}

    def operator(self, name: str) -> Operator:
        """Raises KeyError for an unknown name."""
        return self._operators[name]

    def model(self, name: str) -> Model:
        """Raises KeyError for an unknown name."""
        return self._models[name]

    def container(self, name: str) -> Container:
        """Raises KeyError for an unknown name."""
        return self._containers[name]

    def index(self, operator: str) -> int:
        """Position of an operator in the graph's order."""
        return self._indices[operator]

    def model_of(self, operator: str) -> Model | None:
        """The model that an operator invokes, the first of a fused one; None for a function."""
        name = self._operators[operator].model
        return None if name is None else self._models[name]

    def models_of(self, operator: str) -> tuple[Model, ...]:
        """All models that an operator invokes."""
        return tuple(self._models[name] for name in self._operators[operator].models)

    @property
    def staleness(self) -> dict[str, int]:
        """tau: trainable model name -> budget, in model order."""
        return {model.name: model.staleness for model in self.models if model.trainable}
