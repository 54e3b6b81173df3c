"""Megatron-Core 0.16 on a CPU: what it takes to run code that says "cuda" where it means "the device".

Megatron creates small tensors with ``device="cuda"``, asks ``torch.cuda.current_device()`` where to put its buffers,
synchronizes the CUDA device, and compares ``Tensor.type()`` with ``"torch.cuda.FloatTensor"``. While
:func:`as_if_cuda` is open on a CPU, these four mean the CPU. On a GPU nothing here is ever active: callers use
:func:`rpeg_plugin_megatron.device.Device.megatron`, which opens it for CPU devices only.

It is opened around Megatron's own entry points (building a model, wrapping it, the schedules, the optimizer's step)
and not around generation, because every torch function passes through an open mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["as_if_cuda"]

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Maps a ``device`` argument that names a CUDA device to the CPU, and answers `Tensor.type` as CUDA would."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            device = kwargs.get("device")
            if device is not None and _names_cuda(device):
                return func(*args, **{**kwargs, "device": _CPU})
            return func(*args, **kwargs)
        return func(*args)


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


@contextlib.contextmanager
def as_if_cuda() -> Iterator[None]:
    """Let Megatron's "cuda" mean the CPU until the context is left."""
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        with _CudaMeansCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize
