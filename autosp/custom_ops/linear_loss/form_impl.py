"""The sum of cross entropies with its gradient formed in the forward: three GEMMs, a chunk of tokens at a time.

Per chunk: ``logits = h @ W^T`` into one reused buffer, row statistics, over a group one max and one packed sum
all-reduce, the gradient of the logits over the logits, ``dW += dlogits^T @ h`` in the GEMM's fp32 epilogue, and
``dh = dlogits @ W`` in fp32, whose all-reduce runs beside the next chunk's GEMMs.

The gradient is that of the plain sum (upstream 1) and is kept in fp32; the upstream number is applied to it in fp32
before anything is narrowed. With a ``main_grad`` the weight gradient is added there at once, so the upstream number
must be known in the forward: ``promised`` is then applied to the coefficients, in fp32 too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import gemm, groups, plan, rows
from .problem import Counting, Head, Scratch, narrowing_scale, refuse_outside, row_shape
from .stats_impl import Options, combine, found

EARLY_ROWS = 256
"""Enough rows to keep a device busy for the few hundred microseconds that the host needs."""


@dataclass(frozen=True)
class Loss:
    """``(1 - smoothing) nll + smoothing * mean_v(-log p_v) + z_loss * lse^2``: ``F.cross_entropy`` plus the z-loss."""

    smoothing: float
    z_loss: float

    def value(self, logprob: torch.Tensor, mean: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        loss = -(1 - self.smoothing) * logprob
        if self.smoothing:
            loss = loss - self.smoothing * mean
        return loss + self.z_loss * lse * lse if self.z_loss else loss


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    valid: torch.Tensor,
    temperature: torch.Tensor | None,
    loss: Loss,
    options: Options,
    needs: tuple[bool, bool, bool],
    main_grad: torch.Tensor | None,
    promised: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of the losses of the ``valid`` tokens (fp32, a number), and the gradients of hidden, weight and bias.

    The gradients are fp32 and of upstream 1 without ``promised``; with it they are final and in the inputs' dtypes. One
    that is not needed (or went to ``main_grad``) has no elements.
    """
    run = _Run(hidden, weight, bias, valid, temperature, loss, options, needs, main_grad)
    if options.debug:
        groups.check_same(hidden, "hidden", options.tp)
        groups.check_same(target, "target", options.tp)
    if options.strict:
        refuse_outside(target[:, None], valid, run.shards)
    part, shards, shape = run.part, run.shards, run.shape
    ids = part.take(target) - shards.start
    live = part.take(valid)
    state = _Gradients(hidden, weight, bias, part, needs, main_grad, promised, options, shape, loss)
    total = torch.zeros((), device=hidden.device, dtype=state.wide)
    for first, last, h, logits, grad in run.chunks(hidden):
        span = ids[first:last], live[first:last]
        total += _losses_and_gradient(grad, logits, shape.rows(first, last), *span, shards, options, loss, state.factor)
        state.add(grad, h, run.head, first, last)
    return total, *state.finished()


class _Run:
    """The chunks of tokens and their buffers.

    Without a group the first few rows' logits are launched before the number of tokens that count is waited for: the
    device does not idle while the host learns it, and at most those rows are computed in vain.
    """

    def __init__(self, hidden, weight, bias, valid, temperature, loss, options, needs, main_grad) -> None:
        total = hidden.shape[0]
        counting = Counting(valid, total, hidden.device)
        alone = groups.group_size(options.tp) == 1
        early = total if alone else counting.rows().count
        way = (groups.FORMED if main_grad is None else groups.FORMED_IN_PLACE) + needs[0]
        self.shards = groups.agree_on_shards(
            weight.shape[0], options.start, options.end, early, options.chunk_size, hidden.device, options.tp, way
        )
        self.dtype = options.dtype
        self.head = Head.of(weight, bias, self.shards.local, options.dtype)
        two = self.head.logits_dtype != options.dtype
        width = torch.empty((), dtype=self.head.logits_dtype).element_size() + (2 if two else 0)
        sizes = self.shards.largest, self.shards.total
        budget = plan.chunk_budget(weight, self.shards.largest, needs[1], main_grad is not None, alone)
        self.step = plan.chunk_rows(options.chunk_size, early, *sizes, width, budget)
        self._raw = Scratch(self.step, self.shards.local, self.head.logits_dtype, hidden.device)
        self._grad = Scratch(self.step, self.shards.local, options.dtype, hidden.device) if two else self._raw
        self._early = 0
        if alone and total:
            rows_ = min(self.step, total, EARLY_ROWS)
            h = hidden if valid is None else hidden.index_select(0, counting.order[:rows_])
            self.head.logits_into(self._raw.view(rows_, self.shards.local), h[:rows_].to(options.dtype))
            self._early = rows_
        self.part = counting.rows()
        if self.part.count:
            self.step = min(self.step, plan.chunk_rows(options.chunk_size, self.part.count, *sizes, width, budget))
        self.shape = row_shape(temperature, options.softcap, self.part, options.dtype)

    def chunks(self, hidden: torch.Tensor):
        """First and last row, hidden states, raw logits, and where the gradient goes (over them, or beside)."""
        for first in range(0, self.part.count, self.step):
            last = min(self.part.count, first + self.step)
            logits = self._raw.view(last - first, self.shards.local)
            h = self.part.chunk(hidden, first, last).to(self.dtype)
            done = self._early if first == 0 else 0
            self.head.logits_into(logits[done:], h[done:])
            yield first, last, h, logits, self._grad.view(last - first, self.shards.local)


