"""In-place operators on values of the graph become their functional forms."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..errors import UnsupportedGraphError
from ..location import user_location


def _is_inplace_name(target: torch._ops.OpOverload) -> bool:
    name = target._schema.name
    return name.endswith("_") and not name.endswith("__")


def functional_form(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """``aten.add_.Tensor`` -> ``aten.add.Tensor``; None when the operator writes nothing or has no such form."""
    namespace, name = target._schema.name.split("::")
    if not target._schema.is_mutable or not _is_inplace_name(target):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overload = target._overloadname
    return getattr(packet, overload, None) if packet is not None else None


def _is_view(node: fx.Node) -> bool:
    """The result of the node shares storage with its first argument."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    # reshape, contiguous and casts may return their operand; they count as views so that no write is lost.
    maybe = ("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten", "aten::dropout", "aten::expand_as")
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)
    return aliased or node.target._schema.name in maybe


def _is_write(node: fx.Node) -> bool:
    """An in-place operator: its result is its first argument."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and _is_inplace_name(target)


def _storage_root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and (_is_view(node) or _is_write(node)) and node.all_input_nodes:
        node = node.args[0]
    return node


def _written_value(node: fx.Node) -> fx.Node:
    """What a chain of in-place operators (``x.mul_(2).add_(1)``) writes to."""
    while _is_write(node):
        node = node.args[0]
    return node


def _in_dtype_of(written: fx.Node, node: fx.Node) -> fx.Node:
    """``node``, now out of place, cast to the dtype that the write would have kept."""
    value = written.meta["val"]
    operands = [arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
    if all(operand.dtype == value.dtype for operand in operands):
        return node
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(torch.ops.aten.to.dtype, (node, value.dtype))
    cast.meta = {**node.meta, "val": value}
    # Its own value may be wider; the interpreter checks dtypes against it.
    with value.fake_mode:
        node.meta["val"] = node.target(*_values(node.args), **_values(node.kwargs))
    return cast


def _values(args: Any) -> Any:
    return fx.node.map_arg(args, lambda n: n.meta["val"])


def functionalize_inplace_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrites: ``y = add_(x, v)`` with ``x`` made in the graph -> ``y = add(x, v)``, later uses of ``x`` reading
    ``y``.

    Requires: a captured graph.
    Ensures: what is still written in place is an input of the graph (a buffer), which ranks hold whole.
    Refuses: a write through a view, or to a value that has views which are read later: their order would be lost.
    """
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    plan: list[tuple[fx.Node, torch._ops.OpOverload]] = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not node.target._schema.is_mutable:
            continue
        root = _storage_root(node.args[0])
        if root.op in ("placeholder", "get_attr"):
            continue
        form = functional_form(node.target)
        # Views that are made afterwards are made of what is then the written value.
        views = [n for n in gm.graph.nodes if order[n] < order[node] and _written_value(n) is not root]
        aliases = [n for n in views if _storage_root(n) is root]
        read_later = any(order[user] > order[node] for alias in aliases for user in alias.users if user is not node)
        if form is None or root is not _written_value(node) or read_later:
            raise UnsupportedGraphError(
                "a value is written in place through a view, or views of it are read afterwards",
                operator=str(node.target),
                location=user_location(node),
                remedy="write it out of place (torch.where, x = x + ..., torch.scatter)",
            )
        plan.append((node, form))
    for node, form in plan:
        written = node.args[0]
        node.target = form
        result = _in_dtype_of(written, node)
        for user in [user for user in written.users if order.get(user, -1) > order[node]]:
            user.replace_input_with(written, result)
        if result is not node:
            for user in [user for user in node.users if user is not result]:
                user.replace_input_with(node, result)
    if plan:
        gm.recompile()
    return gm
