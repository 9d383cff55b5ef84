"""Time block attention by kind of mask, forward and backward, beside torch's causal attention and other ways.

Every mask is the program that a compiled model gets for it. "ratio" is the time of forward and backward over that of
``scaled_dot_product_attention(is_causal=True)`` at the same shape; "tiles" says how many tiles of 128 x 64 of
all heads are visited, so a mask that hides much can be below 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autosp.bench.losses import check_names, milliseconds
from autosp.custom_ops.block_attention import CAUSAL_BOUNDS, OPEN_BOUNDS, blocks, fused
from autosp.errors import ConfigError

LENGTHS = (16384, 65536)
DTYPES = ("bfloat16", "float16", "float32")
IMPLEMENTATIONS = ("autosp", "sdpa", "flex", "plain")
_CAUSAL = "causal"


@dataclass(frozen=True)
class Shape:
    """Batch rows, query heads, key heads and elements of a head."""

    batch: int = 1
    heads: int = 32
    key_heads: int = 8
    size: int = 128


@dataclass(frozen=True)
class Mask:
    """A mask as a compiled model has it, and as ``flex_attention`` takes it."""

    leaves: list[Tensor]
    program: str
    bounds: tuple[int, int]
    visible: Callable[..., Any]
    score: Callable[..., Any] | None = None


@dataclass
class Row:
    """One line: times in ms, None where it did not run and ``note`` says why; tiles visited of all."""

    length: int
    mask: str
    implementation: str
    forward_ms: float | None
    backward_ms: float | None
    ratio: float | None
    tiles: int
    all_tiles: int
    note: str = ""


def _program(steps: list[Any], **results: Any) -> str:
    return json.dumps({"steps": steps, **results})


def _same(ids: Tensor) -> Mask:
    """Causal among tokens with the same number."""
    program = _program([["aten::eq.Tensor", [{"leaf": 0}, {"leaf": 1}], {}]], mask={"step": 0})
    return Mask([ids[None, None, :, None], ids[None, None, None, :]], program, CAUSAL_BOUNDS,
                lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]))  # fmt: skip


def _causal(length: int, heads: int, device: torch.device) -> Mask:
    return Mask([], "", CAUSAL_BOUNDS, lambda b, h, q, k: q >= k)


def _window(length: int, heads: int, device: torch.device) -> Mask:
    width = max(1, length // 16)
    return Mask([], "", (0, width - 1), lambda b, h, q, k: (q >= k) & (q - k < width))


def _documents(length: int, heads: int, device: torch.device) -> Mask:
    """Packed documents of random lengths, an eighth of the sequence at most."""
    draws = torch.randint(1, max(2, length // 8), (length,), generator=torch.Generator().manual_seed(0))
    ends = draws.cumsum(0)
    return _same(torch.bucketize(torch.arange(length), ends[ends < length], right=True).to(device))


def _chunks(length: int, heads: int, device: torch.device) -> Mask:
    return _same(torch.arange(length, device=device) // max(1, length // 8))


def _padding(length: int, heads: int, device: torch.device) -> Mask:
    seen = torch.arange(length, device=device) >= length // 16
    return Mask([seen[None, None, None]], _program([], mask={"leaf": 0}), CAUSAL_BOUNDS,
                lambda b, h, q, k: (q >= k) & seen[k])  # fmt: skip


def _prefix(length: int, heads: int, device: torch.device) -> Mask:
    places, seen = torch.arange(length, device=device), torch.arange(length, device=device) < length // 16
    steps = [
        ["aten::le.Tensor", [{"leaf": 0}, {"leaf": 1}], {}],
        ["aten::__or__.Tensor", [{"step": 0}, {"leaf": 2}], {}],
    ]
    return Mask([places[None], places[:, None], seen[None]], _program(steps, mask={"step": 1}), OPEN_BOUNDS,
                lambda b, h, q, k: (k <= q) | (k < length // 16))  # fmt: skip


def _alibi(length: int, heads: int, device: torch.device) -> Mask:
    slopes = 2.0 ** (-8.0 * (torch.arange(heads, device=device) + 1) / heads)
    steps = [
        ["aten::sub.Tensor", [{"index": "key"}, {"index": "query"}], {}],
        ["aten::mul.Tensor", [{"leaf": 0}, {"step": 0}], {}],
        ["aten::add.Tensor", [{"score": 0}, {"step": 1}], {}],
    ]
    return Mask([slopes[:, None, None]], _program(steps, score={"step": 2}), CAUSAL_BOUNDS,
                lambda b, h, q, k: q >= k, lambda score, b, h, q, k: score + slopes[h] * (k - q))  # fmt: skip


MASKS: dict[str, Callable[[int, int, torch.device], Mask]] = {
    _CAUSAL: _causal, "window": _window, "documents": _documents, "chunks": _chunks, "padding": _padding,
    "prefix": _prefix, "alibi": _alibi,
}  # fmt: skip


@contextlib.contextmanager
def _triton(setting: str) -> Iterator[None]:
    """Kernels ("1") or plain blocks ("0"), whatever the environment says."""
    before = os.environ.get("AUTOSP_TRITON")
    os.environ["AUTOSP_TRITON"] = setting
    try:
        yield
    finally:
        if before is None:
            del os.environ["AUTOSP_TRITON"]
        else:
            os.environ["AUTOSP_TRITON"] = before


def _block_attention(mask: Mask) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = [q.shape[2], k.shape[2]]
        return torch.ops.autosp.block_attention(
            q, k, v, mask.leaves, [], mask.program, q.shape[-1] ** -0.5, [0, 0, 0, 0], sizes, list(mask.bounds)
        )[0]

    return run


def _flex(mask: Mask, length: int, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    made = create_block_mask(mask.visible, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=mask.score, block_mask=made, enable_gqa=True)


def _function(name: str, mask: Mask, length: int, device: torch.device) -> Callable[..., Tensor]:
    if name == "flex":
        return _flex(mask, length, device)
    if name == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return _block_attention(mask)


def _operands(shape: Shape, length: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """As a model has them: views of ``[batch, tokens, heads, size]``."""
    generator = torch.Generator(device).manual_seed(0)
    made = [
        torch.randn(shape.batch, length, heads, shape.size, device=device, dtype=dtype, generator=generator)
        for heads in (shape.heads, shape.key_heads, shape.key_heads)
    ]
    return [x.transpose(1, 2).requires_grad_() for x in made]


def _time(function: Callable[..., Tensor], operands: list[Tensor], repeats: int) -> tuple[float, float]:
    """Median ms of the forward, of the backward."""
    device = operands[0].device
    forward = milliseconds(lambda: function(*operands), device, repeats)
    out = function(*operands)
    upstream = torch.randn_like(out)
    backward = milliseconds(lambda: torch.autograd.grad(out, operands, upstream, retain_graph=True), device, repeats)
    return forward, backward


def _tiles(mask: Mask, operands: list[Tensor]) -> tuple[int, int]:
    """Tiles of all heads that are visited, and all of them."""
    q, k, _ = operands
    sizes = [q.shape[2], k.shape[2]]
    problem = blocks.Problem.of(mask.leaves, [], mask.program, 1.0, [0, 0, 0, 0], sizes, mask.bounds)
    empty, partial, full = fused.count_tiles(problem, q, k)
    return partial + full, empty + partial + full


def _measure(name: str, mask: Mask, operands: list[Tensor], repeats: int) -> tuple[float | None, float | None, str]:
    length, device = operands[0].shape[2], operands[0].device
    try:
        with _triton("0" if name == "plain" else "1"):
            # The plain blocks are slow enough for two runs to say how slow.
            times = _time(
                _function(name, mask, length, device), operands, min(repeats, 2) if name == "plain" else repeats
            )
    except Exception as error:
        if name == "autosp":
            raise
        return None, None, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return *times, ""


def run(
    lengths: Sequence[int] = LENGTHS,
    masks: Sequence[str] = tuple(MASKS),
    implementations: Sequence[str] = IMPLEMENTATIONS,
    shape: Shape | None = None,
    dtype: str = "bfloat16",
    device: str = "cuda",
    repeats: int = 10,
) -> list[Row]:
    """Measure, and return one row a length, mask and implementation; causal sdpa once a length.

    Args:
        lengths: tokens.
        masks: keys of ``MASKS``.
        implementations: names among ``IMPLEMENTATIONS``; "plain" is autosp without its kernels. sdpa always runs.
        shape: heads and their size.
        dtype: a name among ``DTYPES``.
        device: "cuda" or "cpu".
        repeats: timed runs, of which the median is taken.

    Raises:
        ConfigError: an unknown name, or heads that key heads do not divide; nothing is measured then.
    """
    check_names("masks", masks, tuple(MASKS))
    check_names("implementations", implementations, IMPLEMENTATIONS)
    check_names("dtypes", [dtype], DTYPES)
    shape = shape or Shape()
    if shape.heads % shape.key_heads:
        raise ConfigError(f"{shape.heads} heads and {shape.key_heads} key heads; key heads have to divide the heads")
    where = torch.device(device)
    rows = []
    for length in lengths:
        operands = _operands(shape, length, where, getattr(torch, dtype))
        causal = _causal(length, shape.heads, where)
        floor = _time(_function("sdpa", causal, length, where), operands, repeats)
        rows.append(Row(length, _CAUSAL, "sdpa", *floor, 1.0, *_tiles(causal, operands)))
        for name in masks:
            mask = MASKS[name](length, shape.heads, where)
            for implementation in implementations:
                if implementation == "sdpa":
                    continue
                forward, backward, note = _measure(implementation, mask, operands, repeats)
                ratio = None if forward is None or backward is None else (forward + backward) / sum(floor)
                rows.append(Row(length, name, implementation, forward, backward, ratio, *_tiles(mask, operands), note))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| tokens | mask | implementation | forward ms | backward ms | ratio to causal sdpa | tiles | note |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = ["-" if x is None else f"{x:.2f}" for x in (row.forward_ms, row.backward_ms, row.ratio)]
        tiles = f"{row.tiles} of {row.all_tiles} ({100 * row.tiles / row.all_tiles:.1f}%)"
        lines.append(
            f"| {row.length} | {row.mask} | {row.implementation} | {' | '.join(shown)} | {tiles} | {row.note} |"
        )
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """The median ratio of autosp over all masks and lengths."""
    found = [row.ratio for row in rows if row.implementation == "autosp" and row.ratio is not None]
    return f"autosp: median ratio {statistics.median(found):.2f}, worst {max(found):.2f}" if found else ""


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
