"""Bytes that attention exchanges: those of the key/value heads as they are, whatever a model does to repeat them."""

from __future__ import annotations

from typing import Any

import pool
import pytest
import torch
import toys
from torch import nn
from torch.nn import functional as F

ROWS, LENGTH, SIZE = 2, 12, 4
FORMS = ("grouped", "expanded", "interleaved", "early")


class _Compiled(Exception):
    """Ends a compilation once its graph has been looked at."""


class Grouped(nn.Module):
    """Attention with fewer key/value heads, repeated by the operator, by ``repeat_kv``, by ``repeat_interleave``, or
    before heads and tokens are transposed.
    """

    def __init__(self, form: str, heads: int, key_heads: int) -> None:
        super().__init__()
        self.toy = toys.build(heads=heads, kv_heads=key_heads, size=SIZE)
        self.form, self.heads, self.key_heads = form, heads, key_heads

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        times = self.heads // self.key_heads
        if self.form == "interleaved":
            return x.repeat_interleave(times, dim=1)
        rows, heads, length, size = x.shape
        return x[:, :, None].expand(rows, heads, times, length, size).reshape(rows, heads * times, length, size)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        layers, x = self.toy.attention, self.toy.embed(input_ids)
        q, k, v = (f(x).view(ROWS, LENGTH, -1, SIZE).transpose(1, 2) for f in (layers.q, layers.k, layers.v))
        if self.form == "early":
            k, v = (f(x).view(ROWS, LENGTH, -1, SIZE) for f in (layers.k, layers.v))
            times = self.heads // self.key_heads
            k, v = (y.repeat_interleave(times, dim=2).transpose(1, 2) for y in (k, v))
        elif self.form != "grouped":
            k, v = self.repeated(k), self.repeated(v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.form == "grouped")
        logits = self.toy.head(layers.o(out.transpose(1, 2).flatten(2)))
        return toys.pad_slice(self.toy, logits, labels)


def sent(form: str, heads: int, key_heads: int, world: int, rank: int) -> list[list[int]]:
    """Elements that one rank sends to each in every exchange of its program."""
    import autosp
    from autosp import backend, mesh

    found: list[list[int]] = []

    def inspect(gm: Any, examples: list[Any]) -> Any:
        work, _ = backend._partition(gm, examples, mesh.select(None))
        nodes = work.graph.graph.find_nodes(op="call_function", target=torch.ops.autosp.all_to_all.default)
        found.extend(list(node.args[1]) for node in nodes)
        raise _Compiled

    with pool.fake_group(world, rank):
        autosp.initialize({"autosp": {"attention": "ulysses"}})
        torch._dynamo.reset()
        with pytest.raises(Exception, match="_Compiled"):
            model = Grouped(form, heads, key_heads)
            torch.compile(model, backend=inspect, dynamic=False)(**toys.batch(LENGTH, rows=ROWS))
    return found


@pytest.mark.parametrize(
    ("heads", "key_heads", "world", "rank"),
    [
        (7, 1, 3, 1),
        (9, 3, 4, 2),
        *(
            pytest.param(heads, key_heads, world, rank, marks=pytest.mark.slow)
            for heads, key_heads in ((4, 2), (9, 3), (5, 5), (3, 1), (28, 7))
            for world in (2, 3, 4)
            for rank in range(world)
        ),
    ],
)
def test_key_and_value_heads_travel_un_repeated(heads: int, key_heads: int, world: int, rank: int):
    """Rank p needs query heads [p H // P, (p + 1) H // P) and of keys and values those alone that they read."""
    piece = ROWS * (LENGTH // world) * SIZE
    queries = [range(p * heads // world, (p + 1) * heads // world) for p in range(world)]
    keys = [{head // (heads // key_heads) for head in block} for block in queries]
    there = [piece * (len(q) + 2 * len(k)) for q, k in zip(queries, keys, strict=True)]
    back = [piece * len(queries[rank])] * world
    for form in FORMS:
        assert sent(form, heads, key_heads, world, rank) == [there, back], form
