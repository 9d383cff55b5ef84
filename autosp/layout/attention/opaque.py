"""Attention operators of kernel libraries: run as they are, each rank with a block of heads over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import InputError
from ..call import OpCall, Refusal, Strategy, Value
from ..placement import REPLICATE, Shard
from ..registry import register_rule
from .choose import attention_strategy
from .forms import Form
from .kernels import LAYOUTS, Kernel, remember_kernel

# Where batch, heads, tokens and head size stand in each layout; None: no such dimension.
_LAYOUTS: dict[str, tuple[int, ...]] = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "shd": (1, 0, 2)}


@dataclass(frozen=True)
class Order:
    """How an operator's tensors become ``[batch, heads, tokens, size]`` and back."""

    layout: str

    @property
    def tokens(self) -> int:
        return self.layout.index("s")

    def standard(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(_LAYOUTS[self.layout])
        return x.unsqueeze(0) if self.layout == "shd" else x

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Contiguous, as kernels want it."""
        x = x.squeeze(0) if self.layout == "shd" else x
        # Each of these orders is its own inverse.
        return x.permute(_LAYOUTS[self.layout]).contiguous()


@dataclass(frozen=True)
class OpaqueForm(Form):
    """An operator that only it knows how to run, on whole sequences."""

    order: Order = Order("bhsd")

    @property
    def wants_lse(self) -> bool:
        return False

    def tokens_of(self, local: dict[str, Any]) -> Any:
        return tuple(self.order.standard(local[name]) for name in self.names)

    def run_heads(self, c: OpCall, local: dict[str, Any], q, k, v, block: tuple[int, int], grouped: bool) -> Any:
        changed = {name: self.order.own(x) for name, x in zip(self.names, (q, k, v), strict=True)}
        out = c.run(local, **changed)
        return self.order.standard(out[0] if isinstance(out, (list, tuple)) else out), None

    def result(self, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
        own = self.order.own(out)
        return [own] + [None] * (len(self.call.out) - 1) if isinstance(self.call.out, (list, tuple)) else own


def register_attention(*targets: Any, query: str = "q", key: str = "k", value: str = "v", layout: str = "bshd") -> None:
    """Register operators of a kernel library as attention: they then run on a rank's heads over the whole sequence.

    The operator is called as the model calls it, with fewer heads: whatever else it takes (cumulative lengths, a
    scale, a window) is handed over as it is, so it must not speak of heads. It needs a fake implementation and an
    autograd formula, as any operator of a compiled model does. Its first result is the attention's; others must be
    unused.

    Args:
        targets: operator overloads (``torch.ops.mylib.flash.default``) or packets (every overload).
        query, key, value: names of its arguments.
        layout: order of the dimensions of all three and of the result: "bshd" (batch, tokens, heads, size), "bhsd", or
            "shd" for one packed row of tokens, as variable-length kernels take it.

    Raises:
        InputError: an unknown layout, or an operator without these arguments.
    """
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}; allowed: {', '.join(map(repr, sorted(LAYOUTS)))}")
    names = (query, key, value)
    for target in targets:
        overloads = [getattr(target, n) for n in target.overloads()] if hasattr(target, "overloads") else [target]
        for overload in overloads:
            arguments = [argument.name for argument in overload._schema.arguments]
            missing = [name for name in names if name not in arguments]
            if missing:
                raise InputError(f"{overload} has no argument {', '.join(missing)}; it takes {', '.join(arguments)}")
            remember_kernel(overload, Kernel(names, layout))
    register_rule(*targets, seeds=True)(_rule(names, Order(layout)))


def _rule(names: tuple[str, str, str], order: Order) -> Callable[[OpCall], Strategy]:
    def rule(call: OpCall) -> Strategy:
        values = [call[name] for name in names]
        if all(value.shard is None for value in values):
            several = isinstance(call.out, (list, tuple))
            return Strategy(output=[REPLICATE] * len(call.out) if several else REPLICATE)
        q, k, v = standard_operands(call, values, order)
        return _in_order(attention_strategy(OpaqueForm(call, q, k, v, names=names, order=order)), names, order, call)

    return rule


def standard_operands(call: OpCall, values: Sequence[Value], order: Order) -> list[Value]:
    """Queries, keys and values as ``[batch, heads, tokens, size]``, cut over tokens.

    Raises:
        Refusal: they are not, or the operator has a second result that is used.
    """
    cuts = [value.shard for value in values]
    if any(cut is None or cut.dim != order.tokens or not cut.is_unfactored for cut in cuts):
        raise Refusal("attention whose queries, keys and values are not cut over tokens alike")
    if isinstance(call.out, (list, tuple)) and any(user.args[1] != 0 for user in call.node.users):
        raise Refusal("a second result of a registered attention operator is used")
    q, k, v = (_standard(value, order) for value in values)
    heads, key_heads = q.shape[1], k.shape[1]
    if not isinstance(heads, int) or not isinstance(key_heads, int) or heads % key_heads:
        raise Refusal(f"{heads} query heads over {key_heads} key/value heads")
    return [q, k, v]


def _standard(value: Value, order: Order) -> Value:
    shard = value.shard
    assert shard is not None
    return replace(value, val=order.standard(value.val), placement=shard.at(2))


def _in_order(strategy: Strategy, names: tuple[str, str, str], order: Order, call: OpCall) -> Strategy:
    """The strategy with its cuts where the operator's own layout has the tokens."""
    inputs = {name: cut.at(order.tokens) for name, cut in strategy.inputs.items() if name in names}
    output: Any = strategy.output
    assert isinstance(output, Shard)
    output = output.at(order.tokens)
    if isinstance(call.out, (list, tuple)):
        output = [output] + [None] * (len(call.out) - 1)
    return replace(strategy, inputs=inputs, output=output)
