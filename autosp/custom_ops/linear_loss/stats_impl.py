"""Per-token statistics of a head's logits, and their gradient, a block of vocabulary rows at a time.

Forward: for each block, ``logits = h @ W_block^T``, merged into the running statistics of all tokens; no collective
inside the loop, so uneven and empty shards need no care; over a group one max and one (packed) sum at the end.
Backward: the statistics are known, so a block's gradient is complete at once: ``dW_block`` is one GEMM over all tokens
(no fp32 copy of the weight gradient), ``dh`` is accumulated in fp32, and its all-reduce runs beside the last ``dW``
GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import gemm, groups, plan, rows
from .problem import Counting, Head, Rows, Scratch, narrowing_scale, refuse_outside, row_shape


@dataclass(frozen=True)
class Options:
    """What is the same in forward and backward."""

    softcap: float
    tp: str
    start: int
    end: int
    chunk_size: int
    dtype: torch.dtype
    strict: bool = False
    debug: bool = False


@dataclass
class Statistics:
    """Everything is ``[N]`` (or ``[N, K]``) in the accumulation dtype; rows that do not count hold zeros.

    logprob: NaN where an id that counts is in nobody's shard, or in two (the ranks' ids differ).
    is_top: whether the id's logit is the row's maximum.
    mean: the mean over the vocabulary of the log-probabilities.
    order: ``[N]`` int64, the rows that count first (no elements when all do).
    layout: int64 CPU tensor ``[start, local, total, count]``: where this rank's vocabulary rows lie, tokens that count.
    kept: the raw logits ``[N, V_local]``, or empty.
    """

    logprob: torch.Tensor
    is_top: torch.Tensor
    top: torch.Tensor
    log_total: torch.Tensor
    entropy: torch.Tensor
    mean: torch.Tensor
    order: torch.Tensor
    layout: torch.Tensor
    kept: torch.Tensor


def combine(state: rows.State, extra: list[torch.Tensor], tp: str, total: int) -> tuple[rows.State, list[torch.Tensor]]:
    """Statistics over the whole vocabulary: one max and one packed sum all-reduce. ``extra`` are ``[n]`` sums."""
    if groups.group_size(tp) == 1:
        return state, extra
    top = groups.all_reduce(state.top.clone(), "max", tp)
    moved = state.moved_to(top)
    packed = torch.stack([moved.total, moved.weighted, moved.centred, *extra])
    packed = groups.all_reduce(packed, "sum", tp)
    return rows.State(top, packed[0], packed[1], packed[2], total), list(packed[3:].unbind())


def found(index: torch.Tensor, start: int, local: int) -> torch.Tensor:
    return (index >= start) & (index < start + local)


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    valid: torch.Tensor | None,
    temperature: torch.Tensor | None,
    options: Options,
    keep: bool,
    wants: tuple[bool, bool],
) -> Statistics:
    """Statistics of ``hidden [N, H] @ weight [V_local, H].T``.

    Args:
        index: ``[N, K]`` int64 global ids, K may be 0. valid: ``[N]`` bool, the rows that count.
        wants: whether the entropy and the mean are wanted; otherwise they have no elements.
    """
    total_rows = hidden.shape[0]
    counting = Counting(valid, total_rows, hidden.device)
    part = counting.rows()
    shards = groups.agree_on_shards(
        weight.shape[0], options.start, options.end, part.count, options.chunk_size, hidden.device, options.tp,
        groups.STATISTICS,
    )  # fmt: skip
    if options.debug:
        groups.check_same(hidden, "hidden", options.tp)
        groups.check_same(index, "target", options.tp)
    if options.strict:
        refuse_outside(index, valid, shards)
    head = Head.of(weight, bias, shards.local, options.dtype)
    h = part.take(hidden).to(options.dtype)
    ids = part.take(index)
    shape = row_shape(temperature, options.softcap, part, options.dtype)
    wide = gemm.accumulator_dtype(options.dtype)
    kept = h.new_empty(total_rows if keep else 0, weight.shape[0], dtype=head.logits_dtype)
    # What is not written below: rows that do not count, padding columns.
    kept[part.count :].zero_()
    kept[:, shards.local :].zero_()
    running = rows.Running(part.count, h.device, wide, shape, *wants, ids - shards.start)
    if part.count and shards.local:
        for first, block in _blocks(h, head, shards, options, kept if keep else None):
            head.logits_into(block, h, first)
            running.add(block)
    state, picked = running.state, running.picked
    hits = found(ids, shards.start, shards.local).to(wide)
    extra = [*picked.unbind(1), *hits.unbind(1)]
    state, extra = combine(state, extra, options.tp, shards.total)
    k = ids.shape[1]
    if k:
        picked, hits = torch.stack(extra[:k], 1), torch.stack(extra[k:], 1)
        picked = torch.where(hits == 1, picked, float("nan"))
    logprob = (picked - state.top[:, None]) - state.log_total[:, None]
    is_top = picked == state.top[:, None]
    # A centred statistic: exactly 0 when one logit holds all the mass.
    entropy = state.log_total - state.weighted / state.total
    mean = state.centred / max(1, shards.total) - state.log_total
    layout = torch.tensor([shards.start, shards.local, shards.total, part.count])
    outputs = [logprob, is_top, state.top.clone(), state.log_total]
    outputs += [extra for extra, wanted in ((entropy, wants[0]), (mean, wants[1])) if wanted]
    if valid is not None and part.index is None:
        # Nothing was compacted (all rows count, or a CUDA graph is captured): what does not count is masked.
        outputs = [torch.where(valid.view(-1, *[1] * (v.dim() - 1)), v, torch.zeros_like(v)) for v in outputs]
    outputs = [part.put(v) for v in outputs]
    for place, wanted in ((4, wants[0]), (5, wants[1])):
        if not wanted:
            outputs.insert(place, h.new_empty(0, dtype=wide))
    return Statistics(*outputs, counting.order, layout, kept)


def _blocks(h: torch.Tensor, head: Head, shards: groups.Shards, options: Options, kept: torch.Tensor | None):
    """Pairs of first vocabulary row and the ``[n, columns]`` buffer for its logits."""
    n = h.shape[0]
    if kept is not None:
        yield 0, kept[:n, : shards.local]
        return
    size = torch.empty((), dtype=head.logits_dtype).element_size()
    budget = plan.lean_block(*h.shape)
    columns = plan.block_columns(options.chunk_size, n, shards.local, shards.total, size, budget)
    scratch = Scratch(n, columns, head.logits_dtype, h.device)
    for first in range(0, shards.local, columns):
        yield first, scratch.view(n, min(columns, shards.local - first))


@dataclass
class Upstream:
    """Gradients of the per-token outputs, each ``None`` or in the accumulation dtype.

    logprob: ``[N, K]`` of ``x_target - lse``; entropy, lse: ``[N]``; mean: ``[N]`` of ``mean_v(x_v) - lse``.
    """

    logprob: torch.Tensor | None
    entropy: torch.Tensor | None
    lse: torch.Tensor | None
    mean: torch.Tensor | None


def coefficients(up: Upstream, stats: Statistics, part: Rows, total: int) -> tuple[rows.Coefficients, torch.Tensor]:
    """The row gradient's coefficients, and a bound of its size, from the upstream gradients.

    ``d logprob/dx = [v = t] - p``; ``d lse/dx = p``; ``d entropy/dx = -p (lp + entropy)``;
    ``d mean/dx = 1/V - p`` with V the size of the whole vocabulary.
    """
    top, log_total = part.take(stats.top), part.take(stats.log_total)
    b = torch.zeros_like(top)
    bound = torch.zeros_like(top)
    c = d = None
    if up.logprob is not None:
        g = part.take(up.logprob)
        # An id outside the vocabulary gave NaN: so does its gradient, on the whole row.
        missing = torch.isnan(part.take(stats.logprob)) & ~torch.isnan(log_total)[:, None] & (g != 0)
        b = b - torch.where(missing, float("nan"), g).sum(1)
        bound = bound + 2 * g.abs().sum(1)
    if up.lse is not None:
        g = part.take(up.lse)
        b, bound = b + g, bound + g.abs()
    if up.entropy is not None:
        g, entropy = part.take(up.entropy), part.take(stats.entropy)
        b, c = b - g * entropy, -g
        bound = bound + g.abs() * (entropy.abs() + 1)
    if up.mean is not None:
        g = part.take(up.mean)
        b, d = b - g, g / max(1, total)
        bound = bound + 2 * g.abs()
    return rows.Coefficients(top, log_total, b.contiguous(), c=c, d=d), bound


def backward(
    up: Upstream,
    stats: Statistics,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    temperature: torch.Tensor | None,
    options: Options,
    needs: tuple[bool, bool, bool],
    main_grad: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of hidden, weight and bias in their dtypes; a tensor of no elements for each that is not needed.

    With ``main_grad`` (``[V_local, H]`` fp32) the weight gradient is added there and not returned.
    """
    start, local, total, count = stats.layout.tolist()
    part = Rows.of(stats.order, count, hidden.shape[0])
    head = Head.of(weight, bias, local, options.dtype)
    h = part.take(hidden).to(options.dtype)
    ids = part.take(index) - start
    shape = row_shape(temperature, options.softcap, part, options.dtype)
    co, bound = coefficients(up, stats, part, total)
    a = None if up.logprob is None else part.take(up.logprob)
    if shape.inverse_temperature is not None:
        bound = bound * shape.inverse_temperature.abs()
    scale = narrowing_scale(bound.amax() if bound.numel() else 1.0, options.dtype, h)
    if scale is not None:
        co.b, co.c, co.d, a = (None if t is None else t * scale for t in (co.b, co.c, co.d, a))
    sink = GradientSink(h, weight, bias, head, needs, main_grad, scale, options.tp)
    if part.count and local:
        logits_block = stats.kept[: part.count, :local] if stats.kept.numel() else None
        _backward_blocks(sink, h, head, ids, shape, co, a, options, logits_block, (start, local, total))
    return sink.finished(hidden, part)


