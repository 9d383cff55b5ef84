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
    heads of every rank. The probabilities of the local heads exist as a tensor here.
    """
    q, k, v = local["query"], local["key"], local["value"]
    scale = call["scale"] if call["scale"] is not None else q.shape[-1] ** -0.5
    if k.shape[-3] != q.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, dim=-3), v.repeat_interleave(repeats, dim=-3)
    scores = torch.matmul(q * scale, k.transpose(-2, -1))
    if call["is_causal"]:
        rows = torch.arange(scores.shape[-2], device=q.device).unsqueeze(-1)
        hidden = torch.arange(scores.shape[-1], device=q.device) > rows
        scores = scores.masked_fill(hidden, float("-inf"))
    elif mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    # As the operator has it: a row that sees nothing is zeros, and no NaN in its gradients.
    probabilities = torch.ops.aten._safe_softmax.default(scores, -1)
    probabilities = drop(probabilities, call["dropout_p"], draw_seed(q.device, None), call.axis.rank)
    return torch.matmul(probabilities.to(v.dtype), v)