def _losses_and_gradient(grad, logits, shape, ids, live, shards, options, loss, factor) -> torch.Tensor:
    """Sum of a chunk's losses; its gradient goes to ``grad``, which may be ``logits``."""
    co, losses = _chunk(logits, shape, ids, live, shards, options, loss, factor)
    rows.gradient_into(grad, logits, shape, co)
    return losses.sum()


def _chunk(logits, shape, ids, live, shards, options, loss, factor) -> tuple[rows.Coefficients, torch.Tensor]:
    """Losses ``[n]`` of a chunk and the coefficients of its row gradient; rows that do not count give zeros.

    ``dloss/dx = p (1 + 2 z_loss lse) - (1 - smoothing) [v = t] - smoothing / V``.
    """
    wide = gemm.accumulator_dtype(logits.dtype)
    running = rows.Running(ids.shape[0], logits.device, wide, shape, False, loss.smoothing != 0, ids[:, None])
    running.add(logits)
    state, picked = running.state, running.picked
    hit = found(ids, 0, shards.local).to(wide)
    state, (picked, hit) = combine(state, [picked[:, 0], hit], options.tp, shards.total)
    log_total = state.log_total
    lse = state.top + log_total
    logprob = torch.where(hit == 1, (picked - state.top) - log_total, float("nan"))
    mean = state.centred / max(1, shards.total) - log_total
    losses = torch.where(live, loss.value(logprob, mean, lse), 0.0)
    # NaN for an id that is in nobody's shard, or that ranks with other targets claim twice: so is its row's gradient.
    live = torch.where(hit == 1, live.to(wide), torch.where(live, float("nan"), 0.0))
    live = live if factor is None else live * factor
    a = -(1 - loss.smoothing) * live
    b = live * (1 + 2 * loss.z_loss * lse) if loss.z_loss else live
    d = -loss.smoothing / max(1, shards.total) * live if loss.smoothing else None
    return rows.Coefficients(state.top, log_total, b.contiguous(), a, ids.contiguous(), None, d), losses


class _Gradients:
    """The fp32 gradients as they grow, chunk by chunk."""

    def __init__(self, hidden, weight, bias, part, needs, main_grad, promised, options, shape, loss) -> None:
        self.hidden, self.weight, self.bias, self.part, self.tp = hidden, weight, bias, part, options.tp
        self.wide = gemm.accumulator_dtype(options.dtype)
        self.final = promised is not None
        self.main_grad = main_grad
        bound = 1.0 + 2e5 * loss.z_loss
        if shape.inverse_temperature is not None and shape.inverse_temperature.numel():
            bound = bound * shape.inverse_temperature.abs().amax()
        self.scale = narrowing_scale(bound, options.dtype, hidden)
        self.factor = promised.to(self.wide) if self.final else self.scale
        self.needs = needs
        device = hidden.device
        self.dh = self.dw = self.db = None
        if needs[0]:
            dtype = hidden.dtype if self.final else self.wide
            self.dh = torch.empty(part.count, hidden.shape[1], device=device, dtype=dtype)
        if needs[1] and main_grad is None:
            self.dw = torch.empty(weight.shape, device=device, dtype=self.wide)
        if needs[2]:
            self.db = torch.zeros(bias.shape, device=device, dtype=self.wide)
        self.empty = True
        # Nothing is added to a chunk's hidden gradient before it is narrowed: the GEMM may do it.
        self.alone = groups.group_size(options.tp) == 1
        self.pending: tuple[torch.Tensor, int, int] | None = None

    def add(self, grad: torch.Tensor, h: torch.Tensor, head: Head, first: int, last: int) -> None:
        local = head.weight.shape[0]
        if self.dh is not None:
            self._settle()
            if self.dh.dtype == self.wide or self.alone:
                part = self.dh[first:last]
            else:
                part = torch.empty(last - first, h.shape[1], device=h.device, dtype=self.wide)
            gemm.matmul_into(part, grad, head.weight)
            groups.start_all_reduce(part, "sum", self.tp)
            self.pending = (part, first, last)
        if self.needs[1]:
            into = self.main_grad if self.main_grad is not None else self.dw
            if self.empty and self.main_grad is None:
                into[local:].zero_()
            fresh = self.empty and self.main_grad is None
            gemm.matmul_into(into[:local], grad.t(), h, accumulate=not fresh)
        if self.db is not None:
            self.db[:local] += grad.sum(0, dtype=self.wide)
        self.empty = False

    def _settle(self) -> None:
        """Wait for the all-reduce of the chunk before, and narrow it where the result is final."""
        if self.pending is None:
            return
        part, first, last = self.pending
        part = groups.finish(part)
        if part.dtype != self.dh.dtype:
            self.dh[first:last] = part
        self.pending = None

    def finished(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._settle()
        if self.dw is not None and self.empty:
            self.dw.zero_()
        if self.scale is not None and not self.final:
            inverse = self.scale.reciprocal()
            for tensor in (self.dh, self.dw, self.db):
                if tensor is not None:
                    tensor *= inverse
        dh = None if self.dh is None else self.part.put(self.dh)
        db = self.db.to(self.bias.dtype) if self.final and self.db is not None else self.db
        none_dtype = self.hidden.dtype if self.final else self.wide
        return tuple(self.hidden.new_empty(0, dtype=none_dtype) if t is None else t for t in (dh, self.dw, db))
