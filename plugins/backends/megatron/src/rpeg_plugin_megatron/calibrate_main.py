"""One rank of ``rpeg calibrate``: ``python -m rpeg_plugin_megatron.calibrate_main``, started by :mod:`calibrate`.

All ranks measure the same at the same time, since workers too run side by side. Rank 0 writes one JSON object per line
to standard output: the share that is done, and what was measured. Times are the shortest of some repetitions: what
disturbs a measurement only makes it longer. On a CPU they are processor time where no other rank takes part, which
other processes do not stretch by taking the core away, and wall-clock time of the slowest rank where one does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rpeg_core.ir import Role
from rpeg_core.planning.assignment import Layout
from rpeg_core.runtime.semantics import LossParts, ModelOutputs, OptimizerSettings
from rpeg_core.spec.machine import Allocation
from rpeg_plugin_megatron.calibrate_points import Point, points
from rpeg_plugin_megatron.device import Device, choose_device
from rpeg_plugin_megatron.forward import Rows, by_length, infer
from rpeg_plugin_megatron.generate import Decoding
from rpeg_plugin_megatron.groups import PlaceGroups, build_groups
from rpeg_plugin_megatron.initial import fill, random_reader
from rpeg_plugin_megatron.model import ModelShard, build_shard
from rpeg_plugin_megatron.places import Place
from rpeg_plugin_megatron.settings import Sampling
from rpeg_plugin_megatron.train import Trainer

__all__ = ["main"]

BATCHES = 5
BATCH_S = 0.01
REPEATS = 4
PAD = 0
LONG_S = 1.0
"""Operators that take longer are repeated once only."""


class Measuring:
    """What the measurements of one rank share."""

    def __init__(self, rank: int, ranks: int, device: Device, *, total: int) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self._done, self._total = 0, total

    def tell(self, **found: Any) -> None:
        """A line for the parent, of rank 0."""
        if self.rank == 0:
            print(json.dumps(found), flush=True)

    def next(self, what: str) -> None:
        """One more measurement begins."""
        self.tell(share=self._done / self._total, what=what)
        self._done += 1

    def mean(self, value: float) -> float:
        """Over all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device.torch)
        dist.all_reduce(tensor)
        return float(tensor) / self.ranks

    def slowest(self, value: float) -> float:
        """Over all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device.torch)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def clock(self, *, alone: bool) -> float:
        """Seconds of this process, or of the wall where others take part."""
        self.device.synchronize()
        return time.process_time() if alone and self.device.is_cpu else time.perf_counter()

    def kernel_s(self, work: Callable[[], object]) -> float:
        """Of one call that no other rank takes part in; the mean over the ranks."""
        work()
        start = self.clock(alone=True)
        work()
        repeats = max(1, min(1000, math.ceil(BATCH_S / max(self.clock(alone=True) - start, 1e-6))))
        best = math.inf
        for _ in range(BATCHES):
            start = self.clock(alone=True)
            for _ in range(repeats):
                work()
            best = min(best, (self.clock(alone=True) - start) / repeats)
        return self.mean(best)

    def together_s(self, work: Callable[[], object], *, alone: bool = False) -> float:
        """Of one call on all ranks, the slowest of them."""
        work()
        best, count = math.inf, 0
        while count < REPEATS:
            dist.barrier()
            start = self.clock(alone=alone)
            work()
            seconds = self.slowest(self.clock(alone=alone) - start)
            best = min(best, seconds)
            count += REPEATS // 2 if seconds > LONG_S else 1
        return best


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = choose_device(options.device, local_rank=options.rank)
    device.make_deterministic()
    dist.init_process_group(
        device.backend, init_method=f"file://{options.store}", rank=options.rank, world_size=options.ranks
    )
    wanted = points(cpu=device.is_cpu, ranks=options.ranks, quick=options.quick)
    messages = len(wanted.message_bytes) if options.ranks > 1 else 0
    total = len(wanted.gemms) + 1 + messages + len(wanted.operators)
    measuring = Measuring(options.rank, options.ranks, device, total=total)
    gpu = None if device.is_cpu else torch.cuda.get_device_properties(device.torch)
    measuring.tell(
        device="cpu" if gpu is None else gpu.name,
        memory_bytes=0 if gpu is None else gpu.total_memory,
        bytes_per_element=device.bytes_per_element,
        torch=torch.__version__,
    )
    for shape in wanted.gemms:
        measuring.next("matrix products {} x {} x {}".format(*shape))
        measuring.tell(gemm=shape, seconds=_gemm(measuring, *shape))
    measuring.next("a large copy")
    measuring.tell(copy=_copy(measuring, wanted.copy_bytes))
    if options.ranks > 1:
        for size in wanted.message_bytes:
            measuring.next(f"messages of {size} bytes")
            measuring.tell(all_reduce=size, seconds=_all_reduce(measuring, size))
            measuring.tell(p2p=size, seconds=_message(measuring, size))
    groups = _groups(wanted.operators, options.rank, options.ranks)
    for index, point in enumerate(wanted.operators):
        measuring.next(point.name)
        measuring.tell(operator=index, seconds=_operator(measuring, point, groups[point.layout]))
    measuring.tell(share=1.0, what="")
    dist.barrier()
    dist.destroy_process_group()


def _gemm(measuring: Measuring, rows: int, columns: int, inner: int) -> float:
    device = measuring.device
    x = torch.randn(rows, inner, device=device.torch).to(device.dtype)
    weight = torch.randn(columns, inner, device=device.torch).to(device.dtype)
    with torch.no_grad():
        return measuring.kernel_s(lambda: torch.nn.functional.linear(x, weight))


def _copy(measuring: Measuring, size: int) -> float:
    """Bytes read and written per second."""
    source = torch.ones(size // 4, device=measuring.device.torch)
    target = torch.zeros_like(source)
    return 2.0 * size / measuring.kernel_s(lambda: target.copy_(source))


def _repeated_s(measuring: Measuring, work: Callable[[], object], size: int) -> float:
    count = 50 if size < 2**18 else 5

    def all_of_them() -> None:
        for _ in range(count):
            work()

    return measuring.together_s(all_of_them) / count


def _all_reduce(measuring: Measuring, size: int) -> float:
    tensor = torch.ones(size // 4, device=measuring.device.torch)
    return _repeated_s(measuring, lambda: dist.all_reduce(tensor), size)


def _message(measuring: Measuring, size: int) -> float:
    """One way: half of there and back."""
    tensor = torch.ones(size // 4, device=measuring.device.torch)

    def there_and_back() -> None:
        if measuring.rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif measuring.rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    return _repeated_s(measuring, there_and_back, size) / 2.0


def _groups(operators: tuple[Point, ...], rank: int, ranks: int) -> dict[Layout, PlaceGroups]:
    """The groups of this rank in every layout; a layout of one rank is there once on each."""
    layouts = list(dict.fromkeys(point.layout for point in operators))
    places = [
        Place(Allocation(start, start + layout.gpus), layout)
        for layout in layouts
        for start in range(0, ranks - layout.gpus + 1, layout.gpus)
    ]
    built = build_groups(places)
    return {place.layout: groups for place, groups in built.items() if rank in place.ranks}


def _operator(measuring: Measuring, point: Point, groups: PlaceGroups) -> float:
    shard = build_shard(point.model, groups, device=measuring.device)
    fill(shard, random_reader(0))
    alone = point.layout.gpus == point.layout.data and (point.role is not Role.TRAINING or point.layout.data == 1)
    return measuring.together_s(_work(measuring, point, shard), alone=alone)


def _work(measuring: Measuring, point: Point, shard: ModelShard) -> Callable[[], object]:
    """One execution of the operator on this rank's replica."""
    device, workload = measuring.device.torch, point.workload
    count = workload.sequences // point.layout.data
    generator = torch.Generator().manual_seed(0)
    length = workload.sequence_tokens
    tokens = torch.randint(1, point.model.vocab, (count, length), generator=generator).to(device)
    tokens[::2, 0] = PAD  # prompts differ in length, so that attention needs a mask, as in a run
    if point.role is Role.GENERATION:
        return lambda: _decode(point, shard, tokens[:, : workload.prompt_tokens])
    rows = Rows(tokens, tokens != PAD, workload.prompt_tokens)
    if point.role is Role.INFERENCE:
        return lambda: infer(shard, rows, microbatches=point.microbatches)
    trainer = Trainer(shard, OptimizerSettings(learning_rate=1e-6))
    batches = [rows[part] for part in by_length(rows, point.microbatches, pipeline=point.layout.pipeline)]

    def loss(index: int, outputs: ModelOutputs) -> LossParts:
        assert outputs.logprobs is not None
        mask = batches[index].response_mask
        ratio = torch.exp(outputs.logprobs - outputs.logprobs.detach())
        return LossParts(loss=-(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * mask).sum() / mask.sum(), metrics={})

    return lambda: trainer.update(batches, loss)


def _decode(point: Point, shard: ModelShard, prompts: torch.Tensor) -> None:
    decoding = Decoding(
        shard,
        prompts,
        rollouts=1,
        first_row=0,
        seed=0,
        step=0,
        sampling=Sampling(),
        response_tokens=point.workload.response_tokens,
        pad_id=PAD,
        end_ids=(),
        microbatches=point.microbatches,
    )
    decoding.advance(point.workload.response_tokens)
    decoding.result()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
