"""A ``torch.autograd.Function`` in a Dynamo graph, as ``autosp::autograd_function``, with what is known of it.

A function is an arbitrary forward with an arbitrary backward. Two kinds can be shared by ranks without a rule of their
own: those that treat every element alone in both, and those around an attention operator of a kernel library, which
run on a block of heads. What is known goes with the operator as JSON (``use``), for its layout rule.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from .custom_ops.autograd_function import Bodies, remember
from .errors import UnsupportedGraphError
from .function_results import without_intermediates
from .layout.attention.kernels import find_kernel
from .layout.call import bind_arguments
from .layout.elementwise import is_elementwise
from .layout.placement import known_equal

# Results are zero where an operand is; of the last ones, where the first operand is; of sums, where all operands are.
_PRODUCTS = frozenset(("aten::mul", "aten::__and__", "aten::bitwise_and", "aten::logical_and"))
_FIRST = frozenset(
    f"aten::{name}"
    for name in ("div", "neg", "to", "_to_copy", "clone", "detach", "alias", "lift_fresh_copy", "abs", "sign",
                 "view_as", "masked_fill", "relu", "tanh", "sin", "tan", "asinh", "atan", "erf", "expm1", "log1p",
                 "sqrt")
)  # fmt: skip
_SUMS = frozenset(f"aten::{name}" for name in ("add", "sub", "rsub", "where", "maximum", "minimum"))
# What may lie between the arguments of a function and its attention operator: they keep tokens and heads.
_KEEPS_HEADS = frozenset(
    f"aten::{name}" for name in ("detach", "alias", "clone", "contiguous", "constant_pad_nd", "pad", "lift_fresh_copy")
)
_CASTS = frozenset(("aten::to", "aten::_to_copy"))


def emit_autograd_function(args: Sequence[Any], kwargs: dict[str, Any], used: set[int] | None, location: str) -> Any:
    """Run ``autosp::autograd_function`` in place of the higher-order operator, under the trace at hand.

    Args:
        args: the forward body, the backward body and the arguments, as ``autograd_function_apply`` takes them.
        kwargs: its settings.
        used: which of its results somebody takes; None for all. Of others there may be None.
        location: the line of the model, for messages.

    Raises:
        UnsupportedGraphError: a function that writes its inputs, or returns what is no tensor.
    """
    forward, backward, *given = args
    forward, backward, kwargs, left = without_intermediates(forward, backward, kwargs, used)
    is_tensor = tuple(isinstance(x, Tensor) for x in given)
    tensors = [x for x in given if isinstance(x, Tensor)]
    numbers = [x for x in given if not isinstance(x, Tensor)]
    with disable_proxy_modes_tracing():
        results, saved = fx.Interpreter(forward).run(*given)
    listed = [results] if isinstance(results, Tensor) else list(results)
    why_not = "writes to its inputs" if kwargs.get("dirty_idx") else ""
    why_not = why_not or ("" if all(isinstance(x, Tensor) for x in listed) else "returns what is no tensor")
    remedy = "write it as torch.library.custom_op with register_autograd, and give that a rule"
    if not why_not and not all(isinstance(x, (int, torch.SymInt)) for x in numbers):
        why_not = "takes a number that is no integer and changes from call to call"
        remedy = f"pass that number to the model as a tensor of no dimensions, torch.tensor(number), or {remedy}"
    if why_not:
        raise UnsupportedGraphError(
            f"a torch.autograd.Function {why_not}",
            operator="autograd_function_apply",
            location=location,
            remedy=remedy,
        )
    bodies = Bodies(forward, backward, dict(kwargs), is_tensor, isinstance(results, Tensor))
    use = json.dumps(_describe(forward, backward, given, listed, list(saved)))
    found = torch.ops.autosp.autograd_function(tensors, numbers, remember(bodies), use)
    if bodies.single:
        return found[0]
    made = iter(found)
    return tuple(next(made) if is_left else None for is_left in left)


def _describe(
    forward: fx.GraphModule, backward: fx.GraphModule, given: list[Any], results: list[Any], saved: list[Any]
) -> dict[str, Any]:
    """``{"kind": "attention" | "elementwise" | "unknown", ...}``; what is unknown has a "reason"."""
    there = _aten(forward, given)
    attention = _attention(there, given)
    if attention is not None:
        return attention
    size = _size_read_by(forward) or _size_read_by(backward)
    if size:
        return {"kind": "unknown", "reason": f"{size} of a tensor inside it would be a rank's own: pass it as a number"}
    reason = _not_elementwise(there)
    if reason:
        return {"kind": "unknown", "reason": f"its forward has {reason}"}
    gradients = [torch.empty_like(x) for x in results]
    back = _aten(backward, [*gradients, *saved])
    reason = _not_elementwise(back)
    if reason:
        return {"kind": "unknown", "reason": f"its backward has {reason}"}
    if not _vanishes(back, len(gradients)):
        return {"kind": "unknown", "reason": "its gradient may be other than zero where the gradient of its result is"}
    return {"kind": "elementwise"}


def _aten(body: fx.GraphModule, args: Sequence[Any]) -> fx.Graph:
    with disable_proxy_modes_tracing():
        return reenter_make_fx(body)(*args).graph


def _size_read_by(body: fx.GraphModule) -> str:
    """What a body reads of a tensor's sizes, where that is not one number for good; empty when nothing."""
    for node in body.graph.nodes:
        if not node.op.startswith("call_") or not _has_symbols(node.meta.get("example_value")):
            continue
        if any(isinstance(x.meta.get("example_value"), Tensor) for x in node.all_input_nodes):
            return f"{node.target if isinstance(node.target, str) else node.target.__name__}()"
    return ""


