"""Masks and biases as programs: which are, what they then compute, and what stays the exact tensor that it was."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import test_masks
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from autosp import backend  # noqa: F401 - defines the operators
from autosp.passes.express_masks import express_masks_pass

LENGTH = 12
BLOCK = torch.ops.autosp.block_attention.default
Mask = Callable[[int], torch.Tensor]


def places(s: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(s)[:, None], torch.arange(s)[None, :]


def chunked(s: int) -> torch.Tensor:
    q, k = places(s)
    return (k <= q) & (q // 4 == k // 4)


def key_padding(s: int) -> torch.Tensor:
    q, k = places(s)
    return ((k <= q) & (torch.arange(s) > 2)).expand(2, 1, s, s)


def either(s: int) -> torch.Tensor:
    """A prefix that all see, and causal behind it."""
    q, k = places(s)
    return (k <= q) | (k < 3)


def additive(s: int) -> torch.Tensor:
    q, k = places(s)
    return torch.where(k <= q, 0.0, torch.finfo(torch.float32).min)


def alibi(s: int) -> torch.Tensor:
    q, k = places(s)
    return (torch.tensor([0.5, 0.25, 0.1, 0.05]).view(4, 1, 1) * (k - q)).masked_fill(k > q, float("-inf"))


def triangle(s: int) -> torch.Tensor:
    return torch.tril(torch.ones(s, s)).bool() & (torch.arange(s) > 0)


def table_of_distances(s: int) -> torch.Tensor:
    q, k = places(s)
    return torch.linspace(0, 1, 6)[(q - k).clamp(0, 5)]


def every_pair(s: int) -> torch.Tensor:
    """Hides nothing and is made of nothing that varies."""
    return torch.zeros(s, s) + 1.0


PROGRAMS: list[Mask] = [
    test_masks.two_documents, test_masks.every_second, test_masks.window, test_masks.anti_causal, test_masks.off_by_one,
    test_masks.tril_shifted, test_masks.doubled, test_masks.dynamic_slice, test_masks.wrong_corner, chunked,
    key_padding, either, additive, alibi, triangle, table_of_distances, every_pair,
]  # fmt: skip


def embedded(s: int) -> torch.Tensor:
    q, k = places(s)
    return F.embedding((q - k).clamp(0, 5), torch.linspace(0, 1, 24).view(6, 4)).permute(2, 0, 1)


def eye(s: int) -> torch.Tensor:
    return torch.ones(s, s, dtype=torch.bool).tril() | torch.eye(s, dtype=torch.bool)


def drawn(s: int) -> torch.Tensor:
    return torch.rand(s, s)


def running(s: int) -> torch.Tensor:
    """A running sum over keys mixes them."""
    q, k = places(s)
    return (k <= q).cumsum(-1) > 1


def turned(s: int) -> torch.Tensor:
    """Queries and keys change places after a value was made of both."""
    return chunked(s).transpose(0, 1)


def traced(mask: Mask, **settings: object) -> fx.GraphModule:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[2]), **settings)

    x = torch.randn(2, 4, LENGTH, 8)
    return make_fx(function, pre_dispatch=True, tracing_mode="fake")(x, x.clone(), x.clone())


def run_pass(gm: fx.GraphModule) -> fx.GraphModule:
    return express_masks_pass(gm, fake_mode=gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode)


def square_tensors(gm: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for node in gm.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and list(node.meta["val"].shape[-2:]) == [LENGTH, LENGTH]
    ]


@pytest.mark.parametrize("mask", PROGRAMS)
def test_masks_become_programs(mask: Mask) -> None:
    gm = run_pass(traced(mask))
    (node,) = gm.graph.find_nodes(op="call_function", target=BLOCK)
    assert not square_tensors(gm), "a tensor of queries x keys is still made"
    assert not node.args[5] or set(json.loads(node.args[5])) <= {"steps", "mask", "score"}
    q, k, v = (torch.randn(2, 4, LENGTH, 8) for _ in range(3))
    reference = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(LENGTH))
    torch.testing.assert_close(gm(q, k, v), reference, rtol=1e-5, atol=1e-5)
    text = str(gm.graph)
    assert str(run_pass(gm).graph) == text


@pytest.mark.parametrize("mask", [embedded, eye, drawn, running, turned])
def test_other_masks_keep_their_tensor(mask: Mask) -> None:
    gm = traced(mask)
    before = str(gm.graph)
    assert str(run_pass(gm).graph) == before


@pytest.mark.parametrize("settings", [{"dropout_p": 0.5}])
def test_dropout_keeps_the_operator(settings: dict[str, object]) -> None:
    gm = traced(chunked, **settings)
    before = str(gm.graph)
    assert str(run_pass(gm).graph) == before


@pytest.mark.parametrize(
    ("mask", "bounds"),
    [(test_masks.window, [0, 3]), (test_masks.off_by_one, [-1, 2**40]), (test_masks.anti_causal, [-(2**40), 0]),
     (chunked, [0, 2**40])],
)  # fmt: skip
def test_distances_become_bounds(mask: Mask, bounds: list[int]) -> None:
    (node,) = run_pass(traced(mask)).graph.find_nodes(op="call_function", target=BLOCK)
    assert node.args[9] == bounds


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_keys_alone_stays_small(dtype: torch.dtype) -> None:
    def keys_alone(s: int) -> torch.Tensor:
        seen = (torch.arange(s) > 2).expand(2, 1, 1, s)
        return seen.to(dtype).expand(2, 1, s, s)

    gm = run_pass(traced(keys_alone))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    mask = node.args[3] if len(node.args) > 3 else node.kwargs["attn_mask"]
    assert list(mask.meta["val"].shape) == [2, 1, 1, LENGTH] and not square_tensors(gm)
    q, k, v = (torch.randn(2, 4, LENGTH, 8) for _ in range(3))
    reference = F.scaled_dot_product_attention(q, k, v, attn_mask=keys_alone(LENGTH))
    torch.testing.assert_close(gm(q, k, v), reference, rtol=1e-5, atol=1e-5)
    text = str(gm.graph)
    assert str(run_pass(gm).graph) == text


def test_gradients_reach_what_a_bias_is_made_of() -> None:
    def function(q: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        row, column = places(LENGTH)
        bias = (slopes.view(4, 1, 1) * (column - row)).masked_fill(column > row, float("-inf"))
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias)

    q, slopes = torch.randn(2, 4, LENGTH, 8).requires_grad_(), torch.rand(4).requires_grad_()
    gm = run_pass(make_fx(function, pre_dispatch=True, tracing_mode="fake")(q, slopes))
    assert gm.graph.find_nodes(op="call_function", target=BLOCK)
    upstream = torch.randn(2, 4, LENGTH, 8)
    found = torch.autograd.grad(gm(q, slopes), [q, slopes], upstream)
    for mine, other in zip(found, torch.autograd.grad(function(q, slopes), [q, slopes], upstream), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "became"),
    [
        (test_masks.window, "query - key at least 0 and at most 3"),
        (chunked, "a mask computed block by block from 2 tensors, query - key at least 0"),
        (alibi, "a bias computed block by block from 3 tensors"),
    ],
)
def test_the_compile_report_says_what_became_of_a_mask(mask: Mask, became: str) -> None:
    from autosp.report.build import _program_record

    (node,) = run_pass(traced(mask)).graph.find_nodes(op="call_function", target=BLOCK)
    record = _program_record(node)
    assert record.became == became
    assert record.bytes <= 8 * 4 * LENGTH