def _backward_blocks(sink, h, head, ids, shape, co, a, options, kept, layout) -> None:
    n, local, total = h.shape[0], layout[1], layout[2]
    size = torch.empty((), dtype=head.logits_dtype).element_size()
    two = kept is None and head.logits_dtype != options.dtype
    width = size + h.element_size() if two else size
    columns = plan.block_columns(options.chunk_size, n, local, total, width, plan.lean_block(*h.shape))
    scratch = Scratch(n, columns, options.dtype, h.device)
    raw = scratch if not two else Scratch(n, columns, head.logits_dtype, h.device)
    for first in range(0, local, columns):
        last = min(local, first + columns)
        grad = scratch.view(n, last - first)
        if kept is None:
            logits = raw.view(n, last - first)
            head.logits_into(logits, h, first)
        else:
            logits = kept[:, first:last]
        block_gradient(grad, logits, shape, co, ids - first, a)
        sink.add(grad, first, last, final=last == local)


def block_gradient(grad, logits, shape, co, ids, a) -> None:
    """Row gradient of a block: one target is added in the kernel, several (or none) outside it."""
    if a is not None and ids.shape[1] == 1:
        co = rows.Coefficients(co.top, co.log_total, co.b, a[:, 0].contiguous(), ids[:, 0].contiguous(), co.c, co.d)
    several = a is not None and ids.shape[1] > 1
    if several:
        raw = logits.gather(1, ids.clamp(0, logits.shape[1] - 1)).to(co.b.dtype)
    rows.gradient_into(grad, logits, shape, co)
    if several:
        rows.add_at(grad, raw, shape, ids, a)


