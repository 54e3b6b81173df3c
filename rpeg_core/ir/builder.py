"""A builder for template authors: declare models, data and operators, connect them, ``build()``.

Weights containers, operator interfaces of weights and boundary sets follow from the declarations::

    b = RpegBuilder("mini")
    b.model("actor", spec, trainable=True, staleness=1)
    prompts = b.data("prompts", elements=512 * 128, bytes_per_element=4)
    completions = b.data("completions", elements=512 * 640, bytes_per_element=4)
    b.generation("actor_generation", "actor", reads=[prompts], writes=[completions])
    b.training("actor_training", "actor", reads=[completions])
    b.connect("actor_generation", completions, "actor_training")
    b.publish("actor_training", "actor_generation")
    graph = b.build()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from rpeg_core.ir.graph import (
    Container,
    ContainerKind,
    DataEdge,
    Model,
    Operator,
    PublicationEdge,
    Role,
    Rpeg,
    Training,
)
from rpeg_core.ir.wellformed import require_well_formed
from rpeg_core.spec.models import ModelSpec

__all__ = ["RpegBuilder"]


class RpegBuilder:
    """Collects declarations in order; ``build()`` checks them all and returns the graph."""

    def __init__(self, name: str, *, weight_bytes_per_element: int = 2) -> None:
        self._name = name
        self._weight_bytes = weight_bytes_per_element
        self._models: list[Model] = []
        self._containers: list[Container] = []
        self._operators: list[Operator] = []
        self._data_edges: list[DataEdge] = []
        self._publications: list[PublicationEdge] = []

    def model(self, name: str, spec: ModelSpec, *, trainable: bool, staleness: int = 0) -> str:
        """Declare a model and its weights container ``W_<name>``; returns ``name``."""
        self._models.append(Model(name=name, spec=spec, trainable=trainable, staleness=staleness))
        self._containers.append(
            Container(
                name=weights_name(name),
                kind=ContainerKind.WEIGHTS,
                elements=spec.total_parameters,
                bytes_per_element=self._weight_bytes,
                model=name,
            )
        )
        return name

    def data(self, name: str, *, elements: int, bytes_per_element: int) -> str:
        """Declare a data container; returns ``name``."""
        self._containers.append(
            Container(name=name, kind=ContainerKind.DATA, elements=elements, bytes_per_element=bytes_per_element)
        )
        return name

    def generation(self, name: str, model: str, *, reads: Iterable[str], writes: Iterable[str]) -> str:
        """An autoregressive invocation of ``model``."""
        return self._operator(name, Role.GENERATION, model, reads, writes)

    def inference(self, name: str, model: str, *, reads: Iterable[str], writes: Iterable[str]) -> str:
        """A teacher-forced forward invocation of ``model``."""
        return self._operator(name, Role.INFERENCE, model, reads, writes)

    def function(self, name: str, *, reads: Iterable[str], writes: Iterable[str], seconds_per_sample: float) -> str:
        """An assessment without a model, e.g. a rule-based reward, with its stated cost per sample."""
        return self._operator(name, Role.INFERENCE, None, reads, writes, seconds_per_sample)

    def training(self, name: str, model: str, *, reads: Iterable[str]) -> str:
        """An optimizer step of ``model``; it writes the model's weights."""
        return self._operator(name, Role.TRAINING, model, reads, (weights_name(model),))

    def fused_training(self, name: str, trainings: Mapping[str, str], *, reads: Iterable[str]) -> str:
        """One invocation that updates several models in one schedule of microtasks.

        Args:
            name: of the operator.
            trainings: the name of each training -> the model that it updates, in the order of the microtasks.
            reads: what they read together.
        """
        fused = tuple(Training(training, model) for training, model in trainings.items())
        weights = [weights_name(training.model) for training in fused]
        first = fused[0].model if fused else None
        self._operator(name, Role.TRAINING, first, (*weights, *reads), weights)
        self._operators[-1] = attrs.evolve(self._operators[-1], fused=fused)
        return name

    def connect(self, source: str, container: str, *targets: str) -> None:
        """Data edges ``source -container-> target`` for every target."""
        self._data_edges.extend(DataEdge(source, target, container) for target in targets)

    def publish(self, source: str, *targets: str) -> None:
        """Publication edges of the weights that training ``source`` makes; of the target's model when it is fused."""
        operators = {op.name: op for op in self._operators}
        made = operators[source].models if source in operators else ()
        for target in targets:
            wanted = operators[target].model if target in operators else None
            model = wanted if wanted in made else next(iter(made), source)
            self._publications.append(PublicationEdge(source, target, weights_name(model)))

    def build(self) -> Rpeg:
        """The graph.

        Raises:
            GraphError: the declarations are not well-formed; names every violation.
        """
        read = frozenset().union(*(operator.inputs for operator in self._operators))
        written = frozenset().union(*(operator.outputs for operator in self._operators))
        weights = {c.name for c in self._containers if c.kind is ContainerKind.WEIGHTS}
        return require_well_formed(
            Rpeg(
                name=self._name,
                models=tuple(self._models),
                containers=tuple(self._containers),
                operators=tuple(self._operators),
                data_edges=tuple(self._data_edges),
                publication_edges=tuple(self._publications),
                inputs=frozenset(name for name in read if name in weights or name not in written),
                outputs=frozenset(name for name in written if name in weights or name not in read),
            )
        )

    def _operator(
        self,
        name: str,
        role: Role,
        model: str | None,
        reads: Iterable[str],
        writes: Iterable[str],
        seconds_per_sample: float | None = None,
    ) -> str:
        own = () if model is None else (weights_name(model),)
        self._operators.append(
            Operator(
                name=name,
                role=role,
                model=model,
                inputs=frozenset((*own, *reads)),
                outputs=frozenset(writes),
                seconds_per_sample=seconds_per_sample,
            )
        )
        return name


def weights_name(model: str) -> str:
    """The name of a model's weights container."""
    return f"W_{model}"
