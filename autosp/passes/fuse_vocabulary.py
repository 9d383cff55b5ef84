"""Formulas over a sharded vocabulary that a model writes out become the operators that read the logits once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..layout.nodes import argument, is_barred, keeps_last_dim
from ..layout.placement import known_equal
from ..location import kept_meta

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_CASTS = (aten.to.dtype, aten._to_copy.default)
# What may choose, merge or copy rows between the cast of logits and their loss.
_ROWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.slice.Tensor,
    aten.contiguous.default, aten.clone.default,
)  # fmt: skip
_NONE, _MEAN, _SUM = 0, 1, 2
# No id of a vocabulary and no label that a model ignores.
_NOTHING_IGNORED = -(2**62)
_WHOLE = [-1, -1, -1]


def fuse_vocabulary_pass(gm: fx.GraphModule, *, fake_mode: Any) -> fx.GraphModule:
    """Rewrites, of logits ``z`` that a vocabulary-parallel head makes, the sums being over the vocabulary:

    - ``gather(log_softmax(z), ids)`` -> the log-probabilities of ``vocab_row_stats(z, ids)``
    - ``sum(softmax(z) * log_softmax(z))`` and ``logsumexp(z) - sum(softmax(z) * z)`` -> its entropy
    - ``sum(p * (log p - log q))``, ``kl_div(log q, log p or p)`` -> ``vocab_kl``
    - ``cross_entropy(float(z), t)``, ``logsumexp(float(z))`` of half-precision ``z`` -> the same of ``z`` itself, views
      and copies of rows between the cast and the loss included

    Requires: a functional graph, the vocabulary operators registered.
    Ensures: the same values, of the same dtypes; the operators read whole logits, as what they replace did. Nothing
    is moved out of a region (no_grad, autocast) or over a write.
    Refuses: nothing; a formula of another form stays as it is, and is right, with more memory.
    """
    logits = _derived(gm)
    if not logits:
        return gm
    changed = False
    for node in list(gm.graph.nodes):
        make = _formula(node, logits) if node.op == "call_function" else None
        if make is None:
            continue
        with gm.graph.inserting_before(node):
            result = make(_Builder(gm.graph, fake_mode, node))
        node.replace_all_uses_with(result)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.graph.eliminate_dead_code(lambda n: n.is_impure() or n.meta.get("val") is None)
        gm.recompile()
    return gm


def has_vocabulary_head(gm: fx.GraphModule) -> bool:
    """Whether the graph holds logits of a vocabulary-parallel head."""
    return any(node.target is torch.ops.autosp.vocab_linear.default for node in gm.graph.nodes)


def _derived(gm: fx.GraphModule) -> set[fx.Node]:
    """What is computed from the logits of a vocabulary-parallel head and still as wide as they are."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.target is torch.ops.autosp.vocab_linear.default:
            found.add(node)
        elif isinstance(value, torch.Tensor) and value.dim():
            sources = [n for n in node.all_input_nodes if n in found]
            if any(known_equal(n.meta["val"].shape[-1], value.shape[-1]) for n in sources):
                found.add(node)
    return found


class _Builder:
    """Adds nodes in front of ``site``, each with its value."""

    def __init__(self, graph: fx.Graph, fake_mode: Any, site: fx.Node) -> None:
        self.graph, self.fake_mode, self.site = graph, fake_mode, site

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        with self.fake_mode, torch.no_grad():
            node.meta["val"] = target(*values, **kwargs)
        node.meta.update(kept_meta(self.site))
        return node

    def stats(self, z: fx.Node, wanted: int, ids: fx.Node | None = None, ignore: int = _NOTHING_IGNORED, **flags: bool):
        """Result number ``wanted`` of ``vocab_row_stats`` of whole logits."""
        if ids is None:
            sizes = [
                size if isinstance(size, int) else self(aten.sym_size.int, z, dim)
                for dim, size in enumerate(z.meta["val"].shape[:-1])
            ]
            ids = self(aten.new_empty.default, z, [*sizes, 0], dtype=torch.int64)
        asked = [flags.get(name, False) for name in ("entropy", "mean", "exclude", "skip_ignored", "inplace")]
        stats = torch.ops.autosp.vocab_row_stats.default
        return self(operator.getitem, self(stats, z, ids, None, [1.0, 0.0], _WHOLE, "", ignore, asked), wanted)

    def entropy(self, z: fx.Node) -> fx.Node:
        return self.stats(self.source(z), 2, entropy=True)

    def kl(self, p: fx.Node, q: fx.Node) -> fx.Node:
        """KL(P || Q) of whole logits, one number a row."""
        kl = torch.ops.autosp.vocab_kl.default
        return self(operator.getitem, self(kl, self.source(p), self.source(q), None, [1.0, 0.0], _WHOLE, ""), 0)

    def source(self, z: fx.Node) -> fx.Node:
        """``z``, or the half-precision logits that it is the cast of."""
        found = _before_cast(z, self.site)
        if found is None:
            return z
        half, rows = found
        for node in rows:
            half = self(node.target, half, *node.args[1:], **node.kwargs)
        return half

    def finished(self, rows: fx.Node, keepdim: bool = False) -> fx.Node:
        """``rows`` in the dtype of the site, with its last dimension of size 1."""
        dtype = self.site.meta["val"].dtype
        rows = rows if rows.meta["val"].dtype == dtype else self(aten.to.dtype, rows, dtype)
        return self(aten.unsqueeze.default, rows, -1) if keepdim else rows


