"""A pass on Inductor's graphs: matrix products run in the order in which they stand.

The parts of a tiled stretch stand one after another, each with its recomputation, its gradients of activations and of
weights. Inductor orders by its own estimate of memory and by what the next collective needs, and computes wide values
of all parts first, and nothing is gained. Each product is therefore told to wait for the one before.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import fx
from torch.utils._ordered_set import OrderedSet

from .gradient_sums import PassWithOthers

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def keep_products_in_order(graph: fx.Graph) -> int:
    """Have each matrix product of ``graph`` wait for the one before it, in place.

    Returns:
        The number of products that wait.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    products = [node for node in graph.nodes if node.target in PRODUCTS]
    waits = {later: OrderedSet([earlier]) for earlier, later in pairwise(products)}
    preserve_node_ordering(graph, waits)
    return len(waits)


class KeepProductsInOrder(PassWithOthers):
    """``keep_products_in_order`` as Inductor takes passes, after the others, which see the products as they are."""

    file = __file__

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.others:
            each(graph)
        keep_products_in_order(graph)
