"""``flex_attention`` in a Dynamo graph, as ``autosp::block_attention``: score and mask functions become programs.

The functions are written for one score at a time; what they are made of (comparisons, arithmetic, reads of tables by
position) means the same on a block of scores, with positions that broadcast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from .custom_ops import block_attention  # noqa: F401 - defines the operator
from .errors import UnsupportedGraphError
from .layout.elementwise import is_elementwise

_POSITIONS: list[Any] = [{"index": name} for name in ("batch", "head", "query", "key")]
_UNBOUNDED = 2**40
_CONSTANTS = ("aten::scalar_tensor", "aten::full")


def emit_flex_attention(args: Sequence[Any], location: str) -> tuple[Tensor, Tensor, None]:
    """Run ``autosp::block_attention`` in place of the higher-order operator, under the trace at hand.

    Args:
        args: query, key, value, score function, block mask, scale, kernel options, buffers of the two functions, as
            ``torch.ops.higher_order.flex_attention`` takes them.
        location: the line of the model, for messages.

    Returns:
        ``(out, log-sum-exp to base 2, None)``.

    Raises:
        UnsupportedGraphError: a function that is more than pointwise in the scores, or keys stretched over the batch.
    """
    q, k, v, score_mod, block_mask, scale, _, score_buffers, mask_buffers = args
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if not (k.shape[0] == v.shape[0] == q.shape[0]):
        raise UnsupportedGraphError(
            "flex_attention stretches its keys and values over the batch",
            operator="flex_attention",
            location=location,
            remedy="expand them before",
        )
    writer = _Writer(location)
    score = [q.new_zeros(())]
    places = [q.new_zeros((), dtype=torch.int) for _ in range(4)]
    changed = writer.body(score_mod, [*score, *places], [{"score": 0}, *_POSITIONS], score_buffers)
    visible = writer.body(block_mask[-1], places, _POSITIONS, mask_buffers)
    visible = writer.restricted(visible, block_mask)
    program = {"steps": writer.steps, "mask": visible}
    if changed != {"score": 0}:
        program["score"] = changed
    sizes = [q.shape[2], k.shape[2]]
    out, lse = torch.ops.autosp.block_attention(
        q, k, v, writer.leaves, writer.numbers, json.dumps(program), float(scale), [0, 0, 0, 0], sizes,
        [-_UNBOUNDED, _UNBOUNDED],
    )  # fmt: skip
    return out, lse / math.log(2), None


class _Writer:
    """Collects steps, tables and numbers of the two functions of one call."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.steps: list[list[Any]] = []
        self.leaves: list[Tensor] = []
        self.numbers: list[Any] = []

    def step(self, name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> dict[str, int]:
        self.steps.append([name, list(args), kwargs or {}])
        return {"step": len(self.steps) - 1}

    def table(self, tensor: Tensor) -> dict[str, int]:
        for index, known in enumerate(self.leaves):
            if known is tensor:
                return {"whole": index}
        self.leaves.append(tensor)
        return {"whole": len(self.leaves) - 1}

    def body(
        self, function: Callable[..., Any], examples: list[Tensor], refs: Sequence[Any], buffers: Sequence[Any]
    ) -> Any:
        """The reference of a function's result, its operators written as steps."""
        with disable_proxy_modes_tracing(), TransformGetItemToIndex():
            graph = reenter_make_fx(function)(*examples, *buffers).graph
        known: dict[fx.Node, Any] = {}
        given = [*refs, *(self._buffer(x) for x in buffers)]
        for node, ref in zip(graph.find_nodes(op="placeholder"), given, strict=True):
            known[node] = ref
        for node in graph.nodes:
            if node.op == "call_function":
                known[node] = self._call(node, known)
            elif node.op == "get_attr":
                self._refuse(f"the constant {node.target}")
        (result,) = graph.output_node().args
        result = result[0] if isinstance(result, (list, tuple)) else result
        return known[result]

    def _buffer(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.table(value)
        self.numbers.append(value)
        return {"number": len(self.numbers) - 1}

    def _call(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            self._refuse(str(target))
        name = target._schema.name
        operand = lambda arg: fx.node.map_arg(arg, lambda x: known[x])  # noqa: E731
        args = [_literal(operand(arg)) for arg in node.args]
        kwargs = {key: _literal(operand(arg)) for key, arg in node.kwargs.items() if key in ("dtype", "alpha", "value")}
        if name == "aten::index":
            table, indices = cast("tuple[fx.Node, list[Any]]", node.args[:2])
            if len(indices) != table.meta["val"].dim() or any(index is None for index in indices):
                self._refuse("a table that is not read by a position in every dimension")
        elif "whole" in str(args) and any(_is_table(arg) for arg in args):
            # A whole tensor inside arithmetic is right only as one number.
            if any(isinstance(a, fx.Node) and _is_table(known[a]) and a.meta["val"].dim() for a in node.args):
                self._refuse(f"{target} of a whole tensor")
        elif not is_elementwise(target) and name not in _CONSTANTS:
            self._refuse(str(target))
        overload = target._overloadname
        return self.step(name + ("" if overload == "default" else f".{overload}"), args, kwargs)

    def restricted(self, visible: Any, block_mask: Sequence[Any]) -> Any:
        """What the mask function shows, in the blocks that the block mask lists; its full blocks show everything."""
        counts, indices, full_counts, full_indices = block_mask[2:6]
        q_block, key_block = block_mask[-3], block_mask[-2]
        place = [
            self.step("aten::mul.Scalar", [{"index": name}, 0 if counts.shape[dim] == 1 else 1])
            for dim, name in enumerate(("batch", "head"))
        ]
        place += [
            self.step("aten::floor_divide.Scalar", [{"index": name}, int(size)])
            for name, size in (("query", q_block), ("key", key_block))
        ]
        listed = self.step("aten::index.Tensor", [self.table(_listed(counts, indices)), place])
        visible = self.step("aten::bitwise_and.Tensor", [listed, visible])
        if full_counts is not None:
            full = self.step("aten::index.Tensor", [self.table(_listed(full_counts, full_indices)), place])
            visible = self.step("aten::bitwise_or.Tensor", [visible, full])
        return visible

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedGraphError(
            f"a function of flex_attention uses {what}, which does not treat every score alone",
            operator="flex_attention",
            location=self.location,
            remedy="write the function with arithmetic, comparisons and tables read by position",
        )


def _is_table(ref: Any) -> bool:
    return isinstance(ref, dict) and "whole" in ref


def _literal(arg: Any) -> Any:
    if isinstance(arg, torch.dtype):
        return {"dtype": str(arg).removeprefix("torch.")}
    return [_literal(x) for x in arg] if isinstance(arg, (list, tuple)) else arg


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """``[batch, heads, query blocks, key blocks]``: the blocks that a block mask lists, by their numbers."""
    width = indices.shape[-1]
    taken = torch.arange(width, device=indices.device) < counts.unsqueeze(-1)
    empty = torch.zeros(indices.shape, dtype=torch.int32, device=indices.device)
    return empty.scatter_add(-1, indices.long().clamp(0, width - 1), taken.to(torch.int32)) > 0
