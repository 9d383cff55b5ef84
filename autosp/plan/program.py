"""A compiled graph as buffers and work: what Inductor would keep in memory, read, write and compute.

Inductor fuses: an elementwise value that only elementwise operators and reductions read is never stored. So a value
is a buffer here when it is the result of anything else (a matrix product, attention, a collective, a reduction),
when such an operator reads it, or when the graph returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import sympy
import torch
import torch.distributed as dist
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..custom_ops.host_copy import COPIES, FROM_HOST, FROM_HOST_DONE, TO_HOST
from ..location import layer_number, module_stack
from ..product_order import PRODUCTS

aten = torch.ops.aten
Size: TypeAlias = int | sympy.Expr
PARTS = ("activations", "attention", "loss", "communication", "gradients")
_RNG = "_rng_state"
_SDPA = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
    }
)  # fmt: skip
_SDPA_BACKWARD = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu_backward, aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward, aten._scaled_dot_product_cudnn_attention_backward,
    }
)  # fmt: skip
# Lowered to loads and stores inside a fused kernel, though torch does not tag them as elementwise.
_FUSED = frozenset(
    {
        aten.embedding, aten.gather, aten.index, aten.index_select, aten.full, aten.full_like, aten.arange,
        aten.iota if hasattr(aten, "iota") else torch.ops.prims.iota, torch.ops.prims.iota,
        aten.scalar_tensor, aten.constant_pad_nd, aten.cat, aten.flip, aten.repeat, aten.clone, aten.expand,
        torch.ops.prims.convert_element_type, aten._to_copy, aten.select_scatter, aten.slice_scatter,
        aten.zeros_like, aten.ones_like, aten.zeros, aten.ones, aten.new_zeros, aten.scatter, aten.tril, aten.triu,
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.var_mean, aten.var, aten.any, aten.all,
     aten.argmax, aten.argmin, aten.prod, aten.cumsum, torch.ops.prims.xor_sum}
)  # fmt: skip
_SENDS = {"all_reduce": 2.0, "all_gather_into_tensor": 1.0, "reduce_scatter_tensor": 1.0, "all_to_all_single": 1.0}


@dataclass
class Buffer:
    """Memory that a graph needs: who makes it, how large it is, what it belongs to."""

    size: Size
    part: str


@dataclass
class Work:
    """One kernel or one collective: the buffers that it makes and reads, and what it costs."""

    layer: int | None
    """Number of the layer of the model that it belongs to, where layers are numbered."""
    made: list[int] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    flops: Size = 0
    moved: Size = 0
    """Bytes read from and written to the device's memory."""
    sent: Size = 0
    """Bytes that this rank sends to the others of the collective's group."""
    elements: Size | None = None
    """How many elements an elementwise kernel runs over; None for other work."""
    product: bool = False
    """A matrix product."""
    copies: Any = None
    """The operator of `autosp.custom_ops.host_copy` that it is, if one."""


@dataclass
class Program:
    """A graph as work in its order. Buffers are known by number."""

    buffers: dict[int, Buffer] = field(default_factory=dict)
    work: list[Work] = field(default_factory=list)
    given: dict[str, int] = field(default_factory=dict)
    """Buffer behind each placeholder that is a tensor, by name and in order."""
    returned: dict[str, int] = field(default_factory=dict)
    """Buffer behind each output that is a tensor, by the name of its node."""


def expression(value: Any) -> Size:
    """A size as a number or as an expression of the graph's symbols."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else int(value)


def tensor_bytes(value: torch.Tensor) -> Size:
    """Bytes of a tensor's elements."""
    return value.element_size() * _elements(value)


def _elements(value: torch.Tensor) -> Size:
    size: Size = 1
    for length in value.shape:
        size = size * expression(length)
    return size


def read_program(graph: fx.Graph) -> Program:
    """Turn a forward or backward graph of AOTAutograd, after Inductor's decompositions, into a `Program`."""
    return _Reader(graph).read()


class _Reader:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.program = Program()
        self.storages: dict[Any, int] = {}
        self.sources: dict[fx.Node, set[int]] = {}
        """The buffers that a node's value is, or is computed from inside a fused kernel."""
        self.layer: int | None = None

    def read(self) -> Program:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._read_placeholder(node)
            elif node.op in ("call_function", "get_attr"):
                self._read_call(node)
            elif node.op == "output":
                self._read_output(node)
        return self.program

    def _read_placeholder(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not _is_random_state(node):
            number = self._buffer(value, "activations")
            if any(user.target is FROM_HOST for user in node.users):
                self.program.buffers[number].size = 0  # the host's memory
            self.program.given[node.name] = number
            self.sources[node] = {number}

    def _read_call(self, node: fx.Node) -> None:
        tensors = _results(node)
        inputs = set().union(*(self.sources.get(source, set()) for source in node.all_input_nodes))
        if not tensors or _is_random_state(node):
            return
        self.layer = layer_number(node, self.layer)
        if node.target in COPIES:
            self._read_host_copy(node, inputs)
            return
        known = {self.storages[_storage(value)] for value in tensors if _storage(value) in self.storages}
        if len(tensors) == 1 and known or _is_view(node):
            # one of several results, a view of a buffer, or a view of what is not stored
            self.sources[node] = known or inputs
            if not known and len(inputs) == 1:
                # a view whose fake is a tensor of its own (the wait of a collective)
                self.storages.update((_storage(value), next(iter(inputs))) for value in tensors)
            return
        if _is_fused(node) and not self._is_stored(node):
            self.sources[node] = inputs
            return
        if _is_sum_over_group(node):
            self._read_sum(node, tensors, inputs)
            return
        part = _part_of(node)
        made = [self._buffer(value, part) for value in tensors]
        self.sources[node] = set(made)
        read = inputs - set(made)
        moved: Size = sum((self.program.buffers[number].size for number in [*read, *made]), 0)
        elements = _elements(tensors[0]) if _is_fused(node) else None
        product = node.target in PRODUCTS
        self.program.work.append(Work(self.layer, made, read, _flops(node), moved, _sent(node), elements, product))

    def _read_sum(self, node: fx.Node, tensors: list[torch.Tensor], inputs: set[int]) -> None:
        """A sum over the group; Inductor writes it over its operand where nobody else reads that."""
        operands = _operands(node)
        made = []
        for operand, value in zip(operands, tensors, strict=True):
            if operands.count(operand) == 1 and _is_read_once(operand):
                (self.storages[_storage(value)],) = self.sources[operand]
            else:
                made.append(self._buffer(value, _part_of(node)))
        self.sources[node] = {self.storages[_storage(value)] for value in tensors}
        self.program.work.append(Work(self.layer, made, inputs, sent=_sent(node)))

    def _read_host_copy(self, node: fx.Node, inputs: set[int]) -> None:
        """Memory of the host counts nothing; the end of a copy gives a value of no size, for what must run after it."""
        if node.target in (TO_HOST, FROM_HOST):
            made = self._buffer(node.meta["val"], _part_of(node))
            self.sources[node] = {made}
        else:
            made = len(self.program.buffers)
            self.program.buffers[made] = Buffer(0, _part_of(node))
            self.sources[node] = {made} | (inputs if node.target is FROM_HOST_DONE else set())
        if node.target is TO_HOST:
            self.program.buffers[made].size = 0
        self.program.work.append(Work(self.layer, [made], inputs, copies=node.target))

    def _read_output(self, node: fx.Node) -> None:
        (outputs,) = node.args
        for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
            if not isinstance(output, fx.Node) or _is_random_state(output):
                continue
            if isinstance(value := output.meta.get("val"), torch.Tensor):
                self.program.returned[output.name] = self._buffer(value, "activations")

    def _buffer(self, value: torch.Tensor, part: str) -> int:
        key = _storage(value)
        if key not in self.storages:
            self.storages[key] = len(self.program.buffers)
            # the storage, not the tensor: one of three views may be seen first; a parameter's fake has none of its own
            size = expression(value.untyped_storage().nbytes())
            self.program.buffers[self.storages[key]] = Buffer(tensor_bytes(value) if size == 0 else size, part)
        return self.storages[key]

    def _is_stored(self, node: fx.Node) -> bool:
        """Whether somebody reads the value of a fusible operator from memory."""
        queue, seen = [node], {node}
        while queue:
            for user in queue.pop().users:
                if user in seen:
                    continue
                seen.add(user)
                if user.op == "output":
                    return True
                if _is_view(user):
                    queue.append(user)
                elif not (_is_fused(user) or _packet(user) in _REDUCTIONS) and _tensors(user.meta.get("val")):
                    return True
        return False


def _call(node: fx.Node) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Operator, arguments and keywords; those inside where a recomputed operator runs with its random state again."""
    if _RNG not in str(node.target):
        return node.target, node.args, node.kwargs
    at = next(i for i, arg in enumerate(node.args) if isinstance(arg, torch._ops.OpOverload))
    return node.args[at], node.args[at + 1 :], node.kwargs


def _is_random_state(node: fx.Node) -> bool:
    """A generator's state that recomputation hands from the forward to the backward; it lies on the host."""
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and "run_and_save" + _RNG in str(source.target):
        return bool(node.args[1] == 0)
    users = [user for user in node.users if "run_with" + _RNG in str(user.target)]
    return node.op == "placeholder" and any(user.args[0] is node for user in users)


def _packet(node: fx.Node) -> Any:
    target = _call(node)[0]
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _results(node: fx.Node) -> list[torch.Tensor]:
    """A node's tensors; torch notes none on an operator with its random state, only on what is taken out of it."""
    if "val" in node.meta or node.op == "get_attr":
        return _tensors(node.meta.get("val"))
    return [tensor for user in node.users if _is_view(user) and not _is_random_state(user) for tensor in _results(user)]


def _storage(value: torch.Tensor) -> Any:
    return StorageWeakRef(value.untyped_storage())


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", "") == "getitem"
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns) or _packet(
        node
    ) in (aten.reshape, aten._unsafe_view, torch.ops._c10d_functional.wait_tensor)


