"""Masks and biases that are pointwise in queries and keys become programs, computed block by block in attention."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..layout.elementwise import is_elementwise
from ..layout.index_expr import Affine, where_of
from ..layout.placement import known_equal
from ..location import kept_meta

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
_UNBOUNDED = 2**40
_AND = ("aten::bitwise_and", "aten::logical_and", "aten::__and__")
_CASTS = ("aten::to", "aten::_to_copy")
_COPIES = ("aten::clone", "aten::contiguous", "aten::alias", "aten::lift_fresh_copy", "aten::detach")
_FILLED = {"aten::ones": 1, "aten::zeros": 0, "aten::new_ones": 1, "aten::new_zeros": 0, "aten::ones_like": 1,
           "aten::zeros_like": 0, "aten::full": None, "aten::new_full": None, "aten::full_like": None}  # fmt: skip


def express_masks_pass(gm: fx.GraphModule, *, fake_mode: Any) -> fx.GraphModule:
    """Rewrites: ``sdpa(q, k, v, mask)`` with ``mask = (k <= q) & (document[q] == document[k])`` and the like
    -> ``block_attention(q, k, v, leaves, program)``, where the leaves are the parts that vary along queries or keys
    alone, and the program is what the model does with them.

    Requires: a captured graph.
    Ensures: a mask or bias that pointwise operators make from such leaves is never made as queries x keys; what it
    hides by the distance of query and key alone becomes bounds, and whole blocks are left out by them.
    A mask that is the same for every query is handed over as it is, un-stretched.
    Refuses: nothing; what is made otherwise (an input, an embedding of distances) keeps its exact tensor.
    """
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=SDPA):
        mask = _argument(node, 3, "attn_mask", None)
        if not isinstance(mask, fx.Node) or not _is_plain_attention(node):
            continue
        keys_alone = _broadcast_over_queries(mask)
        if keys_alone is not None:
            # The operator broadcasts it by itself, and its fused kernels take it.
            changed = changed or keys_alone is not mask
            node.replace_input_with(mask, keys_alone)
            continue
        writer = _Writer()
        program = writer.write(mask)
        if program is None:
            continue
        _replace(gm, node, program, writer, fake_mode)
        changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return gm


def is_expressible(node: fx.Node) -> bool:
    """Whether the pass replaces this call of attention."""
    mask = _argument(node, 3, "attn_mask", None)
    if not isinstance(mask, fx.Node) or not _is_plain_attention(node) or _broadcast_over_queries(mask) is not None:
        return False
    return _Writer().write(mask) is not None


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _broadcast_over_queries(mask: fx.Node) -> fx.Node | None:
    """What a mask is stretched from, when it is the same for every query; None when it is not."""
    while mask.target is aten.expand.default and mask.args[0].meta["val"].dim() >= 2:
        mask = mask.args[0]
    shape = mask.meta["val"].shape
    return mask if len(shape) >= 2 and known_equal(shape[-2], 1) else None


def _is_plain_attention(node: fx.Node) -> bool:
    """Without dropout, over ``[batch, heads, tokens, size]``, key heads dividing the heads, one batch for all."""
    q, k, v = (arg.meta["val"].shape for arg in node.args[:3])
    if _argument(node, 4, "dropout_p", 0.0) or _argument(node, 5, "is_causal", False) or len(q) != 4:
        return False
    heads, key_heads = q[1], k[1]
    if not isinstance(heads, int) or not isinstance(key_heads, int) or heads % key_heads or len(k) != 4:
        return False
    return all(known_equal(x[0], q[0]) for x in (k, v)) and known_equal(k[1], v[1])


@dataclass
class _Writer:
    """Writes one program; ``leaves`` and ``numbers`` are the nodes that it reads, ``bounds`` what it need not say."""

    leaves: list[fx.Node] = field(default_factory=list)
    numbers: list[fx.Node] = field(default_factory=list)
    steps: list[list[Any]] = field(default_factory=list)
    bounds: tuple[int, int] = (-_UNBOUNDED, _UNBOUNDED)
    _refs: dict[fx.Node, Any] = field(default_factory=dict)

    def write(self, mask: fx.Node) -> str | None:
        """The program of a boolean mask or of an additive bias, or None when it has none."""
        if mask.meta["val"].dtype != torch.bool:
            ref = self._value(mask)
            if ref is None:
                return None
            added = self._step("aten::add.Tensor", [{"score": 0}, ref])
            return json.dumps({"steps": self.steps, "score": added})
        refs = []
        for term in _terms(mask):
            if self._take_bounds(term):
                continue
            ref = self._value(term)
            if ref is None:
                return None
            refs.append(ref)
        if not refs:
            return ""
        both = refs[0]
        for ref in refs[1:]:
            both = self._step("aten::bitwise_and.Tensor", [both, ref])
        return json.dumps({"steps": self.steps, "mask": both})

    def _take_bounds(self, term: fx.Node) -> bool:
        """A term that speaks of the distance of query and key alone narrows the bounds."""
        proof = where_of(term)
        if proof is None:
            return False
        low, high = self.bounds
        for condition in proof.conditions:
            bound = _distance(condition)
            if bound is None:
                return False
            low, high = max(low, bound[0]), min(high, bound[1])
        self.bounds = (low, high)
        return True

    def _step(self, name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> dict[str, int]:
        self.steps.append([name, list(args), kwargs or {}])
        return {"step": len(self.steps) - 1}

    def _leaf(self, node: fx.Node) -> int:
        if node not in self.leaves:
            self.leaves.append(node)
        return self.leaves.index(node)

    def _value(self, node: fx.Node) -> Any:
        """The reference of a tensor, its steps written; None when it is not pointwise in queries and keys."""
        if node not in self._refs:
            val = node.meta.get("val")
            if not isinstance(val, torch.Tensor):
                return None
            self._refs[node] = {"leaf": self._leaf(node)} if _is_leaf(val) else self._call(node)
        return self._refs[node]

    def _call(self, node: fx.Node) -> Any:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return None
        name = target._schema.name
        source = node.args[0] if node.args else None
        if name in _COPIES or (name in ("aten::expand", "aten::unsqueeze", "aten::slice") and _keeps_block(node)):
            return self._value(source)
        if name in _CASTS:
            inner = self._value(source)
            dtype = {"dtype": str(node.meta["val"].dtype).removeprefix("torch.")}
            return None if inner is None else self._step("aten::to.dtype", [inner, dtype])
        if name in _FILLED:
            return self._constant(node, name)
        if name == "aten::tril" or name == "aten::triu":
            return self._triangle(node, name)
        if name == "aten::index":
            return self._table(node)
        if is_elementwise(target):
            args = [self._operand(arg) for arg in node.args]
            kwargs = {key: self._operand(arg) for key, arg in node.kwargs.items()}
            if any(arg is _UNKNOWN for arg in [*args, *kwargs.values()]):
                return None
            return self._step(_full_name(target), args, kwargs)
        return None

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            if isinstance(arg.meta.get("val"), (torch.SymInt, int)) and not isinstance(arg.meta["val"], bool):
                self.numbers.append(arg)
                return {"number": len(self.numbers) - 1}
            ref = self._value(arg)
            return _UNKNOWN if ref is None else ref
        if isinstance(arg, torch.dtype):
            return {"dtype": str(arg).removeprefix("torch.")}
        return arg if arg is None or isinstance(arg, (bool, int, float, str)) else _UNKNOWN

    def _constant(self, node: fx.Node, name: str) -> Any:
        """A tensor filled with one number, as one element that is broadcast."""
        value = _FILLED[name]
        fill = value if value is not None else node.args[-1]
        if not isinstance(fill, (bool, int, float)):
            return None
        dtype = {"dtype": str(node.meta["val"].dtype).removeprefix("torch.")}
        return self._step("aten::full", [[1, 1], fill], {"dtype": dtype})

    def _triangle(self, node: fx.Node, name: str) -> Any:
        diagonal = node.args[1] if len(node.args) > 1 else 0
        inner = self._value(node.args[0])
        if inner is None or not isinstance(diagonal, int):
            return None
        distance = self._step("aten::sub.Tensor", [{"index": "key"}, {"index": "query"}])
        compare = "aten::le.Scalar" if name == "aten::tril" else "aten::ge.Scalar"
        kept = self._step(compare, [distance, diagonal])
        if node.meta["val"].dtype == torch.bool:
            return self._step("aten::bitwise_and.Tensor", [inner, kept])
        return self._step("aten::where.self", [kept, inner, self._step("aten::zeros_like", [inner])])

    def _table(self, node: fx.Node) -> Any:
        """``table[i, j]`` with an index for every dimension is pointwise in the indices."""
        table, indices = node.args
        if not isinstance(table, fx.Node) or table.meta["val"].dim() != len(indices):
            return None
        refs = [self._operand(index) if isinstance(index, fx.Node) else _UNKNOWN for index in indices]
        if any(ref is _UNKNOWN for ref in refs):
            return None
        return self._step("aten::index.Tensor", [{"whole": self._leaf(table)}, refs])


_UNKNOWN = object()


def _full_name(target: Any) -> str:
    overload = target._overloadname
    return target._schema.name + ("" if overload == "default" else f".{overload}")


def _is_leaf(val: torch.Tensor) -> bool:
    """It varies along queries or keys alone: one of the last two dimensions is 1 for certain."""
    return val.dim() < 2 or known_equal(val.shape[-1], 1) or known_equal(val.shape[-2], 1)


def _keeps_block(node: fx.Node) -> bool:
    """A view that leaves the last two dimensions what they are and only adds or stretches others."""
    source, result = node.args[0].meta["val"].shape, node.meta["val"].shape
    if len(source) < 2 or len(source) > len(result):
        return False
    if not all(map(known_equal, source[-2:], result[-2:])):
        return False
    if node.target._schema.name == "aten::unsqueeze":
        return node.args[1] % len(result) == 0
    if node.target._schema.name == "aten::slice":
        return all(map(known_equal, source, result))
    return True


def _terms(mask: fx.Node) -> list[fx.Node]:
    """The terms of a conjunction, seen through boolean casts, copies and views that keep the block."""
    name = getattr(getattr(mask.target, "_schema", None), "name", "")
    source = mask.args[0] if mask.args and isinstance(mask.args[0], fx.Node) else None
    if name in _AND and all(isinstance(x, fx.Node) and x.meta["val"].dtype == torch.bool for x in mask.args[:2]):
        return [term for part in mask.args[:2] for term in _terms(part)]
    is_bool = source is not None and getattr(source.meta.get("val"), "dtype", None) == torch.bool
    if is_bool and name in _CASTS + _COPIES:
        return _terms(source)
    if is_bool and name in ("aten::expand", "aten::unsqueeze", "aten::slice") and _keeps_block(mask):
        return _terms(source)
    return [mask]


def _distance(condition: Affine) -> tuple[int, int] | None:
    """What ``condition >= 0`` says of ``query - key``: a range; None when it speaks of something else."""
    coefficients, constant = dict(condition.coefficients), condition.constant
    if not isinstance(constant, int):
        return None
    if not coefficients:
        return (-_UNBOUNDED, _UNBOUNDED) if constant >= 0 else (1, 0)
    if coefficients == {-2: 1, -1: -1}:
        return -constant, _UNBOUNDED
    if coefficients == {-2: -1, -1: 1}:
        return -_UNBOUNDED, constant
    return None


def _replace(gm: fx.GraphModule, node: fx.Node, program: str, writer: _Writer, fake_mode: Any) -> None:
    q, k, v = node.args[:3]
    scale = _argument(node, 6, "scale", None)
    scale = q.meta["val"].shape[-1] ** -0.5 if scale is None else scale
    kept = kept_meta(node)
    val = node.meta["val"]
    with gm.graph.inserting_before(node):
        # Under autocast the operator casts its operands; ours takes them as they are.
        q, k, v = (_in_dtype(gm, x, val.dtype, kept, fake_mode) for x in (q, k, v))
        sizes = [_size(gm, x, kept) for x in (q, k)]
        args = (q, k, v, list(writer.leaves), list(writer.numbers), program, float(scale), [0, 0, 0, 0], sizes,
                list(writer.bounds))  # fmt: skip
        made = gm.graph.call_function(torch.ops.autosp.block_attention.default, args)
        out = gm.graph.call_function(operator.getitem, (made, 0))
    wide = torch.float64 if val.dtype == torch.float64 else torch.float32
    with fake_mode:
        made.meta = {**kept, "val": (val, val.new_empty(val.shape[:-1], dtype=wide))}
    out.meta = {**kept, "val": val}
    node.replace_all_uses_with(out)
    gm.graph.erase_node(node)


def _in_dtype(gm: fx.GraphModule, x: fx.Node, dtype: torch.dtype, kept: dict[str, Any], fake_mode: Any) -> fx.Node:
    if x.meta["val"].dtype == dtype:
        return x
    node = gm.graph.call_function(aten.to.dtype, (x, dtype))
    with fake_mode:
        node.meta = {**kept, "val": x.meta["val"].to(dtype)}
    return node


def _size(gm: fx.GraphModule, x: fx.Node, kept: dict[str, Any]) -> Any:
    """The number of tokens of ``x``, as a number or as a node that has it."""
    size = x.meta["val"].shape[-2]
    if isinstance(size, int):
        return size
    node = gm.graph.call_function(aten.sym_size.int, (x, 2))
    node.meta = {**kept, "val": size}
    return node
