"""A ``torch.autograd.Function`` on a shard: one that treats every element alone, or one around an attention operator.

What is known of a function is the argument ``use`` of its operator (``autosp/function_capture.py``). Any other runs on
whole values alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..attention.choose import attention_strategy
from ..attention.opaque import OpaqueForm, Order, standard_operands
from ..call import OpCall, Refusal, Strategy, Value
from ..placement import REPLICATE, known_equal
from ..registry import register_rule
from .pointwise import align, find_cut

_OPERATOR_INSTEAD = (
    "write it as torch.library.custom_op with register_autograd and give that a rule (docs/add_an_operator_rule.md), "
    'or set unsupported: "gather"'
)


def register_function_rule() -> None:
    """Register the rule of the operator, once ``autosp.custom_ops.autograd_function`` has defined it."""
    register_rule(torch.ops.autosp.autograd_function.default, seeds=True)(function_rule)


def function_rule(call: OpCall) -> Strategy:
    use, tensors = json.loads(call["use"]), call["tensors"]
    if all(value.shard is None for value in tensors):
        return Strategy(output=[REPLICATE] * len(call.out))
    if use["kind"] == "attention":
        return _attention(call, use, tensors)
    if use["kind"] == "elementwise":
        return _elementwise(call, tensors)
    raise Refusal(f"a torch.autograd.Function mixes tokens for all that is known: {use['reason']}", _OPERATOR_INSTEAD)


def _elementwise(call: OpCall, tensors: Sequence[Value]) -> Strategy:
    """Results are cut like the first operand that is cut, as those of any operator that treats every element alone."""
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    for out in call.out:
        if out.dim() != len(shape) or not all(map(known_equal, out.shape, shape)):
            raise Refusal("a torch.autograd.Function whose results are smaller than its operands", _OPERATOR_INSTEAD)
    cut = find_cut(list(tensors), shape)
    if cut is None:
        return Strategy(output=[REPLICATE] * len(call.out))
    return Strategy(inputs={"tensors": [align(value, shape, cut) for value in tensors]}, output=[cut] * len(call.out))


@dataclass(frozen=True)
class _FunctionForm(OpaqueForm):
    """Operands stand in a list: ``places`` says where, ``by_head`` which of the others have a number a head."""

    places: tuple[int, ...] = ()
    by_head: tuple[int, ...] = ()

    def run_heads(self, c: OpCall, local: dict[str, Any], q, k, v, block: tuple[int, int], grouped: bool) -> Any:
        tensors = list(local["tensors"])
        for at, x in zip(self.places, (q, k, v), strict=True):
            tensors[at] = self.order.own(x)
        for at in self.by_head:
            tensors[at] = tensors[at].narrow(-1, block[0], block[1] - block[0])
        return self.order.standard(c.run(local, tensors=tensors)[0]), None


def _attention(call: OpCall, use: dict[str, Any], tensors: Sequence[Value]) -> Strategy:
    if use["dropout"]:
        raise Refusal(
            f"{use['operator']} with dropout would drop the same positions in the heads of every rank",
            "set its dropout to 0, or take attn_implementation sdpa, whose dropout draws on each rank by itself",
            always=True,
        )
    order, places, by_head = Order(use["layout"]), tuple(use["operands"]), tuple(use["by_head"])
    q, k, v = standard_operands(call, [tensors[at] for at in places], order)
    form = _FunctionForm(call, q, k, v, order=order, names=("q", "k", "v"), places=places, by_head=by_head)
    strategy = attention_strategy(form)
    needed: list[Any] = [REPLICATE] * len(tensors)
    for name, at in zip(form.names, places, strict=True):
        needed[at] = strategy.inputs[name].at(order.tokens)
    several = [None] * (len(call.out) - 1)

    def attend(c: OpCall, local: dict[str, Any]) -> Any:
        assert strategy.local is not None
        named = {name: local["tensors"][at] for name, at in zip(form.names, places, strict=True)}
        return strategy.local(c, {**local, **named})

    output = strategy.output[0] if isinstance(strategy.output, (list, tuple)) else strategy.output
    return replace(
        strategy, inputs={"tensors": needed}, output=[output.at(order.tokens), *several], local=attend,
        note=f"{strategy.note} of {use['operator']}",
    )  # fmt: skip
