"""Stretches that treat each token alone and widen it (an MLP) are marked to run a few tokens at a time.

That an operator's rule runs the operator itself on a shard of the tokens, with no communication, is the proof that it
may run on any part of the tokens: the same rules that make a shard make a tile. Tiles are recomputed in the backward,
so the wide values never exist for all tokens at once, in either direction.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..layout.call import OpCall, Strategy, Value
from ..layout.infer import CALL, LAYOUT, STRATEGY
from ..layout.nodes import is_barred
from ..layout.placement import REPLICATE, Replicate, Shard, product
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
        # The end comes last, so that nothing that it waits for waits for a member.
        if len(ends) == 1:
            found = sorted(members, key=order.__getitem__)
            # They are moved together: not out of a no_grad or autocast region, nor past a write.
            return None if is_barred(found[0], found[-1]) else found
    return None


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
    """Elements a token, when that is a number."""
    value, shard = node.meta["val"], node.meta[LAYOUT]
    width = product([size for dim, size in enumerate(value.shape) if dim != shard.dim])
    return width if isinstance(width, int) else None


def _is_wide(node: fx.Node, wide: set[fx.Node]) -> bool:
    """Wider than its widest sharded operand, or as wide as that and fed by one of ``wide``."""
    operands = _sharded_inputs(node)
    width = _width(node)
    widest = max((_width(other) or 0 for other in operands), default=0)
    if width is None or not widest:
        return False
    return width >= WIDER * widest or (width == widest and not wide.isdisjoint(operands))


def _sharded_inputs(node: fx.Node) -> list[fx.Node]:
    return [value.node for _, value in node.meta[CALL].values() if isinstance(value.node.meta.get(LAYOUT), Shard)]


def is_token_wise(node: fx.Node) -> bool:
    """The operator itself runs on the shard, and each row of its result needs the same row of its operands alone."""
    strategy: Strategy | None = node.meta.get(STRATEGY)
    layout = node.meta.get(LAYOUT)
    if strategy is None or strategy.local is not None or not isinstance(layout, Shard) or not layout.is_unfactored:
        return False
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    call: OpCall = node.meta[CALL]
    return all(_is_tileable(arg, strategy.inputs.get(name, REPLICATE), layout) for name, arg in call.args.items())


def _is_tileable(arg: object, needed: object, layout: Shard) -> bool:
    if isinstance(arg, Value):
        if isinstance(needed, Replicate):
            return True
        return isinstance(needed, Shard) and needed.is_unfactored and needed.same_rows(layout)
    # Lists of tensors and sizes of the whole value do not occur in what this is for.
    if isinstance(arg, (list, tuple)):
        return not any(isinstance(item, (Value, torch.SymInt, fx.Node)) for item in arg)
    return not isinstance(arg, (torch.SymInt, fx.Node))
