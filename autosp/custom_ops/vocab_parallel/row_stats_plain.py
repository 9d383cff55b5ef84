"""Row statistics of vocabulary-parallel logits in plain PyTorch: the reference path, chunked over rows.

Notation of this package. ``x`` are the logits, ``u = softcap(x) = c tanh(x/c)`` (``u = x`` without a cap), ``k`` the
inverse temperature, ``z = k u`` the effective logits; ``m`` the maximum of ``u``, ``s = sum exp(k(u - m))``, ``w = sum
exp(k(u - m)) (u - m)`` and ``c = sum (u - m)`` over the valid columns of the shard. Everything is centred on ``m``
before it is scaled, so that a common offset of the logits loses nothing, and terms whose weight is zero are skipped,
so that ``0 * inf`` never appears. The Triton kernels in ``kernels/`` compute the same quantities in one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .groups import sum_in_rank_order
from .rows import accumulator_dtype, row_view

PACKED_FIELDS = 4  # m, s, w, c; then one u per id. The shard's size and first id follow after the last row.


class RowOptions(NamedTuple):
    """What a call of the row-statistics operator asks for.

    Args:
        inverse_rows: inverse temperature per row, accumulator dtype, or None.
        inverse: inverse temperature of every row when ``inverse_rows`` is None.
        softcap: the cap, 0.0 for none.
        start: first global id of the shard.
        valid: valid columns of the shard.
        total: size of the vocabulary that the caller stated, -1 when it did not.
        ignore_index: the id that stands for "no target".
        entropy: gather ``w``.
        mean: gather ``c``.
        exclude: leave the columns named by the ids out of ``m, s, w, c`` (statistics of the tail).
        skip_ignored: rows whose single id is ``ignore_index`` need no statistics at all.
    """

    inverse_rows: torch.Tensor | None
    inverse: float
    softcap: float
    start: int
    valid: int
    total: int
    ignore_index: int
    entropy: bool = False
    mean: bool = False
    exclude: bool = False
    skip_ignored: bool = False

    def inverse_of(self, rows: slice) -> torch.Tensor | float:
        """Inverse temperature of a chunk, ready to broadcast over columns."""
        return self.inverse if self.inverse_rows is None else self.inverse_rows[rows].unsqueeze(-1)


class RowResults(NamedTuple):
    """Outputs of the row-statistics operator, see ``row_stats_op``."""

    logp: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    mean_logp: torch.Tensor
    is_argmax: torch.Tensor
    saved: torch.Tensor


def cap(x: torch.Tensor, softcap: float) -> torch.Tensor:
    """``softcap * tanh(x / softcap)``, or ``x`` itself for 0."""
    return softcap * torch.tanh(x / softcap) if softcap else x


def cap_slope(x: torch.Tensor, softcap: float) -> torch.Tensor | float:
    """Derivative of ``cap`` at ``x``: ``1 - tanh(x / softcap)^2 = 4 t / (1 + t)^2`` with ``t = exp(-2 |x / softcap|)``,
    the form without cancellation.
    """
    if not softcap:
        return 1.0
    t = torch.exp(-2.0 * (x / softcap).abs())
    return 4.0 * t / (1.0 + t).square()


def finite_or_zero(m: torch.Tensor) -> torch.Tensor:
    """``m`` with -inf (no column at all, or none that counts) replaced by 0, so that differences to it are defined."""
    return torch.where(m == -torch.inf, torch.zeros_like(m), m)


def weighted(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``weight * value`` with the terms of weight zero skipped; NaN weights stay NaN."""
    return torch.where(weight == 0, torch.zeros_like(weight), weight * value)