def _is_sum_over_group(node: fx.Node) -> bool:
    return getattr(_packet(node), "__name__", "") in ("all_reduce", "all_reduce_coalesced")


def _operands(node: fx.Node) -> list[fx.Node]:
    """The tensors that a collective is given, one as often as it is given."""
    first = node.args[0]
    return [x for x in (first if isinstance(first, (list, tuple)) else [first]) if isinstance(x, fx.Node)]


def _is_read_once(node: fx.Node) -> bool:
    """Whether what a node computes, or is a view of, has one reader."""
    while len(node.users) == 1 and _is_view(node) and isinstance(node.target, torch._ops.OpOverload):
        node = cast(fx.Node, node.args[0])
    return len(node.users) == 1 and node.op == "call_function"


def _is_fused(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or _packet(node) in _FUSED


def _part_of(node: fx.Node) -> str:
    name = str(_call(node)[0])
    if "_c10d_functional" in name:
        return "communication"
    if "scaled_dot_product" in name or "flash_attention" in name:
        return "attention"
    stack = module_stack(node)
    trace = (node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or "").lower()
    if stack.endswith(("lm_head", "lm_head']")) or "loss" in trace.rsplit("file ", 1)[-1] or "cross_entropy" in trace:
        return "loss"
    return "activations"


def _flops(node: fx.Node) -> Size:
    """Floating-point operations of a product or an attention (causal: half), by torch's own formulas."""
    target, args, kwargs = _call(node)
    packet = _packet(node)
    if packet in _SDPA or packet in _SDPA_BACKWARD:
        return _attention_flops(target, args, kwargs, backward=packet in _SDPA_BACKWARD)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    value = lambda x: x.meta.get("val") if isinstance(x, fx.Node) else x  # noqa: E731
    count = formula(*map(value, args), **{k: value(v) for k, v in kwargs.items()}, out_val=node.meta.get("val"))
    return expression(count)


def _attention_flops(target: Any, args: Sequence[Any], kwargs: dict[str, Any], *, backward: bool) -> Size:
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    *gradient, query, key, value = (x.meta["val"].shape for x in args[: 3 + backward])
    # Each key head meets the queries of its group: as many products as if it were repeated. torch 2.11's formulas
    # refuse fewer key heads than query heads.
    key, value = (torch.Size((x[0], query[1], *x[2:])) for x in (key, value))
    formula: Callable[..., Any] = sdpa_backward_flop_count if backward else sdpa_flop_count
    count = formula(*gradient, query, key, value)
    return expression(count) / 2 if given.get("is_causal") else expression(count)


def _sent(node: fx.Node) -> Size:
    name = getattr(_packet(node), "__name__", "").removesuffix("_coalesced")
    if "_c10d_functional" not in str(node.target) or name not in _SENDS:
        return 0
    larger = [node] if name == "all_gather_into_tensor" else _operands(node)
    moved: Size = sum((tensor_bytes(value) for x in larger for value in _tensors(x.meta["val"])), 0)
    ranks = dist.distributed_c10d._resolve_process_group(cast(Any, node.args[-1])).size()
    return int(_SENDS[name]) * moved * (ranks - 1) / ranks
