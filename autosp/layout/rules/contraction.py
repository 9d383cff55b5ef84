"""Contractions: linear layers, matrix products and batched matrix products.

A cut row or column dimension stays cut. A cut batch dimension must be cut in both operands. Where both operands are
cut over tokens in dimensions that the product sets against each other (attention scores written out), the group is
moved from the tokens to a batch dimension (heads) by all-to-alls, and the probabilities meet the values on the same
heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..call import OpCall, Refusal, Strategy, Value
from ..placement import PARTIAL, REPLICATE, Placement, Shard, known_equal, shard_of_dim
from ..registry import register_rule
from .reduction import mask_padding

aten = torch.ops.aten


@register_rule(aten.linear.default, seeds=True)
def linear_rule(call: OpCall) -> Strategy:
    """``input @ weight.T + bias``: token-wise."""
    value: Value = call["input"]
    shard = value.shard
    if call["weight"].shard is not None:
        raise Refusal("the weight of a linear layer is a sharded activation")
    if shard is None:
        return Strategy()
    if shard.dim == value.ndim - 1:
        raise Refusal(
            "a linear layer contracts the sharded dimension", "a layer that mixes tokens cannot run on a shard"
        )
    return Strategy(inputs={"input": shard}, output=shard)


@dataclass(frozen=True)
class _Roles:
    """Places of a product ``[*batch, m, k] @ [*batch, k, n]`` in each operand and in the result (None: not there)."""

    ndim: int
    a: Value
    b: Value

    def role(self, value: Value, dim: int) -> tuple[str, int]:
        """("m" | "k" | "n" | "batch", result dimension) of a dimension of an operand."""
        is_a = value is self.a
        if value.ndim == 1:
            return "k", -1
        if dim == value.ndim - 2:
            return ("m", self.ndim - (2 if self.b.ndim > 1 else 1)) if is_a else ("k", -1)
        if dim == value.ndim - 1:
            return ("k", -1) if is_a else ("n", self.ndim - 1)
        vectors = sum(v.ndim == 1 for v in (self.a, self.b))
        return "batch", self.ndim - (2 - vectors) - (value.ndim - 2 - dim)

    def batch_need(self, other: Value, value: Value, shard: Shard) -> Placement:
        """What ``other`` needs when ``value`` is cut along a batch dimension."""
        dim = shard.dim + other.ndim - value.ndim
        if dim < 0 or (known_equal(other.shape[dim], 1) and not known_equal(value.shape[shard.dim], 1)):
            return REPLICATE
        return shard.at(dim)


def _heads(call: OpCall, a: Value, b: Value) -> int | None:
    """The batch dimension that the group moves to: the last one that both operands have and that feeds every rank."""
    if a.ndim != b.ndim:
        return None
    for dim in reversed(range(a.ndim - 2)):
        size = a.shape[dim]
        if isinstance(size, int) and size >= call.axis.size and known_equal(size, b.shape[dim]):
            return dim
    return None


def product_strategy(call: OpCall, a: Value, b: Value, names: tuple[str, str]) -> Strategy:
    """Strategy of ``a @ b`` by what the cut dimension of each operand is in the product."""
    first, second = names
    if a.shard is None and b.shard is None:
        return Strategy()
    roles = _Roles(len(call.out_shape), a, b)
    kind_a, out_a = roles.role(a, a.shard.dim) if a.shard is not None else ("", -1)
    kind_b, out_b = roles.role(b, b.shard.dim) if b.shard is not None else ("", -1)
    if kind_a == "batch":
        return Strategy(inputs={first: a.shard, second: roles.batch_need(b, a, a.shard)}, output=a.shard.at(out_a))
    if kind_b == "batch":
        return Strategy(inputs={first: roles.batch_need(a, b, b.shard), second: b.shard}, output=b.shard.at(out_b))
    if kind_a == "m" and kind_b in ("n", "k"):
        heads = None if call.homing else _heads(call, a, b)
        if heads is None:
            return Strategy(inputs={first: a.shard}, output=a.shard.at(out_a), note="second operand gathered")
        cut = shard_of_dim(a.shape, heads)
        return Strategy(inputs={first: cut, second: cut}, output=cut, note="tokens exchanged for heads")
    if kind_a == "m":
        return Strategy(inputs={first: a.shard}, output=a.shard.at(out_a))
    if kind_b == "n":
        if kind_a == "k":
            raise Refusal("a matrix product contracts the sharded dimension of one operand")
        return Strategy(inputs={second: b.shard}, output=b.shard.at(out_b))
    return _contracted(call, a, b, names)


def _contracted(call: OpCall, a: Value, b: Value, names: tuple[str, str]) -> Strategy:
    """The contracted tokens are cut, in both operands or in one, to whose rows the other is cut: each rank's product is
    a partial sum.
    """
    first, second = names
    cut = (a.shard or b.shard).at(a.ndim - 1)
    needed = cut.at(b.ndim - 2 if b.ndim > 1 else 0)

    def partial_product(c: OpCall, local: dict):
        return c.run(local, **{first: mask_padding(c.axis, local[first], cut, 0)})

    return Strategy(inputs={first: cut, second: needed}, output=PARTIAL, local=partial_product, note="sum over tokens")


@register_rule(aten.matmul.default, aten.mm.default, aten.bmm.default, seeds=True)
def matmul_rule(call: OpCall) -> Strategy:
    """``self @ other`` with broadcast batch dimensions."""
    second = next(name for name in ("other", "mat2") if name in call.args)
    return product_strategy(call, call["self"], call[second], ("self", second))


@register_rule(aten.addmm.default, aten.baddbmm.default, aten.addbmm.default, seeds=True)
def addmm_rule(call: OpCall) -> Strategy:
    """``beta * self + alpha * (first @ second)``; the added term is cut like the result."""
    names = ("mat1", "mat2") if "mat1" in call.args else ("batch1", "batch2")
    if call.target is aten.addbmm.default:
        raise Refusal("addbmm sums its batch")
    strategy = product_strategy(call, call[names[0]], call[names[1]], names)
    if not isinstance(strategy.output, Shard):
        if strategy.output is PARTIAL:
            raise Refusal("a bias would be added once a rank to a partial sum", "add it after the product")
        return strategy
    added: Value = call["self"]
    cut = strategy.output
    dim = cut.dim - (len(call.out_shape) - added.ndim)
    stretched = dim < 0 or (known_equal(added.shape[dim], 1) and not known_equal(call.out_shape[cut.dim], 1))
    inputs = {**strategy.inputs, "self": REPLICATE if stretched else cut.at(dim)}
    return Strategy(inputs=inputs, output=cut, note=strategy.note)