class GradientSink:
    """Takes gradients of logits a block of vocabulary rows at a time; gives those of hidden, weight and bias."""

    def __init__(self, h, weight, bias, head, needs, main_grad, scale, tp) -> None:
        self.h, self.head, self.tp, self.main_grad, self.scale = h, head, tp, main_grad, scale
        self.inverse = None if scale is None else scale.reciprocal()
        self.wide = gemm.accumulator_dtype(h.dtype)
        self.dh = self.dw = self.db = None
        if needs[0]:
            self.dh = torch.empty(h.shape, device=h.device, dtype=self.wide)
        if needs[1] and main_grad is None:
            # Every block of the local rows is written; padding rows, or all rows without a token, are zero.
            self.dw = torch.empty(weight.shape, device=h.device, dtype=weight.dtype)
            self.dw[head.weight.shape[0] if h.shape[0] else 0 :].zero_()
        if needs[2]:
            self.db = torch.zeros_like(bias)
        self.needs = needs
        self.reduced = False
        self.first = True

    def add(self, grad: torch.Tensor, first: int, last: int, final: bool) -> None:
        if self.dh is not None:
            gemm.matmul_into(self.dh, grad, self.head.weight[first:last], accumulate=not self.first)
            if final:
                self._reduce()
        self.first = False
        if self.needs[1]:
            self._add_weight(grad, first, last)
        if self.db is not None:
            column = grad.sum(0, dtype=self.wide)
            self.db[first:last] = column if self.inverse is None else column * self.inverse

    def _add_weight(self, grad: torch.Tensor, first: int, last: int) -> None:
        if self.main_grad is not None and self.inverse is None:
            gemm.matmul_into(self.main_grad[first:last], grad.t(), self.h, accumulate=True)
            return
        if self.main_grad is None and self.inverse is None:
            gemm.matmul_into(self.dw[first:last], grad.t(), self.h)
            return
        block = torch.empty(last - first, self.h.shape[1], device=self.h.device, dtype=self.wide)
        gemm.matmul_into(block, grad.t(), self.h)
        block *= self.inverse
        if self.main_grad is not None:
            self.main_grad[first:last] += block
        else:
            self.dw[first:last] = block

    def _reduce(self) -> None:
        self.reduced = True
        if self.inverse is not None:
            self.dh *= self.inverse
        if self.dh.numel():
            groups.start_all_reduce(self.dh, "sum", self.tp)

    def finished(self, hidden: torch.Tensor, part: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dh = None
        if self.dh is not None:
            if not self.reduced:
                # An empty shard has nothing to add, but its group waits for it.
                self.dh.zero_()
                self._reduce()
            dh = part.put(groups.finish(self.dh).to(hidden.dtype))
        return tuple(self.h.new_empty(0) if t is None else t for t in (dh, self.dw, self.db))
