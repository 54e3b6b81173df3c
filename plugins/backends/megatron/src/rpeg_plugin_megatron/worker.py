"""What one rank does: it holds its models and artifacts, and executes its part of the nodes that it is told.

All ranks of a node execute it together, in the order in which the controller dispatches; no other rank takes part.
Which rows travel where follows from the graph (:mod:`rpeg_plugin_megatron.flow`), which boxes of weights from the
geometry of all installations, which the ranks tell each other once at the start. There are no sockets and no clock of
the run in this module.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rpeg_core.errors import BackendError, ExecutionError
from rpeg_core.ir import ContainerKind, Role
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.protocol import Artifact
from rpeg_core.runtime.window import Window
from rpeg_core.spec.execution import Recompute
from rpeg_plugin_megatron import checkpoint, huggingface
from rpeg_plugin_megatron.device import Device, choose_device
from rpeg_plugin_megatron.flow import Flow, Rows
from rpeg_plugin_megatron.groups import build_groups
from rpeg_plugin_megatron.inputs import open_inputs
from rpeg_plugin_megatron.installations import Installation, first_weights, role_of, spec_to_run
from rpeg_plugin_megatron.layouts import check_workload
from rpeg_plugin_megatron.messages import Done, Execute
from rpeg_plugin_megatron.model import build_shard
from rpeg_plugin_megatron.operators import Job, Operators, row_shape
from rpeg_plugin_megatron.places import Place
from rpeg_plugin_megatron.regroup import RowMover
from rpeg_plugin_megatron.settings import Settings
from rpeg_plugin_megatron.shards import Fragment
from rpeg_plugin_megatron.store import RowsKey, RowsValue, Store, WeightsKey
from rpeg_plugin_megatron.train import Trainer
from rpeg_plugin_megatron.transfer import BUCKET_BYTES, Held, Route, move, route

__all__ = ["Worker"]

Installed = tuple[str, Place]
"""Model and place."""


class Worker:
    """One rank of a run.

    Args:
        rank: global rank, the device of the plan with that index.
        world: number of ranks.
        plan: what will run.
        settings: of the backend.
    """

    def __init__(self, rank: int, world: int, plan: Plan, settings: Settings) -> None:
        self.rank, self.world, self.plan, self.settings = rank, world, plan, settings
        self.window = Window(plan.rpeg, plan.assignments, plan.workload, split_lengths=plan.options.split_lengths)
        self.flow = Flow(self.window, plan.assignments)
        self.store = Store()
        self.installations: dict[Installed, Installation] = {}
        self._routes: dict[tuple[str, Place, Place], Route] = {}
        self._owns_world = False

    # Setting up

    def setup(self, store: dist.Store | None = None) -> str:
        """Join the world, build every model and give it its first weights; collective over the world.

        Args:
            store: where the ranks meet; None for what the environment says, as under torchrun. A world that this
                process is in already is used as it is.

        Returns:
            The device in words.

        Raises:
            BackendError: the plan cannot run on this device, or a model is not supported.
            SettingsError, DataError: the data or the reward cannot be used.
        """
        settings, plan = self.settings, self.plan
        self.device = choose_device(
            settings.device, settings.precision, local_rank=int(os.environ.get("LOCAL_RANK", self.rank))
        )
        self._check_plan()
        self.device.make_deterministic()
        self._join(store)
        places = {name: Place(a.allocation, a.layout) for name, a in plan.assignments.items()}
        self._places = {op.name: places[op.name] for op in plan.rpeg.operators}
        fused = {self._places[op.name] for op in plan.rpeg.operators if op.fused}
        self._groups = build_groups(tuple(self._places.values()), fused=fused)
        self._open_data()
        self._install()
        self._held = self._exchange_geometry()
        # NCCL wants all ranks in the first operation of a group; transfers between some of them come later.
        dist.all_reduce(torch.zeros(1, device=self.device.torch))
        return _words(self.device)

    def _check_plan(self) -> None:
        width = self.plan.workload.bytes_per_element
        if width != self.device.bytes_per_element:
            raise BackendError(
                f"the plan is for weights of {width} bytes, this worker computes with {self.device.bytes_per_element}",
                facts=[f"device: {self.device.torch}, {self.device.dtype}"],
                hint=f"plan with workload.bytes_per_element: {self.device.bytes_per_element}",
            )
        reason = check_workload(self.plan.workload)
        if reason is not None:
            raise BackendError("backend megatron cannot run this plan", facts=[reason])

    def _join(self, store: dist.Store | None) -> None:
        if dist.is_initialized():
            return
        dist.init_process_group(
            self.device.backend,
            store=store,
            rank=self.rank,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=self.settings.node_timeout_s),
        )
        self._owns_world = True

    def _open_data(self) -> None:
        plan, workload = self.plan, self.plan.workload
        inputs = open_inputs(plan, self.settings)
        contents = inputs.semantics.contents
        self._data = inputs.data
        self._job = Job(
            graph=plan.rpeg,
            semantics=inputs.semantics,
            settings=inputs.algorithm,
            workload=workload,
            data=inputs.data,
            sampling=inputs.sampling,
            seed=self.settings.seed,
            device=self.device.torch,
        )
        self._operators = Operators(self._job)
        self._mover = RowMover(self.rank, workload, lambda name: row_shape(contents[name], workload), self.device.torch)

    def _install(self) -> None:
        """Build this rank's installations; version 0 where something will read it."""
        graph = self.plan.rpeg
        trained = {(t.model, self._places[op.name]): t.name for op in graph.operators for t in op.trainings}
        backward = {
            (t.model, self._places[op.name]): self.plan.assignments[op.name].mode.recompute
            for op in graph.operators
            for t in op.trainings
        }
        initial = {
            (graph.container(artifact.container).model, Place(artifact.allocation, artifact.layout))
            for artifact in self.window.initial
        }
        used = ((model, self._places[op.name]) for op in graph.operators for model in graph.models_of(op.name))
        for model, place in used:
            key = (model.name, place)
            if key in self.installations or place not in self._groups:
                continue
            spec = spec_to_run(self.plan.experiment, model.name, model.spec)
            recompute = backward.get(key) or Recompute(self.settings.recompute if key in trained else "none")
            shard = build_shard(spec, self._groups[place], device=self.device, recompute=recompute)
            serves = any(
                model.name in op.models and op.role is not Role.TRAINING and self._places[op.name] == place
                for op in graph.operators
            )
            installation = Installation(model.name, place, shard, changes=model.trainable, serves=serves)
            self.installations[key] = installation
            if key in trained or key in initial or not model.trainable:
                installation.fill(0, first_weights(self.plan.experiment, model.name, spec, self.settings.seed))
            if key in trained:
                optimizer = self._job.semantics.recipe(trained[key], self._job.settings).optimizer
                installation.train_with(lambda shard, optimizer=optimizer: Trainer(shard, optimizer))
        for index, artifact in enumerate(self.window.initial):
            key = (graph.container(artifact.container).model, Place(artifact.allocation, artifact.layout))
            if key in self.installations:
                readers = sum(
                    (-1 - index, artifact.container) == read[1:]
                    for step in range(self.window.steady_step)
                    for reads in self.window.shape(step).reads
                    for read in reads
                )
                self.store.put_weights(artifact.node, artifact.container, WeightsKey(*key, 0), readers)

    def _exchange_geometry(self) -> dict[Installed, Held]:
        """Which fragments every rank of the world holds of which installation."""
        mine = {key: installation.fragments for key, installation in self.installations.items()}
        everyone: list[dict[Installed, tuple[Fragment, ...]]] = [{} for _ in range(self.world)]
        dist.all_gather_object(everyone, mine)
        found: dict[Installed, dict[int, Sequence[Fragment]]] = {}
        for rank, theirs in enumerate(everyone):
            for key, fragments in theirs.items():
                found.setdefault(key, {})[rank] = fragments
        return found

    # Executing

    def execute(self, message: Execute) -> Done:
        """Run this rank's part of a node.

        Raises:
            ExecutionError: the node is bound to a version that is not here, an artifact is missing, or the work failed.
        """
        started_s = time.perf_counter()
        node = message.node
        weights = [a for a in message.inputs if self._is_weights(a.container)]
        for artifact in weights:
            self.store.read_weights(artifact.node, artifact.container)
        elements, wire_bytes, metrics = 0, 0, {}
        if node.kind is NodeKind.OP:
            wire_bytes, metrics = self._run(node, weights)
        elif node.model is not None:
            elements, wire_bytes = self._move_weights(node, weights)
        else:
            elements, wire_bytes = self._move_rows(node)
        self.device.synchronize()
        width = 0 if node.container is None else self.plan.rpeg.container(node.container).bytes_per_element
        return Done(
            rank=self.rank,
            node=node.index,
            seconds=time.perf_counter() - started_s,
            bytes=elements * width,
            wire_bytes=wire_bytes,
            metrics=metrics,
        )

    def drop(self, artifacts: Sequence[Artifact]) -> None:
        """Forget artifacts; those that are not here are passed over."""
        for artifact in artifacts:
            unused = self.store.drop(artifact.node, artifact.container)
            if unused is not None and self.plan.rpeg.model(unused.model).trainable:
                self.installations[unused.model, unused.place].release(unused.version)

    def _is_weights(self, container: str) -> bool:
        return self.plan.rpeg.container(container).kind is ContainerKind.WEIGHTS

    def _run(self, node: Node, weights: Sequence[Artifact]) -> tuple[int, dict[str, float]]:
        step, position = self.window.locate(node.index)
        groups = self._groups[self._places[node.operator]]
        inputs, wire_bytes = self._inputs(node, step, position)
        operator, bound = self.plan.rpeg.operator(node.operator), self._bind(node, weights)
        for training in operator.trainings:
            if self.store.is_awaited(WeightsKey(training.model, groups.place, node.version)):
                bound[training.model].keep()
        shard = None if node.model is None else bound[node.model].shard
        trainers = {training.name: bound[training.model].trainer for training in operator.trainings}
        result = self._operators.run(node, groups, inputs, shard, trainers)
        metrics = dict(result.metrics)
        for container, value in result.rows.items():
            whole = value.numbers is None
            self.store.put_rows(RowsKey(node.index, container, groups.place, whole), value)
        for training in operator.trainings:
            prefix = f"{training.name}/" if operator.fused else ""
            metrics |= {prefix + name: age for name, age in self._staleness(node, training.model, step).items()}
            version = bound[training.model].advance()
            for container in sorted(operator.outputs):
                if self.plan.rpeg.container(container).model == training.model:
                    self._note_weights(node, container, WeightsKey(training.model, groups.place, version))
        return wire_bytes, metrics

    def _staleness(self, node: Node, model: str, step: int) -> dict[str, float]:
        """How many versions older than the one in training the policy, or critic, is that made the step's rows.

        One version makes all sequences of a step, so that this is the staleness of every token.
        """
        served = [
            other.version
            for other in self.window.nodes(step)
            if other.kind is NodeKind.OP and other.model == model and other.operator != node.operator
        ]
        return {"staleness": float(node.version - min(served))} if served else {}

    def _bind(self, node: Node, weights: Sequence[Artifact]) -> dict[str, Installation]:
        """The installations of an operator's models, with the version that the node is bound to."""
        place = self._places[node.operator]
        bound = {model: self.installations[model, place] for model in node.models}
        for artifact in weights:
            self._check_version(node, artifact)
        training = self.plan.rpeg.operator(node.operator).role is Role.TRAINING
        for installation in bound.values():
            if training and installation.trained != node.version:
                raise _wrong_version(node, node.version, installation.trained)
            with _naming(node):
                installation.bind(node.version)
        return bound

    def _check_version(self, node: Node, artifact: Artifact) -> None:
        """Whether an artifact of weights is the version that a node is bound to."""
        with _naming(node):
            found = self.store.weights(artifact.node, artifact.container)
        if found.model not in node.models or found.version != node.version:
            raise _wrong_version(node, node.version, found.version)

    def _note_weights(self, node: Node, container: str, key: WeightsKey) -> None:
        step, position = self.window.locate(node.index)
        shape = self.window.shape(step)
        readers = shape.readers[position][shape.writes[position].index(container)]
        self.store.put_weights(node.index, container, key, len(readers))

    # Rows

    def _key(self, step: int, rows: Rows, part: int = 0) -> RowsKey:
        return RowsKey(self.window.index(step, rows.makers[part]), rows.container, rows.place, rows.whole)

    def _read(self, step: int, rows: Rows) -> list[RowsValue]:
        parts = range(1 if rows.whole else len(rows.makers))
        return [self.store.rows(self._key(step, rows, part)) for part in parts]

    def _inputs(self, node: Node, step: int, position: int) -> tuple[dict[str, RowsValue], int]:
        """The rows that an operator reads, brought into its own layout where they lie in another one."""
        place, found = self._places[node.operator], {}
        pairs = []
        for rows in self.flow.inputs(step, position):
            as_is = rows.place == place and (rows.whole or node.phase is not None)
            if as_is:
                (found[rows.container],) = self._read(step, rows)
            else:
                pairs.append((rows, Rows(rows.container, rows.makers, place, whole=True)))
        if not pairs:
            return found, 0
        if node.phase is not None:
            raise ExecutionError(
                f"{node.label} reads {pairs[0][0].container!r} in another layout, which length phases do not allow",
                hint="give both operators the same degrees, or plan without workload.response_lengths",
            )
        shipped = self._mover.ship(pairs, lambda rows: self._read(step, rows))
        for (rows, _), values in zip(pairs, shipped.values, strict=True):
            (found[rows.container],) = values
        return found, shipped.wire_bytes

    def _move_rows(self, node: Node) -> tuple[int, int]:
        """Run a data transfer with its riders; elements of its own container delivered here, and bytes sent."""
        step, position = self.window.locate(node.index)
        own, *riders = self.flow.cargo(step, position)
        # A rider that is the transfer's own container travels once.
        same = [cargo for cargo in riders if cargo.source == own.source and _alike(cargo.target, own.target)]
        cargos = [own, *(cargo for cargo in riders if cargo not in same)]
        shipped = self._mover.ship([(c.source, c.target) for c in cargos], lambda rows: self._read(step, rows))
        for cargo, values in zip(cargos, shipped.values, strict=True):
            self._keep(step, cargo.target, values)
        for cargo in same:
            self._keep(step, cargo.target, shipped.values[0])
        return shipped.elements[0], shipped.wire_bytes

    def _keep(self, step: int, rows: Rows, values: Sequence[RowsValue] | None) -> None:
        for part, value in enumerate(values or ()):
            self.store.put_rows(self._key(step, rows, part), value)

    # Weights

    def _move_weights(self, node: Node, weights: Sequence[Artifact]) -> tuple[int, int]:
        """Publish or redistribute a version; elements delivered here, and bytes sent."""
        artifact = weights[0]
        source = Place(artifact.allocation, artifact.layout)
        target = Place(node.allocation, node.layout)
        key = (node.model, source, target)
        if key not in self._routes:
            self._routes[key] = route(self.rank, self._held[node.model, source], self._held[node.model, target])
        into = self.installations.get((node.model, target))
        mine: list[torch.Tensor] = []
        if (node.model, source) in self.installations:
            self._check_version(node, artifact)
            mine = self.installations[node.model, source].views(node.version)
        targets: list[torch.Tensor] = []
        if into is not None:
            # Lowering also redistributes to a trainer, which has the version already: its tensors get their own values.
            targets = into.install(node.version)
        moved = move(self._routes[key], mine, targets, device=self.device.torch)
        if into is not None:
            self._note_weights(node, node.container, WeightsKey(node.model, target, node.version))
        return moved.elements, moved.wire_bytes

    def _trains(self, model: str, place: Place) -> bool:
        graph = self.plan.rpeg
        return any(t.model == model and self._places[op.name] == place for op in graph.operators for t in op.trainings)

    # Keeping

    def checkpoint(self, folder: str, step: int) -> None:
        """Write all that this rank needs to go on at the start of RL step ``step``.

        Raises:
            BackendError: the folder cannot be written.
        """
        checkpoint.save(Path(folder), self.rank, step, self.plan.digest, self.store, self.installations)

    def restore(self, folder: str) -> None:
        """Take back what :meth:`checkpoint` wrote; collective over the world.

        Raises:
            BackendError: the folder has no checkpoint of this rank, or one of another plan.
        """
        self.store = checkpoint.load(Path(folder), self.rank, self.plan.digest, self.installations, self.device.torch)

    def export(self, folder: str, model: str) -> None:
        """Write the newest weights of a trained model as a Hugging Face folder; collective over its trainer's place.

        The first rank of the place writes; at any time it holds what is being gathered and what is being assembled.

        Raises:
            BackendError: the model cannot be written.
        """
        key = next(key for key in self._held if key[0] == model and self._trains(*key))
        installation = self.installations.get(key)
        if installation is None:
            return
        pieces = self._gathered(key, installation)
        if self.rank != key[1].ranks[0]:
            for _ in pieces:
                pass
            return
        weights = self.plan.experiment.weights.get(role_of(self.plan.experiment, model))
        huggingface.export(
            pieces,
            installation.shard.spec,
            Path(folder),
            tokenizer=self._data.tokenizer,
            source=None if weights is None else Path(weights),
        )

    def _gathered(self, key: Installed, installation: Installation) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """All boxes of the trained version, on the first rank of its place; nothing on the others."""
        first, held = key[1].ranks[0], self._held[key]
        boxes = sorted({box for boxes in held.values() for box in boxes}, key=lambda box: (box.name, box.start))
        mine, device, dtype = installation.views(installation.trained), self.device.torch, installation.shard.dtype
        while boxes:
            taken, size = [], 0
            while boxes and (not taken or size + boxes[0].elements <= BUCKET_BYTES // dtype.itemsize):
                taken.append(boxes.pop(0))
                size += taken[-1].elements
            into = [torch.empty(box.size, device=device, dtype=dtype) for box in taken] if self.rank == first else []
            move(route(self.rank, held, {first: taken}), mine, into)
            if self.rank == first:
                yield from zip(taken, into, strict=True)

    def close(self) -> None:
        """Leave the world, if this worker joined it."""
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()


def _alike(a: Rows, b: Rows) -> bool:
    """Whether two targets differ in their makers only."""
    return (a.container, a.place, a.whole, a.phases) == (b.container, b.place, b.whole, b.phases)


def _wrong_version(node: Node, expected: int | None, found: int | None) -> ExecutionError:
    return ExecutionError(
        f"{node.label} is bound to version {expected} of model {node.model!r}, found version {found}",
        facts=[f"GPUs {node.allocation}"],
    )


@contextlib.contextmanager
def _naming(node: Node) -> Iterator[None]:
    """Add the node to an error about what it needs."""
    try:
        yield
    except ExecutionError as error:
        raise ExecutionError(
            f"{node.label} is bound to version {node.version} of model {node.model!r}: {error.what}",
            facts=[*error.facts, f"GPUs {node.allocation}"],
            hint=error.hint,
        ) from error


def _words(device: Device) -> str:
    if device.is_cpu:
        return "cpu"
    return f"{device.torch} {torch.cuda.get_device_name(device.torch)}"
