"""``scaled_dot_product_attention`` with dropout, and masks by head, on a rank's heads."""

from __future__ import annotations

import torch

from ..call import OpCall
from ..counter_random import draw_seed, drop


def head_mask(mask: torch.Tensor | None, block: tuple[int, int], heads: int) -> torch.Tensor | None:
    """The part of a whole mask that the heads ``[lo, hi)`` see: cut when it differs by head, as it is otherwise."""
    if mask is None or mask.dim() < 3 or mask.shape[-3] == 1 or heads == 1:
        return mask
    return mask.narrow(-3, block[0], block[1] - block[0])


def written_out(call: OpCall, local: dict, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention with dropout on its probabilities, written out so that each rank draws a mask of its own.

    The fused kernels draw from one generator for all ranks of a group, which would drop the same positions in the
    heads of every rank. The probabilities of the local heads exist as a tensor here. As in the operator, scores and
    probabilities of half precision are single, whatever autocast would make of them.
    """
    kind = call.out.dtype
    q, k, v = (local[name].to(kind) for name in ("query", "key", "value"))
    if k.shape[-3] != q.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, dim=-3), v.repeat_interleave(repeats, dim=-3)
    seed = draw_seed(q.device, None)
    with torch.autocast(q.device.type, enabled=False):
        probabilities = torch.ops.aten._safe_softmax.default(_scores(call, q, k, mask), -1)
        probabilities = drop(probabilities, call["dropout_p"], seed, call.axis.rank)
        return torch.matmul(probabilities.to(kind), v)


def _scores(call: OpCall, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """In single precision at least. Rows that see nothing are -inf, which the operator's softmax makes zeros."""
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    scale = call["scale"] if call["scale"] is not None else q.shape[-1] ** -0.5
    scores = torch.matmul(q.to(wide) * scale, k.to(wide).transpose(-2, -1))
    if call["is_causal"]:
        rows = torch.arange(scores.shape[-2], device=q.device).unsqueeze(-1)
        hidden = torch.arange(scores.shape[-1], device=q.device) > rows
        return scores.masked_fill(hidden, float("-inf"))
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
