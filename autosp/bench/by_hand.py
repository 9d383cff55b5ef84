"""Ulysses as an expert writes it by hand: an attention function of one's own, a sharded batch, summed gradients.

What ``autosp`` is measured against. The exchange is one all-to-all for q, k and v, the whole model is compiled, and the
gradients are summed over the group after the backward in flight together, since a training step needs them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F

NAME = "ulysses_by_hand"


def _exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
    return funcol.all_to_all_single_autograd(x, None, None, group)


def attention(module: Any, query, key, value, attention_mask=None, scaling=None, **_: Any):
    """Causal attention on ``[batch, heads, local length, size]``; head counts that the group divides, batch 1."""
    group = dist.group.WORLD
    ranks = dist.get_world_size(group)
    batch, _, rows, size = query.shape
    counts = [t.shape[1] // ranks for t in (query, key, value)]
    parts = [t.permute(2, 1, 0, 3).reshape(rows, ranks, -1, batch, size).transpose(0, 1) for t in (query, key, value)]
    whole = _exchange(torch.cat(parts, dim=2).flatten(0, 1), group)
    q, k, v = whole.permute(2, 1, 0, 3).split(counts, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=counts[0] != counts[1])
    out = _exchange(out.permute(2, 1, 0, 3).contiguous(), group)
    out = out.reshape(ranks, rows, counts[0], batch, size).permute(3, 1, 0, 2, 4)
    return out.reshape(batch, rows, ranks * counts[0], size), None


class ByHand:
    """``step(ids)`` runs forward and backward of a causal LM on this rank's shard; the loss is that of the whole.

    Args:
        model: the plain model; its attention function is replaced.
        compiled: what ``torch.compile`` made of it.
    """

    def __init__(self, model: torch.nn.Module, compiled: Any) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, attention)
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        self.model = model
        self.compiled = compiled

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of ``ids``, [1, length], whose length the group divides; gradients are summed over the group."""
        return sharded_step(self.model, self.compiled, ids)


def sharded_step(model: torch.nn.Module, compiled: Any, ids: torch.Tensor) -> torch.Tensor:
    """Forward and backward on this rank's tokens with whole positions, labels shifted beforehand, sums by hand."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    length = ids.shape[1] // ranks
    mine = slice(rank * length, (rank + 1) * length)
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:]
    loss = compiled(
        input_ids=ids[:, mine].contiguous(),
        position_ids=torch.arange(ids.shape[1], device=ids.device)[None, mine],
        labels=ids[:, mine],
        shift_labels=targets[:, mine].contiguous(),
        num_items_in_batch=ids.shape[1] - 1,
    ).loss
    loss.backward()
    sums = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters() if p.grad is not None]
    total = loss.detach().clone()
    dist.all_reduce(total)
    for work in sums:
        work.wait()
    return total
