"""Training one model on its place: Megatron's data-parallel wrapper, distributed optimizer and schedules.

The gradient is the plain *sum* over microbatches and replicas of losses that are normalised over the whole batch, so it
does not depend on the layout. Megatron divides by the replicas unless losses are "per token" and by their number of
tokens if they are; the per-token setting is used, and the division left out when the gradients are finalised.

The optimizer is ZeRO stage 1: each replica holds the fp32 weights and moments of its part of every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor

from rpeg_core.errors import ExecutionError
from rpeg_core.runtime.semantics import LossParts, ModelOutputs, OptimizerSettings
from rpeg_plugin_megatron.forward import Rows, outputs_of, run_schedule
from rpeg_plugin_megatron.model import HeadOutputs, ModelShard

__all__ = ["Trainer", "Update"]


@attrs.frozen(kw_only=True)
class Update:
    """One optimizer update.

    Attributes:
        loss: of the minibatch, summed over microbatches and replicas.
        gradient_norm: global L2 norm before clipping.
        learning_rate: that was used.
        metrics: of the loss function, summed like the loss.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    metrics: Mapping[str, float]


class Trainer:
    """The optimizer of one model on one place; all ranks of the place make it and call it together.

    Making it moves the weights into one contiguous buffer (views from `ModelShard.fragments` made before are stale).

    Args:
        shard: the model, filled.
        settings: of AdamW.
    """

    def __init__(self, shard: ModelShard, settings: OptimizerSettings) -> None:
        self.shard = shard
        self.settings = settings
        self.updates = 0
        with shard.device.megatron():
            self._ddp = _wrap(shard)
            self._optimizer = _optimizer(shard, self._ddp, settings)
        config = shard.module.config
        config.no_sync_func = self._ddp.no_sync
        config.finalize_model_grads_func = _finalize

    def update(
        self,
        batches: Sequence[Rows],
        loss: Callable[[int, ModelOutputs], LossParts],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Update:
        """One update on a minibatch.

        Args:
            batches: the microbatches of this replica.
            loss: ``loss(index, outputs)``, the part of microbatch ``index``; called on the last stage.
            temperature, entropy: of the model's outputs, as in `rpeg_plugin_megatron.forward.infer`.

        Returns:
            The same on all ranks of the place.

        Raises:
            ExecutionError: the gradient is not finite; the weights are unchanged.
        """
        shard = self.shard
        parts: dict[int, LossParts] = {}

        def part(index: int, short: Rows, output: HeadOutputs) -> tuple[Tensor, Tensor, None]:
            parts[index] = self.part(
                batches[index],
                short,
                output,
                lambda outputs: loss(index, outputs),
                temperature=temperature,
                entropy=entropy,
            )
            return parts[index].loss, torch.zeros((), dtype=torch.int, device=shard.device.torch), None

        self.begin()
        try:
            run_schedule(shard, self._ddp, batches, part, at_token=False, forward_only=False)
            return self.step(parts)
        finally:
            self.end()

    # The parts of an update, for a schedule of one's own

    @property
    def wrapped(self) -> DistributedDataParallel:
        """The module whose backward passes collect gradients."""
        return self._ddp

    def begin(self) -> None:
        """Before the first forward pass."""
        self.shard.module.train()
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def part(
        self,
        batch: Rows,
        short: Rows,
        output: HeadOutputs,
        loss: Callable[[ModelOutputs], LossParts],
        *,
        temperature: float,
        entropy: bool,
    ) -> LossParts:
        """The loss of a microbatch from the last stage's output; ``short`` is ``batch``, trimmed."""
        outputs = outputs_of(self.shard, short, output, batch.response_tokens, temperature=temperature, entropy=entropy)
        return loss(outputs)

    def finalize(self) -> None:
        """After the last backward pass: reduce the gradients over replicas, and between tied embeddings."""
        _finalize([self._ddp], pg_collection=self.shard.groups.collection)

    def step(self, parts: Mapping[int, LossParts]) -> Update:
        """The optimizer's part; ``parts`` by microbatch, on the last stage."""
        rate = self.settings.learning_rate_at(self.updates)
        norm = self._step(rate)
        self.updates += 1
        totals = self._totals([parts[index] for index in sorted(parts)])
        return Update(loss=totals.pop("loss"), gradient_norm=norm, learning_rate=rate, metrics=totals)

    def end(self) -> None:
        """After the update, also one that failed."""
        self.shard.module.eval()

    def weights_changed(self) -> None:
        """To be called after the weights were written from outside, on all ranks of the place."""
        with self.shard.device.megatron():
            self._optimizer.reload_model_params()

    def state(self) -> dict[str, Tensor]:
        """Everything of this rank that an exact continuation needs, its part of the weights included."""
        state = {"updates": torch.tensor(self.updates)}
        for index, parameter in enumerate(self._main_parameters()):
            state[f"{index}.main"] = parameter.detach().clone()
            for key, value in self._optimizer.optimizer.state.get(parameter, {}).items():
                state[f"{index}.{key}"] = value.detach().clone()
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave on the same rank of the same layout; collective over the place.

        Raises:
            ExecutionError: the state is of another model or layout.
        """
        parameters = self._main_parameters()
        shapes = [tuple(state[f"{i}.main"].shape) if f"{i}.main" in state else None for i in range(len(parameters))]
        if shapes != [tuple(parameter.shape) for parameter in parameters]:
            raise ExecutionError(
                f"the optimizer state is not that of {self.shard.spec.name} on {self.shard.groups.place}",
                hint="resume with the plan that wrote the checkpoint",
            )
        self.updates = int(state["updates"])
        with torch.no_grad(), self.shard.device.megatron():
            for index, parameter in enumerate(parameters):
                parameter.copy_(state[f"{index}.main"])
                prefix = f"{index}."
                values = {
                    key.removeprefix(prefix): value
                    for key, value in state.items()
                    if key.startswith(prefix) and key != f"{index}.main"
                }
                self._optimizer.optimizer.state[parameter] = {
                    key: value.clone() if key == "step" else value.to(parameter.device).clone()
                    for key, value in values.items()
                }
            self._optimizer._copy_main_params_to_model_params()
            self._ddp.start_param_sync(force_sync=True)

    def _main_parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.optimizer.param_groups for parameter in group["params"]]

    def _step(self, rate: float) -> float:
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = rate
        with self.shard.device.megatron():
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.clip_grad_norm(self.settings.clip_norm or float("inf")))
            if norm != norm or norm in (float("inf"), float("-inf")):
                raise ExecutionError(
                    f"the gradient of {self.shard.spec.name} has norm {norm} in update {self.updates}",
                    facts=["the weights were left as they are"],
                    hint="a lower learning rate, or look at the metrics of the steps before",
                )
            self._optimizer.step_with_ready_grads()
        return norm

    def _totals(self, parts: Sequence[LossParts]) -> dict[str, float]:
        """Loss and metrics summed over microbatches and replicas, on all ranks."""
        groups, layout = self.shard.groups, self.shard.groups.place.layout
        totals: dict[str, float] = {}
        if groups.last_stage:
            names = ["loss", *sorted(parts[0].metrics)]
            rows = [[p.loss.detach(), *(p.metrics[name] for name in names[1:])] for p in parts]
            sums = torch.stack([torch.stack([v.double().reshape(()) for v in row]) for row in rows]).sum(dim=0)
            if layout.data > 1:
                dist.all_reduce(sums, group=groups.dp)
            totals = dict(zip(names, sums.tolist(), strict=True))
        if layout.pipeline > 1:
            box = [totals]
            source = dist.get_global_rank(groups.pp, layout.pipeline - 1)
            dist.broadcast_object_list(box, src=source, group=groups.pp)
            totals = box[0]
        return totals


def _wrap(shard: ModelShard) -> DistributedDataParallel:
    return DistributedDataParallel(
        config=shard.module.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
        ),
        module=shard.module,
        pg_collection=shard.groups.collection,
    )


def _optimizer(shard: ModelShard, ddp: DistributedDataParallel, settings: OptimizerSettings) -> DistributedOptimizer:
    """Megatron's distributed optimizer around torch's AdamW.

    Made directly: Megatron's factory compares the parameter groups of all ranks of the world, but here the ranks of
    other places do not take part.
    """
    decayed = [p for p in ddp.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in ddp.parameters() if p.requires_grad and p.dim() <= 1]
    kinds = {"is_expert_parallel": False, "lr_mult": 1.0, "is_decoupled_lr": False, "default_config": True}
    adam = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay, "wd_mult": 1.0, **kinds},
            {"params": others, "weight_decay": 0.0, "wd_mult": 0.0, **kinds},
        ],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    groups = shard.groups
    optimizer = DistributedOptimizer(
        adam,
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            clip_grad=settings.clip_norm,
            bf16=shard.dtype is torch.bfloat16,
            params_dtype=shard.dtype,
            use_distributed_optimizer=True,
        ),
        None,
        lambda *_: None,
        model_chunks=[ddp],
        per_model_buffers={0: ddp.buffers},
        data_parallel_group=groups.dp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=dist.get_rank(groups.mp),
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = groups.all
    optimizer.tp_group = groups.tp
    return optimizer


def _finalize(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron's last part of the backward pass, without its division by the number of tokens."""
    finalize_model_grads(model, None, **groups)
