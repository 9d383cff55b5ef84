"""The bands given to FlashAttention say what the bounds say; on a GPU its results are those of the plain blocks."""

from __future__ import annotations

import itertools

import pytest
import torch

from autosp.custom_ops import dispatch
from autosp.custom_ops.block_attention import blocks, flash, ops


def problem(origin: tuple[int, int], sizes: tuple[int, int], bounds: tuple[int, int]) -> blocks.Problem:
    return blocks.Problem.of([], [], "", 0.3, [0, 0, *origin], sizes, bounds)


def seen(part: flash.Band, queries: int, keys: int) -> torch.Tensor:
    """What FlashAttention shows: its windows count from the last query and the last key."""
    shown = torch.zeros(queries, keys, dtype=torch.bool)
    rows, count = part.last - part.first, part.stop - part.start
    for r, c in itertools.product(range(rows), range(count)):
        distance = (r + count - rows) - c
        left_ok = part.left < 0 or distance <= part.left
        right_ok = part.right < 0 or -distance <= part.right
        shown[part.first + r, part.start + c] = left_ok and right_ok
    return shown


def wanted(p: blocks.Problem, queries: int, keys: int) -> torch.Tensor:
    i = torch.arange(queries)[:, None] + p.origin[2]
    j = torch.arange(keys)[None, :] + p.origin[3]
    exists = (i >= 0) & (i < p.sizes[0]) & (j >= 0) & (j < p.sizes[1])
    return exists & (i - j >= p.bounds[0]) & (i - j <= p.bounds[1])


@pytest.mark.parametrize("bounds", [(0, 2**40), (-(2**40), 2**40), (0, 3), (-2, 2), (2, 5), (-(2**40), 0), (1, 0)])
def test_a_band_is_what_its_bounds_say(bounds: tuple[int, int]):
    tried = 0
    for q0, k0, queries, keys in itertools.product((-2, 0, 4, 8), (-1, 0, 4, 8), (1, 4, 7), (1, 4, 12)):
        p = problem((q0, k0), (12, 12), bounds)
        part = flash.band(p, queries, keys)
        if part is None:
            continue
        tried += 1
        assert torch.equal(seen(part, queries, keys), wanted(p, queries, keys)), (p, part)
        assert part.scores == wanted(p, queries, keys).sum(), (p, part)
    assert tried > 100


@pytest.mark.parametrize(
    ("capability", "length", "setting", "taken"),
    [((9, 0), 16384, "1", "kernels"), ((9, 0), 4096, "1", "flash"), ((8, 0), 16384, "1", "flash"),
     ((9, 0), 16384, "0", "flash")],
)  # fmt: skip
def test_large_bands_go_to_the_kernels_on_hopper(capability, length, setting, taken, monkeypatch: pytest.MonkeyPatch):
    """Where the kernels were measured faster, and are not turned off."""
    q = torch.empty(1, 32, length, 128, dtype=torch.bfloat16, device="meta")
    k = q[:, :8]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(flash, "serves", lambda *_: True)
    monkeypatch.setattr(dispatch, "triton_usable", lambda *_: setting == "1")
    p = problem((0, 0), (length, length), (0, 2**40))
    assert (ops._band(p, q, k, k) is None) == (taken == "kernels")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention runs on a GPU")
@pytest.mark.parametrize("bounds", [(0, 2**40), (-(2**40), 2**40), (0, 40), (-20, 30)])
@pytest.mark.parametrize("origin", [(0, 0), (64, 0), (128, 64), (0, 128)])
def test_flash_blocks_are_plain_blocks(bounds: tuple[int, int], origin: tuple[int, int]):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 100, 32, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 128, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    p = problem(origin, (200, 220), bounds)
    assert flash.serves(p, q, k, v)
    part = flash.band(p, 100, 128)
    assert part is not None
    valid = slice(0, min(100, 200 - origin[0]))
    out, lse = flash.forward(p, part, q, k, v)
    exact, exact_lse = blocks.forward(p, q.double(), k.double(), v.double())
    torch.testing.assert_close(out[:, :, valid].double(), exact[:, :, valid], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[:, :, valid].double(), exact_lse[:, :, valid], rtol=1e-3, atol=1e-3)
    grad = torch.randn_like(out)
    grad[:, :, valid.stop :] = 0
    found = flash.backward(p, part, grad, q, k, v, out, lse)
    reference = blocks.backward(p, grad.double(), None, q.double(), k.double(), v.double(), exact, exact_lse)
    for mine, other in zip(found, reference[:3], strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=5e-2, atol=5e-2)
