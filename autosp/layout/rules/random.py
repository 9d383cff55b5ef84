"""Dropout, by ``layout.counter_random``, and other random operators."""

from __future__ import annotations

import torch

from ..call import OpCall, Refusal, Strategy, Value
from ..counter_random import draw_seed, drop
from ..placement import Shard
from ..registry import register_rule

aten = torch.ops.aten


@register_rule(aten.dropout.default)
def dropout_rule(call: OpCall) -> Strategy:
    """Each rank drops elements of its own tokens from a stream of its own; a whole value is dropped alike
    everywhere.
    """
    value: Value = call["input"]
    shard: Shard | None = value.shard
    if not call["train"] or call["p"] == 0:
        return Strategy(
            inputs={"input": value.placement}, output=value.placement, local=lambda c, local: local["input"]
        )
    p = call["p"]

    def local_drop(c: OpCall, local: dict):
        x = local["input"]
        seed = draw_seed(x.device, c.axis.group if shard is None else None)
        return drop(x, p, seed, 0 if shard is None else c.axis.rank)

    placement = {} if shard is None else {"input": shard}
    return Strategy(inputs=placement, output=shard or Strategy().output, local=local_drop, note="dropout")


@register_rule(
    aten.rand, aten.randn, aten.randint, aten.randperm, aten.rand_like, aten.randn_like, aten.randint_like,
    aten.bernoulli, aten.multinomial, aten.normal, aten.native_dropout, aten.alpha_dropout, aten.feature_dropout,
)  # fmt: skip
def random_rule(call: OpCall) -> Strategy:
    """Draws that ranks would not agree on are refused."""
    raise Refusal(
        "a random operator other than dropout would draw differently on each rank",
        "draw the numbers outside the model and pass them in, or use dropout",
        always=True,
    )
