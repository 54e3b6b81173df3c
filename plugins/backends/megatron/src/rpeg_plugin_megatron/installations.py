"""The models of a rank: one installation for each model and place, whatever operators run there, and its versions.

A version is a set of tensors, one for each parameter of this rank. To *bind* a version is to point the module's
parameters at its tensors; nothing is copied. A serving installation holds the versions that were delivered to it and
that something still reads, usually one, and no storage otherwise. The tensors of the version that is being trained
belong to the trainer, which overwrites them in place; if that version is still awaited, it is copied first: on the
device where operators serve from it there, which is what planned memory counts, and else, where it only waits for its
transfer, into the host's memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from rpeg_core.errors import BackendError, ExecutionError
from rpeg_core.spec.experiment import Experiment
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_megatron.huggingface import reader
from rpeg_plugin_megatron.initial import random_reader
from rpeg_plugin_megatron.model import ModelShard
from rpeg_plugin_megatron.places import Place
from rpeg_plugin_megatron.shards import Fragment
from rpeg_plugin_megatron.train import Trainer

__all__ = ["Installation", "first_weights", "role_of", "spec_to_run"]


class Installation:
    """One model at one place, on this rank.

    Args:
        model: its name in the graph.
        place: where.
        changes: whether it gets new versions, i.e. is not frozen.
        serves: whether operators other than its training use it here.
        shard: this rank's part, just built: its parameters have storage of their own.

    Attributes:
        trainer: once :meth:`train_with` was called.
        trained: the version that the trainer's tensors hold; None without a trainer.
        fragments: what this rank holds, in the order of :meth:`views`.
    """

    def __init__(self, model: str, place: Place, shard: ModelShard, *, changes: bool, serves: bool) -> None:
        self.model, self.place, self.shard, self.changes, self.serves = model, place, shard, changes, serves
        self.trainer: Trainer | None = None
        self.trained: int | None = None
        self._parameters = list(shard.module.parameters())
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._pieces = _pieces(shard, self._parameters)
        self.fragments: tuple[Fragment, ...] = tuple(fragment for fragment, _ in shard.fragments)
        self._own: tuple[Tensor, ...] | None = None
        self._versions: dict[int, tuple[Tensor, ...]] = {}
        self._aside: dict[int, tuple[Tensor, ...]] = {}  # in the host's memory
        self._bound: int | None = None
        self._unbind()

    @property
    def versions(self) -> tuple[int, ...]:
        """What is here, ascending."""
        trained = () if self.trained is None else (self.trained,)
        return tuple(sorted({*self._versions, *self._aside, *trained}))

    @property
    def copies(self) -> tuple[tuple[Tensor, ...], ...]:
        """The versions that are kept in the device's memory beside the trainer's."""
        return tuple(self._versions.values())

    @property
    def bytes(self) -> int:
        """Size of all versions that are kept beside the trainer's, wherever they lie."""
        return sum(tensor.numel() * tensor.element_size() for kept in self.kept().values() for tensor in kept)

    def train_with(self, make: Callable[[ModelShard], Trainer], version: int = 0) -> None:
        """Give a version to the trainer that ``make`` wraps around the shard; collective over the place.

        From then on that version's tensors are the trainer's.
        """
        self.bind(version)
        self.trainer = make(self.shard)
        self._own = tuple(parameter.data for parameter in self._parameters)
        self._versions.pop(version)
        self.trained = version

    def install(self, version: int) -> list[Tensor]:
        """Storage for a version, or the version itself when it is here: the views to write it into."""
        if version not in self.versions:
            device, dtype = self.shard.device.torch, self.shard.dtype
            self._versions[version] = tuple(torch.empty(shape, device=device, dtype=dtype) for shape in self._shapes)
        return self.views(version)

    def fill(self, version: int, read: Callable[[Fragment], Tensor]) -> None:
        """Install a version from a source of boxes."""
        for fragment, view in zip(self.fragments, self.install(version), strict=True):
            view.copy_(read(fragment))

    def views(self, version: int) -> list[Tensor]:
        """The boxes of a version, in the order of ``fragments``.

        Raises:
            ExecutionError: the version is not here.
        """
        tensors = self.tensors(version)
        return [
            tensors[piece.parameter].as_strided(
                piece.size, piece.stride, tensors[piece.parameter].storage_offset() + piece.offset
            )
            for piece in self._pieces
        ]

    def tensors(self, version: int) -> tuple[Tensor, ...]:
        """The parameters of a version.

        Raises:
            ExecutionError: the version is not here.
        """
        if self._own is not None and version == self.trained:
            return self._own
        kept = self.kept()
        if version not in kept:
            raise ExecutionError(
                f"version {version} of model {self.model!r} is not at {self.place}",
                facts=[f"this rank has versions: {', '.join(map(str, self.versions)) or 'none'}"],
            )
        return kept[version]

    def bind(self, version: int) -> ModelShard:
        """The shard with the weights of a version.

        Raises:
            ExecutionError: the version is not here.
        """
        tensors = self.tensors(version)
        if self._bound != version:
            for parameter, tensor in zip(self._parameters, tensors, strict=True):
                parameter.data = tensor
            self._bound = version
        return self.shard

    def keep(self) -> None:
        """Copy the version that is trained, because something will read it after the next update."""
        if self.trained is not None and self.trained not in self.kept():
            self._keep(self.trained, self.tensors(self.trained))

    def advance(self) -> int:
        """The trainer has made the next version out of the one it had; returns its number."""
        if self.trained is None:
            raise ExecutionError(f"model {self.model!r} is not trained at {self.place}")
        # The parameters still point at the trainer's tensors, which now hold the next version.
        self.trained += 1
        self._bound = self.trained
        return self.trained

    def release(self, version: int) -> None:
        """Give the storage of a version back; that of the trainer stays, and what is not here is passed over."""
        self._aside.pop(version, None)
        if self._versions.pop(version, None) is not None and self._bound == version:
            self._unbind()

    def restore(self, versions: Mapping[int, Sequence[Tensor]], trained: int | None) -> None:
        """Take back versions that :meth:`kept` gave; the trainer restores its own tensors."""
        self._versions, self._aside = {}, {}
        self.trained = trained
        for version, tensors in versions.items():
            self._keep(version, tensors)
        self._unbind()

    def kept(self) -> Mapping[int, tuple[Tensor, ...]]:
        """All versions but the trainer's, for a checkpoint."""
        return self._versions | self._aside

    def _keep(self, version: int, tensors: Sequence[Tensor]) -> None:
        """A copy of a version, where it belongs."""
        here = self.serves or self.trained is None
        kept, device = (self._versions, self.shard.device.torch) if here else (self._aside, torch.device("cpu"))
        kept[version] = tuple(tensor.detach().to(device, copy=True) for tensor in tensors)

    def _unbind(self) -> None:
        """Point the parameters at the trainer's tensors, or at nothing."""
        if self._own is not None:
            for parameter, tensor in zip(self._parameters, self._own, strict=True):
                parameter.data = tensor
            self._bound = self.trained
            return
        nothing = torch.empty(0, device=self.shard.device.torch, dtype=self.shard.dtype)
        for parameter in self._parameters:
            parameter.data = nothing
        self._bound = None


