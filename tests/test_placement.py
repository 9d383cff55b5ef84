"""Cuts, windows and factors against brute force, in one process."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from autosp.layout.axis import Axis
from autosp.layout.exact_division import _reduced
from autosp.layout.placement import REPLICATE, Partial, Shard, map_view, same_placement, shard_of_dim


def local_part(axis: Axis, whole: torch.Tensor, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's local tensor by the definition of a cut, one grid position at a time; and which rows are valid."""
    block = math.ceil(shard.length / axis.size)
    before, after = whole.shape[: shard.dim], whole.shape[shard.dim + 1 :]
    factored = whole.reshape(*before, shard.outer, shard.size, shard.inner, *after)
    local = torch.full((*before, shard.outer, block, shard.inner, *after), -1, dtype=whole.dtype)
    valid = torch.zeros_like(local, dtype=torch.bool)
    at = len(before) + 1
    for row in range(block):
        position = axis.rank * block + row - shard.start
        if 0 <= position < shard.size and axis.rank * block + row < shard.length:
            local.select(at, row).copy_(factored.select(at, position))
            valid.select(at, row).fill_(True)
    shape = (*before, shard.outer * block * shard.inner, *after)
    return local.reshape(shape), valid.reshape(shape)


def axis_of(size: int, rank: int) -> Axis:
    return Axis("sp", size, rank, "no group")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], Shard]:
    """A tensor's sizes and a cut of one of its dimensions."""
    length = draw(st.integers(1, 7))
    size = draw(st.integers(1, length))
    start = draw(st.integers(0, length - size))
    outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    dim = draw(st.integers(0, len(sizes)))
    sizes.insert(dim, outer * size * inner)
    return sizes, Shard(dim=dim, length=length, size=size, start=start, outer=outer, inner=inner)


@st.composite
def factorisations(draw: st.DrawFn, count: int) -> list[int]:
    """Sizes of a row-major shape with ``count`` elements."""
    sizes = []
    while count > 1 and len(sizes) < 4:
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        count //= sizes[-1]
    return [*sizes, count]


@settings(max_examples=300, deadline=None)
@given(st.data(), cuts(), st.integers(2, 4))
def test_map_view_against_brute_force(data: st.DataObject, cut: tuple[list[int], Shard], ranks: int):
    """Where a view can be followed, the local reshape gives every valid row its place."""
    source, shard = cut
    target = data.draw(factorisations(math.prod(source)))
    mapped = map_view(shard, source, target)
    if mapped is None:
        return
    assert target[mapped.dim] == mapped.outer * mapped.size * mapped.inner
    assert (mapped.length, mapped.size, mapped.start) == (shard.length, shard.size, shard.start)
    whole = torch.arange(math.prod(source)).reshape(source)
    for rank in range(ranks):
        axis = axis_of(ranks, rank)
        local, valid = local_part(axis, whole, shard)
        expected, expected_valid = local_part(axis, whole.reshape(target), mapped)
        shape = axis.local_shape(target, mapped)
        assert torch.equal(local.reshape(shape), expected)
        assert torch.equal(valid.reshape(shape), expected_valid)


@settings(max_examples=200, deadline=None)
@given(st.data(), cuts())
def test_map_view_follows_what_keeps_the_sequence_in_one_dimension(data: st.DataObject, cut: tuple[list[int], Shard]):
    """Neighbours merged into the cut dimension, and split off again, are always followed."""
    source, shard = cut
    first = data.draw(st.integers(0, shard.dim))
    last = data.draw(st.integers(shard.dim, len(source) - 1))
    merged = [*source[:first], math.prod(source[first : last + 1]), *source[last + 1 :]]
    there = map_view(shard, source, merged)
    assert there is not None
    back = map_view(there, merged, source)
    assert back is not None
    assume(shard.size > 1)
    assert there.dim == first
    assert same_placement(back, shard)


def test_map_view_never_goes_by_equal_sizes():
    """The batch, the sequence and the heads have one size; index arithmetic tells them apart."""
    cut = shard_of_dim([4, 4, 8], 1)
    heads = map_view(cut, [4, 4, 8], [4, 4, 4, 2])
    assert heads is not None and heads.dim == 1
    flat = map_view(cut, [4, 4, 8], [16, 8])
    assert flat is not None and (flat.dim, flat.outer, flat.inner) == (0, 4, 1)
    other = map_view(cut, [4, 4, 8], [2, 8, 8])
    assert other is not None and (other.dim, other.outer) == (1, 2)


