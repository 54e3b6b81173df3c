"""The checkpoints of a run: one folder each, complete once it has its final name.

``checkpoints/step-00000006/`` holds what every rank wrote (the worker's business) and ``meta.json``: the plan, the
settings that the results depend on, and the number of complete steps. A folder is written under another name and
renamed when every rank said that its part is on disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import attrs

from rpeg_core.errors import BackendError
from rpeg_core.planning.plan import Plan
from rpeg_plugin_megatron.settings import Settings

__all__ = ["CHECKPOINTS_FOLDER", "Checkpoints", "Found"]

CHECKPOINTS_FOLDER = "checkpoints"
"""In the output folder of a run."""

SCHEMA = 1
"""Of ``meta.json``."""

_COMPLETE = re.compile(r"step-(\d{8,})")

_FREE = frozenset(
    {
        "checkpoint_every",
        "checkpoints_kept",
        "device",
        "export",
        "heartbeat_timeout_s",
        "launcher",
        "listen",
        "node_timeout_s",
        "oversubscribe",
        "recompute",
        "setup_timeout_s",
        "steps",
        "threads_per_worker",
    }
)
"""Settings that do not change what is computed; a run that goes on must have all others as before."""


@attrs.frozen
class Found:
    """A complete checkpoint: steps ``0 .. step - 1`` are done."""

    step: int
    folder: Path


class Checkpoints:
    """The checkpoints in an output folder.

    Args:
        output: of the run.
        plan, settings: of the run.
        world: number of ranks.
    """

    def __init__(self, output: Path, plan: Plan, settings: Settings, world: int) -> None:
        self._folder = output / CHECKPOINTS_FOLDER
        self._kept = settings.checkpoints_kept
        self._meta: dict[str, Any] = {
            "schema": SCHEMA,
            "plan": plan.digest,
            "world": world,
            "settings": {name: value for name, value in sorted(attrs.asdict(settings).items()) if name not in _FREE},
        }

    def latest(self) -> Found:
        """The last complete checkpoint.

        Raises:
            BackendError: there is none, it cannot be read, or it belongs to another plan or to other settings.
        """
        complete = self._complete()
        if not complete:
            raise BackendError(
                f"{self._folder} holds no complete checkpoint",
                facts=["a run writes them with --set megatron.checkpoint_every=N"],
                hint="leave out --resume to start from the beginning, in another folder",
            )
        step = max(complete)
        self._check(complete[step])
        return Found(step, complete[step])

    def last_step(self) -> int | None:
        """After how many steps the last complete checkpoint was written."""
        return max(self._complete(), default=None)

    def refuse_earlier(self) -> None:
        """Make sure that a run that starts from the beginning does not mix its checkpoints with another's.

        Raises:
            BackendError: there are some.
        """
        last = self.last_step()
        if last is not None:
            raise BackendError(
                f"{self._folder} holds checkpoints of an earlier run, the last after {last} steps",
                hint="go on from it with --resume, or choose another --output",
            )

    def begin(self, step: int) -> Path:
        """An empty folder for the ranks to write into.

        Raises:
            BackendError: it cannot be made.
        """
        folder = self._folder / f"partial-{step:08d}"
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        except OSError as error:
            raise BackendError(f"cannot make {folder}", facts=[error.strerror or str(error)]) from error
        return folder

    def complete(self, step: int) -> Path:
        """Every rank has written its part: give the checkpoint its name, and delete old ones.

        Raises:
            BackendError: the file system does not allow it.
        """
        partial = self._folder / f"partial-{step:08d}"
        final = self._folder / f"step-{step:08d}"
        try:
            with (partial / "meta.json").open("w", encoding="utf-8") as file:
                json.dump({**self._meta, "step": step}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            if final.exists():  # of a run that went on from an earlier one
                shutil.rmtree(final)
            partial.rename(final)
            for _, old in sorted(self._complete().items())[: -self._kept]:
                shutil.rmtree(old)
        except OSError as error:
            raise BackendError(f"cannot complete {final}", facts=[error.strerror or str(error)]) from error
        return final

    def _complete(self) -> dict[int, Path]:
        """Step -> folder."""
        folders = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        matches = ((_COMPLETE.fullmatch(folder.name), folder) for folder in folders)
        return {int(match[1]): folder for match, folder in matches if match and (folder / "meta.json").exists()}

    def _check(self, folder: Path) -> None:
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BackendError(f"{folder / 'meta.json'} cannot be read", facts=[str(error)]) from error
        if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
            raise BackendError(f"{folder / 'meta.json'} is no description of a checkpoint of this version")
        if meta.get("plan") != self._meta["plan"]:
            raise BackendError(
                f"{folder} belongs to another plan",
                facts=[f"it was written by {meta.get('plan')}", f"this plan is {self._meta['plan']}"],
                hint="resume with the plan.json of that run",
            )
        before = meta.get("settings", {})
        changed = [
            f"megatron.{name}: {before.get(name)!r} then, {value!r} now"
            for name, value in self._meta["settings"].items()
            if before.get(name) != value
        ]
        if changed:
            raise BackendError(
                f"{folder} was written with other settings", facts=changed, hint="resume with the same settings"
            )
