"""Launchers of the row-statistics kernels: the local pass, the combination over ranks, and the gradient."""

from __future__ import annotations

import torch
import triton

from ..row_stats_plain import PACKED_FIELDS, RowGradients, RowOptions, RowResults
from ..rows import lane_view, row_view
from .common import on_device_of, pointer_or
from .row_stats_backward import row_stats_backward_kernel
from .row_stats_combine import row_stats_combine_kernel
from .row_stats_forward import row_stats_forward_kernel

# Block sizes by bytes of an element, from the sweeps in docs/benchmarks_losses.md. The forward reads tiles of DEPTH x
# LANES # columns, the backward writes STEPS blocks of BLOCK columns a program.
FORWARD = {
    2: dict(DEPTH=4, LANES=1024, STAGES=3, EVICT="", num_warps=4),
    4: dict(DEPTH=8, LANES=1024, STAGES=1, EVICT="", num_warps=8),
}
BACKWARD = {2: dict(BLOCK=4096, STEPS=1, EVICT="", num_warps=4), 4: dict(BLOCK=1024, STEPS=1, EVICT="", num_warps=4)}
# Gradients of log-probability and entropy together: a block of 4096 takes 64 registers then, this one 32.
BACKWARD_SEVERAL = {2: dict(BLOCK=2048, STEPS=2, EVICT="", num_warps=4)}
_COMBINE_ROWS = 32


def local_row_stats(logits: torch.Tensor, index: torch.Tensor, options: RowOptions) -> torch.Tensor:
    """As ``row_stats_plain.local_row_stats``, in one read."""
    rows, ids = index.shape
    if rows == 0:
        return torch.tensor([options.valid, options.start], dtype=torch.float32, device=logits.device)
    packed = torch.empty(rows * (PACKED_FIELDS + ids) + 2, dtype=torch.float32, device=logits.device)
    _forward(logits, index, options, packed, RowResults(*[packed] * 6), whole=False)
    return packed


def whole_row_stats(logits: torch.Tensor, index: torch.Tensor, options: RowOptions) -> RowResults:
    """Both steps in one launch, for a vocabulary that is not sharded."""
    results = _empty_results(index, options)
    if index.shape[0]:
        _forward(logits, index, options, results.saved, results, whole=True)
    else:
        results.saved.fill_(options.valid)
    return results


def _forward(
    logits: torch.Tensor,
    index: torch.Tensor,
    options: RowOptions,
    packed: torch.Tensor,
    results: RowResults,
    whole: bool,
) -> None:
    (view, vectors), ids = lane_view(logits), index.shape[1]
    with on_device_of(logits):
        row_stats_forward_kernel[(view.rows,)](
            view.tensor,
            index,
            pointer_or(options.inverse_rows, packed),
            packed,
            results.logp,
            results.lse,
            results.entropy,
            results.mean_logp,
            results.is_argmax.view(torch.uint8) if whole else packed,
            results.saved,
            view.rows,
            options.valid,
            view.inner,
            view.outer_stride,
            view.inner_stride,
            options.start,
            ids,
            options.inverse,
            options.softcap,
            options.ignore_index,
            0,
            VECTORS=vectors,
            WHOLE=whole,
            PER_ROW=options.inverse_rows is not None,
            SOFTCAP=options.softcap != 0.0,
            ENTROPY=options.entropy,
            MEAN=options.mean,
            EXCLUDE=options.exclude,
            SKIP=options.skip_ignored,
            IDS=triton.next_power_of_2(ids) if ids else 0,
            **FORWARD[logits.element_size()],
        )


def _empty_results(index: torch.Tensor, options: RowOptions) -> RowResults:
    rows, ids = index.shape

    def new(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=index.device)

    return RowResults(
        logp=new(rows, ids),
        lse=new(rows),
        entropy=new(rows if options.entropy else 0),
        mean_logp=new(rows if options.mean else 0),
        is_argmax=new(rows, ids, dtype=torch.bool),
        saved=new(2 * rows + 1),
    )


def combine_row_stats(gathered: torch.Tensor, index: torch.Tensor, options: RowOptions) -> RowResults:
    """As ``row_stats_plain.combine_row_stats``."""
    rows, ids = index.shape
    results = _empty_results(index, options)
    with on_device_of(index):
        row_stats_combine_kernel[(max(1, triton.cdiv(rows, _COMBINE_ROWS)),)](
            gathered,
            gathered.stride(0),
            gathered.shape[0],
            index,
            pointer_or(options.inverse_rows, gathered),
            results.logp,
            results.lse,
            results.entropy,
            results.mean_logp,
            results.is_argmax.view(torch.uint8),
            results.saved,
            rows,
            ids,
            options.inverse,
            options.total,
            options.ignore_index,
            PER_ROW=options.inverse_rows is not None,
            ENTROPY=options.entropy,
            MEAN=options.mean,
            EXCLUDE=options.exclude,
            SKIP=options.skip_ignored,
            CHECK=ids > 0 or options.total >= 0,
            ROWS=_COMBINE_ROWS,
            num_warps=1,
        )
    return results


def row_stats_backward(
    logits: torch.Tensor,
    index: torch.Tensor,
    saved: torch.Tensor,
    entropy: torch.Tensor,
    upstream: RowGradients,
    options: RowOptions,
    out: torch.Tensor,
) -> None:
    """As ``row_stats_plain.row_stats_backward``; ``out`` is contiguous and may be the logits themselves."""
    view, ids, columns = row_view(logits), index.shape[1], logits.shape[-1]
    if view.rows == 0 or columns == 0:
        return
    config = BACKWARD[logits.element_size()]
    if upstream.logp is not None and upstream.entropy is not None:
        config = BACKWARD_SEVERAL.get(logits.element_size(), config)
    groups = triton.cdiv(columns, config["BLOCK"] * config["STEPS"])
    with on_device_of(logits):
        row_stats_backward_kernel[(view.rows * groups,)](
            view.tensor,
            out,
            index,
            pointer_or(options.inverse_rows, saved),
            saved,
            entropy,
            pointer_or(upstream.logp, saved),
            pointer_or(upstream.lse, saved),
            pointer_or(upstream.entropy, saved),
            pointer_or(upstream.mean_logp, saved),
            view.rows,
            columns,
            options.valid,
            groups,
            view.inner,
            view.outer_stride,
            view.inner_stride,
            options.start,
            ids,
            options.inverse,
            options.softcap,
            options.ignore_index,
            PER_ROW=options.inverse_rows is not None,
            SOFTCAP=options.softcap != 0.0,
            EXCLUDE=options.exclude,
            SKIP=options.skip_ignored,
            ONE_ID=ids == 1,
            G_LOGP=upstream.logp is not None and ids > 0,
            G_LSE=upstream.lse is not None,
            G_ENTROPY=upstream.entropy is not None,
            G_MEAN=upstream.mean_logp is not None,
            **config,
        )
