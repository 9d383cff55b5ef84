"""The mathematics of block attention in plain PyTorch: a loop over chunks of queries, exact to rounding.

Scores are held in fp32 (fp64 for fp64) for one chunk at a time, so memory is linear in the number of keys. The
backward is that of FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 4): probabilities are recomputed from
the log-sum-exp of the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .program import Block, evaluate, parse

# Elements of one chunk of scores: 16 MiB in fp32 (positions to compare are int64, and a few live at a time), and
# 256 MiB on a GPU, which smaller products would leave idle.
CHUNK_ELEMENTS = 2**22
GPU_CHUNKS = 16


@dataclass(frozen=True)
class Problem:
    """Where q, k and v lie in the whole attention, and what is done to the scores.

    Args:
        leaves, numbers, program: see ``program``.
        scale: factor of the scores.
        origin: first batch row, first head, position of the first query row, position of the first key row.
        sizes: number of queries and of keys of the whole attention; rows beyond are padding.
        bounds: ``query - key`` of what is visible lies in ``[bounds[0], bounds[1]]``.
        text: the program as it was given.
    """

    leaves: Sequence[Tensor]
    numbers: Sequence[int]
    program: dict[str, Any]
    scale: float
    origin: Sequence[int]
    sizes: Sequence[int]
    bounds: Sequence[int]
    text: str

    @classmethod
    def of(cls, leaves, numbers, program, scale, origin, sizes, bounds) -> Problem:
        return cls(leaves, numbers, parse(program), scale, origin, sizes, bounds, program)

    @property
    def has_scores(self) -> bool:
        return self.program.get("score") is not None

    @property
    def has_mask(self) -> bool:
        return self.program.get("mask") is not None


@dataclass
class Chunk:
    """Queries ``[first, last)`` against keys ``[start, stop)``, as local rows; ``hidden`` is True where not visible."""

    first: int
    last: int
    start: int
    stop: int
    block: Block
    hidden: Tensor | None


def positions(first: int, start: int, stop: int, size: int, device: torch.device) -> Tensor:
    """Positions of local rows; padding rows get those of the nearest real one, so that what they compute is finite."""
    return (torch.arange(start, stop, device=device) + first).clamp(0, max(size - 1, 0))


def chunks(problem: Problem, q: Tensor, k: Tensor) -> Iterator[Chunk]:
    """The chunks of queries in order, each with the keys that its bounds and its mask may let it see."""
    batch, heads, rows, _ = q.shape
    q0, k0 = problem.origin[2], problem.origin[3]
    low, high = problem.bounds
    # Keys that exist: local rows [first_key, last_key) of k.
    first_key, last_key = max(0, -k0), min(k.shape[2], problem.sizes[1] - k0)
    elements = CHUNK_ELEMENTS * (1 if q.device.type == "cpu" else GPU_CHUNKS)
    step = max(1, min(rows, elements // max(1, batch * heads * k.shape[2])))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        queries = positions(q0, first, last, problem.sizes[0], q.device)
        nearest = max(0, min(first + q0, problem.sizes[0] - 1)), max(0, min(last - 1 + q0, problem.sizes[0] - 1))
        start = max(first_key, nearest[0] - high - k0)
        stop = min(last_key, nearest[1] - low + 1 - k0)
        if start >= stop:
            yield Chunk(first, last, 0, 0, Block((0, 0), (0, 0), queries, queries), None)
            continue
        yield _masked_chunk(problem, q, first, last, start, stop, queries)


def _masked_chunk(problem: Problem, q: Tensor, first: int, last: int, start: int, stop: int, queries: Tensor) -> Chunk:
    """The chunk with its mask; keys at the ends that nobody sees are left out. Looking costs a GPU a wait for each
    chunk, and saves all products with other documents.
    """
    keys = torch.arange(start, stop, device=q.device) + problem.origin[3]
    extent = (problem.origin[0], q.shape[0]), (problem.origin[1], q.shape[1])
    block = Block(*extent, queries, keys)
    hidden = _outside(problem.bounds, queries, keys)
    if problem.has_mask and not problem.has_scores:
        _, mask = evaluate(problem.program, block, problem.leaves, problem.numbers, None)
        assert mask is not None
        hidden = ~mask if hidden is None else ~mask | hidden
        if hidden.shape[-1] == stop - start:
            seen = (~hidden).reshape(-1, hidden.shape[-1]).any(0).nonzero()
            low, high = (int(seen[0]), int(seen[-1]) + 1) if seen.numel() else (0, 0)
            keys, hidden = keys[low:high], hidden[..., low:high]
            start, stop, block = start + low, start + high, Block(*extent, queries, keys)
    return Chunk(first, last, start, stop, block, hidden)


def _outside(bounds: Sequence[int], queries: Tensor, keys: Tensor) -> Tensor | None:
    """Where ``query - key`` is out of bounds; None when it is nowhere for these positions."""
    distance = queries.unsqueeze(-1) - keys
    return (distance < bounds[0]) | (distance > bounds[1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[B, heads, rows, D]`` as ``[B, key heads, group x rows, D]``."""
    batch, heads, rows, size = x.shape
    return x.reshape(batch, groups, heads // groups * rows, size)


def raw_scores(problem: Problem, q: Tensor, k: Tensor, chunk: Chunk) -> Tensor:
    """Scaled products ``[B, heads, queries, keys]`` of a chunk."""
    batch, heads = q.shape[:2]
    part = _grouped(q[:, :, chunk.first : chunk.last], k.shape[1])
    scores = part @ k[:, :, chunk.start : chunk.stop].transpose(-1, -2)
    return scores.view(batch, heads, chunk.last - chunk.first, chunk.stop - chunk.start) * problem.scale


def changed_scores(problem: Problem, chunk: Chunk, scores: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """Scores after the program and the mask: -inf where a key is hidden."""
    hidden = chunk.hidden
    if problem.has_scores:
        new, mask = evaluate(problem.program, chunk.block, leaves, problem.numbers, scores)
        assert new is not None
        scores = new.to(scores.dtype).expand(scores.shape)
        if mask is not None:
            hidden = ~mask if hidden is None else ~mask | hidden
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """``exp(scores - lse)``; zero in rows that see nothing, as scaled_dot_product_attention gives them."""
    safe = torch.where(lse.isinf(), torch.zeros_like(lse), lse)
    return torch.exp(scores - safe.unsqueeze(-1))


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``(out [B, H, Sq, Dv] in the dtype of q, lse [B, H, Sq] in fp32 or fp64)``."""
    batch, heads, rows, _ = q.shape
    wide = _wide(q.dtype)
    out = torch.zeros(batch, heads, rows, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full((batch, heads, rows), float("-inf"), dtype=wide, device=q.device)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    for chunk in chunks(problem, q, k):
        if chunk.start == chunk.stop or q.numel() == 0:
            continue
        scores = changed_scores(problem, chunk, raw_scores(problem, q, k, chunk), problem.leaves)
        part = torch.logsumexp(scores, dim=-1)
        weights = _grouped(_probabilities(scores, part), k.shape[1])
        mixed = weights @ v[:, :, chunk.start : chunk.stop]
        lse[:, :, chunk.first : chunk.last] = part
        out[:, :, chunk.first : chunk.last] = mixed.view(batch, heads, -1, v.shape[-1]).to(out.dtype)
    return out, lse


def backward(
    problem: Problem, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Gradients of q, k, v and of every leaf that is wanted (empty tensors for the others).

    ``out`` and ``lse`` may be those of more keys than ``k`` holds: the result is then the share of these keys.
    """
    dtypes = q.dtype, k.dtype, v.dtype
    wide = _wide(q.dtype)
    q, k, v, grad = (x.to(wide) for x in (q, k, v, grad))
    delta = (grad * out.to(wide)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse.to(wide)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    leaf_grads = [x.new_zeros(x.shape if want else 0) for x, want in zip(problem.leaves, wanted, strict=True)]
    for chunk in chunks(problem, q, k):
        if chunk.start == chunk.stop or q.numel() == 0:
            continue
        _chunk_backward(problem, chunk, (q, k, v, grad, delta, lse), (dq, dk, dv), leaf_grads, wanted)
    return dq.to(dtypes[0]), dk.to(dtypes[1]), dv.to(dtypes[2]), leaf_grads


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Autograd records here, inside of an operator's implementation, where the dispatcher leaves it out."""
    keys = torch._C.DispatchKey
    with contextlib.ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.AutogradOther):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def _chunk_backward(
    problem: Problem,
    chunk: Chunk,
    saved: tuple[Tensor, ...],
    grads: tuple[Tensor, Tensor, Tensor],
    leaf_grads: list[Tensor],
    wanted: Sequence[bool],
) -> None:
    q, k, v, grad, delta, lse = saved
    rows, keys, groups = slice(chunk.first, chunk.last), slice(chunk.start, chunk.stop), k.shape[1]
    raw = raw_scores(problem, q, k, chunk)
    leaves = list(problem.leaves)
    with recorded() if problem.has_scores else contextlib.nullcontext():
        if problem.has_scores:
            raw.requires_grad_()
            leaves = [x.detach().requires_grad_() if want else x for x, want in zip(leaves, wanted, strict=True)]
        scores = changed_scores(problem, chunk, raw, leaves)
    weights = _probabilities(scores.detach(), lse[:, :, rows])
    upstream = _grouped(grad[:, :, rows], groups)
    grads[2][:, :, keys] += _grouped(weights, groups).transpose(-1, -2) @ upstream
    product = (upstream @ v[:, :, keys].transpose(-1, -2)).view(weights.shape)
    change = weights * (product - delta[:, :, rows].unsqueeze(-1))
    if problem.has_scores:
        sources = [x for x, want in zip(leaves, wanted, strict=True) if want]
        with recorded():
            change, *found = torch.autograd.grad(scores, [raw, *sources], change, allow_unused=True)
        change = torch.zeros_like(raw) if change is None else change
        places = [place for place, want in zip(leaf_grads, wanted, strict=True) if want]
        for place, value in zip(places, found, strict=True):
            if value is not None:
                place += value
    change = _grouped(change * problem.scale, groups)
    grads[0][:, :, rows] += (change @ k[:, :, keys]).view(q[:, :, rows].shape)
    grads[1][:, :, keys] += change.transpose(-1, -2) @ _grouped(q[:, :, rows], groups)
