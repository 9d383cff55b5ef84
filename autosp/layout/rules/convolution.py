"""Convolutions along the sequence: each rank takes the rows that it needs from its neighbours (a halo exchange)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ..axis import Axis
from ..call import OpCall, Refusal, Strategy, Value
from ..placement import IntLike, known_equal
from ..registry import register_rule
from .reduction import mask_padding

aten = torch.ops.aten


def _one(value: Any) -> int:
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def reach(weight: torch.Tensor, dilation: Any) -> int:
    """How many positions beyond its first a kernel covers."""
    return int(weight.shape[-1] - 1) * _one(dilation)


@register_rule(aten.conv1d.default)
def conv1d_rule(call: OpCall) -> Strategy:
    """``[batch, channels, tokens]``: local when cut over the batch; over tokens it keeps their number or refuses."""
    value: Value = call["input"]
    if not known_equal(_one(call["stride"]), 1):
        return _elsewhere(call, value, "a strided convolution changes the length of the sequence")
    padding = _one(call["padding"])
    if 2 * padding != reach(call["weight"].val, call["dilation"]):
        return _elsewhere(call, value, "a convolution changes the length of the sequence")
    return _along_tokens(call, value, padding, padding)


@register_rule(aten.conv1d.padding)
def conv1d_same_rule(call: OpCall) -> Strategy:
    """``padding="same"`` keeps the number of tokens, ``"valid"`` does not."""
    value: Value = call["input"]
    total = reach(call["weight"].val, call["dilation"])
    if call["padding"] != "same" and total:
        return _elsewhere(call, value, "a convolution changes the length of the sequence")
    return _along_tokens(call, value, total // 2, total - total // 2)


def token_convolution_rule(call: OpCall) -> Strategy:
    """``autosp::token_conv1d``: rows before and behind the sequence are zero, as many as the kernel reaches."""
    total = reach(call["weight"].val, call["dilation"])
    return _along_tokens(call, call["input"], call["left"], total - call["left"])


def register_convolution_rule() -> None:
    """Register the rule of the operator, once ``autosp.custom_ops.convolution`` has defined it."""
    register_rule(torch.ops.autosp.token_conv1d.default)(token_convolution_rule)


def _elsewhere(call: OpCall, value: Value, reason: str) -> Strategy:
    """Whole, or cut over the batch; over tokens ``reason`` forbids it."""
    if value.shard is None:
        return Strategy()
    if value.shard.dim != 0 or value.ndim != 3:
        raise Refusal(reason, 'pad it so that every token keeps its place, or gather with unsupported: "gather"')
    return Strategy(inputs={"input": value.shard}, output=value.shard)


def _along_tokens(call: OpCall, value: Value, left: int, right: int) -> Strategy:
    cut = value.shard
    if cut is None or cut.dim == 0 and value.ndim == 3:
        return _elsewhere(call, value, "")
    if cut.dim != value.ndim - 1:
        raise Refusal("a convolution over a sharded channel dimension")
    if not cut.is_plain:
        raise Refusal("a convolution over a window of the sequence, or over joined sequences")
    block = call.axis.block(cut.length)
    if bool(block < max(left, right)):
        raise Refusal(f"a convolution reaches {max(left, right)} tokens, farther than a neighbour's {block}")

    def convolve(c: OpCall, local: dict[str, Any]) -> torch.Tensor:
        x = mask_padding(c.axis, local["input"], cut, 0)
        x = with_halo(c.axis, x, left, right)
        return F.conv1d(x, local["weight"], local["bias"], 1, 0, c["dilation"], c["groups"])

    return Strategy(
        inputs={"input": cut}, output=cut, local=convolve, note=f"halo of {left} tokens before and {right} behind"
    )


def with_halo(axis: Axis, x: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """``x`` with the last ``left`` rows of the rank before and the first ``right`` rows of the rank behind it; zeros
    at the ends of the sequence. Along the last dimension, in one exchange.
    """
    if left == right == 0:
        return x
    rest, rows = x.shape[:-1], x.shape[-1]
    before, behind = axis.rank > 0, axis.rank < axis.size - 1
    width: IntLike = 1
    for size in rest:
        width = width * size
    send: list[IntLike] = [0] * axis.size
    receive: list[IntLike] = [0] * axis.size
    parts = []
    if before:
        send[axis.rank - 1], receive[axis.rank - 1] = right * width, left * width
        parts.append(x.narrow(-1, 0, right).reshape(-1))
    if behind:
        send[axis.rank + 1], receive[axis.rank + 1] = left * width, right * width
        parts.append(x.narrow(-1, rows - left, left).reshape(-1))
    buffer = torch.ops.autosp.all_to_all(torch.cat(parts), send, receive, axis.group)
    first = receive[axis.rank - 1] if before else 0
    front = buffer.narrow(0, 0, first).reshape(*rest, left) if before else x.new_zeros(*rest, left)
    back = buffer.narrow(0, first, right * width).reshape(*rest, right) if behind else x.new_zeros(*rest, right)
    return torch.cat([front, x, back], dim=-1)