def _has_symbols(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_symbols, value))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _not_elementwise(graph: fx.Graph) -> str:
    """What in a graph does not treat every element alone; empty when nothing does."""
    for node in graph.nodes:
        if node.op == "get_attr":
            return f"the constant {node.target}"
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        if not is_elementwise(node.target) and not _is_identity(node):
            return str(node.target)
    return ""


def _is_identity(node: fx.Node) -> bool:
    """``x.view_as(y)`` with a ``y`` of the shape of ``x``, which it is on a shard as well."""
    if node.target is not torch.ops.aten.view_as.default:
        return False
    shapes = [x.meta["val"].shape for x in node.args]  # type: ignore[union-attr]
    return len(shapes[0]) == len(shapes[1]) and all(map(known_equal, *shapes))


def _vanishes(graph: fx.Graph, gradients: int) -> bool:
    """All gradients that a backward gives are zero where those that it gets are: what padding rows need."""
    placeholders = graph.find_nodes(op="placeholder")
    zero: set[Any] = set(placeholders[:gradients])
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name
        operands = [arg for arg in node.args if not isinstance(arg, (torch.dtype, str))]
        if name in _PRODUCTS:
            vanishing = any(arg in zero for arg in operands if isinstance(arg, fx.Node))
        elif name in _FIRST:
            vanishing = operands[0] in zero
            if name == "aten::masked_fill":
                vanishing = vanishing and operands[2] == 0
        elif name == "aten::clamp":
            vanishing = operands[0] in zero and _keeps_zero(node)
        elif name in _SUMS:
            # The condition of where chooses; alpha of add multiplies.
            terms = operands[1:] if name == "aten::where" else operands[:2]
            vanishing = all(arg == 0 if not isinstance(arg, fx.Node) else arg in zero for arg in terms)
        else:
            vanishing = False
        if vanishing:
            zero.add(node)
    (given,) = graph.output_node().args
    return all(x in zero for x in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(x, fx.Node))


def _keeps_zero(clamp: fx.Node) -> bool:
    """Zero lies within the bounds, which are numbers."""
    bound = bind_arguments(clamp)
    low, high = (0.0 if bound.get(name) is None else bound[name] for name in ("min", "max"))
    return isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= 0 <= high


def _attention(graph: fx.Graph, given: list[Any]) -> dict[str, Any] | None:
    """How a forward body calls an attention operator with its own arguments; None where it does not."""
    calls = [(node, find_kernel(node.target)) for node in graph.nodes if node.op == "call_function"]
    found = [(node, kernel) for node, kernel in calls if kernel is not None]
    if not found:
        return None
    if len(found) > 1:
        return {"kind": "unknown", "reason": "its forward calls more than one attention operator"}
    node, kernel = found[0]
    bound = bind_arguments(node)
    tensors = [index for index, x in enumerate(given) if isinstance(x, Tensor)]
    places = {p: tensors.index(i) for i, p in enumerate(graph.find_nodes(op="placeholder")) if i in tensors}
    operands = {name: places.get(_origin(bound[name])) for name in kernel.names}
    result = _first_result(graph)
    if any(at is None for at in operands.values()) or result is None or _origin(result) is not node:
        return {"kind": "unknown", "reason": f"more than {node.target} is done to its arguments or its result"}
    by_head = [places.get(_origin(bound[name])) for name in kernel.by_head if bound.get(name) is not None]
    if None in by_head:
        return {"kind": "unknown", "reason": f"{', '.join(kernel.by_head)} of {node.target} are made inside"}
    other = next((name for name in bound if _is_tensor(bound[name]) and not kernel.knows(name)), None)
    if other is not None:
        return {"kind": "unknown", "reason": f"{node.target} takes {other}, of which a part would be a rank's"}
    dropout = bound.get(kernel.dropout) if kernel.dropout else 0.0
    described = {"kind": "attention", "operator": str(node.target), "layout": kernel.layout_of(bound)}
    return {**described, "operands": list(operands.values()), "by_head": by_head, "dropout": bool(dropout)}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def _first_result(graph: fx.Graph) -> Any:
    given: Any = graph.output_node().args[0]
    results = given[0]
    return results[0] if isinstance(results, (list, tuple)) else results


def _origin(node: Any) -> Any:
    """What a value is a copy, a padded copy or the first result of; slices of the last dimension are let through."""
    while isinstance(node, fx.Node) and _passes(node):
        node = node.args[0]
    return node


def _passes(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return bool(node.args[1] == 0)
    return isinstance(node.target, torch._ops.OpOverload) and _keeps(node, node.target._schema.name)


def _keeps(node: fx.Node, name: str) -> bool:
    if name == "aten::slice":
        last = node.meta["val"].dim() - 1
        return (node.args[1] if len(node.args) > 1 else 0) in (last, -1) or _is_whole_slice(node)
    if name in ("aten::constant_pad_nd", "aten::pad"):
        return len(node.args[1]) == 2  # type: ignore[arg-type]
    return name in _KEEPS_HEADS or name in _CASTS


def _is_whole_slice(node: fx.Node) -> bool:
    given: list[Any] = [*node.args[2:], *(None, None, 1)[len(node.args) - 2 :]]
    start, end, step = given
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= 2**62)) and bool(step == 1)
