"""Layout inference: one pass over a captured graph that gives every value its layout and every call its strategy.

Two things are followed for each value: its real layout, and its *home*, the cut over tokens that it would have. Homes
tell where sharded computation starts (a token-wise operator on a whole value whose home is known runs on this rank's
tokens) and where a value goes that is cut over heads for a while. They never decide what is right: any cut of a whole
value is exact, because each operator's rule follows it by the operator's own meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..errors import UnsupportedGraphError
from ..location import user_location
from .axis import Axis
from .call import OpCall, Refusal, Strategy, Value, bind_arguments
from .placement import REPLICATE, Placement, Shard, same_placement
from .registry import find_rule, is_seed

LAYOUT = "autosp_layout"
HOME = "autosp_home"
STRATEGY = "autosp_strategy"
CALL = "autosp_call"


@dataclass(frozen=True)
class Source:
    """How a placeholder arrives: its layout, and its home when it runs over tokens."""

    placement: Placement = REPLICATE
    home: Shard | None = None


@dataclass
class Gathered:
    """An operator that ran on the whole sequence because it has no exact form on a shard."""

    operator: str
    location: str
    reason: str
    sizes: list[Any]


def infer_layouts(
    gm: fx.GraphModule, *, axis: Axis, sources: Mapping[str, Source], unsupported: str = "error"
) -> list[Gathered]:
    """Annotate every node of a captured graph with its layout, home and strategy.

    Args:
        gm: a pre-dispatch ATen graph with ``meta["val"]`` on every node.
        axis: the mesh axis to partition over.
        sources: by placeholder name; what is not named is whole.
        unsupported: "error" refuses what has no exact form on a shard, "gather" runs it on the whole sequence.

    Returns:
        What was gathered under ``unsupported="gather"``.

    Raises:
        UnsupportedGraphError: naming the operator, the line of the model and a remedy; nothing has been changed then.
    """
    gathered: list[Gathered] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = sources.get(node.name, Source())
            node.meta[LAYOUT], node.meta[HOME] = source.placement, source.home or _as_shard(source.placement)
        elif node.op == "get_attr":
            node.meta[LAYOUT], node.meta[HOME] = REPLICATE, None
        elif node.op == "call_function":
            _infer_call(node, axis, unsupported, gathered)
    return gathered


def _as_shard(placement: Placement) -> Shard | None:
    return placement if isinstance(placement, Shard) else None


def _infer_call(node: fx.Node, axis: Axis, unsupported: str, gathered: list[Gathered]) -> None:
    if node.target is operator.getitem:
        source, index = node.args
        if LAYOUT in source.meta:
            node.meta[LAYOUT], node.meta[HOME] = source.meta[LAYOUT][index], source.meta[HOME][index]
        return
    if not isinstance(node.target, torch._ops.OpOverload) or not _has_tensor(node.meta.get("val")):
        _check_scalar_read(node)
        return
    call = _make_call(node, axis)
    strategy = _choose(call, node, unsupported, gathered)
    node.meta[CALL], node.meta[STRATEGY] = call, strategy
    node.meta[LAYOUT] = strategy.output
    node.meta[HOME] = _home_of(call, strategy)


def _check_scalar_read(node: fx.Node) -> None:
    """A number read out of a tensor is right only when the tensor is whole; sizes are always those of the whole
    value.
    """
    sizes_only = ("sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "sym_is_contiguous")
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name.split("::")[-1] in sizes_only:
        return
    for source in node.all_input_nodes:
        if not isinstance(source.meta.get(LAYOUT, REPLICATE), type(REPLICATE)):
            raise UnsupportedGraphError(
                "a number is read out of a tensor that is sharded over the sequence",
                operator=str(node.target),
                location=user_location(node),
                remedy="compute it from whole inputs, or outside the model",
            )


def _has_tensor(val: Any) -> bool:
    if isinstance(val, (list, tuple)):
        return any(isinstance(item, torch.Tensor) for item in val)
    return isinstance(val, torch.Tensor)


def _make_call(node: fx.Node, axis: Axis) -> OpCall:
    def value(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            val = arg.meta.get("val")
            if isinstance(val, torch.Tensor):
                return Value(arg, val, arg.meta[LAYOUT], arg.meta.get(HOME))
            # Integers are rebuilt from their symbols; another number is taken from where it is made.
            return arg if isinstance(val, (torch.SymFloat, torch.SymBool)) else val
        if isinstance(arg, (list, tuple)):
            return type(arg)(value(item) for item in arg)
        return arg

    args = {name: value(arg) for name, arg in bind_arguments(node).items()}
    return OpCall(node=node, target=node.target, args=args, out=node.meta["val"], axis=axis)


def placed_call(call: OpCall, place: Callable[[Value], Placement], *, homing: bool = False) -> OpCall:
    """The same call with each tensor argument in the layout ``place(value)``."""

    def move(arg: Any) -> Any:
        if isinstance(arg, Value):
            return replace(arg, placement=place(arg))
        if isinstance(arg, (list, tuple)):
            return type(arg)(move(item) for item in arg)
        return arg

    return replace(call, args={name: move(arg) for name, arg in call.args.items()}, homing=homing)


def _at_home(value: Value) -> Placement:
    return value.home if value.home is not None else REPLICATE


def _choose(call: OpCall, node: fx.Node, unsupported: str, gathered: list[Gathered]) -> Strategy:
    values = [value for _, value in call.values()]
    rule = find_rule(call.target, call.axis.name)
    if all(value.is_replicated for value in values):
        return _choose_whole(call, rule, values)
    if (rule is None or _mutates(call)) and all(value.shard is None for value in values):
        # Sums over the group are all that is missing for whole operands.
        return _choose_whole(call, None, values)
    try:
        if _mutates(call):
            raise Refusal(
                "an input of the graph is written in place with a sharded value",
                "write it outside the model, from a gathered value",
            )
        if rule is None:
            raise Refusal(
                "this operator has no rule, so its effect on a shard is unknown",
                'register one with autosp.register_rule (docs/add_an_operator_rule.md), or set unsupported: "gather"',
            )
        try:
            return rule(call)
        except Refusal:
            if not any(_is_away(value) for value in values):
                raise
            return rule(placed_call(call, lambda v: v.home if _is_away(v) else v.placement))
    except Refusal as refusal:
        if unsupported != "gather" or refusal.always or _mutates(call):
            raise _unsupported(call, node, refusal) from None
        sharded = [value for value in values if not value.is_replicated]
        gathered.append(
            Gathered(call.name, user_location(node), refusal.reason, [(value.shape, value.dtype) for value in sharded])
        )
        return Strategy(output=_whole_output(call), note="gathered: " + refusal.reason)


def _is_away(value: Value) -> bool:
    """Cut, but not over its tokens: over heads."""
    return value.shard is not None and value.home is not None and not same_placement(value.shard, value.home)


def _mutates(call: OpCall) -> bool:
    return call.target._schema.is_mutable


def _choose_whole(call: OpCall, rule: Any, values: list[Value]) -> Strategy:
    """All operands are whole: start sharded computation here, or run the operator as it is, which is always right."""
    if rule is None:
        if torch.Tag.nondeterministic_seeded in call.target.tags:
            refusal = Refusal(
                "a random operator would draw differently on each rank",
                "draw before the model and pass the numbers in, or use dropout",
                always=True,
            )
            raise _unsupported(call, call.node, refusal)
        return Strategy(output=_whole_output(call))
    if is_seed(call.target) and any(value.home is not None for value in values):
        try:
            strategy = rule(placed_call(call, _at_home))
        except Refusal:
            strategy = None
        if strategy is not None and isinstance(strategy.output, Shard):
            return strategy
    try:
        strategy = rule(call)
    except Refusal as refusal:
        if refusal.always:
            raise _unsupported(call, call.node, refusal) from None
        return Strategy(output=_whole_output(call))
    return replace(strategy, output=_whole_output(call)) if strategy.output is REPLICATE else strategy


def _whole_output(call: OpCall) -> Any:
    if isinstance(call.out, (list, tuple)):
        return [REPLICATE] * len(call.out)
    return REPLICATE


def _home_of(call: OpCall, strategy: Strategy) -> Any:
    """The home of a result: what the rule gives when every operand is at home."""
    values = [value for _, value in call.values()]
    if not any(value.home is not None for value in values):
        return _map_output(strategy.output, _as_shard)
    if _stays(call, strategy) and all(same_placement(value.placement, _at_home(value)) for value in values):
        return _map_output(strategy.output, _as_shard)
    rule = find_rule(call.target, call.axis.name)
    none = _map_output(strategy.output, lambda _: None)
    if rule is None:
        return none
    # A mask of padding is whole, with a home along the keys; scores that it hides keep their own home.
    for place in (_at_home, lambda value: REPLICATE if value.is_replicated else _at_home(value)):
        try:
            at_home = rule(placed_call(call, place, homing=True))
        except Refusal:
            continue
        return _map_output(at_home.output, _as_shard)
    return none


def _stays(call: OpCall, strategy: Strategy) -> bool:
    """The strategy takes its operands as they are, so it keeps tokens where they were."""
    for name, value in call.values():
        needed = strategy.inputs.get(name, REPLICATE)
        if isinstance(needed, (list, tuple)):
            continue
        if not same_placement(needed, value.placement):
            return False
    return True


def _map_output(output: Any, function: Any) -> Any:
    if isinstance(output, (list, tuple)):
        return [function(item) for item in output]
    return function(output)


def _unsupported(call: OpCall, node: fx.Node, refusal: Refusal) -> UnsupportedGraphError:
    layouts = ", ".join(f"{name}: {list(value.shape)} {value.placement}" for name, value in call.values())
    return UnsupportedGraphError(
        f"{refusal.reason} ({layouts})",
        operator=call.name,
        location=user_location(node),
        remedy=refusal.remedy
        or f'set unsupported: "gather" to run it on the whole {call.axis.what}, at the cost of memory and traffic',
    )
