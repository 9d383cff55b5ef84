"""``scaled_dot_product_attention`` on a shard.

Queries cut over tokens that meet keys and values cut over tokens run as Ulysses; queries that meet whole keys and
values (cross-attention over replicated memory) stay where they are and need no communication at all. Masks are whole,
made for the whole sequence; a mask that differs by head is cut to the heads of the rank.
"""

from __future__ import annotations

import torch

from ..call import OpCall, Refusal, Strategy, Value
from ..placement import REPLICATE, Shard, known_equal
from ..registry import register_rule
from ..ulysses import HeadBlocks, empty_attention, exchange_all, gather_heads, local_keys
from .random import draw_seed, drop

aten = torch.ops.aten


@register_rule(aten.scaled_dot_product_attention.default, seeds=True)
def attention_rule(call: OpCall) -> Strategy:
    """Chosen by what is cut: heads or batch (local), tokens of q only, or tokens of q, k and v."""
    q, k, v = call["query"], call["key"], call["value"]
    cuts = [x.shard for x in (q, k, v)]
    if all(cut is None for cut in cuts):
        if call["dropout_p"] > 0:
            raise Refusal(
                "dropout in attention over whole values would draw differently on each rank",
                "set its dropout to 0, or let its inputs run over the sequence",
                always=True,
            )
        return Strategy()
    tokens = q.ndim - 2
    if q.shard is None or q.shard.dim == q.ndim - 1:
        raise Refusal("attention whose queries are whole and whose keys are sharded")
    if q.shard.dim < tokens:
        return _local_attention(call, q)
    if k.shard is None and v.shard is None:
        return _cross_attention(call, q)
    if k.shard is None or v.shard is None or k.shard.dim != tokens or v.shard.dim != tokens:
        raise Refusal("attention whose keys and values are sharded differently")
    if not (q.shard.is_unfactored and k.shard.is_unfactored and v.shard.is_unfactored):
        raise Refusal("attention over tokens that were joined or repeated along the sequence")
    if not all(known_equal(x.shape[0], q.shape[0]) for x in (k, v)):
        raise Refusal("attention whose keys and values are stretched over the batch", "expand them before")
    if q.ndim != 4:
        raise Refusal(f"attention over {q.ndim} dimensions", "use [batch, heads, tokens, head size]")
    return _ulysses_attention(call, q, k)


def _mask_value(call: OpCall) -> Value | None:
    mask = call.get("attn_mask")
    return mask if isinstance(mask, Value) else None


def _local_attention(call: OpCall, q: Value) -> Strategy:
    """Heads or batch are cut: every rank attends on its own."""
    cut = q.shard
    inputs = {"query": cut, "key": cut, "value": cut}
    for name in ("key", "value"):
        if not known_equal(call[name].shape[cut.dim], q.shape[cut.dim]):
            raise Refusal("grouped key/value heads meet query heads that are already sharded")
    mask = _mask_value(call)
    if mask is not None:
        dim = cut.dim - (q.ndim - mask.ndim)
        stretched = dim < 0 or known_equal(mask.shape[dim], 1)
        inputs["attn_mask"] = REPLICATE if stretched else cut.at(dim)
    if call["dropout_p"] > 0:
        return Strategy(inputs=inputs, output=cut, local=lambda c, local: written_out(c, local, local.get("attn_mask")))
    return Strategy(inputs=inputs, output=cut)


def _cross_attention(call: OpCall, q: Value) -> Strategy:
    """Whole keys and values: each query row stands alone."""
    cut = q.shard
    if call["is_causal"]:
        raise Refusal("causal attention of sharded queries over whole keys", "pass the mask as a tensor")
    inputs = {"query": cut}
    mask = _mask_value(call)
    if mask is not None and mask.ndim >= 2:
        stretched = known_equal(mask.shape[-2], 1) and not known_equal(q.shape[-2], 1)
        inputs["attn_mask"] = REPLICATE if stretched else cut.at(mask.ndim - 2)
    if call["dropout_p"] > 0:
        return Strategy(inputs=inputs, output=cut, local=lambda c, local: written_out(c, local, local.get("attn_mask")))
    return Strategy(inputs=inputs, output=cut, note="cross-attention over whole keys and values")


def _ulysses_attention(call: OpCall, q: Value, k: Value) -> Strategy:
    q_cut: Shard = q.shard
    k_cut: Shard = k.shard
    heads, key_heads = q.shape[1], k.shape[1]
    if not isinstance(heads, int) or not isinstance(key_heads, int) or heads % key_heads:
        raise Refusal(f"{heads} query heads over {key_heads} key/value heads")
    blocks = HeadBlocks.of(call.axis.size, heads, key_heads)

    def attend(c: OpCall, local: dict):
        axis = c.axis
        new_q, new_k, new_v = exchange_all(axis, local["query"], local["key"], local["value"], blocks, q_cut, k_cut)
        if new_q.shape[1] == 0:
            return gather_heads(axis, empty_attention(new_q, new_k, new_v), blocks.query, q_cut)
        new_k, grouped = local_keys(new_k, blocks, axis.rank)
        new_v, _ = local_keys(new_v, blocks, axis.rank)
        mask = head_mask(local.get("attn_mask"), blocks.query[axis.rank], heads)
        changed = {"query": new_q, "key": new_k, "value": new_v, "attn_mask": mask, "enable_gqa": grouped}
        dropped = c["dropout_p"] > 0
        out = written_out(c, {**local, **changed}, mask) if dropped else c.run(local, **changed)
        return gather_heads(axis, out, blocks.query, q_cut)

    inputs = {"query": q_cut, "key": k_cut, "value": k_cut.at(q.ndim - 2)}
    return Strategy(inputs=inputs, output=q_cut, local=attend, note=f"ulysses: {heads}/{key_heads} heads")


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
    probabilities = torch.softmax(scores, dim=-1)
    probabilities = drop(probabilities, call["dropout_p"], draw_seed(q.device, None), call.axis.rank)
    return torch.matmul(probabilities.to(v.dtype), v)