@pytest.mark.parametrize(
    ("source", "dim", "target"),
    [([12, 4], 0, [3, 4, 4]), ([2, 6], 1, [3, 4]), ([6], 0, [2, 3]), ([4, 6, 2], 1, [8, 6])],
)
def test_map_view_gives_up_where_the_sequence_is_split(source: list[int], dim: int, target: list[int]):
    assert map_view(shard_of_dim(source, dim), source, target) is None


@settings(max_examples=200, deadline=None)
@given(cuts(), st.integers(2, 4))
def test_valid_rows_and_local_sizes(cut: tuple[list[int], Shard], ranks: int):
    sizes, shard = cut
    whole = torch.arange(math.prod(sizes)).reshape(sizes)
    seen = 0
    for rank in range(ranks):
        axis = axis_of(ranks, rank)
        local, valid = local_part(axis, whole, shard)
        assert list(local.shape) == axis.local_shape(sizes, shard)
        mask = axis.valid_rows(shard, len(sizes), torch.device("cpu")).expand(local.shape)
        assert torch.equal(mask, valid)
        if not axis.has_padding(shard):
            assert valid.all()
        seen += int(valid.sum())
    assert seen == whole.numel(), "every element is valid on exactly one rank"


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_blocks_are_those_of_torch_chunk(length: int, ranks: int):
    chunks = torch.arange(length).chunk(ranks)
    for rank in range(ranks):
        axis = axis_of(ranks, rank)
        block = axis.block(length)
        held = torch.arange(length)[rank * block : (rank + 1) * block]
        expected = chunks[rank] if rank < len(chunks) else torch.arange(0)
        assert torch.equal(held, expected)


def test_what_makes_two_cuts_the_same():
    cut = shard_of_dim([2, 8, 4], 1)
    assert same_placement(cut, shard_of_dim([9, 8], 1))
    assert not same_placement(cut, cut.at(2))
    assert cut.same_rows(cut.at(2))
    for change in ({"length": 9}, {"size": 7}, {"start": 1, "size": 7}, {"outer": 2}, {"inner": 2}):
        assert not same_placement(cut, replace(cut, **change)), change
    assert same_placement(REPLICATE, REPLICATE) and not same_placement(REPLICATE, cut)
    assert not same_placement(Partial(), REPLICATE)


def test_properties_and_text():
    cut = shard_of_dim([2, 8], 1)
    assert cut.is_plain and cut.is_full and cut.is_unfactored and cut.global_size == 8
    window = replace(cut, start=1, size=6)
    assert not window.is_full and not window.is_plain and window.is_unfactored
    assert str(window) == "shard(dim 1, 8, window [1, 7))"
    factored = replace(cut, outer=2, inner=3)
    assert not factored.is_unfactored and factored.global_size == 48
    assert str(factored) == "shard(dim 1, 8, 2 x 8 x 3)"
    assert str(REPLICATE) == "replicate" and str(Partial()) == "partial(sum)"


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1), (6, 3), (9, 3), (28, 7), (40, 8), (2, 1), (3, 3)]
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_head_blocks(heads: int, kv_heads: int, ranks: int):
    """Every query head is on one rank, next to exactly the key/value heads that its rank needs."""
    from autosp.layout.ulysses import HeadBlocks

    blocks = HeadBlocks.of(ranks, heads, kv_heads)
    assert [h for lo, hi in blocks.query for h in range(lo, hi)] == list(range(heads))
    for rank, ((lo, hi), (first, last)) in enumerate(zip(blocks.query, blocks.key, strict=True)):
        assert heads // ranks <= hi - lo <= -(-heads // ranks)
        read = [head * kv_heads // heads for head in range(lo, hi)]
        assert sorted(set(read)) == list(range(first, last))
        assert [first + index for index in blocks.local_key_index(rank)] == read


@pytest.mark.parametrize(
    ("numerator", "divisor", "exact"),
    [
        ("s*s", "s", True),
        ("s*(s + 2)", "s + 2", True),
        ("s*s + s*t", "s + t", True),
        ("6*s*t", "3*s", True),
        ("s*s + 2*s", "2*s", False),  # s / 2 + 1, whose two terms have no common denominator as they stand
        ("s*s + 3*s*t", "4*s", False),
        ("s*t + 1", "s", False),
    ],
)
def test_divisions_are_carried_out_where_they_are_exact(numerator: str, divisor: str, exact: bool):
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in "st"}
    divided = FloorDiv(sympy.sympify(numerator, symbols), sympy.sympify(divisor, symbols))
    reduced = _reduced(divided)
    assert reduced.has(FloorDiv) is not exact
    for s, t in itertools.product(range(2, 7), repeat=2):
        values = {symbols["s"]: s, symbols["t"]: t}
        assert reduced.subs(values) == divided.subs(values), (s, t)
