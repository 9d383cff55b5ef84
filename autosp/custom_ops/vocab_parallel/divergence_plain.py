"""KL and Jensen-Shannon divergences of two vocabulary-parallel distributions in plain PyTorch: the reference path.

Notation as in ``row_stats_plain``: P and Q are the two distributions, each centred on its own row maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .groups import sum_in_rank_order
from .row_stats_plain import cap, cap_slope, finite_or_zero, weighted
from .rows import accumulator_dtype, count_rows, row_view

KL_FIELDS = 5  # m_p, s_p, m_q, s_q, acc


class PairOptions(NamedTuple):
    """What a call of a divergence operator asks for: scaling, and the valid columns of the shard.

    Args:
        inverse_rows: inverse temperature per row, accumulator dtype, or None.
        inverse: inverse temperature of every row when ``inverse_rows`` is None.
        softcap: the cap of both distributions, 0.0 for none.
        valid: valid columns of the shard.
    """

    inverse_rows: torch.Tensor | None
    inverse: float
    softcap: float
    valid: int

    def inverse_of(self, rows: slice) -> torch.Tensor | float:
        """Inverse temperature of a chunk, ready to broadcast over columns."""
        return self.inverse if self.inverse_rows is None else self.inverse_rows[rows].unsqueeze(-1)


def pair_chunks(p: torch.Tensor, q: torch.Tensor, valid: int):
    """Yield ``(row slice, chunk of p, chunk of q)`` in one accumulator dtype."""
    dtype = accumulator_dtype(p, q)
    p_view, q_view = row_view(p), row_view(q)
    for (rows, x), (_, y) in zip(p_view.chunks(valid), q_view.chunks(valid), strict=True):
        yield rows, x.to(dtype), y.to(dtype)


def local_kl_stats(p: torch.Tensor, q: torch.Tensor, options: PairOptions) -> torch.Tensor:
    """``[rows * 5]``: maxima, sums and ``acc = sum exp(k(u_p - m_p)) ((u_p - m_p) - (u_q - m_q))`` of this shard."""
    rows_total = row_view(p).rows
    fields = torch.zeros(rows_total, KL_FIELDS, dtype=accumulator_dtype(p, q), device=p.device)
    fields[:, 0] = fields[:, 2] = -torch.inf
    if options.valid == 0:
        return fields.flatten()
    for rows, x, y in pair_chunks(p, q, options.valid):
        inverse = options.inverse_of(rows)
        u_p, u_q = cap(x, options.softcap), cap(y, options.softcap)
        m_p, m_q = u_p.max(dim=1).values, u_q.max(dim=1).values
        d_p, d_q = u_p - finite_or_zero(m_p)[:, None], u_q - finite_or_zero(m_q)[:, None]
        weight = torch.exp(d_p * inverse)
        fields[rows, 0], fields[rows, 1] = m_p, weight.sum(dim=1)
        fields[rows, 2], fields[rows, 3] = m_q, torch.exp(d_q * inverse).sum(dim=1)
        fields[rows, 4] = weighted(weight, d_p - d_q).sum(dim=1)
    return fields.flatten()


def combine_kl_stats(gathered: torch.Tensor, options: PairOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """``(KL(P || Q) [N], saved [4, N] = m_p, log s_p, m_q, log s_q)`` from all shards, in rank order."""
    fields = gathered.view(gathered.shape[0], -1, KL_FIELDS)
    m_p, s_p, m_q, s_q, acc = fields.unbind(-1)
    inverse = options.inverse if options.inverse_rows is None else options.inverse_rows
    top_p, top_q = m_p.max(dim=0).values, m_q.max(dim=0).values
    shift_p, shift_q = m_p - finite_or_zero(top_p), finite_or_zero(m_q) - finite_or_zero(top_q)
    scale = torch.exp(shift_p * inverse)
    total_p = sum_in_rank_order(scale * s_p)
    total_q = sum_in_rank_order(torch.exp((m_q - finite_or_zero(top_q)) * inverse) * s_q)
    total = sum_in_rank_order(weighted(scale, acc + weighted(s_p, shift_p - shift_q)))
    log_p, log_q = torch.log(total_p), torch.log(total_q)
    kl = total / total_p * inverse - (log_p - log_q)
    return kl, torch.stack([top_p, log_p, top_q, log_q])


def kl_backward(
    p: torch.Tensor,
    q: torch.Tensor,
    kl: torch.Tensor,
    saved: torch.Tensor,
    upstream: torch.Tensor,
    options: PairOptions,
    grad_p: torch.Tensor | None,
    grad_q: torch.Tensor | None,
) -> None:
    """Write the gradients of P's and Q's logits; formulas in ``kl_op``."""
    if options.valid == 0:
        _zero(grad_p, grad_q)
        return
    for rows, x, y in pair_chunks(p, q, options.valid):
        log_p, log_q, slope_p, slope_q, difference = _log_probabilities(x, y, saved[:, rows], options, rows)
        prob_p, g = torch.exp(log_p), upstream[rows, None] * options.inverse_of(rows)
        if grad_p is not None:
            value = weighted(prob_p, difference - kl[rows, None])
            _store(grad_p, rows, options.valid, upstream[rows], g * value * slope_p)
        if grad_q is not None:
            _store(grad_q, rows, options.valid, upstream[rows], g * (torch.exp(log_q) - prob_p) * slope_q)


def _log_probabilities(x, y, saved, options: PairOptions, rows: slice):
    inverse = options.inverse_of(rows)
    m_p, log_s_p, m_q, log_s_q = saved[:, :, None].unbind(0)
    d_p, d_q = cap(x, options.softcap) - m_p, cap(y, options.softcap) - m_q
    log_p, log_q = d_p * inverse - log_s_p, d_q * inverse - log_s_q
    difference = (d_p - d_q) * inverse - (log_s_p - log_s_q)
    return log_p, log_q, cap_slope(x, options.softcap), cap_slope(y, options.softcap), difference


def _store(out: torch.Tensor, rows: slice, valid: int, upstream: torch.Tensor, value: torch.Tensor) -> None:
    target = out.view(count_rows(out), out.shape[-1])
    value = torch.where(upstream[:, None] == 0, torch.zeros_like(value), value)
    target[rows, :valid] = value.to(out.dtype)
    target[rows, valid:] = 0


def _zero(*outs: torch.Tensor | None) -> None:
    for out in outs:
        if out is not None:
            out.zero_()


def mixture_logs(difference: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor, beta: float):
    """``(P, Q, log(P/M), log(Q/M))`` for ``M = (1 - beta) P + beta Q`` from ``difference = log P - log Q``.

    The larger of the two is factored out of M, so that equal probabilities give exactly 0 and neither overflows; where
    P (or Q) is zero its logarithm is not used.
    """
    gap = torch.where(difference.isnan() & (log_p == -torch.inf) & (log_q == -torch.inf), 0.0, difference.abs())
    ratio = torch.exp(-gap)
    larger = torch.exp(torch.maximum(log_p, log_q))
    p_larger = ~(difference < 0)
    mixed = torch.log1p(torch.where(p_larger, beta, 1.0 - beta) * (ratio - 1.0))
    smaller = weighted(ratio, larger)
    big, small = -mixed, -gap - mixed
    return (
        torch.where(p_larger, larger, smaller),
        torch.where(p_larger, smaller, larger),
        torch.where(p_larger, big, small),
        torch.where(p_larger, small, big),
    )


def local_jsd_sums(
    p: torch.Tensor, q: torch.Tensor, saved: torch.Tensor, beta: float, options: PairOptions
) -> torch.Tensor:
    """``[2, N]``: this shard's ``sum P log(P/M)`` and ``sum Q log(Q/M)`` with global probabilities."""
    # 0, but NaN where a normalisation is not finite: a row that holds nothing at all is no divergence of 0.
    sums = torch.stack([saved[1] - saved[1], saved[3] - saved[3]])
    if options.valid == 0:
        return sums
    for rows, x, y in pair_chunks(p, q, options.valid):
        log_p, log_q, _, _, difference = _log_probabilities(x, y, saved[:, rows], options, rows)
        prob_p, prob_q, ratio_p, ratio_q = mixture_logs(difference, log_p, log_q, beta)
        sums[0, rows] = weighted(prob_p, ratio_p).sum(dim=1)
        sums[1, rows] = weighted(prob_q, ratio_q).sum(dim=1)
    return sums


def jsd_backward(
    p: torch.Tensor,
    q: torch.Tensor,
    sums: torch.Tensor,
    saved: torch.Tensor,
    upstream: torch.Tensor,
    beta: float,
    options: PairOptions,
    grad_p: torch.Tensor | None,
    grad_q: torch.Tensor | None,
) -> None:
    """Write the gradients of P's and Q's logits; formulas in ``jsd_op``."""
    if options.valid == 0:
        _zero(grad_p, grad_q)
        return
    for rows, x, y in pair_chunks(p, q, options.valid):
        log_p, log_q, slope_p, slope_q, difference = _log_probabilities(x, y, saved[:, rows], options, rows)
        prob_p, prob_q, ratio_p, ratio_q = mixture_logs(difference, log_p, log_q, beta)
        g = upstream[rows, None] * options.inverse_of(rows)
        if grad_p is not None:
            value = (1.0 - beta) * weighted(prob_p, ratio_p - sums[0, rows, None])
            _store(grad_p, rows, options.valid, upstream[rows], g * value * slope_p)
        if grad_q is not None:
            value = beta * weighted(prob_q, ratio_q - sums[1, rows, None])
            _store(grad_q, rows, options.valid, upstream[rows], g * value * slope_q)
