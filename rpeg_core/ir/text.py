"""The printable form of an RPEG: stable, one line per fact, read back by :func:`from_text`.

::

    rpeg ppo
    model actor trainable staleness=1 spec={...}
    data prompts elements=65536 bytes=4
    weights W_actor elements=6738415616 bytes=2 model=actor
    generation actor_generation model=actor reads=W_actor,prompts writes=completions
    edge actor_generation -completions-> reward_inference
    publish actor_training -W_actor-> actor_generation
    input W_actor
    output W_actor
"""

from __future__ import annotations

import json
import re

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

__all__ = ["from_text", "to_text"]

_EDGE = re.compile(r"^(\S+) -(\S+)-> (\S+)$")
_ROLES = {role.value: role for role in Role}


def to_text(graph: Rpeg) -> str:
    """The text of ``graph``; equal graphs give equal bytes."""
    lines = [f"rpeg {graph.name}"]
    for model in graph.models:
        kind = "trainable" if model.trainable else "frozen"
        spec = json.dumps(model.spec.to_dict(), sort_keys=True, separators=(",", ":"))
        lines.append(f"model {model.name} {kind} staleness={model.staleness} spec={spec}")
    for container in graph.containers:
        owner = f" model={container.model}" if container.model is not None else ""
        lines.append(
            f"{container.kind.value} {container.name} elements={container.elements} "
            f"bytes={container.bytes_per_element}{owner}"
        )
    for op in graph.operators:
        what = f"model={op.model}" if op.model is not None else f"seconds_per_sample={op.seconds_per_sample!r}"
        if op.fused:
            what += " fused=" + ",".join(f"{part.name}:{part.model}" for part in op.fused)
        reads, writes = ",".join(sorted(op.inputs)), ",".join(sorted(op.outputs))
        lines.append(f"{op.role.value} {op.name} {what} reads={reads} writes={writes}")
    lines.extend(f"edge {e.source} -{e.container}-> {e.target}" for e in graph.data_edges)
    lines.extend(f"publish {e.source} -{e.container}-> {e.target}" for e in graph.publication_edges)
    lines.extend(f"input {name}" for name in sorted(graph.inputs))
    lines.extend(f"output {name}" for name in sorted(graph.outputs))
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Rpeg:
    """The graph that :func:`to_text` printed (not checked for well-formedness).

    Raises:
        GraphError: a line cannot be read, with its number; or no line names the graph.
    """
    name = ""
    models: list[Model] = []
    containers: list[Container] = []
    operators: list[Operator] = []
    data_edges: list[DataEdge] = []
    publications: list[PublicationEdge] = []
    inputs: set[str] = set()
    outputs: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        word, _, rest = line.partition(" ")
        try:
            if word == "rpeg":
                name = rest
            elif word == "model":
                models.append(_model(rest))
            elif word in ("data", "weights"):
                containers.append(_container(word, rest))
            elif word in _ROLES:
                operators.append(_operator(_ROLES[word], rest))
            elif word in ("edge", "publish"):
                source, container, target = _EDGE.fullmatch(rest).groups()  # type: ignore[union-attr]
                if word == "edge":
                    data_edges.append(DataEdge(source, target, container))
                else:
                    publications.append(PublicationEdge(source, target, container))
            elif word == "input":
                inputs.add(rest)
            elif word == "output":
                outputs.add(rest)
            else:
                raise ValueError(f"unknown word {word!r}")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise GraphError(f"line {number} of the graph text cannot be read: {line!r}", facts=[str(error)]) from error
    if not name:
        raise GraphError("the graph text has no name", facts=["allowed: a first line `rpeg NAME`"])
    return Rpeg(
        name=name,
        models=tuple(models),
        containers=tuple(containers),
        operators=tuple(operators),
        data_edges=tuple(data_edges),
        publication_edges=tuple(publications),
        inputs=frozenset(inputs),
        outputs=frozenset(outputs),
    )


def _fields(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(" "))


def _model(rest: str) -> Model:
    head, spec = rest.split(" spec=", 1)
    name, kind, staleness = head.split(" ")
    if kind not in ("trainable", "frozen"):
        raise ValueError(f"{kind!r} is neither trainable nor frozen")
    return Model(
        name=name,
        spec=ModelSpec.from_dict(json.loads(spec)),
        trainable=kind == "trainable",
        staleness=int(staleness.removeprefix("staleness=")),
    )


def _container(kind: str, rest: str) -> Container:
    name, _, fields = rest.partition(" ")
    values = _fields(fields)
    return Container(
        name=name,
        kind=ContainerKind(kind),
        elements=int(values["elements"]),
        bytes_per_element=int(values["bytes"]),
        model=values.get("model"),
    )


def _operator(role: Role, rest: str) -> Operator:
    name, _, fields = rest.partition(" ")
    values = _fields(fields)
    seconds = values.get("seconds_per_sample")
    return Operator(
        name=name,
        role=role,
        model=values.get("model"),
        inputs=frozenset(filter(None, values["reads"].split(","))),
        outputs=frozenset(filter(None, values["writes"].split(","))),
        seconds_per_sample=None if seconds is None else float(seconds),
        fused=tuple(Training(*part.split(":")) for part in values.get("fused", "").split(",") if part),
    )
