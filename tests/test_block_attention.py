"""``autosp::block_attention`` against ``scaled_dot_product_attention`` with the whole mask, in fp64."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autosp.custom_ops import block_attention  # noqa: F401 - defines the operators
from autosp.custom_ops.block_attention import blocks
from autosp.layout.attention.forms import BIAS, CAUSAL_BOUNDS, OPEN_BOUNDS, VISIBLE

BATCH, HEADS, KEY_HEADS, LENGTH, SIZE, VALUE_SIZE = 2, 4, 2, 13, 8, 6
attend = torch.ops.autosp.block_attention.default


def operands(dtype: torch.dtype = torch.float64, rows: int = LENGTH) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(HEADS, rows, SIZE), (KEY_HEADS, LENGTH, SIZE), (KEY_HEADS, LENGTH, VALUE_SIZE)]
    return [torch.randn(BATCH, *shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def causal() -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def blind_row() -> torch.Tensor:
    mask = causal()
    mask[4] = False
    return mask


def bias() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, HEADS, LENGTH, LENGTH, generator=generator, dtype=torch.float64).requires_grad_()


TABLE_BIAS = json.dumps(
    {
        "steps": [
            ["aten::sub.Tensor", [{"index": "query"}, {"index": "key"}], {}],
            ["aten::clamp.default", [{"step": 0}, 0, 5], {}],
            ["aten::index.Tensor", [{"whole": 0}, [{"step": 1}, {"index": "head"}]], {}],
            ["aten::add.Tensor", [{"score": 0}, {"step": 2}], {}],
        ],
        "score": {"step": 3},
    }
).replace("clamp.default", "clamp")


def table() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, HEADS, generator=generator, dtype=torch.float64).requires_grad_()


def table_bias(leaf: torch.Tensor) -> torch.Tensor:
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).clamp(0, 5)
    return leaf[distance].permute(2, 0, 1)


# Name -> (program, leaf, bounds, the mask for scaled_dot_product_attention from the leaf).
CASES: dict[str, tuple[str, Any, Any, Any]] = {
    "nothing": ("", None, OPEN_BOUNDS, lambda leaf: None),
    "causal": ("", None, CAUSAL_BOUNDS, lambda leaf: causal()),
    "window": ("", None, (0, 3), lambda leaf: causal() & ~causal().tril(-4)),
    "band": ("", None, (-2, 2), lambda leaf: torch.ones(LENGTH, LENGTH).tril(2).triu(-2).bool()),
    "mask": (VISIBLE, blind_row, OPEN_BOUNDS, lambda leaf: leaf),
    "bias": (BIAS, bias, OPEN_BOUNDS, lambda leaf: leaf),
    "causal_bias": (BIAS, bias, CAUSAL_BOUNDS, lambda leaf: leaf.masked_fill(~causal(), float("-inf"))),
    "table": (TABLE_BIAS, table, OPEN_BOUNDS, table_bias),
}


def settings(name: str) -> tuple[list[torch.Tensor], list[Any], torch.Tensor | None]:
    program, make, bounds, mask_of = CASES[name]
    leaves = [] if make is None else [make()]
    rest = [leaves, [], program, SIZE**-0.5, [0, 0, 0, 0], [LENGTH, LENGTH], list(bounds)]
    return leaves, rest, mask_of(leaves[0] if leaves else None)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture(params=[1, 5, 2**24], ids=["row", "few", "all"])
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(blocks, "CHUNK_ELEMENTS", BATCH * HEADS * LENGTH * request.param)
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, chunk_rows: int):
    leaves, rest, mask = settings(name)
    q, k, v = operands()
    wanted = [q, k, v, *(x for x in leaves if x.requires_grad)]
    out, lse = attend(q, k, v, *rest)
    reference = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    close(out, reference)
    upstream = torch.randn_like(out)
    for mine, other in zip(
        torch.autograd.grad(out, wanted, upstream, retain_graph=True),
        torch.autograd.grad(reference, wanted, upstream, retain_graph=True),
        strict=True,
    ):
        close(mine, other)
    assert lse.shape == (BATCH, HEADS, LENGTH) and lse.dtype == torch.float64
    assert torch.equal(lse.isinf(), torch.tensor([name == "mask" and i == 4 for i in range(LENGTH)]).expand_as(lse))


def test_the_log_sum_exp_has_a_gradient():
    q, k, v = operands()
    _, rest, _ = settings("causal")
    _, lse = attend(q, k, v, *rest)
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) * SIZE**-0.5
    reference = torch.logsumexp(scores.masked_fill(~causal(), float("-inf")), -1)
    close(lse, reference)
    upstream = torch.randn_like(lse)
    for mine, other in zip(
        torch.autograd.grad(lse, [q, k], upstream), torch.autograd.grad(reference, [q, k], upstream), strict=True
    ):
        close(mine, other)


@pytest.mark.parametrize("name", CASES)
def test_parts_of_queries_heads_and_keys(name: str, chunk_rows: int):
    """A block is the same part of the whole; rows beyond the queries are finite; keys beyond the keys are hidden."""
    _, rest, _ = settings(name)
    q, k, v = (x.detach() for x in operands())
    whole, whole_lse = attend(q, k, v, *rest)
    part = list(rest)
    part[4] = [0, 2, 9, 0]
    junk = torch.full((BATCH, 2, 3, SIZE), 7.0, dtype=torch.float64)
    out, _ = attend(torch.cat([q[:, 2:, 9:], junk], 2), k[:, 1:], v[:, 1:], *part)
    close(out[:, :, :4], whole[:, 2:, 9:])
    assert out.isfinite().all()
    total, lse = torch.zeros_like(whole), torch.full_like(whole_lse, float("-inf"))
    pad = torch.full((BATCH, KEY_HEADS, 1, SIZE), 5.0, dtype=torch.float64)
    keys, values = torch.cat([k, pad], 2), torch.cat([v, pad[..., :VALUE_SIZE]], 2)
    for first in (0, 7):
        part[4] = [0, 0, 0, first]
        some, some_lse = attend(q, keys[:, :, first : first + 7], values[:, :, first : first + 7], *part)
        both = torch.logaddexp(lse, some_lse)
        share = lambda x: torch.where(both.isinf(), 0.0, torch.exp(x - both)).unsqueeze(-1)  # noqa: E731, B023
        total, lse = total * share(lse) + some * share(some_lse), both
    close(total, whole)
    close(lse, whole_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_held_wide(dtype: torch.dtype):
    _, rest, mask = settings("window")
    q, k, v = (x.detach() for x in operands(dtype))
    out, lse = attend(q, k, v, *rest)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask, enable_gqa=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert (out.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("name", ["window", "bias"])
def test_opcheck(name: str):
    _, rest, _ = settings(name)
    torch.library.opcheck(attend, (*operands(), *rest))


def test_fewer_queries_than_keys_and_none_at_all():
    q, k, v = operands(rows=5)
    _, rest, _ = settings("causal")
    rest[5] = [5, LENGTH]
    out, _ = attend(q, k, v, *rest)
    close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=causal()[:5], enable_gqa=True))
    rest[5] = [0, LENGTH]
    out, lse = attend(q[:, :, :0], k, v, *rest)
    assert out.shape == (BATCH, HEADS, 0, VALUE_SIZE) and lse.shape == (BATCH, HEADS, 0)
