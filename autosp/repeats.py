"""A trace that runs each kind of call once: layers repeat, and running an operator on fake tensors with symbolic sizes
is what tracing takes its time for.

`Repeats` stands between an interpreter and the calls that it makes under ``make_fx``. A call is known by its *key*:
everything that what it records can depend on, which is the function and its closure, its arguments, the layouts and
the metadata of its tensors with sizes as expressions, and the state of autograd and autocast. The first call of a key
runs, and the nodes that it added to the graph are remembered; a later one adds copies of them, with its own operands,
line and layer, and runs nothing. What has no key (an object of an unknown type, a real tensor, a value read out of a
tensor) runs every time, and so does what writes in place, draws symbols or leaves nothing but numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    snapshot_fake,
    track_tensor,
    track_tensor_tree,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from .repeat_keys import Keys, Repeated, Unkeyed

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (type(None), bool, int, float, str, torch.SymInt)
# What a node carries because of what it computes; the rest of its meta says where it comes from.
_COMPUTED = ("val", "tensor_meta", "original_aten", "torch_fn", "eager_input_vals", "low_precision_pointwise_barrier")


@dataclass(frozen=True)
class _Step:
    """A node to copy: in its arguments an `_Operand` or `_Earlier` stands where a tensor does."""

    node: fx.Node
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class _Operand:
    index: int


@dataclass(frozen=True)
class _Earlier:
    index: int


@dataclass(frozen=True)
class _Made:
    """A tensor result: made by step ``step``, which may stand for operand ``operand`` from then on."""

    step: int
    requires_grad: bool
    key: Any
    operand: int | None = None


@dataclass(frozen=True)
class _Record:
    steps: list[_Step]
    results: list[Any]
    spec: TreeSpec


class Repeats:
    """The calls of one trace; see the module's docstring.

    Args:
        enabled: False runs every call, which gives the same graph and takes longer.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.keys = Keys()
        self.copied = 0
        self._records: dict[Any, _Record | None] = {}

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any = None, *, what: Any = None) -> Any:
        """``function(*args, **kwargs)``, by running it or by copying what an equal call has recorded.

        Args:
            function: what to run; it must give the same for equal keys.
            args: tensors, `Repeated` results of earlier calls and other arguments, nested at will.
            kwargs: arguments by name.
            what: stands for ``function`` in the key where that is a closure made for this call.
        """
        kwargs = kwargs or {}
        operands: list[Any] = []
        key = self._key(function if what is None else what, args, kwargs, operands) if self.enabled else None
        record = self._records.get(key) if key is not None else None
        if record is not None:
            nodes = [_node_of(x) for x in operands]
            if all(node is not None for node in nodes):
                self.copied += 1
                return self._copy(record, operands, nodes)
        if key is None or key in self._records:
            return function(*self.tensors(args), **self.tensors(kwargs))
        if any(isinstance(x, Repeated) for x in operands):
            args, kwargs, operands = self.tensors(args), self.tensors(kwargs), [self.tensors(x) for x in operands]
        watch = _Watch(operands)
        result = function(*args, **kwargs)
        self._records[key] = watch.record(result, self.keys)
        return result

    def tensors(self, values: Any) -> Any:
        """``values`` with a tensor in place of each `Repeated`; each is made once."""
        if isinstance(values, Repeated):
            return self._tensor(values)
        if not self.enabled:
            return values
        return tree_map(lambda x: self._tensor(x) if isinstance(x, Repeated) else x, values)

    def _key(self, what: Any, args: Any, kwargs: Any, operands: list[Any]) -> Any:
        # Every look at a tensor would otherwise go through the modes of the trace.
        with torch._C.DisableTorchFunction():
            try:
                return self.keys.of_call(what, args, kwargs, operands)
            except Unkeyed:
                return None

    def _tensor(self, value: Repeated) -> torch.Tensor:
        if value.tensor is None:
            tracer = get_proxy_mode().tracer
            with disable_proxy_modes_tracing():
                made = snapshot_fake(value.node.meta["val"])
                if value.requires_grad:
                    made = _as_result(made)
            track_tensor(made, tracer.proxy(value.node), constant=None, tracer=tracer)
            value.tensor = made
        return value.tensor

    def _copy(self, record: _Record, operands: list[Any], nodes: Sequence[fx.Node]) -> Any:
        tracer = get_proxy_mode().tracer
        made: list[fx.Node] = []

        def put(arg: Any) -> Any:
            if isinstance(arg, _Operand):
                return nodes[arg.index]
            return made[arg.index] if isinstance(arg, _Earlier) else arg

        for step in record.steps:
            args, kwargs = _map(step.args, put), _map(step.kwargs, put)
            node = tracer.create_node("call_function", step.node.target, args, kwargs, name=step.node.name)
            node.meta.update((name, step.node.meta[name]) for name in _COMPUTED if name in step.node.meta)
            made.append(node)
        results = [self._result(item, operands, made) for item in record.results]
        return tree_unflatten(results, record.spec)

    def _result(self, item: Any, operands: list[Any], made: list[fx.Node]) -> Any:
        if isinstance(item, _Operand):
            return operands[item.index]
        if not isinstance(item, _Made):
            return item
        node = made[item.step]
        if item.operand is None:
            return Repeated(node, item.requires_grad, item.key)
        # The operator gave its operand back: what is read of either is from now on the new node's, as in a trace.
        operand = operands[item.operand]
        if isinstance(operand, Repeated) and operand.tensor is None:
            operand.node = node
            return operand
        tensor = operand.tensor if isinstance(operand, Repeated) else operand
        tracer = get_proxy_mode().tracer
        track_tensor_tree(tensor, tracer.proxy(node), constant=None, tracer=tracer)
        return operand


