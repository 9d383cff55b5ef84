"""Whole values that only shards use are made as shards, from their source on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..layout.call import OpCall, Refusal, Strategy, Value
from ..layout.infer import CALL, HOME, LAYOUT, STRATEGY, placed_call
from ..layout.placement import REPLICATE, Placement, Replicate, Shard, same_placement, shard_of_dim
from ..layout.registry import find_rule


def move_slices_up_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrites: ``whole = cos(arange(S) * f); slice(whole)`` -> ``cos(slice(arange(S)) * f)``, on the annotations.

    Requires: ``infer_layouts`` has annotated ``gm``.
    Ensures: a whole value whose every use takes the same rows of it, and that its operator's rule can make from the
    same rows of its operands, has those rows as its layout; rotary tables and the like then exist for this rank's
    tokens only.
    Refuses: nothing; what cannot move stays where it is.
    """
    cuts = _possible_cuts(gm)
    for node in reversed(gm.graph.nodes):
        cut = cuts.get(node)
        if cut is None or node.op != "call_function" or not _every_use_wants(node, cut):
            continue
        strategy = _strategy_at(node, cuts)
        if strategy is not None and isinstance(strategy.output, Shard) and same_placement(strategy.output, cut):
            node.meta[STRATEGY] = strategy
            node.meta[LAYOUT] = node.meta[HOME] = cut
    return gm


def _possible_cuts(gm: fx.GraphModule) -> dict[fx.Node, Shard]:
    """For each whole value, the cut that it would have if the positions and token inputs it comes from were cut."""
    cuts: dict[fx.Node, Shard] = {}
    for node in gm.graph.nodes:
        if not isinstance(node.meta.get(LAYOUT), Replicate) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if node.op == "placeholder" and isinstance(node.meta.get(HOME), Shard):
            cuts[node] = node.meta[HOME]
        elif node.op == "call_function" and STRATEGY in node.meta:
            cut = _cut_of(node, cuts)
            if cut is not None:
                cuts[node] = cut
    return cuts


def _cut_of(node: fx.Node, cuts: dict[fx.Node, Shard]) -> Shard | None:
    if node.target._schema.name == "aten::arange":
        return shard_of_dim(node.meta["val"].shape, 0)
    if node.target._schema.is_mutable:
        return None
    strategy = _strategy_at(node, cuts, homing=True)
    return strategy.output if strategy is not None and isinstance(strategy.output, Shard) else None


def _strategy_at(node: fx.Node, cuts: dict[fx.Node, Shard], homing: bool = False) -> Strategy | None:
    """What the rule answers when each whole operand is cut as ``cuts`` says; None when it refuses."""
    call: OpCall = node.meta[CALL]
    rule = find_rule(node.target)
    if node.target._schema.name == "aten::arange":
        return Strategy(output=cuts[node], local=_own_positions)
    if rule is None or not any(value.node in cuts for _, value in call.values()):
        return None

    def place(value: Value) -> Placement:
        return cuts.get(value.node, REPLICATE)

    try:
        return rule(placed_call(call, place, homing=homing))
    except Refusal:
        return None


def _own_positions(call: OpCall, local: dict[str, Any]) -> torch.Tensor:
    """This rank's part of an ``arange``."""
    whole = call.run(local)
    cut = shard_of_dim(whole.shape, 0)
    axis = call.axis
    return torch.ops.autosp.shard_sequence(whole, 0, cut.length, cut.size, 0, 1, 1, None, axis.group)


def _every_use_wants(node: fx.Node, cut: Shard) -> bool:
    """Every user takes the rows of ``cut``; users that only look at sizes do not count."""
    wanted = 0
    for user in node.users:
        if user.op == "output":
            return False
        if STRATEGY not in user.meta:
            if isinstance(user.meta.get("val"), torch.Tensor) or not _is_size(user):
                return False
            continue
        needs = _needs(user.meta[CALL], user.meta[STRATEGY], node)
        if not all(isinstance(need, Shard) and same_placement(need, cut) for need in needs):
            return False
        wanted += len(needs)
    return wanted > 0


def _is_size(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in ("aten::sym_size", "aten::sym_numel")


def _needs(call: OpCall, strategy: Strategy, node: fx.Node) -> list[Placement]:
    """The layouts that one call needs ``node`` in, one for each place where it stands."""
    found: list[Placement] = []
    for name, arg in call.args.items():
        needed = strategy.inputs.get(name, REPLICATE)
        if isinstance(arg, Value) and arg.node is node:
            found.append(needed)
        elif isinstance(arg, (list, tuple)):
            many = needed if isinstance(needed, (list, tuple)) else [needed] * len(arg)
            found += [want for item, want in zip(arg, many, strict=True) if getattr(item, "node", None) is node]
    return found
