"""What a worker computes on: a CPU core with gloo in fp32, or a GPU with NCCL in bf16."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager

import attrs
import torch

from rpeg_core.errors import BackendError
from rpeg_plugin_megatron.cpu import as_if_cuda

__all__ = ["Device", "choose_device"]


@attrs.frozen
class Device:
    """The device of this process.

    Attributes:
        torch: where tensors live.
        backend: of ``torch.distributed``; on GPUs gloo beside NCCL for tensors that stay on the CPU.
        dtype: of weights and activations. Gradients, optimizer state, log-probabilities and losses are fp32.
    """

    torch: torch.device
    backend: str
    dtype: torch.dtype

    @property
    def bytes_per_element(self) -> int:
        """Width of a weight."""
        return self.dtype.itemsize

    @property
    def is_cpu(self) -> bool:
        return self.torch.type == "cpu"

    def megatron(self) -> AbstractContextManager[None]:
        """To be open around calls into Megatron-Core (see :mod:`rpeg_plugin_megatron.cpu`)."""
        return as_if_cuda() if self.is_cpu else contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait until everything that was launched has finished."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.torch)

    def make_deterministic(self) -> None:
        """Ask torch for deterministic kernels; call it before the first one runs.

        Where CUDA has none, torch warns instead of failing.
        """
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=not self.is_cpu)
        torch.utils.deterministic.fill_uninitialized_memory = False  # every new tensor is written before it is read


def choose_device(kind: str, precision: str = "auto", *, local_rank: int = 0) -> Device:
    """The device that settings ask for; makes a GPU the current one.

    Args:
        kind: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
        precision: ``auto`` (fp32 on a CPU, bf16 on a GPU), ``fp32`` or ``bf16``.
        local_rank: which GPU of this machine.

    Raises:
        BackendError: there is no such GPU, or a value is not one of these.
    """
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if kind not in ("auto", "cpu", "cuda"):
        raise BackendError(f"device is {kind!r}", facts=["allowed: auto, cpu, cuda"])
    if precision != "auto" and precision not in dtypes:
        raise BackendError(f"precision is {precision!r}", facts=["allowed: auto, bf16, fp32"])
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return Device(torch.device("cpu"), "gloo", dtypes.get(precision, torch.float32))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= found:
        raise BackendError(
            f"this worker needs GPU {local_rank}, torch finds {found}", hint="set megatron.device to cpu"
        )
    torch.cuda.set_device(local_rank)
    return Device(torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl", dtypes.get(precision, torch.bfloat16))