class RepeatInterpreter(fx.Interpreter):
    """Runs a graph under a trace; each kind of call once. What it returns may hold `Repeated` values."""

    def __init__(self, gm: fx.GraphModule, repeats: Repeats) -> None:
        super().__init__(gm)
        self.repeats = repeats

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operator.getitem and isinstance(args[0], (list, tuple)):
            return args[0][args[1]]
        return self.repeats.call(super().call_function, (target, args, kwargs), what="function")

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.repeats.call(super().call_method, (target, args, kwargs), what="method")

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_module(target, self.repeats.tensors(args), self.repeats.tensors(kwargs))


class _Watch:
    """What a call adds to the graph of the trace."""

    def __init__(self, operands: list[torch.Tensor]) -> None:
        self.graph = get_proxy_mode().tracer.graph
        self.last = next(iter(reversed(self.graph.nodes)))
        self.operands = operands
        self.nodes = [_node_of(x) for x in operands]

    def record(self, result: Any, keys: Keys) -> _Record | None:
        """What to copy for another call; None where copies would not be the same."""
        if any(node is None for node in self.nodes):
            return None
        places: dict[fx.Node, Any] = {node: _Operand(index) for index, node in enumerate(self.nodes)}
        steps: list[_Step] = []
        node = self.last.next
        while node is not self.graph._root:
            if not _serves_all(node):
                if not _can_be_copied(node) or not all(_is_reachable(x, places) for x in node.all_input_nodes):
                    return None
                args, kwargs = _map(node.args, places.get, True), _map(node.kwargs, places.get, True)
                places[node] = _Earlier(len(steps))
                steps.append(_Step(node, args, kwargs))
            node = node.next
        leaves, spec = tree_flatten(result)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        with torch._C.DisableTorchFunction():
            try:
                results = [self._leaf(leaf, places, keys) for leaf in leaves]
            except Unkeyed:
                return None
        return _Record(steps, results, spec)

    def _leaf(self, leaf: Any, places: dict[fx.Node, Any], keys: Keys) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if isinstance(leaf, _PLAIN):
                return leaf
            raise Unkeyed
        key, place = keys.of_tensor(leaf), places.get(_node_of(leaf))
        index = next((i for i, x in enumerate(self.operands) if x is leaf), None)
        if isinstance(place, _Earlier):
            return _Made(place.index, leaf.requires_grad, key, index)
        if index is not None and place == _Operand(index):
            return place
        raise Unkeyed


def _node_of(value: Any) -> fx.Node | None:
    """The node that a tensor of the trace, or a `Repeated`, is read from."""
    if isinstance(value, Repeated) and value.tensor is None:
        return value.node
    tensor = value.tensor if isinstance(value, Repeated) else value
    proxy = get_proxy_mode().tracer.unwrap_proxy(tensor)
    return proxy.node if isinstance(proxy, fx.Proxy) else None


def _can_be_copied(node: fx.Node) -> bool:
    """A call without effect whose result is new for each copy."""
    if node.op != "call_function" or "unbacked_bindings" in node.meta or "val" not in node.meta:
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is torch.ops.aten.detach_.default:
        # The end of ``torch.tensor``, on the value that it has just made.
        return node.args[0].target is torch.ops.aten.lift_fresh_copy.default
    schema = node.target._schema
    return not schema.is_mutable and len(schema.returns) > 0


def _serves_all(node: fx.Node) -> bool:
    """A size that was worked out once, or a constant, is there for every copy; a tensor of another call is not."""
    return node.op == "get_attr" or isinstance(node.meta.get("val"), _SYMBOLS)


def _is_reachable(node: fx.Node, places: dict[fx.Node, Any]) -> bool:
    return node in places or _serves_all(node)


def _map(value: Any, put: Callable[..., Any], with_default: bool = False) -> Any:
    """``value`` with ``put(x)``, or ``put(x, x)``, in place of each node or placeholder of one in it."""
    if isinstance(value, (fx.Node, _Operand, _Earlier)):
        return put(value, value) if with_default else put(value)
    if isinstance(value, (list, tuple)):
        return (
            type(value)(_map(item, put, with_default) for item in value)
            if type(value) in (list, tuple)
            else [_map(item, put, with_default) for item in value]
        )
    if isinstance(value, dict):
        return {name: _map(item, put, with_default) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_map(x, put, with_default) for x in (value.start, value.stop, value.step)))
    return value


class _Result(torch.autograd.Function):
    """A tensor as the result of an operator that autograd follows: no leaf, and nobody's view."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        return box[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise AssertionError("a fake value has no backward")


def _as_result(value: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return value.requires_grad_()
    anchor = torch.empty((), device=value.device, dtype=value.dtype, requires_grad=True)
    return _Result.apply(anchor, [value])
