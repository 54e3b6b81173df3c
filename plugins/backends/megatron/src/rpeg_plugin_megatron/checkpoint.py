"""What a rank writes so that a run can go on as if it had never stopped.

One file for each rank, ``FOLDER/rank-<r>/state.pt``: the artifacts of its store, the versions of its trainable models,
and the state of its trainers. It holds tensors, numbers and text only and is read as such. The folder appears under its
name when the file is complete.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rpeg_core.errors import BackendError
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation
from rpeg_plugin_megatron.installations import Installation
from rpeg_plugin_megatron.places import Place
from rpeg_plugin_megatron.store import RowsKey, RowsValue, Store, WeightsKey

__all__ = ["load", "save"]

SCHEMA = 1

_FILE = "state.pt"


def save(
    folder: Path,
    rank: int,
    step: int,
    digest: str,
    store: Store,
    installations: Mapping[tuple[str, Place], Installation],
) -> None:
    """Write the state of a rank at the start of RL step ``step``.

    Raises:
        BackendError: the folder cannot be written.
    """
    state: dict[str, Any] = {
        "schema": SCHEMA,
        "plan": digest,
        "rank": rank,
        "step": step,
        "rows": [
            {
                "node": key.node,
                "container": key.container,
                "place": _plain(key.place),
                "whole": key.whole,
                "tensor": value.tensor.cpu().contiguous(),
                "numbers": None if value.numbers is None else value.numbers.cpu().contiguous(),
            }
            for key, value in store.all_rows()
        ],
        "weights": [
            {
                "node": node,
                "container": container,
                "model": key.model,
                "place": _plain(key.place),
                "version": key.version,
                "readers": readers,
            }
            for (node, container), (key, readers) in store.all_weights().items()
        ],
        "installations": [
            {
                "model": model,
                "place": _plain(place),
                "trained": installation.trained,
                "trainer": None if installation.trainer is None else dict(installation.trainer.state()),
                "versions": {
                    version: [tensor.cpu().contiguous() for tensor in tensors]
                    for version, tensors in installation.kept().items()
                },
            }
            for (model, place), installation in installations.items()
            if installation.changes
        ],
    }
    target, unfinished = _folder(folder, rank), folder / f".rank-{rank}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with (unfinished / _FILE).open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    except OSError as error:
        raise BackendError(f"cannot write a checkpoint into {target}", facts=[str(error)]) from error


def load(
    folder: Path,
    rank: int,
    digest: str,
    installations: Mapping[tuple[str, Place], Installation],
    device: torch.device,
) -> Store:
    """Take back what :func:`save` wrote for this rank; collective over the places of all trainers.

    Returns:
        The store as it was.

    Raises:
        BackendError: there is no checkpoint of this rank, or it belongs to another plan.
    """
    state = _read(_folder(folder, rank) / _FILE)
    if state["plan"] != digest:
        raise BackendError(
            f"the checkpoint {folder} belongs to another plan",
            facts=[f"its plan: {state['plan']}", f"this plan: {digest}"],
            hint="resume with the plan that wrote it",
        )
    for kept in state["installations"]:
        installation = installations[kept["model"], _place(kept["place"])]
        if installation.trainer is not None:
            installation.restore(kept["versions"], kept["trained"])
            installation.bind(kept["trained"])
            installation.trainer.restore(kept["trainer"])
        else:
            installation.restore(kept["versions"], None)
    store = Store()
    for row in state["rows"]:
        key = RowsKey(row["node"], row["container"], _place(row["place"]), row["whole"])
        numbers = None if row["numbers"] is None else row["numbers"].to(device)
        store.put_rows(key, RowsValue(row["tensor"].to(device), numbers))
    for found in state["weights"]:
        key = WeightsKey(found["model"], _place(found["place"]), found["version"])
        store.put_weights(found["node"], found["container"], key, found["readers"])
    return store


def _folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise BackendError(
            f"cannot read the checkpoint {path}",
            facts=[str(error).partition("\n")[0]],
            hint=f"delete {path.parents[1]}; --resume then goes on from the checkpoint before, if there is one",
        ) from error
    if state.get("schema") != SCHEMA:
        raise BackendError(f"the checkpoint {path} has schema {state.get('schema')!r}", facts=[f"allowed: {SCHEMA}"])
    return state


def _plain(place: Place) -> list[int]:
    allocation, layout = place.allocation, place.layout
    return [allocation.start, allocation.stop, layout.data, layout.pipeline, layout.tensor]


def _place(values: list[int]) -> Place:
    start, stop, data, pipeline, tensor = values
    return Place(Allocation(start, stop), Layout(data, pipeline, tensor))
