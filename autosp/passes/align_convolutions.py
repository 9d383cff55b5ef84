"""Convolutions along the sequence in the forms in which causal ones are written, as one operator that keeps tokens in
place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..layout.placement import known_equal
from ..location import kept_meta

aten = torch.ops.aten
CONV = aten.conv1d.default
_PADS = (aten.constant_pad_nd.default, aten.pad.default)


def align_convolutions_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrites: ``conv1d(x, w, padding=p)[..., :S]`` and ``conv1d(pad(x, (l, r)), w)`` -> ``token_conv1d(x, w)``.

    Requires: a captured graph.
    Ensures: a convolution of stride 1 whose result has as many tokens as its input is one node.
    Refuses: nothing; other convolutions stay as they are.
    """
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=CONV):
        found = _sliced(node) or _padded(node)
        if found is None:
            continue
        x, left, replaced = found
        _, weight, bias, _, _, dilation, groups = _arguments(node)
        for old in replaced:
            with gm.graph.inserting_before(old):
                args = (x, weight, bias, left, dilation, groups)
                new = gm.graph.call_function(torch.ops.autosp.token_conv1d.default, args)
            new.meta = {**kept_meta(old), "val": old.meta["val"]}
            old.replace_all_uses_with(new)
        changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return gm


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Input, weight, bias, stride, padding, dilation, groups; lists of one number as the number."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    defaults = (None, None, None, 1, 0, 1, 1)
    values = [
        node.args[i] if len(node.args) > i else node.kwargs.get(name, default)
        for i, (name, default) in enumerate(zip(names, defaults, strict=True))
    ]
    return tuple(value[0] if isinstance(value, (list, tuple)) else value for value in values)


def _sliced(node: fx.Node) -> tuple[fx.Node, int, list[fx.Node]] | None:
    """Padding on both sides of which the result keeps the first tokens: causal when it pads what the kernel reaches."""
    x, weight, _, stride, padding, dilation, _ = _arguments(node)
    reach = int(weight.meta["val"].shape[-1] - 1) * dilation
    length = x.meta["val"].shape[-1]
    slices = list(node.users)
    if stride != 1 or padding > reach or 2 * padding == reach or not slices:
        return None
    if not all(_keeps_first(user, length) for user in slices):
        return None
    return x, padding, slices


def _keeps_first(node: fx.Node, length: Any) -> bool:
    if node.target is not aten.slice.Tensor:
        return False
    ndim = node.meta["val"].dim()
    dim = node.args[1] if len(node.args) > 1 else 0
    start = node.args[2] if len(node.args) > 2 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return (
        dim % ndim == ndim - 1 and start in (None, 0) and step == 1 and known_equal(node.meta["val"].shape[-1], length)
    )


def _padded(node: fx.Node) -> tuple[fx.Node, int, list[fx.Node]] | None:
    """Zeros added before the convolution, as many as its kernel reaches."""
    x, weight, _, stride, padding, dilation, _ = _arguments(node)
    if x.target not in _PADS or stride != 1 or padding != 0:
        return None
    pads = list(x.args[1])
    mode = x.args[2] if x.target is aten.pad.default and len(x.args) > 2 else "constant"
    value = (x.args[3] if len(x.args) > 3 else None) if x.target is aten.pad.default else (*x.args, 0)[2]
    reach = int(weight.meta["val"].shape[-1] - 1) * dilation
    zeros = mode == "constant" and not value and x.kwargs.get("value", 0) in (0, None)
    if not zeros or len(pads) != 2 or not all(isinstance(p, int) and p >= 0 for p in pads) or sum(pads) != reach:
        return None
    return x.args[0], pads[0], [node]
