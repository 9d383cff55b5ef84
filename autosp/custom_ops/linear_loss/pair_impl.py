"""Divergences between two heads' distributions, with no ``[tokens, vocabulary]`` block beyond a chunk.

Values: a chunk of tokens at a time, the logits of both heads; over a group one max and one packed sum all-reduce for
the normalizers, one more for the divergence, which needs them. A reduced divergence forms its gradient in the same pass
(per side three GEMMs, one for a teacher that needs no gradient). Per token, the backward recomputes the logits a block
of vocabulary rows at a time, as ``stats_impl`` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import gemm, groups, pair_rows, plan, rows
from .problem import Counting, Head, Rows, Scratch, narrowing_scale, row_shape
from .stats_impl import GradientSink, Options


@dataclass
class Model:
    """One side: hidden states ``[N, H]``, head ``[V_local, H]``, bias ``[V_local]`` or ``None``, soft cap (0: none)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float
    needs: tuple[bool, bool, bool] = (False, False, False)

    def head(self, local: int, dtype: torch.dtype) -> Head:
        return Head.of(self.weight, self.bias, local, dtype)


@dataclass
class PairStatistics:
    """``[6, N]`` in the accumulation dtype: maximum and log of the sum of student and teacher, then A and B.

    ``order`` and ``layout`` as in ``stats_impl.Statistics``.
    """

    table: torch.Tensor
    order: torch.Tensor
    layout: torch.Tensor


def begin(
    student: Model, teacher: Model, valid, options: Options, way: int
) -> tuple[Rows, groups.Shards, torch.Tensor]:
    counting = Counting(valid, student.hidden.shape[0], student.hidden.device)
    part = counting.rows()
    rows_ = student.weight.shape[0]
    shards = groups.agree_on_shards(
        rows_, options.start, options.end, part.count, options.chunk_size, student.hidden.device, options.tp, way
    )
    if options.debug:
        groups.check_same(student.hidden, "student_hidden", options.tp)
        groups.check_same(teacher.hidden, "teacher_hidden", options.tp)
    return part, shards, counting.order


def normalizers(state_s: rows.State, state_t: rows.State, tp: str) -> tuple[rows.State, rows.State]:
    """Both sides' statistics over the whole vocabulary: one max and one sum all-reduce, packed."""
    if groups.group_size(tp) == 1:
        return state_s, state_t
    tops = groups.all_reduce(torch.stack([state_s.top, state_t.top]), "max", tp)
    moved = [state.moved_to(top) for state, top in zip((state_s, state_t), tops.unbind(), strict=True)]
    totals = groups.all_reduce(torch.stack([m.total for m in moved]), "sum", tp)
    for m, total in zip(moved, totals.unbind(), strict=True):
        m.total = total
    return moved[0], moved[1]


def _pair(logits_s, logits_t, shape_s, shape_t, kind, tp):
    """The two sides with their normalizers, and A and B over the whole vocabulary."""
    state_s, state_t = normalizers(rows.statistics(logits_s, shape_s), rows.statistics(logits_t, shape_t), tp)
    side_s = pair_rows.Side(logits_s, shape_s, state_s.top.contiguous(), state_s.log_total)
    side_t = pair_rows.Side(logits_t, shape_t, state_t.top.contiguous(), state_t.log_total)
    a, b = pair_rows.values(side_s, side_t, kind)
    if groups.group_size(tp) > 1:
        a, b = groups.all_reduce(torch.stack([a, b]), "sum", tp).unbind()
    return side_s, side_t, a, b


class _Chunks:
    """Chunks of tokens: the logits of both heads in two reused buffers."""

    def __init__(self, student: Model, teacher: Model, part: Rows, shards, temperature, options: Options) -> None:
        self.part, self.shards, self.dtype = part, shards, options.dtype
        self.models = (student, teacher)
        self.heads = [m.head(shards.local, options.dtype) for m in self.models]
        self.shapes = [row_shape(temperature, m.softcap, part, options.dtype) for m in self.models]
        sizes = [torch.empty((), dtype=h.logits_dtype).element_size() for h in self.heads]
        self.step = plan.chunk_rows(
            options.chunk_size, part.count, shards.largest, shards.total, sum(sizes), plan.CHUNK_BYTES_PAIR
        )
        device = student.hidden.device
        self.buffers = [Scratch(self.step, shards.local, h.logits_dtype, device) for h in self.heads]

    def __iter__(self):
        """Triples of the chunk's rows, its hidden states and its raw logits (pairs: student, teacher)."""
        for first in range(0, self.part.count, self.step):
            last = min(self.part.count, first + self.step)
            hidden, logits = [], []
            for model, head, buffer in zip(self.models, self.heads, self.buffers, strict=True):
                h = self.part.chunk(model.hidden, first, last).to(self.dtype)
                block = buffer.view(last - first, self.shards.local)
                head.logits_into(block, h)
                hidden.append(h)
                logits.append(block)
            yield slice(first, last), hidden, logits


