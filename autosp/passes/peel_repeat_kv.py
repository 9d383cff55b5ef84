"""Key and value heads that a model repeats before attention are handed over un-repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..layout.call import bind_arguments
from ..layout.placement import known_equal

aten = torch.ops.aten

_CASTS = (aten.contiguous.default, aten.clone.default)
_JOINS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints)


def peel_repeat_kv_pass(gm: fx.GraphModule, *, where: Callable[[fx.Node], bool] = lambda node: True) -> fx.GraphModule:
    """Rewrites: ``sdpa(q, reshape(expand(unsqueeze(k, 2))), ...)`` -> ``sdpa(q, k, ..., enable_gqa=True)``; likewise
    ``repeat_interleave``, and either of them before heads and tokens are transposed.

    Requires: a captured graph.
    Ensures: the keys and values on the wire are those of the key/value heads, each once.
    Refuses: nothing; keys and values that are not repeated alike, or are attention's of which ``where`` is False, stay
    as they are.
    """
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        key, value = _repeated(node.args[1]), _repeated(node.args[2])
        if key is None or value is None or node.kwargs.get("enable_gqa", False) or not where(node):
            continue
        heads = [x.meta["val"].shape[1] for x in node.args[:3]]
        if not (known_equal(key.heads, value.heads) and known_equal(heads[0], heads[1])):
            continue
        with gm.graph.inserting_before(node):
            node.args = (node.args[0], key.standard(gm.graph), value.standard(gm.graph), *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}
        changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return gm


def has_grouped_kernel(node: fx.Node) -> bool:
    """Whether torch has a fused kernel for attention with fewer key heads than heads: on CUDA FlashAttention alone,
    which takes no mask, no fp32, and heads of one size up to 256 (``native/transformers/cuda/sdp_utils.cpp``).
    """
    out, value = node.meta["val"], node.args[2].meta["val"]
    if out.device.type != "cuda":
        return True
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    sizes = [x.meta["val"].shape[-1] for x in node.args[:3]]
    is_one_size = all(known_equal(size, value.shape[-1]) for size in sizes) and isinstance(sizes[0], int)
    return mask is None and out.dtype in (torch.float16, torch.bfloat16) and is_one_size and sizes[0] <= 256


@dataclass(frozen=True)
class _Repeated:
    """What is repeated: ``[batch, heads, tokens, size]``, or ``[batch, tokens, heads, size]`` where it is transposed
    afterwards.
    """

    source: fx.Node
    transposed: bool

    @property
    def heads(self) -> Any:
        return self.source.meta["val"].shape[2 if self.transposed else 1]

    def standard(self, graph: fx.Graph) -> fx.Node:
        if not self.transposed:
            return self.source
        node = graph.call_function(aten.transpose.int, (self.source, 1, 2))
        node.meta = {**self.source.meta, "val": self.source.meta["val"].transpose(1, 2)}
        return node


def _repeated(node: fx.Node) -> _Repeated | None:
    """What ``node`` repeats each head of ``n`` times in place; None where it does not.

    ``repeat_interleave`` does so. So does a new dimension behind the heads that is stretched to ``n`` and joined with
    them: head ``h`` of the result is head ``h // n`` of the source, which is how grouped attention reads them.
    """
    node = _uncast(node)
    transposed = node.target is aten.transpose.int and {dim % 4 for dim in node.args[1:]} == {1, 2}
    if transposed:
        node = _uncast(node.args[0])
    at = 3 if transposed else 2
    if node.target is aten.repeat_interleave.self_int:
        dim = bind_arguments(node)["dim"]
        is_by_head = dim is not None and node.meta["val"].dim() == 4 and dim % 4 == at - 1
        return _Repeated(node.args[0], transposed) if is_by_head else None
    if node.target not in _JOINS:
        return None
    result, stretched = node.meta["val"].shape, _uncast(node.args[0])
    if stretched.target is not aten.expand.default:
        return None
    wide, source = stretched.meta["val"].shape, stretched.args[0]
    while source.target is aten.slice.Tensor and _is_whole_slice(source):
        source = source.args[0]
    if source.target is not aten.unsqueeze.default or len(wide) != 5 or len(result) != 4:
        return None
    k = source.args[0]
    if source.args[1] % 5 != at:
        return None
    before, after = k.meta["val"].shape[: at - 1], k.meta["val"].shape[at:]
    heads, times = k.meta["val"].shape[at - 1], wide[at]
    joined, kept = (*before, heads * times, *after), (*before, heads, times, *after)
    if all(map(known_equal, result, joined)) and all(map(known_equal, wide, kept)):
        return _Repeated(k, transposed)
    return None


def _uncast(node: fx.Node) -> fx.Node:
    while node.target in _CASTS:
        node = node.args[0]
    return node


def _is_whole_slice(node: fx.Node) -> bool:
    source, result = node.args[0].meta["val"].shape, node.meta["val"].shape
    return all(map(known_equal, source, result))
