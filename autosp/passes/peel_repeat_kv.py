"""Key and value heads that a model repeats before attention are handed over un-repeated."""

from __future__ import annotations

import torch
from torch import fx

from ..layout.placement import known_equal

aten = torch.ops.aten

_CASTS = (aten.contiguous.default, aten.clone.default)


def peel_repeat_kv_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrites: ``sdpa(q, reshape(expand(unsqueeze(k, 2))), ...)`` -> ``sdpa(q, k, ..., enable_gqa=True)``.

    Requires: a captured graph.
    Ensures: the keys and values on the wire are those of the key/value heads, each once.
    Refuses: nothing; keys and values that are not repeated alike stay as they are.
    """
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        key, value = peeled(node.args[1]), peeled(node.args[2])
        if key is None or value is None or node.kwargs.get("enable_gqa", False):
            continue
        if not known_equal(key.meta["val"].shape[1], value.meta["val"].shape[1]):
            continue
        node.args = (node.args[0], key, value, *node.args[3:])
        node.kwargs = {**node.kwargs, "enable_gqa": True}
        changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return gm


def peeled(node: fx.Node) -> fx.Node | None:
    """``k`` of ``[B, H, S, D]`` when ``node`` repeats each of its heads ``n`` times in place; None otherwise.

    The heads are repeated when a new dimension behind the heads is stretched to ``n`` and joined with them: head
    ``h`` of the result is head ``h // n`` of ``k``, which is how grouped attention reads them.
    """
    while node.target in _CASTS:
        node = node.args[0]
    if node.target not in (aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    result, stretched = node.meta["val"].shape, node.args[0]
    while stretched.target in _CASTS:
        stretched = stretched.args[0]
    if stretched.target is not aten.expand.default:
        return None
    wide, source = stretched.meta["val"].shape, stretched.args[0]
    while source.target is aten.slice.Tensor and _is_whole_slice(source):
        source = source.args[0]
    if source.target is not aten.unsqueeze.default or len(wide) != 5 or source.args[1] % 5 != 2 or len(result) != 4:
        return None
    k = source.args[0]
    batch, heads, tokens, size = k.meta["val"].shape
    joined = (batch, heads * wide[2], tokens, size)
    kept = (batch, heads, wide[2], tokens, size)
    if all(map(known_equal, result, joined)) and all(map(known_equal, wide, kept)):
        return k
    return None


def _is_whole_slice(node: fx.Node) -> bool:
    source, result = node.args[0].meta["val"].shape, node.meta["val"].shape
    return all(map(known_equal, source, result))
