"""Log-probabilities and entropies from logits whose vocabulary is divided over a tensor-parallel group.

Megatron has a cross entropy of this kind, but it takes its group from the one global set of groups, knows no
temperature and no entropy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["token_logprobs"]


def token_logprobs(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under ``softmax(logits / temperature)``, and that distribution's entropy in nats.

    Args:
        logits: ``[..., vocab / tp]``, this rank's slice of the vocabulary, in any floating type; computed in fp32.
        targets: token ids ``[...]``, the same on all ranks of the group.
        group: tensor-parallel group, slices in rank order.
        temperature: positive.
        entropy: whether the entropy is wanted.

    Returns:
        fp32 ``[...]`` each, equal on all ranks of the group; gradients flow back to this rank's logits.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits, targets, group, temperature, entropy)
    return logprobs, entropies if entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.float() / temperature
        first = dist.get_rank(group) * scaled.shape[-1]
        largest = scaled.amax(dim=-1)
        _all_reduce(largest, group, dist.ReduceOp.MAX)
        scaled = scaled - largest.unsqueeze(-1)
        index = targets.long() - first
        ours = (index >= 0) & (index < scaled.shape[-1])
        index = index.clamp(0, scaled.shape[-1] - 1).unsqueeze(-1)
        picked = torch.where(ours, scaled.gather(-1, index).squeeze(-1), 0.0)
        sums = torch.stack([picked, scaled.exp().sum(dim=-1)])
        _all_reduce(sums, group, dist.ReduceOp.SUM)
        log_total = sums[1].log()
        log_softmax = scaled - log_total.unsqueeze(-1)
        entropies = torch.zeros_like(largest)
        if entropy:
            entropies = -(log_softmax.exp() * log_softmax).sum(dim=-1)
            _all_reduce(entropies, group, dist.ReduceOp.SUM)
        ctx.save_for_backward(log_softmax, index, ours, entropies)
        ctx.temperature, ctx.entropy, ctx.dtype = temperature, entropy, logits.dtype
        return sums[0] - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d logp(target) / d logit_j = 1[j = target] - p_j, and d H / d logit_j = -p_j (log p_j + H)."""
        log_softmax, index, ours, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = gradients
        factor = -of_logprobs.unsqueeze(-1)
        if ctx.entropy:
            factor = factor - of_entropies.unsqueeze(-1) * (log_softmax + entropies.unsqueeze(-1))
        result = log_softmax.exp() * factor
        result.scatter_add_(-1, index, torch.where(ours, of_logprobs, 0.0).unsqueeze(-1))
        return (result / ctx.temperature).to(ctx.dtype), None, None, None, None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, operation: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=group)
