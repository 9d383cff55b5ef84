"""Every strategy on one attention call, carried out on real shards with junk in their padding rows, in fp64; and the
rules of what surrounds attention: convolutions, parts that are replaced, complex numbers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pool import RankPool
from rule_harness import Case, Found, Input, check, run_cases
from torch.nn import functional as F

from autosp.layout.attention.forms import BIAS, CAUSAL_BOUNDS, OPEN_BOUNDS, VISIBLE

LENGTHS = [6, 7, 4]
"""At 3 ranks: divisible, uneven, and with a rank that has no token at all."""

CASES: dict[str, Case] = {}
OTHER: list[str] = []


def case(name: str, function: Any, inputs: list[Input], expect: str, *, attends: bool = True) -> None:
    CASES[name] = Case(function, inputs, expect)
    if not attends:
        OTHER.append(name)


def floats(*shape: Any, at: int | None = None, **more: Any) -> Input:
    return Input("float", shape, at, **more)


def block(
    program: str = "", bounds: tuple[int, int] = OPEN_BOUNDS, cut: slice = slice(None), with_lse: bool = False
) -> Any:
    """``block_attention`` of a window of the tokens, with the tensors of its program."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *leaves: torch.Tensor) -> Any:
        q, k, v = (x[:, :, cut] for x in (q, k, v))
        sizes = [q.shape[2], k.shape[2]]
        out, lse = torch.ops.autosp.block_attention(
            q, k, v, list(leaves), [], program, 0.5, [0, 0, 0, 0], sizes, list(bounds)
        )
        return (out, lse) if with_lse else out

    return attend


def sdpa(**settings: Any) -> Any:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **settings)


SAME = json.dumps({"steps": [["aten::eq.Tensor", [{"leaf": 0}, {"leaf": 1}], {}]], "mask": {"step": 0}})
HEADS, KEYS = floats(2, 4, "S", 3, at=2), floats(2, 2, "S", 3, at=2)
WIDE = floats(2, 2, "S", 5, at=2)
GROUPED = [HEADS, KEYS, KEYS]
ODD = [floats(2, 6, "S", 3, at=2), floats(2, 3, "S", 3, at=2), floats(2, 3, "S", 3, at=2)]
MASK = Input("bool", (2, 1, "S", "S"))

case("whole", sdpa(), [HEADS] * 3, "S2")
case("causal", sdpa(is_causal=True), [HEADS] * 3, "S2")
case("grouped", sdpa(is_causal=True, enable_gqa=True), GROUPED, "S2")
case("odd_heads", sdpa(is_causal=True, enable_gqa=True), ODD, "S2")
case("one_head", sdpa(is_causal=True), [floats(2, 1, "S", 3, at=2)] * 3, "S2")
case("value_size", sdpa(is_causal=True, enable_gqa=True), [HEADS, KEYS, WIDE], "S2")
case("mask", sdpa(), [HEADS, HEADS, HEADS, MASK], "S2")
case("bias_per_head", sdpa(), [HEADS, HEADS, HEADS, floats(2, 4, "S", "S")], "S2")
case("bias_shared", sdpa(enable_gqa=True), [*GROUPED, floats("S", "S")], "S2")
case("block_causal", block(bounds=CAUSAL_BOUNDS, with_lse=True), GROUPED, "S2")
case("block_window", block(bounds=(0, 2)), [HEADS, KEYS, WIDE], "S2")
case("block_band", block(bounds=(-1, 1)), ODD, "S2")
case("block_mask", block(VISIBLE, with_lse=True), [*GROUPED, MASK], "S2")
case("block_bias", block(BIAS), [*GROUPED, floats(1, 4, "S", "S")], "S2")
case("block_key_bias", block(BIAS, CAUSAL_BOUNDS), [*GROUPED, floats(2, 1, 1, "S")], "S2")
case(
    "block_documents",
    block(SAME, CAUSAL_BOUNDS),
    [*GROUPED, *[Input(("int", 2), (2, 1, *s)) for s in (("S", 1), (1, "S"))]],
    "S2",
)
case("block_of_a_window", block(bounds=CAUSAL_BOUNDS, cut=slice(1, -1)), GROUPED, "W2")
case("whole_keys", lambda q, k, v: sdpa(is_causal=True)(q, k, v), [HEADS, *[floats(2, 4, 5, 3)] * 2], "S2")
case("key_is_value", lambda q, k: sdpa(is_causal=True)(q, k, k) + q, [HEADS, HEADS], "S2")

