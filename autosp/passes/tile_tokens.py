"""Stretches that treat each token alone and widen it (an MLP) are marked to run a few tokens at a time.

That an operator's rule runs the operator itself on a shard of the tokens, with no communication, is the proof that it
may run on any part of the tokens: the same rules that make a shard make a tile. Where batch and tokens are merged into
one dimension, a tile is the same positions of each sequence, as a shard is. Tiles are recomputed in the backward, so
the wide values never exist for all tokens at once, in either direction.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..layout.call import OpCall, Strategy, Value
from ..layout.infer import CALL, LAYOUT, STRATEGY
from ..layout.nodes import is_barred
from ..layout.placement import REPLICATE, Replicate, Shard, known_equal, product, same_placement
from ..layout.stretch import TILED, Stretch

WIDER = 1.5
"""A value is wide when it holds this many times the elements that its widest operand holds, or more."""

_NARROWING = 16
"""At most so many nodes narrow a wide value again."""


def tile_tokens_pass(gm: fx.GraphModule, *, tiles: int) -> fx.GraphModule:
    """Rewrites: ``down(silu(gate(x)) * up(x))`` -> the same nodes side by side, marked to run in ``tiles`` parts.

    Requires: ``infer_layouts`` has annotated ``gm``.
    Ensures: ``node.meta["autosp_tiled"]`` holds the stretch of each marked node; the nodes of a stretch follow one
    another, and only the last one's value is used outside. Nothing is marked when ``tiles`` is 1.
    Refuses: nothing; what is not proven token-wise runs whole.
    """
    if tiles == 1:
        return gm
    region = max((node.meta.get("ac_graph_id", 0) for node in gm.graph.nodes), default=0) + 1
    for found in _stretches(gm):
        for node in found[:-1]:
            found[-1].prepend(node)
        # What a user checkpoints is recomputed as a whole already.
        recomputed = any("recompute" in node.meta for node in found)
        stretch = Stretch(tuple(found), tiles, None if recomputed else region)
        region += tiles
        for node in found:
            node.meta[TILED] = stretch
            if not recomputed:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return gm


def _stretches(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """Connected wide values with the nodes that narrow them again, in the order of the graph."""
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    wide: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if is_token_wise(node) and _is_wide(node, wide):
            wide.add(node)
    found: list[list[fx.Node]] = []
    seen: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node not in wide or node in seen:
            continue
        group = _connected(node, wide)
        seen |= group
        if len(group) > 1 and (members := _closed(group, order)) is not None:
            found.append(members)
    return found


def _closed(group: set[fx.Node], order: dict[fx.Node, int]) -> list[fx.Node] | None:
    """``group`` and what narrows it again, down to the one node that all else outside reads; None where there is none.

    More than one node may narrow it, as a weight and the adapter beside it do, until their results are added.
    """
    members = set(group)
    for _ in range(_NARROWING):
        ends = sorted({user for member in members for user in member.users} - members, key=order.__getitem__)
        if not ends or not is_token_wise(ends[0]):
            return None
        members.add(ends[0])
        # The end comes last, so that nothing that it waits for waits for a member. It is one tensor, not a list.
        if len(ends) == 1 and isinstance(ends[0].meta[LAYOUT], Shard):
            found = sorted(members, key=order.__getitem__)
            # They are moved together: not out of a no_grad or autocast region, nor past a write.
            return None if is_barred(found[0], found[-1]) or _moves(members) else found
    return None


def _moves(members: set[fx.Node]) -> bool:
    """A member is asked for in another layout by another: a move between ranks lies inside."""
    for node in members:
        if node.target is operator.getitem:
            continue
        needed = node.meta[STRATEGY].inputs
        for name, value in node.meta[CALL].values():
            if value.node in members and not same_placement(value.placement, needed.get(name, REPLICATE)):
                return True
    return False


def _connected(start: fx.Node, wide: set[fx.Node]) -> set[fx.Node]:
    group, pending = {start}, [start]
    while pending:
        node = pending.pop()
        for other in (*node.users, *node.all_input_nodes):
            if other in wide and other not in group:
                group.add(other)
                pending.append(other)
    return group


def _width(node: fx.Node) -> int | None:
    """Elements a token, at the sizes of the compilation: a batch that is open cancels where two are compared.

    Read without a guard, since it decides what pays and not what is right. None where a size is not known yet.
    """
    value, shard = node.meta["val"], node.meta[LAYOUT]
    if isinstance(value, torch.Tensor):
        value, shard = [value], [shard]
    width = 0
    for part, cut in zip(value, shard, strict=True):
        sizes = [size for dim, size in enumerate(part.shape) if dim != cut.dim]
        elements = product([*sizes, cut.outer, cut.inner])
        known = elements.node.hint if isinstance(elements, torch.SymInt) else elements
        if known is None:
            return None
        width += int(known)
    return width


def _is_wide(node: fx.Node, wide: set[fx.Node]) -> bool:
    """Wider than its widest sharded operand, or as wide as that and fed by one of ``wide``, or a view of one.

    A view keeps all of a wide value alive, however little of it it shows.
    """
    if _is_view(node) and node.args[0] in wide:
        return True
    # Rows that ids look up are made, not widened: integers do not count.
    operands = [other for other in _sharded_inputs(node) if not _is_integral(other)]
    width = _width(node)
    widest = max((_width(other) or 0 for other in operands), default=0)
    if width is None or not widest:
        return False
    return width >= WIDER * widest or (width == widest and not wide.isdisjoint(operands))


def _is_integral(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or node.target.is_view


def _sharded_inputs(node: fx.Node) -> list[fx.Node]:
    if node.target is operator.getitem:
        return [node.args[0]]
    return [value.node for _, value in node.meta[CALL].values() if isinstance(value.node.meta.get(LAYOUT), Shard)]


def is_token_wise(node: fx.Node) -> bool:
    """Each row of the result needs the same row of the operands alone, by what the rule says: the operator itself runs
    on the shard, or a function of the rule's that is as good on a part of it.
    """
    if node.target is operator.getitem:
        return STRATEGY in node.args[0].meta and is_token_wise(node.args[0])
    strategy: Strategy | None = node.meta.get(STRATEGY)
    if strategy is None or not (strategy.local is None or strategy.tileable):
        return False
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    cuts = node.meta[LAYOUT] if isinstance(node.meta[LAYOUT], (list, tuple)) else [node.meta[LAYOUT]]
    layout = cuts[0] if cuts else None
    if not isinstance(layout, Shard) or not all(isinstance(cut, Shard) and cut.same_rows(layout) for cut in cuts):
        return False
    if not known_equal(layout.inner, 1):
        return False
    call: OpCall = node.meta[CALL]
    return all(
        _is_tileable(arg, strategy.inputs.get(name, REPLICATE), layout, strategy) for name, arg in call.args.items()
    )


def _is_tileable(arg: object, needed: object, layout: Shard, strategy: Strategy) -> bool:
    reshapes = strategy.local is not None
    if isinstance(arg, Value):
        if isinstance(needed, Replicate):
            return True
        if not isinstance(needed, Shard) or not known_equal(needed.inner, 1):
            return False
        return needed.same_window(layout) if reshapes else needed.same_rows(layout)
    # Lists of tensors do not occur in what this is for. Sizes of the whole value do where the rule has its own.
    refused = (Value, fx.Node) if reshapes else (Value, torch.SymInt, fx.Node)
    items: Iterable[object] = arg if isinstance(arg, (list, tuple)) else [arg]
    return not any(isinstance(item, refused) for item in items)
