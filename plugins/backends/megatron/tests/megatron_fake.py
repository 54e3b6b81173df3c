"""A worker without torch, to drive launcher, controller and session through every kind of ending.

Its "weights" are one number per model, which each training moves; losses follow from it. What it is to do besides comes
from the environment variable ``FAKE``, a JSON object:

``seconds``  operator -> seconds that each of its nodes takes
``at``       ``{"rank", "operator", "step", "do"}``: what happens at a node: ``raise``, ``refuse`` (an RpegError),
             ``exit``, ``hang`` (in Python), ``freeze`` (the whole process), ``linger`` (a second, then go on); the
             operator may be ``setup``, ``transfer`` or ``checkpoint`` too
``folder``   where each rank writes ``pid-RANK``, and ``at-RANK`` when it begins the node of ``at``
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from rpeg_plugin_megatron.messages import Done, Execute
from rpeg_plugin_megatron.settings import Settings

from rpeg_core.errors import DataError
from rpeg_core.ir import Role
from rpeg_core.passes.lower import NodeKind
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.protocol import Artifact

FAKE = "megatron_fake:FakeWorker"

__all__ = ["FAKE", "FakeWorker", "is_running", "listening_ports", "pids"]


class FakeWorker:
    """Like ``rpeg_plugin_megatron.worker.Worker``."""

    uses_torch = False

    def __init__(self, rank: int, world: int, plan: Plan, settings: Settings) -> None:
        self.rank, self.world, self.plan, self.settings = rank, world, plan, settings
        self.orders = json.loads(os.environ.get("FAKE", "{}"))
        self.weights = {model.name: 1.0 for model in plan.rpeg.models if model.trainable}
        self.versions = dict.fromkeys(self.weights, 0)
        self.held: set[tuple[int, str]] = set()
        if "folder" in self.orders:
            note = Path(self.orders["folder"]) / f"pid-{rank}"
            note.with_name(f"new-{rank}").write_text(str(os.getpid()))
            note.with_name(f"new-{rank}").rename(note)

    def setup(self, store: object) -> str:
        print(f"threads {os.environ['OMP_NUM_THREADS']}, key {'RPEG_AUTHKEY' in os.environ}")
        self.obey("setup", 0)
        return "fake"

    def execute(self, message: Execute) -> Done:
        node = message.node
        begin = time.monotonic()
        self.obey(node.operator if node.kind is NodeKind.OP else "transfer", node.step)
        if node.kind is NodeKind.OP:
            time.sleep(self.orders.get("seconds", {}).get(node.operator, 0.0))
        metrics = {}
        operator = self.plan.rpeg.operator(node.operator)
        if node.kind is NodeKind.OP and operator.role is Role.TRAINING:
            assert self.versions[node.model] == node.version
            self.weights[node.model] *= 1.0 - 0.1 / (1 + node.step)
            self.versions[node.model] += 1
            metrics = {"loss": self.weights[node.model], "rank_max": float(self.rank)}
        for container in operator.outputs if node.kind is NodeKind.OP else (node.container,):
            self.held.add((node.index, container))
        received = 0
        if node.kind is not NodeKind.OP and self.rank == node.allocation.start:
            whole = next(c.bytes for c in self.plan.rpeg.containers if c.name == node.container)
            received = whole if node.model is not None else int(node.payload_bytes)
        return Done(
            rank=self.rank,
            node=node.index,
            seconds=time.monotonic() - begin,
            bytes=received,
            wire_bytes=2 * received,
            metrics=metrics,
        )

    def drop(self, artifacts: tuple[Artifact, ...]) -> None:
        self.held -= {(a.node, a.container) for a in artifacts}

    def checkpoint(self, folder: str, step: int) -> None:
        self.obey("checkpoint", step)
        state = {"weights": self.weights, "versions": self.versions, "held": sorted(self.held)}
        (Path(folder) / f"rank-{self.rank}.json").write_text(json.dumps(state))

    def restore(self, folder: str) -> None:
        state = json.loads((Path(folder) / f"rank-{self.rank}.json").read_text())
        self.weights, self.versions = state["weights"], state["versions"]
        self.held = {(node, container) for node, container in state["held"]}

    def export(self, folder: str, model: str) -> None:
        if self.rank == 0:
            (Path(folder) / "weights.json").write_text(json.dumps(self.weights[model]))

    def close(self) -> None:
        print(f"holds {len(self.held)} artifacts")

    def obey(self, operator: str, step: int) -> None:
        at = self.orders.get("at", {})
        if (at.get("rank"), at.get("operator"), at.get("step", 0)) != (self.rank, operator, step):
            return
        print(f"about to {at['do']}", flush=True)
        if "folder" in self.orders:
            (Path(self.orders["folder"]) / f"at-{self.rank}").touch()
        match at["do"]:
            case "raise":
                raise ValueError("a made-up error")
            case "refuse":
                raise DataError("line 3 of prompts.jsonl has no prompt", hint="add one")
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(600)
            case "linger":
                time.sleep(1.0)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)


def pids(folder: Path) -> list[int]:
    """The processes of the fake workers that got so far as to say it."""
    return [int(path.read_text()) for path in sorted(folder.glob("pid-*"))]


def is_running(pid: int) -> bool:
    """Whether there is a process of that id that was not reaped; a zombie of somebody else does not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def listening_ports() -> set[int]:
    """TCP ports on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found
