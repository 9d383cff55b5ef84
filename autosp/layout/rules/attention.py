"""Attention on a shard: ``scaled_dot_product_attention`` and ``autosp::block_attention``.

Queries cut over tokens that meet keys and values cut over tokens are shared by a strategy (``layout.attention``);
queries that meet whole keys and values (cross-attention over replicated memory) stay where they are and need no
communication at all. Masks are whole, made for the whole sequence; a mask that differs by head is cut to the heads of
the rank.
"""

from __future__ import annotations

from typing import Any

import torch

from ..attention.choose import attention_strategy
from ..attention.forms import BlockForm, SdpaForm
from ..attention.strategies import allgather_kv
from ..attention.written_out import written_out
from ..call import OpCall, Refusal, Strategy, Value
from ..placement import REPLICATE, Shard, known_equal
from ..registry import register_rule

aten = torch.ops.aten


@register_rule(aten.scaled_dot_product_attention.default, seeds=True)
def attention_rule(call: OpCall) -> Strategy:
    """Chosen by what is cut: heads or batch (local), tokens of q only, or tokens of q, k and v."""
    q, k, v = call["query"], call["key"], call["value"]
    if all(x.shard is None for x in (q, k, v)):
        if call["dropout_p"] > 0:
            raise Refusal(
                "dropout in attention over whole values would draw differently on each rank",
                "set its dropout to 0, or let its inputs run over the sequence",
                always=True,
            )
        return Strategy()
    _check_queries(q)
    if q.shard.dim < q.ndim - 2:
        return _local_attention(call, q)
    if k.shard is None and v.shard is None:
        return _cross_attention(call, q)
    check_tokens(q, k, v)
    return attention_strategy(SdpaForm(call, q, k, v))


def block_attention_rule(call: OpCall) -> Strategy:
    """As for ``scaled_dot_product_attention``; the tensors of the program stay whole, each block takes its part."""
    q, k, v = call["q"], call["k"], call["v"]
    if all(x.shard is None for x in (q, k, v)):
        return Strategy(output=[REPLICATE, REPLICATE])
    _check_queries(q)
    if q.shard.dim < q.ndim - 2:
        return _local_blocks(call, q)
    form = BlockForm(call, q, k, v, names=("q", "k", "v"))
    if k.shard is None and v.shard is None:
        return allgather_kv.build(form)
    check_tokens(q, k, v)
    return attention_strategy(form)


def register_block_rule() -> None:
    """Register the rule of the operator, once ``autosp.custom_ops.block_attention`` has defined it."""
    register_rule(torch.ops.autosp.block_attention.default, seeds=True)(block_attention_rule)


def _check_queries(q: Value) -> None:
    if q.shard is None or q.shard.dim == q.ndim - 1:
        raise Refusal("attention whose queries are whole and whose keys are sharded")


def check_tokens(q: Value, k: Value, v: Value) -> None:
    """Raise Refusal unless all three are cut over the tokens of ``[batch, heads, tokens, size]``."""
    tokens = q.ndim - 2
    if k.shard is None or v.shard is None or k.shard.dim != tokens or v.shard.dim != tokens:
        raise Refusal("attention whose keys and values are sharded differently")
    if not (q.shard.is_unfactored and k.shard.is_unfactored and v.shard.is_unfactored):
        raise Refusal("attention over tokens that were joined or repeated along the sequence")
    if not all(known_equal(x.shape[0], q.shape[0]) for x in (k, v)):
        raise Refusal("attention whose keys and values are stretched over the batch", "expand them before")
    if q.ndim != 4:
        raise Refusal(f"attention over {q.ndim} dimensions", "use [batch, heads, tokens, head size]")
    heads, key_heads = q.shape[1], k.shape[1]
    if not isinstance(heads, int) or not isinstance(key_heads, int) or heads % key_heads:
        raise Refusal(f"{heads} query heads over {key_heads} key/value heads")


def _mask_value(call: OpCall) -> Value | None:
    mask = call.get("attn_mask")
    return mask if isinstance(mask, Value) else None


def _same_cut(q: Value, others: list[Value]) -> Shard:
    cut = q.shard
    for x in others:
        if not known_equal(x.shape[cut.dim], q.shape[cut.dim]):
            raise Refusal("grouped key/value heads meet query heads that are already sharded")
    return cut


def _local_attention(call: OpCall, q: Value) -> Strategy:
    """Heads or batch are cut: every rank attends on its own."""
    cut = _same_cut(q, [call["key"], call["value"]])
    inputs = {"query": cut, "key": cut, "value": cut}
    mask = _mask_value(call)
    if mask is not None:
        dim = cut.dim - (q.ndim - mask.ndim)
        stretched = dim < 0 or known_equal(mask.shape[dim], 1)
        inputs["attn_mask"] = REPLICATE if stretched else cut.at(dim)
    if call["dropout_p"] > 0:
        return Strategy(inputs=inputs, output=cut, local=lambda c, local: written_out(c, local, local.get("attn_mask")))
    return Strategy(inputs=inputs, output=cut)


def _local_blocks(call: OpCall, q: Value) -> Strategy:
    cut = _same_cut(q, [call["k"], call["v"]])
    if not cut.is_plain or call.axis.has_padding(cut):
        raise Refusal("heads or batch rows that the group does not divide meet attention with a mask of its own")
    form = BlockForm(call, q, call["k"], call["v"], names=("q", "k", "v"))

    def attend(c: OpCall, local: dict[str, Any]) -> Any:
        origin: list[Any] = [0, 0, 0, 0]
        origin[cut.dim] = c.axis.rank * c.axis.block(cut.length)
        return form.result(*form.settings(c, local).run(local["q"], local["k"], local["v"], origin))

    return Strategy(inputs={"q": cut, "k": cut, "v": cut}, output=form.output, local=attend)


def _cross_attention(call: OpCall, q: Value) -> Strategy:
    """Whole keys and values: each query row stands alone."""
    cut = q.shard
    if call["is_causal"]:
        if q.ndim != 4 or not cut.is_unfactored:
            raise Refusal("causal attention of sharded queries over whole keys", "pass the mask as a tensor")
        return allgather_kv.build(SdpaForm(call, q, call["key"], call["value"]))
    inputs = {"query": cut}
    mask = _mask_value(call)
    if mask is not None and mask.ndim >= 2:
        stretched = known_equal(mask.shape[-2], 1) and not known_equal(q.shape[-2], 1)
        inputs["attn_mask"] = REPLICATE if stretched else cut.at(mask.ndim - 2)
    if call["dropout_p"] > 0:
        return Strategy(inputs=inputs, output=cut, local=lambda c, local: written_out(c, local, local.get("attn_mask")))
    return Strategy(inputs=inputs, output=cut, note="cross-attention over whole keys and values")
