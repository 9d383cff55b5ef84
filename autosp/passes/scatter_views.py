"""A write through a view of a value becomes the value with that part replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..layout.placement import known_equal
from ..location import kept_meta

aten = torch.ops.aten
_SLICE, _SELECT, _TRANSPOSE = aten.slice.Tensor, aten.select.int, aten.transpose.int
_UNSQUEEZE, _SQUEEZE, _PERMUTE = aten.unsqueeze.default, aten.squeeze.dim, aten.permute.default
_LINKS = (_SLICE, _SELECT, _TRANSPOSE, _UNSQUEEZE, _SQUEEZE, _PERMUTE)


def scatter_views_pass(gm: fx.GraphModule, *, functional_form: Callable[[Any], Any]) -> fx.GraphModule:
    """Rewrites: ``v = x[..., a:b]; v.copy_(y)`` with ``x`` made in the graph -> ``x' = slice_scatter(x, y, ...)``,
    later uses of ``x`` reading ``x'``, and later uses of its views views of ``x'``.

    Requires: a captured graph.
    Ensures: writes through slices, selections and permutations of a value of the graph are gone.
    Refuses: nothing; other writes are left to whoever comes next.
    """
    changed = False
    for node in list(gm.graph.nodes):
        chain = _chain(node, functional_form)
        if chain is not None:
            _rewrite(gm, node, chain, functional_form)
            changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return gm


def _chain(node: fx.Node, functional_form: Callable[[Any], Any]) -> list[fx.Node] | None:
    """The views between the value and what ``node`` writes, the value's own first; None when it writes otherwise."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    written, chain = node.args[0], []
    while isinstance(written, fx.Node) and written.target in _LINKS:
        chain.append(written)
        written = written.args[0]
    if not chain or not isinstance(written, fx.Node) or not _owns_storage(written) or functional_form(target) is None:
        return None
    # What is made of the value later reads it as it is then; what was made before must be made anew.
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    if not all(_is_known_view(alias) for alias in _aliases(written) if order[alias] < order[node]):
        return None
    return chain[::-1]


def _owns_storage(node: fx.Node) -> bool:
    """A value of the graph that is nobody's view: what returns no alias, and never its own operand."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliased = any(r.alias_info is not None for r in node.target._schema.returns)
    maybe = ("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten", "aten::dropout", "aten::expand_as",
             "aten::type_as", "aten::view_as", "aten::reshape_as")  # fmt: skip
    return not aliased and node.target._schema.name not in maybe


def _shares(node: fx.Node) -> bool:
    """The node's result may share the storage of its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function" and "getitem" in str(node.target)
    return not _owns_storage(node) and not node.target._schema.is_mutable


def _aliases(root: fx.Node) -> list[fx.Node]:
    """Everything that may share the storage of ``root``, views of views included."""
    found: list[fx.Node] = []
    todo = [root]
    while todo:
        source = todo.pop()
        for user in source.users:
            if user.args and user.args[0] is source and _shares(user) and user not in found:
                found.append(user)
                todo.append(user)
    return found


def _is_known_view(node: fx.Node) -> bool:
    return node.target in _LINKS


def _rewrite(gm: fx.GraphModule, node: fx.Node, chain: list[fx.Node], functional_form: Callable[[Any], Any]) -> None:
    """Replace one write; what is read after it reads the new value."""
    graph = gm.graph
    order = {n: i for i, n in enumerate(graph.nodes)}
    root, written = chain[0].args[0], chain[-1]
    assert isinstance(root, fx.Node)
    later = lambda n: order.get(n, -1) > order[node]  # noqa: E731
    aliases = [(alias, [u for u in alias.users if later(u)]) for alias in _aliases(root)]
    root_users = [user for user in root.users if later(user)]
    with graph.inserting_before(node):
        if node.target is aten.copy_.default:
            value = node.args[1]  # the functional copy has no derivative
        else:
            value = _made(graph, functional_form(node.target), node.args, node.kwargs, node)
        if value.meta["val"].dtype != written.meta["val"].dtype:
            value = _made(graph, aten.to.dtype, (value, written.meta["val"].dtype), {}, node)
        if not _same_shape(value, written):
            value = _made(graph, aten.expand_as.default, (value, written), {}, node)
        parents = [root, *chain[:-1]]
        for view, parent in zip(reversed(chain), reversed(parents), strict=True):
            value = _put_back(graph, view, parent, value, node)
        renewed = {root: value}
        for alias, _ in sorted(aliases, key=lambda pair: order[pair[0]]):
            if later(alias):
                continue
            source = renewed.get(alias.args[0], alias.args[0])
            renewed[alias] = _made(graph, alias.target, (source, *alias.args[1:]), alias.kwargs, node)
    for user in root_users:
        user.replace_input_with(root, value)
    for alias, users in aliases:
        for user in users:
            if alias in renewed:
                user.replace_input_with(alias, renewed[alias])
    node.replace_all_uses_with(renewed.get(written, written))
    graph.erase_node(node)


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    shapes = a.meta["val"].shape, b.meta["val"].shape
    return len(shapes[0]) == len(shapes[1]) and all(map(known_equal, *shapes))


def _made(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: Any, like: fx.Node) -> fx.Node:
    """A new node with its value."""
    new = graph.call_function(target, args, dict(kwargs))
    new.meta = kept_meta(like)
    with like.args[0].meta["val"].fake_mode:
        values = fx.node.map_arg((args, dict(kwargs)), lambda n: n.meta["val"])
        new.meta["val"] = target(*values[0], **values[1])
    return new


def _put_back(graph: fx.Graph, view: fx.Node, parent: fx.Node, value: fx.Node, like: fx.Node) -> fx.Node:
    """``parent`` with the part that ``view`` shows replaced by ``value``."""
    rest = view.args[1:]
    if view.target is _SLICE:
        return _made(graph, aten.slice_scatter.default, (parent, value, *rest), view.kwargs, like)
    if view.target is _SELECT:
        return _made(graph, aten.select_scatter.default, (parent, value, *rest), view.kwargs, like)
    if view.target is _UNSQUEEZE:
        return _made(graph, _SQUEEZE, (value, *rest), {}, like)
    if view.target is _SQUEEZE:
        if _same_shape(view, parent):
            return value
        ndim = parent.meta["val"].dim()
        return _made(graph, _UNSQUEEZE, (value, int(rest[0]) % ndim), {}, like)
    if view.target is _PERMUTE:
        dims = [int(d) % len(rest[0]) for d in rest[0]]
        return _made(graph, _PERMUTE, (value, [dims.index(d) for d in range(len(dims))]), {}, like)
    return _made(graph, _TRANSPOSE, (value, *rest), {}, like)