_Make = Callable[[_Builder], fx.Node]


def _formula(node: fx.Node, logits: set[fx.Node]) -> _Make | None:
    for match in (_log_probability, _entropy_sum, _entropy_difference, _divergence_sum, _kl_div, _loss, _log_sum):
        make = match(node, logits)
        if make is not None:
            return make
    return None


def _is_last(node: fx.Node, dim: Any) -> bool:
    ndim = node.meta["val"].dim()
    return isinstance(dim, int) and ndim > 0 and dim % ndim == ndim - 1


def _softmax_source(node: Any, log: bool, site: fx.Node) -> fx.Node | None:
    """``z`` of ``log_softmax(z, -1)``, or else of ``softmax(z, -1)`` or ``exp(log_softmax(z, -1))``, where those may be
    computed at ``site``."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or is_barred(node, site):
        return None
    if not log and node.target is aten.exp.default:
        return _softmax_source(node.args[0], True, site)
    target = aten.log_softmax.int if log else aten.softmax.int
    if node.target is not target or not _is_last(node, argument(node, 1, "dim", None)):
        return None
    return node.args[0]


def _before_cast(z: fx.Node, site: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """Half-precision logits of which ``z`` is the cast to fp32, and what chose rows of that cast: the operators compute
    in fp32 anyway."""
    rows: list[fx.Node] = []
    while z.target in _ROWS and isinstance(z.args[0], fx.Node) and not is_barred(z, site) and keeps_last_dim(z):
        rows.insert(0, z)
        z = z.args[0]
    if z.target not in _CASTS or not isinstance(z.args[0], fx.Node) or is_barred(z, site):
        return None
    source = z.args[0]
    half = source.meta["val"].dtype in _HALF and z.meta["val"].dtype == torch.float32
    return (source, rows) if half else None


def _one_dim(node: fx.Node) -> bool:
    """The call reduces the last dimension alone."""
    dims = argument(node, 1, "dim", None)
    return isinstance(dims, (list, tuple)) and len(dims) == 1 and _is_last(node.args[0], dims[0])


def _summed(node: Any, site: fx.Node) -> tuple[fx.Node, bool] | None:
    """``(x, keepdim)`` of ``sum(x, -1)``, in whose place ``x`` may be computed."""
    if not isinstance(node, fx.Node) or node.target is not aten.sum.dim_IntList or not _one_dim(node):
        return None
    x = node.args[0]
    if is_barred(x, site) or node is not site and is_barred(node, site):
        return None
    return x, bool(argument(node, 2, "keepdim", False))


def _factors(node: fx.Node) -> tuple[tuple[Any, Any], ...]:
    if node.target is not aten.mul.Tensor:
        return ()
    return (node.args[0], node.args[1]), (node.args[1], node.args[0])


def _same_rows(a: fx.Node, b: fx.Node, dims: slice = slice(None)) -> bool:
    first, second = a.meta["val"].shape[dims], b.meta["val"].shape[dims]
    return len(first) == len(second) and all(map(known_equal, first, second))


def _log_probability(node: fx.Node, logits: set[fx.Node]) -> _Make | None:
    if node.target is not aten.gather.default or not _is_last(node, node.args[1]):
        return None
    z, ids = _softmax_source(node.args[0], True, node), node.args[2]
    if z not in logits or ids.meta["val"].dtype != torch.int64 or not _same_rows(z, ids, slice(-1)):
        return None
    return lambda add: add.finished(add.stats(add.source(z), 0, ids))


def _entropy_sum(node: fx.Node, logits: set[fx.Node]) -> _Make | None:
    """``sum(p log p)``: minus the entropy."""
    summed = _summed(node, node)
    if summed is None:
        return None
    term, keepdim = summed
    sources = [
        z
        for p, logp in _factors(term)
        if (z := _softmax_source(logp, True, node)) in logits and _softmax_source(p, False, node) is z
    ]
    if not sources:
        return None
    return lambda add: add.finished(add(aten.neg.default, add.entropy(sources[0])), keepdim)


def _entropy_difference(node: fx.Node, logits: set[fx.Node]) -> _Make | None:
    """``logsumexp(z) - sum(p z)``: the entropy."""
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    lse, total = node.args
    summed = _summed(total, node)
    if summed is None or not isinstance(lse, fx.Node) or lse.target is not aten.logsumexp.default:
        return None
    z, keepdim = lse.args[0], bool(argument(lse, 2, "keepdim", False))
    if z not in logits or not _one_dim(lse) or keepdim != summed[1] or is_barred(lse, node):
        return None
    for p, other in _factors(summed[0]):
        if other is z and _softmax_source(p, False, node) is z:
            return lambda add: add.finished(add.entropy(z), keepdim)
    return None


def _pair(p: Any, logp: Any, logq: Any, site: fx.Node, logits: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """``(z_p, z_q)`` of which one at least is sharded; of ``p`` and ``logp`` one may be None."""
    zs = {_softmax_source(x, log, site) for x, log in ((p, False), (logp, True)) if x is not None}
    zq = _softmax_source(logq, True, site)
    if len(zs) != 1 or None in zs or zq is None:
        return None
    zp = zs.pop()
    return (zp, zq) if (zp in logits or zq in logits) and _same_rows(zp, zq) else None


def _divergence_sum(node: fx.Node, logits: set[fx.Node]) -> _Make | None:
    """``sum(p (log p - log q))``, or ``sum(kl_div(log q, p or log p))``."""
    summed = _summed(node, node)
    if summed is None:
        return None
    term, keepdim = summed
    pair = _kl_terms(term, node, logits, (_NONE,))
    for p, difference in _factors(term):
        is_plain = isinstance(difference, fx.Node) and difference.target is aten.sub.Tensor and not difference.kwargs
        if pair is None and is_plain and not is_barred(difference, node):
            pair = _pair(p, *difference.args, node, logits)
    return None if pair is None else lambda add: add.finished(add.kl(*pair), keepdim)


def _kl_terms(node: fx.Node, site: fx.Node, logits: set[fx.Node], reductions: tuple[int, ...]):
    if node.target is not aten.kl_div.default or argument(node, 2, "reduction", _MEAN) not in reductions:
        return None
    logq, target = node.args[:2]
    is_log = bool(argument(node, 3, "log_target", False))
    return _pair(None if is_log else target, target if is_log else None, logq, site, logits)


def _kl_div(node: fx.Node, logits: set[fx.Node]) -> _Make | None:
    pair = _kl_terms(node, node, logits, (_MEAN, _SUM))
    if pair is None:
        return None
    size = pair[0].meta["val"].shape[-1]

    def make(add: _Builder) -> fx.Node:
        rows = add.kl(*pair)
        if argument(node, 2, "reduction", _MEAN) == _SUM:
            return add.finished(add(aten.sum.default, rows))
        return add.finished(add(aten.div.Tensor, add(aten.mean.default, rows), size))

    return make


def _loss(node: fx.Node, logits: set[fx.Node]) -> _Make | None:
    """Cross entropy of logits that were cast to fp32: the copy is not made."""
    if node.target is not aten.cross_entropy_loss.default or node.args[0] not in logits:
        return None
    z, target = node.args[0], node.args[1]
    if _before_cast(z, node) is None or z.meta["val"].dim() != 2 or target.meta["val"].dtype.is_floating_point:
        return None
    if argument(node, 2, "weight", None) is not None:
        return None
    reduction, ignore = argument(node, 3, "reduction", _MEAN), argument(node, 4, "ignore_index", -100)
    smoothing = float(argument(node, 5, "label_smoothing", 0.0))

    def make(add: _Builder) -> fx.Node:
        flags = dict(mean=smoothing > 0, skip_ignored=True)
        losses = add(aten.neg.default, add.stats(add.source(z), 0, target, ignore, **flags))
        if smoothing > 0:
            mean = add(operator.getitem, losses.args[0].args[0], 3)
            nll = add(aten.mul.Tensor, losses, 1.0 - smoothing)
            losses = add(aten.sub.Tensor, nll, add(aten.mul.Tensor, mean, smoothing))
        if reduction == _NONE:
            return add.finished(losses)
        total = add(aten.sum.default, losses)
        if reduction == _MEAN:
            count = add(aten.sum.default, add(aten.ne.Scalar, target, ignore))
            total = add(aten.div.Tensor, total, add(aten.to.dtype, count, losses.meta["val"].dtype))
        return add.finished(total)

    return make


def _log_sum(node: fx.Node, logits: set[fx.Node]) -> _Make | None:
    """The log-sum-exp of logits that were cast to fp32: the copy is not made."""
    if node.target is not aten.logsumexp.default or node.args[0] not in logits or not _one_dim(node):
        return None
    if _before_cast(node.args[0], node) is None:
        return None
    return lambda add: add.finished(add.stats(add.source(node.args[0]), 1), bool(argument(node, 2, "keepdim", False)))
