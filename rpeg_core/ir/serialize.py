"""JSON-ready dictionaries of an RPEG, and back, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpeg_core.errors import GraphError
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
from rpeg_core.spec.models import ModelSpec

__all__ = ["from_dict", "to_dict"]


def to_dict(graph: Rpeg) -> dict[str, Any]:
    """A JSON-ready dictionary; sets are sorted lists."""
    return {
        "name": graph.name,
        "models": [
            {
                "name": model.name,
                "spec": model.spec.to_dict(),
                "trainable": model.trainable,
                "staleness": model.staleness,
            }
            for model in graph.models
        ],
        "containers": [
            {
                "name": container.name,
                "kind": container.kind.value,
                "elements": container.elements,
                "bytes_per_element": container.bytes_per_element,
                "model": container.model,
            }
            for container in graph.containers
        ],
        "operators": [
            {
                "name": operator.name,
                "role": operator.role.value,
                "model": operator.model,
                "inputs": sorted(operator.inputs),
                "outputs": sorted(operator.outputs),
                "seconds_per_sample": operator.seconds_per_sample,
                **({"fused": [[part.name, part.model] for part in operator.fused]} if operator.fused else {}),
            }
            for operator in graph.operators
        ],
        "data_edges": [[e.source, e.target, e.container] for e in graph.data_edges],
        "publication_edges": [[e.source, e.target, e.container] for e in graph.publication_edges],
        "inputs": sorted(graph.inputs),
        "outputs": sorted(graph.outputs),
    }


def from_dict(document: Mapping[str, Any]) -> Rpeg:
    """The graph of :func:`to_dict` (not checked for well-formedness).

    Raises:
        GraphError: a key is missing or a value has the wrong form.
    """
    try:
        return Rpeg(
            name=document["name"],
            models=tuple(
                Model(
                    name=model["name"],
                    spec=ModelSpec.from_dict(model["spec"]),
                    trainable=model["trainable"],
                    staleness=model["staleness"],
                )
                for model in document["models"]
            ),
            containers=tuple(
                Container(
                    name=container["name"],
                    kind=ContainerKind(container["kind"]),
                    elements=container["elements"],
                    bytes_per_element=container["bytes_per_element"],
                    model=container["model"],
                )
                for container in document["containers"]
            ),
            operators=tuple(
                Operator(
                    name=operator["name"],
                    role=Role(operator["role"]),
                    model=operator["model"],
                    inputs=frozenset(operator["inputs"]),
                    outputs=frozenset(operator["outputs"]),
                    seconds_per_sample=operator["seconds_per_sample"],
                    fused=tuple(Training(*part) for part in operator.get("fused", ())),
                )
                for operator in document["operators"]
            ),
            data_edges=tuple(DataEdge(*edge) for edge in document["data_edges"]),
            publication_edges=tuple(PublicationEdge(*edge) for edge in document["publication_edges"]),
            inputs=frozenset(document["inputs"]),
            outputs=frozenset(document["outputs"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise GraphError(f"the graph document cannot be read: {type(error).__name__}: {error}") from error