def forward(student: Model, teacher: Model, valid, temperature, kind, options: Options) -> PairStatistics:
    """Divergence statistics of every row; rows that do not count hold zeros."""
    part, shards, order = begin(student, teacher, valid, options, groups.PAIR)
    wide = gemm.accumulator_dtype(options.dtype)
    table = torch.zeros(6, part.count, device=student.hidden.device, dtype=wide)
    chunks = _Chunks(student, teacher, part, shards, temperature, options)
    for span, _, logits in chunks:
        shapes = [s.rows(span.start, span.stop) for s in chunks.shapes]
        side_s, side_t, a, b = _pair(*logits, *shapes, kind, options.tp)
        for row, value in enumerate((side_s.top, side_s.log_total, side_t.top, side_t.log_total, a, b)):
            table[row, span] = value
    layout = torch.tensor([shards.start, shards.local, shards.total, part.count])
    return PairStatistics(part.put(table.t().contiguous()).t().contiguous(), order, layout)


def _bound(upstream: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A bound of the gradient's entries: ``sum p (log ratio)`` has negative terms of at most 1 in all."""
    return upstream.abs() * (2 * torch.maximum(a.abs(), b.abs()) + 2)


def backward(
    upstream: torch.Tensor,
    stats: PairStatistics,
    student: Model,
    teacher: Model,
    temperature,
    kind: pair_rows.Kind,
    options: Options,
) -> list[torch.Tensor]:
    """Gradients of (hidden, weight, bias) of the student, then of the teacher; no elements where not needed."""
    _, local, total, count = stats.layout.tolist()
    part = Rows.of(stats.order, count, student.hidden.shape[0])
    table = stats.table if part.index is None else stats.table.index_select(1, part.index)
    top_s, log_s, top_t, log_t, a, b = table.contiguous().unbind()
    up = part.take(upstream)
    models = (student, teacher)
    heads = [m.head(local, options.dtype) for m in models]
    hidden = [part.take(m.hidden).to(options.dtype) for m in models]
    shapes = [row_shape(temperature, m.softcap, part, options.dtype) for m in models]
    bound = _bound(up, a, b)
    if shapes[0].inverse_temperature is not None:
        bound = bound * shapes[0].inverse_temperature.abs()
    scale = narrowing_scale(bound.amax() if bound.numel() else 1.0, options.dtype, up)
    up = (up if scale is None else up * scale).contiguous()
    sinks = [
        GradientSink(h, m.weight, m.bias, head, m.needs, None, scale, options.tp) if any(m.needs) else None
        for h, m, head in zip(hidden, models, heads, strict=True)
    ]
    if part.count and local:
        size = [torch.empty((), dtype=h.logits_dtype).element_size() for h in heads]
        n, step_bytes = part.count, plan.SCRATCH_BYTES
        columns = plan.block_columns(options.chunk_size, n, local, total, sum(size) + 4, step_bytes)
        buffers = [Scratch(n, columns, h.logits_dtype, up.device) for h in heads]
        for first in range(0, local, columns):
            last = min(local, first + columns)
            blocks = [buffer.view(n, last - first) for buffer in buffers]
            for block, head, h in zip(blocks, heads, hidden, strict=True):
                head.logits_into(block, h, first)
            sides = [
                pair_rows.Side(block, shape, top, log)
                for block, shape, top, log in zip(blocks, shapes, (top_s, top_t), (log_s, log_t), strict=True)
            ]
            outs = _outputs(sinks, blocks, options.dtype)
            pair_rows.gradients_into(*outs, *sides, kind, pair_rows.PairGradient(up, a, b))
            for sink, out in zip(sinks, outs, strict=True):
                if sink is not None:
                    sink.add(out, first, last, final=last == local)
    return _collect(sinks, models, part, up)


def _outputs(sinks, blocks, dtype) -> list[torch.Tensor | None]:
    """Where the gradient of each side goes: over its logits when they have the compute dtype already."""
    return [
        None if sink is None else (block if block.dtype == dtype else torch.empty_like(block, dtype=dtype))
        for sink, block in zip(sinks, blocks, strict=True)
    ]


def _collect(sinks, models, part: Rows, like: torch.Tensor) -> list[torch.Tensor]:
    result: list[torch.Tensor] = []
    for sink, model in zip(sinks, models, strict=True):
        if sink is None:
            result += [like.new_empty(0, dtype=model.hidden.dtype) for _ in range(3)]
        else:
            result += list(sink.finished(model.hidden, part))
    return result


def form(student: Model, teacher: Model, valid, temperature, kind, options: Options) -> list[torch.Tensor]:
    """The sum of the divergences (a number), then fp32 gradients of upstream 1: three of the student, three of the
    teacher.
    """
    way = groups.PAIR_FORMED + student.needs[0] + 2 * teacher.needs[0]
    part, shards, _ = begin(student, teacher, valid, options, way)
    wide = gemm.accumulator_dtype(options.dtype)
    device = student.hidden.device
    total = torch.zeros((), device=device, dtype=wide)
    chunks = _Chunks(student, teacher, part, shards, temperature, options)
    grads = [_Accumulated(m, part, wide, shards.local, options.tp) for m in (student, teacher)]
    live = None if valid is None else part.take(valid)
    for span, hidden, logits in chunks:
        shapes = [s.rows(span.start, span.stop) for s in chunks.shapes]
        side_s, side_t, a, b = _pair(*logits, *shapes, kind, options.tp)
        value, up = kind.value(a, b), torch.ones_like(a)
        if live is not None:
            value, up = (torch.where(live[span], x, 0.0) for x in (value, up))
        total += value.sum()
        bound = _bound(up, a, b)
        if shapes[0].inverse_temperature is not None:
            bound = bound * shapes[0].inverse_temperature.abs()
        scale = narrowing_scale(bound.amax(), options.dtype, a)
        up = up if scale is None else up * scale
        outs = _outputs([g if any(g.needs) else None for g in grads], logits, options.dtype)
        pair_rows.gradients_into(*outs, side_s, side_t, kind, pair_rows.PairGradient(up, a, b))
        for grad, out, h, head in zip(grads, outs, hidden, chunks.heads, strict=True):
            if out is not None:
                grad.add(out, h, head, span, scale)
    return [total, *grads[0].finished(), *grads[1].finished()]


class _Accumulated:
    """fp32 gradients of one side, chunk by chunk; the scale of an fp16 chunk is taken out before they are added."""

    def __init__(self, model: Model, part: Rows, wide: torch.dtype, local: int, tp: str) -> None:
        self.needs, self.part, self.local, self.tp = model.needs, part, local, tp
        device = model.hidden.device
        self.like = torch.empty(0, device=device, dtype=wide)
        self.dh = self.dw = self.db = None
        if self.needs[0]:
            self.dh = torch.empty(part.count, model.hidden.shape[1], device=device, dtype=wide)
        if self.needs[1]:
            self.dw = torch.empty(model.weight.shape, device=device, dtype=wide)
            self.dw[local if part.count else 0 :].zero_()
        if self.needs[2]:
            self.db = torch.zeros(model.bias.shape, device=device, dtype=wide)
        self.pending: list[torch.Tensor] = []

    def add(self, grad: torch.Tensor, h: torch.Tensor, head: Head, span: slice, scale: torch.Tensor | None) -> None:
        inverse = None if scale is None else scale.reciprocal()
        if self.dh is not None:
            part = self.dh[span]
            gemm.matmul_into(part, grad, head.weight)
            if inverse is not None:
                part *= inverse
            groups.start_all_reduce(part, "sum", self.tp)
            self.pending.append(part)
        if self.dw is not None:
            if inverse is None:
                gemm.matmul_into(self.dw[: self.local], grad.t(), h, accumulate=span.start > 0)
            else:
                block = torch.empty_like(self.dw[: self.local])
                gemm.matmul_into(block, grad.t(), h)
                block *= inverse
                self.dw[: self.local].copy_(self.dw[: self.local] + block if span.start > 0 else block)
        if self.db is not None:
            column = grad.sum(0, dtype=self.db.dtype)
            self.db[: self.local] += column if inverse is None else column * inverse

    def finished(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for part in self.pending:
            groups.finish(part)
        dh = None if self.dh is None else self.part.put(self.dh)
        return tuple(self.like.new_empty(0) if t is None else t for t in (dh, self.dw, self.db))
