"""The results of a ``torch.autograd.Function`` as Dynamo traced it.

torch 2.11 has its forward body give everything that it computes: sizes, detached arguments, what a kernel gives beside
its result. Its backward body takes a gradient of each, which it does not read. torch 2.13 gives the results alone.
"""

from __future__ import annotations

import copy
import itertools
import operator
from typing import Any, cast

from torch import fx


def results_used(node: fx.Node) -> set[int] | None:
    """Which results of a call are taken out of it by their number; None where it is used as a whole too."""
    if all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users):
        return {cast(int, user.args[1]) for user in node.users if user.users}
    return None


def without_intermediates(
    forward: fx.GraphModule, backward: fx.GraphModule, settings: dict[str, Any], used: set[int] | None
) -> tuple[fx.GraphModule, fx.GraphModule, dict[str, Any], list[bool]]:
    """The bodies without the results that nobody uses and whose gradient the backward does not read.

    Args:
        forward: gives ``(results, values for the backward)``.
        backward: takes gradients of the results, then those values.
        settings: keywords of torch's operator; ``non_differentiable_idx`` has numbers of results.
        used: numbers of the results that are used; None for all.

    Returns:
        Both bodies, the settings, and for each result whether it is left. The bodies given are not changed.
    """
    results, _ = cast(Any, forward.graph.output_node().args[0])
    count = len(results) if isinstance(results, (list, tuple)) else 1
    left = [True] * count
    if used is not None and count > 1:
        gradients = list(backward.graph.find_nodes(op="placeholder"))[:count]
        left = [i in used or bool(gradient.users) for i, gradient in enumerate(gradients)]
    if all(left) or not any(left):  # a call that nobody reads stays as it is
        return forward, backward, settings, [True] * count
    forward, backward = (fx.GraphModule(body, copy.deepcopy(body.graph)) for body in (forward, backward))
    results, saved = cast(Any, forward.graph.output_node().args[0])
    forward.graph.output_node().args = ((tuple(itertools.compress(results, left)), saved),)
    for gradient, is_left in zip(list(backward.graph.find_nodes(op="placeholder")), left, strict=False):
        if not is_left:
            backward.graph.erase_node(gradient)
    forward.recompile()
    backward.recompile()
    if "non_differentiable_idx" in settings:
        known = [sum(left[:i]) for i in settings["non_differentiable_idx"] if left[i]]
        settings = {**settings, "non_differentiable_idx": known}
    return forward, backward, settings, left
