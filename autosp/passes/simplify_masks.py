"""Attention masks that are provably causal become ``is_causal``, so that no S x S tensor is made."""

from __future__ import annotations

import torch
from torch import fx

from ..layout.index_expr import Affine, Where, where_of
from ..layout.placement import known_equal

aten = torch.ops.aten

_CAUSAL = Affine.of({-2: 1, -1: -1}, 0)


def simplify_masks_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrites: ``sdpa(q, k, v, mask)`` with ``mask[..., i, j] = (j <= i)`` -> ``sdpa(q, k, v, is_causal=True)``.

    Requires: a captured graph.
    Ensures: a mask that comparisons of positions prove to be causal, and nothing else, is gone; a mask that they
    prove to hide nothing is gone too. What is not proven keeps its exact mask.
    Refuses: nothing.
    """
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        mask = _argument(node, 3, "attn_mask")
        if not isinstance(mask, fx.Node) or _argument(node, 5, "is_causal"):
            continue
        proof = _proven(mask)
        if proof is None:
            continue
        if not proof.conditions:
            _replace(node, is_causal=False)
        elif _is_causal(proof, node):
            _replace(node, is_causal=True)
        else:
            continue
        changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return gm


def _argument(node: fx.Node, index: int, name: str) -> object:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _proven(mask: fx.Node) -> Where | None:
    """The conditions of a boolean mask, or of an additive mask made from one (0 where true, the least number
    elsewhere).
    """
    value = mask.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype == torch.bool:
        return where_of(mask)
    return None


def _is_causal(proof: Where, node: fx.Node) -> bool:
    """Only ``key <= query``, and as many keys as queries: torch aligns ``is_causal`` at the top left."""
    query, key = node.args[0].meta["val"], node.args[1].meta["val"]
    conditions = [c for c in proof.conditions if not _always(c)]
    same_length = known_equal(query.shape[-2], key.shape[-2])
    return same_length and bool(conditions) and all(c == _CAUSAL for c in conditions)


def _always(condition: Affine) -> bool:
    """A condition without indices that holds for any size."""
    return not condition.coefficients and isinstance(condition.constant, int) and condition.constant >= 0


def _replace(node: fx.Node, *, is_causal: bool) -> None:
    args = list(node.args)
    kwargs = dict(node.kwargs)
    if len(args) > 3:
        args[3] = None
    kwargs.pop("attn_mask", None)
    if len(args) > 5:
        args[5] = is_causal
    else:
        kwargs["is_causal"] = is_causal
    node.args, node.kwargs = tuple(args), kwargs
