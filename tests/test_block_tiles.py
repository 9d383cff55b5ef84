"""What is said of a tile holds for every score in it; bounds of a step bound whatever it is computed from."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from block_kernel_cases import BATCH, CASES, HEADS, text
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autosp.custom_ops.block_attention import blocks, fused, intervals
from autosp.custom_ops.block_attention.program import operator
from autosp.custom_ops.block_attention.tile_map import (
    EMPTY,
    FULL,
    PARTIAL,
    count_tiles,
    lists_of_keys,
    lists_of_queries,
    merged,
)
from autosp.custom_ops.block_attention.tile_program import Unsupported, leaf_kinds, tile_program

BLOCK_Q, BLOCK_K = 16, 8


def prepared(name: str, length: int, origin: list[int], rows: int, keys: int) -> tuple[Any, Tensor, Tensor]:
    """A part of a case; what is visible of it, ``[batch, heads, rows, keys]``, written out; and what its mask alone
    shows, without biases of minus infinity, which are added in every tile that is visited.
    """
    case = CASES[name]
    leaves = case.leaves(length, length)
    problem = blocks.Problem.of(leaves, [], case.program, 1.0, origin, [length, length], list(case.bounds))
    q, k = torch.zeros(BATCH, HEADS, rows, 8), torch.zeros(BATCH, HEADS, keys, 8)
    made = fused.Prepared.of(problem, q, k, leaves)
    places = torch.arange(length)
    scores, mask = case.dense(torch.zeros(BATCH, HEADS, length, length), leaves, places[:, None], places)
    distance = places[:, None] - places
    shown = (distance >= case.bounds[0]) & (distance <= case.bounds[1])
    shown = (shown if mask is None else shown & mask).expand(BATCH, HEADS, length, length)
    first, start = origin[2], origin[3]
    query = (torch.arange(rows) + first).clamp(0, length - 1)
    key = torch.arange(keys) + start
    exists = (key >= 0) & (key < length)
    both = [x[:, :, query][..., key.clamp(0, length - 1)] & exists for x in (shown & (scores > float("-inf")), shown)]
    return made, *both


def tiles_of(shown: Tensor) -> tuple[Tensor, Tensor]:
    """Of each tile, whether any and whether all is visible; keys beyond the end are not, queries do not count."""
    missing_q, missing_k = -shown.shape[2] % BLOCK_Q, -shown.shape[3] % BLOCK_K
    shown = torch.cat([shown, shown[:, :, -1:].expand(-1, -1, missing_q, -1)], 2)
    shown = torch.nn.functional.pad(shown, (0, missing_k))
    parts = shown.unfold(2, BLOCK_Q, BLOCK_Q).unfold(3, BLOCK_K, BLOCK_K).flatten(4)
    return parts.any(-1), parts.all(-1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("length", "origin", "rows", "keys"),
    [(100, [0, 0, 0, 0], 100, 100), (70, [0, 0, 40, -5], 50, 60), (64, [0, 0, 3, 32], 40, 48), (9, [0, 0, 0, 0], 9, 9)],
)
def test_a_tile_is_what_its_class_says(name: str, length: int, origin: list[int], rows: int, keys: int):
    made, shown, masked = prepared(name, length, origin, rows, keys)
    classes = made.classes(BLOCK_Q, BLOCK_K)
    some, every = tiles_of(shown)[0], tiles_of(masked)[1]
    classes = classes.expand(some.shape)
    assert not (some & (classes == EMPTY)).any(), "a tile with something visible would be skipped"
    assert not (~every & (classes == FULL)).any(), "a tile with something hidden would not look at the mask"


@pytest.mark.parametrize("name", ["nothing", "causal", "window", "document", "padding", "chunk", "prefix", "alibi"])
def test_the_classes_of_ordinary_masks_are_sharp(name: str):
    """Nothing that is hidden as a whole is visited, and nothing that is shown as a whole looks at the mask."""
    made, shown, masked = prepared(name, 100, [0, 0, 0, 0], 100, 100)
    some, every = tiles_of(shown)[0], tiles_of(masked)[1]
    classes = made.classes(BLOCK_Q, BLOCK_K).expand(some.shape)
    assert torch.equal(classes != EMPTY, some)
    assert torch.equal(classes == FULL, every & some)


def test_maps_are_made_in_parts_and_no_larger_than_they_must(monkeypatch: pytest.MonkeyPatch):
    from autosp.custom_ops.block_attention import tile_map

    made, *_ = prepared("document", 100, [0, 0, 0, 0], 100, 100)
    whole = made.classes(BLOCK_Q, BLOCK_K)
    assert whole.shape == (BATCH, 1, 7, 13) and whole.dtype == torch.uint8
    assert prepared("chunk", 100, [0, 0, 0, 0], 100, 100)[0].classes(BLOCK_Q, BLOCK_K).shape[:2] == (1, 1)
    lists = lists_of_queries(whole), lists_of_keys(whole)
    monkeypatch.setattr(tile_map, "_AT_ONCE", 30)
    assert torch.equal(made.classes(BLOCK_Q, BLOCK_K), whole)
    for mine, other in zip((lists_of_queries(whole), lists_of_keys(whole)), lists, strict=True):
        assert torch.equal(mine.order, other.order) and torch.equal(mine.counts, other.counts)


@pytest.mark.parametrize("name", ["document", "chunk", "padding", "window", "exact_mask", "alibi"])
def test_tiles_are_merged(name: str):
    """Both backward kernels have tiles of their own, from one map of small ones: nothing is lost by that."""
    made, shown, masked = prepared(name, 100, [0, 0, 0, 0], 100, 100)
    small = made.classes(8, 8)
    for sizes in ((16, 8), (8, 24), (32, 16)):
        both = merged(small, sizes[0] // 8, sizes[1] // 8)
        direct = made.classes(*sizes)
        assert both.shape == direct.shape and both.dtype == direct.dtype
        # From small tiles more is known, never less; but biases that hide some of them make the rest partial.
        assert not ((both == EMPTY) < (direct == EMPTY)).any()
        assert name == "alibi" or not ((both == FULL) < (direct == FULL)).any()
    some, every = tiles_of(shown)[0], tiles_of(masked)[1]
    found = merged(small, BLOCK_Q // 8, BLOCK_K // 8).expand(some.shape)
    assert not (some & (found == EMPTY)).any() and not (~every & (found == FULL)).any()


def test_lists_name_every_tile_that_is_not_empty_once():
    classes = torch.randint(0, 3, (2, 1, 5, 9), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    by_queries, by_keys = lists_of_queries(classes), lists_of_keys(classes)
    assert by_queries.order.dtype == torch.int16 and by_queries.counts.dtype == torch.int32
    for lists, table in ((by_queries, classes), (by_keys, classes.transpose(-1, -2))):
        for line in range(table.shape[2]):
            for batch in range(2):
                partial, full = lists.counts[batch, 0, line].tolist()
                order = lists.order[batch, 0, line].tolist()
                row = table[batch, 0, line]
                assert order[:partial] == (row == PARTIAL).nonzero().flatten().tolist()
                assert order[partial : partial + full] == (row == FULL).nonzero().flatten().tolist()
    assert sum(count_tiles(classes)) == classes.numel()


def test_documents_of_a_thousand_tokens_leave_most_tiles_out():
    length = 8192
    ids = torch.arange(length) // 1024
    problem = blocks.Problem.of([ids[:, None], ids[None]], [], CASES["document"].program, 1.0, [0] * 4, [length] * 2,
                                [0, 2**40])  # fmt: skip
    q = torch.zeros(1, 1, length, 8)
    empty, partial, full = fused.count_tiles(problem, q, q, 128, 64)
    assert (partial, full) == (8 * 8 * 2, 8 * 56) and empty + partial + full == 64 * 128


SCALARS = st.sampled_from([-3, -1, 0, 1, 2, 5, 2**31, -(2**40)])
FLOATS = st.sampled_from([-2.5, -1.0, 0.0, 0.1, 3.0, 1e30, float("inf"), float("-inf"), float("nan")])
PAIRS = ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "minimum", "maximum", "logical_and", "bitwise_or"]
SINGLES = ["neg", "abs", "logical_not", "zeros_like", "ones_like"]


@st.composite
def operand(draw: st.DrawFn, floats: bool) -> Tensor:
    elements = draw(st.lists(FLOATS if floats else SCALARS, min_size=3, max_size=3))
    return torch.tensor(elements, dtype=torch.float32 if floats else torch.int64)


def bounds_of(x: Tensor) -> intervals.Interval:
    return intervals.of_blocks(x.amin().view(1, 1, 1, 1), x.amax().view(1, 1, 1, 1))


def holds(bounds: intervals.Interval, values: Tensor) -> None:
    low, high = (float(x) for x in bounds)
    for value in values.flatten().tolist():
        if value != value:
            assert low == float("-inf") or high == float("inf"), (bounds, values)
        else:
            assert low <= float(value) <= high, (bounds, values)


@given(st.data(), st.booleans(), st.sampled_from(PAIRS), st.sampled_from(SINGLES), st.sampled_from(PAIRS[:10]))
@settings(max_examples=300, deadline=None)
def test_bounds_bound_every_result(data: st.DataObject, floats: bool, first: str, second: str, third: str):
    """Three steps over every combination of three elements an operand."""
    a, b = (data.draw(operand(floats)) for _ in range(2))
    x, y = a[:, None], b[None, :]
    if floats and first == "bitwise_or":
        first = "logical_or"
    tensor = {"add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_or"}

    def run(name: str, bounds: list[Any], values: list[Tensor]) -> tuple[Any, Tensor]:
        full = f"aten::{name}.Tensor" if name in tensor else f"aten::{name}"
        try:
            made = operator(full)(*values)
        except RuntimeError:  # torch has no such operator of booleans
            return None, values[0]
        found = intervals.result(full, bounds, {}, made.dtype, torch.device("cpu"))
        holds(found, made)
        return found, made

    bounds, values = run(first, [bounds_of(a), bounds_of(b)], [x, y])
    if bounds is not None:
        bounds, values = run(second, [bounds], [values])
    if bounds is not None:
        run(third, [bounds, bounds_of(b)], [values, y])


@pytest.mark.parametrize("dividend", [-7, -1, 0, 5, 6, 2**40])
def test_bounds_of_divisions_choices_and_casts(dividend: int):
    a = torch.tensor([dividend, dividend + 9])
    span = torch.arange(dividend, dividend + 10)
    cpu = torch.device("cpu")
    three = intervals.literal(3, cpu)
    holds(intervals.result("aten::floor_divide.Scalar", [bounds_of(a), three], {}, torch.int64, cpu), span // 3)
    holds(intervals.result("aten::clamp", [bounds_of(a), three, None], {}, torch.int64, cpu), span.clamp(3))
    holds(intervals.result("aten::to.dtype", [bounds_of(a), None], {}, torch.bool, cpu), span.bool())
    holds(
        intervals.result("aten::to.dtype", [bounds_of(a - 0.5), None], {}, torch.int64, cpu), (span[:-1] - 0.5).long()
    )
    above = intervals.result("aten::gt.Scalar", [bounds_of(a), three], {}, torch.bool, cpu)
    holds(intervals.result("aten::where.self", [above, bounds_of(a), three], {}, torch.int64, cpu),
          torch.where(span > 3, span, 3))  # fmt: skip


@pytest.mark.parametrize(
    ("program", "leaf", "why"),
    [
        (text([["aten::add.Tensor", [{"leaf": 0}, {"index": "key"}], {}]], score={"step": 0}),
         torch.zeros(5, 1).double(), "torch.float64"),
        (text([], mask={"leaf": 0}), torch.zeros(1, 1, 1, 5, 7), "5 dimensions"),
        (text([["aten::amax", [{"score": 0}, [-1], True], {}]], score={"step": 0}), torch.zeros(1), "summed up"),
        (text([["aten::lt.Scalar", [{"score": 0}, 0.0], {}]], mask={"step": 0}), torch.zeros(1), "looks at scores"),
        (text([["aten::matmul", [{"score": 0}, {"score": 0}], {}]], score={"step": 0}), torch.zeros(1), "meta tensors"),
    ],
)  # fmt: skip
def test_programs_that_tiles_do_not_run(program: str, leaf: Tensor, why: str):
    with pytest.raises(Unsupported, match=why):
        tile_program(program, leaf_kinds([leaf]))


def test_only_what_varies_along_both_is_left_to_tiles():
    """Steps along queries or keys alone are vectors; steps that nothing needs are gone."""
    steps = [
        ["aten::floor_divide.Scalar", [{"index": "query"}, 8], {}],
        ["aten::add.Tensor", [{"leaf": 0}, {"number": 0}], {}],
        ["aten::eq.Tensor", [{"step": 0}, {"step": 1}], {}],
        ["aten::lt.Tensor", [{"index": "query"}, {"index": "key"}], {}],
    ]
    tiles = tile_program(json.dumps({"steps": steps, "mask": {"step": 2}}), leaf_kinds([torch.arange(5)[None]]))
    assert [step.index for step in tiles.steps] == [2]
    assert [(x.source, x.query, x.key) for x in tiles.inputs] == [
        (("step", 0), True, False),
        (("step", 1), False, True),
    ]