def owned_ids(index: torch.Tensor, start: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(mask of the ids that this shard holds, their local columns with 0 elsewhere)``."""
    local = index - start
    owned = (local >= 0) & (local < valid)
    return owned, torch.where(owned, local, torch.zeros_like(local))


def local_row_stats(logits: torch.Tensor, index: torch.Tensor, options: RowOptions) -> torch.Tensor:
    """Packed statistics of this shard: ``[rows * (4 + K) + 2]`` in the accumulator dtype."""
    view = row_view(logits)
    dtype = accumulator_dtype(logits)
    fields = torch.zeros(view.rows, PACKED_FIELDS + index.shape[1], dtype=dtype, device=logits.device)
    fields[:, 0] = -torch.inf
    for rows, x in view.chunks(options.valid):
        if options.valid:
            _chunk_stats(fields[rows], cap(x, options.softcap), index[rows], options.inverse_of(rows), options)
    header = torch.tensor([options.valid, options.start], dtype=dtype, device=logits.device)
    return torch.cat([fields.flatten(), header])


def _chunk_stats(fields: torch.Tensor, u: torch.Tensor, index: torch.Tensor, inverse, options: RowOptions) -> None:
    owned, local = owned_ids(index, options.start, options.valid)
    fields[:, PACKED_FIELDS:] = torch.where(owned, u.gather(1, local), torch.zeros((), dtype=u.dtype, device=u.device))
    if options.exclude:
        named = (owned & (index != options.ignore_index)).int()
        left_out = torch.zeros(u.shape, dtype=torch.int32, device=u.device).scatter_add_(1, local, named)
        u = u.masked_fill(left_out > 0, -torch.inf)
    m = u.max(dim=1).values
    centred = u - finite_or_zero(m).unsqueeze(1)
    weight = torch.exp(centred * inverse)
    fields[:, 0] = m
    fields[:, 1] = weight.sum(dim=1)
    if options.entropy:
        fields[:, 2] = weighted(weight, centred).sum(dim=1)
    if options.mean:
        fields[:, 3] = centred.sum(dim=1)


def combine_row_stats(gathered: torch.Tensor, index: torch.Tensor, options: RowOptions) -> RowResults:
    """Combine the packed statistics of all shards, ``[ranks, length]``, in rank order.

    Shards that do not cover the vocabulary gaplessly from id 0 (or not up to the stated total) make every result NaN
    when ids are looked up: that needs no host synchronisation and gives no plausible number. So does an id in nobody's
    shard.
    """
    rows, ids = index.shape
    ranks = gathered.shape[0]
    fields = gathered[:, : rows * (PACKED_FIELDS + ids)].view(ranks, rows, PACKED_FIELDS + ids)
    valid, start = gathered[:, -2], gathered[:, -1]
    inverse = options.inverse if options.inverse_rows is None else options.inverse_rows
    m_of, s_of, w_of, c_of = fields[..., :PACKED_FIELDS].unbind(-1)
    m = m_of.max(dim=0).values
    safe = finite_or_zero(m)
    scale = torch.exp((m_of - safe) * inverse)
    s = sum_in_rank_order(scale * s_of)
    w = sum_in_rank_order(weighted(scale, w_of + weighted(s_of, m_of - safe)))
    shift = torch.where(valid[:, None] == 0, torch.zeros_like(m_of), valid[:, None] * (finite_or_zero(m_of) - safe))
    c = sum_in_rank_order(c_of + shift)
    log_s = torch.log(s)
    total = sum_in_rank_order(valid)
    poison = _poison(valid, start, total, options) if ids or options.total >= 0 else torch.zeros_like(total)

    u = torch.zeros(rows, ids, dtype=m.dtype, device=m.device)
    for rank in range(ranks):
        owned = (index >= start[rank]) & (index < start[rank] + valid[rank])
        u = torch.where(owned, fields[rank, :, PACKED_FIELDS:], u)
    ignored = index == options.ignore_index
    inside = (index >= 0) & (index < total)
    centre, subtract = m, log_s
    if options.exclude:
        top = torch.where(inside & ~ignored, u, torch.full_like(u, -torch.inf))
        centre = torch.maximum(m, top.max(dim=1).values) if ids else m
        subtract = torch.zeros_like(log_s)
    column = (lambda t: t.unsqueeze(1)) if isinstance(inverse, torch.Tensor) else (lambda t: t)
    logp = (u - centre.unsqueeze(1)) * column(inverse) - subtract.unsqueeze(1)
    logp = torch.where(inside, logp, torch.full_like(logp, torch.nan)) + poison
    logp = torch.where(ignored, torch.zeros_like(logp), logp)
    lse = (m - centre) * inverse + log_s if options.exclude else m * inverse + log_s
    mean_logp = c / total * inverse - log_s + poison
    if options.skip_ignored:
        lse = torch.where(ignored[:, 0], torch.zeros_like(lse), lse)
        mean_logp = torch.where(ignored[:, 0], torch.zeros_like(lse), mean_logp)
    return RowResults(
        logp=logp,
        lse=lse + poison,
        entropy=(log_s - w / s * inverse + poison) if options.entropy else m.new_empty(0),
        mean_logp=mean_logp if options.mean else m.new_empty(0),
        is_argmax=inside & ~ignored & (u >= m.unsqueeze(1)),
        saved=torch.cat([m + poison, log_s, total.unsqueeze(0)]),
    )


def _poison(valid: torch.Tensor, start: torch.Tensor, total: torch.Tensor, options: RowOptions) -> torch.Tensor:
    """0 when the shards lie end to end from id 0 (up to the stated total), NaN otherwise."""
    good = (start == torch.cumsum(valid, 0) - valid).all()
    if options.total >= 0:
        good = good & (total == options.total)
    return torch.where(good, torch.zeros_like(total), torch.full_like(total, torch.nan))


class RowGradients(NamedTuple):
    """Upstream gradients per row; None where the loss does not depend on that output."""

    logp: torch.Tensor | None
    lse: torch.Tensor | None
    entropy: torch.Tensor | None
    mean_logp: torch.Tensor | None


def row_stats_backward(
    logits: torch.Tensor,
    index: torch.Tensor,
    saved: torch.Tensor,
    entropy: torch.Tensor,
    upstream: RowGradients,
    options: RowOptions,
    out: torch.Tensor,
) -> None:
    """Write the gradient of the logits into ``out``; the formula is in ``row_stats_op``."""
    view, target = row_view(logits), out.view(index.shape[0], out.shape[-1])
    rows_total = view.rows
    m_all, log_s_all, total = saved[:rows_total], saved[rows_total : 2 * rows_total], saved[-1]
    a, b, c, d = _coefficients(index, entropy, upstream, options, total)
    active = (a != 0) | (b != 0) | (c != 0) | (d != 0).any(dim=1)
    for rows, x in view.chunks(view.cols):
        x = x[:, : options.valid]
        u = cap(x, options.softcap)
        inverse = options.inverse_of(rows)
        m, log_s = finite_or_zero(m_all[rows]) if options.exclude else m_all[rows], log_s_all[rows]
        if options.exclude:
            log_s = torch.where(log_s == -torch.inf, torch.full_like(log_s, torch.inf), log_s)
        z = (u - m.unsqueeze(1)) * inverse - log_s.unsqueeze(1)
        p = torch.exp(z)
        g = weighted(p, a[rows, None] + weighted(b[rows, None].expand_as(z), z)) + c[rows, None]
        owned, local = owned_ids(index[rows], options.start, options.valid)
        if options.valid:
            if options.exclude:
                named = (owned & (index[rows] != options.ignore_index)).int()
                hit = torch.zeros(u.shape, dtype=torch.int32, device=u.device).scatter_add_(1, local, named)
                g = torch.where(hit > 0, torch.zeros_like(g), g)
            g = g.scatter_add(1, local, torch.where(owned, d[rows], torch.zeros_like(d[rows])))
        g = g * inverse * cap_slope(x, options.softcap)
        target[rows, : options.valid] = torch.where(active[rows, None], g, torch.zeros_like(g)).to(out.dtype)
        target[rows, options.valid :] = 0


def _coefficients(index: torch.Tensor, entropy: torch.Tensor, upstream: RowGradients, options: RowOptions, total):
    rows = index.shape[0]
    zero = total.new_zeros(rows)
    d = upstream.logp.view(index.shape) if upstream.logp is not None else total.new_zeros(index.shape)
    d = torch.where(index == options.ignore_index, torch.zeros_like(d), d)
    invalid = (index != options.ignore_index) & ((index < 0) | (index >= total))
    d = torch.where(invalid & (d != 0), torch.full_like(d, torch.nan), d)
    a = zero if options.exclude else -d.sum(dim=1)
    if options.exclude:
        a = a + torch.where(d.isnan().any(dim=1), torch.nan, 0.0)
    b, c = zero, zero
    if upstream.lse is not None:
        a = a + upstream.lse
    if upstream.entropy is not None:
        a, b = a - weighted(upstream.entropy, entropy), -upstream.entropy
    if upstream.mean_logp is not None:
        a, c = a - upstream.mean_logp, upstream.mean_logp / total
    if options.skip_ignored:
        ignored = index[:, 0] == options.ignore_index
        a, b, c = (torch.where(ignored, zero, coefficient) for coefficient in (a, b, c))
    return a, b, c, d