X = floats(2, 4, "S", at=2)
FILTER = floats(4, 1, 3)


def causal_conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.ops.autosp.token_conv1d(x, w, None, 2, 1, 4)


case("conv_causal", causal_conv, [X, FILTER], "S2|refused", attends=False)
case("conv_same", lambda x, w: F.conv1d(x, w, padding=1, groups=4), [X, FILTER], "S2", attends=False)
case("conv_same_word", lambda x, w: F.conv1d(x, w, padding="same", groups=4), [X, FILTER], "S2", attends=False)
case(
    "conv_batch", lambda x, w: F.conv1d(x, w, stride=2), [floats("S", 4, 7, at=0), floats(5, 4, 3)], "S0", attends=False
)
case(
    "conv_channels",
    lambda x, w: F.conv1d(x, w, padding=1),
    [floats(2, "S", 7, at=1), floats(5, "S", 3)],
    "refuse: channel",
    attends=False,
)
case(
    "conv_window",
    lambda x, w: F.conv1d(x[..., 1:], w, padding=1, groups=4),
    [X, FILTER],
    "refuse: window",
    attends=False,
)
case("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 0, 2), [X, floats(2, 2, "S", at=2)], "S2", attends=False)
case(
    "slice_scatter_whole",
    lambda x, y: x.slice_scatter(y, 1, 0, 2),
    [floats(2, 4, "S"), floats(2, 2, "S", at=2)],
    "S2",
    attends=False,
)
case("select_scatter", lambda x, y: x.select_scatter(y, 1, 2), [X, floats(2, "S", at=1)], "S2", attends=False)
case(
    "select_scatter_whole",
    lambda x, y: x.select_scatter(y, 1, 2),
    [floats(2, 4, "S"), floats(2, "S", at=1)],
    "S2",
    attends=False,
)
case(
    "slice_scatter_tokens",
    lambda x, y: x.slice_scatter(y, 2, 0, 2),
    [X, floats(2, 4, 2)],
    "refuse: a part of a",
    attends=False,
)
case(
    "complex",
    lambda x: torch.view_as_real(torch.view_as_complex(x) * (1 + 2j)),
    [floats(2, "S", 3, 2, at=1)],
    "S1",
    attends=False,
)


GROUPS = [("ulysses", 3), ("allgather_kv", 3), ("ring", 3), ("hybrid", 4)]
MORE = [("ulysses", 2), ("allgather_kv", 2), ("ring", 2), ("ring", 4), ("auto", 3), ("auto", 4)]


@pytest.fixture(
    scope="module",
    params=[*GROUPS, *(pytest.param(group, marks=pytest.mark.slow) for group in MORE)],
    ids=[f"{strategy}-{world}" for strategy, world in GROUPS + MORE],
)
def attended(ranks: RankPool, request: pytest.FixtureRequest) -> list[dict[tuple[str, int], Found | str]]:
    strategy, world = request.param
    names = [name for name in CASES if name not in OTHER]
    return ranks.run(run_cases, __name__, names, LENGTHS, attention=strategy, world_size=world, timeout=300)


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHER])
def test_strategies(attended: list[dict[tuple[str, int], Found | str]], name: str):
    check(CASES[name], name, attended, LENGTHS)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3], ids=["sp2", "sp3"])
def others(ranks: RankPool, request: pytest.FixtureRequest) -> list[dict[tuple[str, int], Found | str]]:
    return ranks.run(run_cases, __name__, OTHER, LENGTHS, world_size=request.param, timeout=300)


@pytest.mark.parametrize("name", OTHER)
def test_rules_around_attention(others: list[dict[tuple[str, int], Found | str]], name: str):
    check(CASES[name], name, others, LENGTHS)