@attrs.frozen
class _Piece:
    """Where a fragment is: in which parameter, and how its elements lie there."""

    parameter: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _pieces(shard: ModelShard, parameters: Sequence[Tensor]) -> tuple[_Piece, ...]:
    by_storage = {parameter.untyped_storage().data_ptr(): index for index, parameter in enumerate(parameters)}
    found = []
    for _, view in shard.fragments:
        index = by_storage[view.untyped_storage().data_ptr()]
        offset = view.storage_offset() - parameters[index].storage_offset()
        found.append(_Piece(index, offset, tuple(view.shape), tuple(view.stride())))
    return tuple(found)


def role_of(experiment: Experiment, model: str) -> str:
    """The role whose first weights a model of the graph has.

    A model that several roles share, as ``actor_critic``, has those of the role that its name begins with.

    Raises:
        BackendError: no role of the experiment fits.
    """
    if model in experiment.models:
        return model
    for role in experiment.models:
        if model.startswith(role):
            return role
    raise BackendError(f"model {model!r} belongs to no role", facts=[f"roles: {', '.join(experiment.models)}"])


def spec_to_run(experiment: Experiment, model: str, spec: ModelSpec) -> ModelSpec:
    """A model's spec with what its folder of first weights says about how it runs.

    Raises:
        BackendError: the folder has no readable ``config.json``.
    """
    folder = experiment.weights.get(role_of(experiment, model))
    if folder is None:
        return spec
    path = Path(folder) / "config.json"
    try:
        return attrs.evolve(spec, runtime_config=json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot read {path}", facts=[f"weights of model {model!r}: {error}"]) from error


def first_weights(experiment: Experiment, model: str, spec: ModelSpec, seed: int) -> Callable[[Fragment], Tensor]:
    """Where version 0 of a model comes from: its role's folder, else random numbers.

    Random weights depend on (seed, role, parameter), where a role that repeats another one counts as that one: a
    reference that is ``same_as: actor`` begins equal to the actor.
    """
    role = role_of(experiment, model)
    origin = experiment.same_as.get(role, role)
    random = random_reader(int.from_bytes(hashlib.sha256(f"{seed}/{origin}".encode()).digest()[:8], "little"))
    folder = experiment.weights.get(role)
    return random if folder is None else reader(Path(folder), spec, missing=random)
