"""Logits as rows: the strided view that kernels address, and the row chunks that the plain path reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

# Elements of a row chunk of the plain path: bounds its extra memory to a few times this many accumulator values.
_CHUNK_ELEMENTS = {"cpu": 1 << 19}
_CHUNK_ELEMENTS_DEVICE = 1 << 23
# What Triton knows of an integer argument is whether it is a multiple of 16, and of a pointer whether it is one of 16
# bytes.
_VECTOR = _VECTOR_BYTES = 16


class RowView(NamedTuple):
    """Row ``r`` of ``tensor`` starts at ``(r // inner) * outer_stride + (r % inner) * inner_stride`` elements.

    Two strides address ``logits[:, :-1]`` of a ``[B, S, V]`` tensor in place; columns are always adjacent.
    """

    tensor: torch.Tensor
    rows: int
    cols: int
    inner: int
    outer_stride: int
    inner_stride: int

    def chunks(self, limit: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ``(row slice, [rows, limit] values in the accumulator dtype)``, copies of a bounded size."""
        if self.rows == 0:
            return
        budget = _CHUNK_ELEMENTS.get(self.tensor.device.type, _CHUNK_ELEMENTS_DEVICE)
        step = max(1, budget // max(1, self.cols))
        outer = math.ceil(self.rows / self.inner)
        grid = self.tensor.as_strided((outer, self.inner, limit), (self.outer_stride, self.inner_stride, 1))
        for begin in range(0, self.rows, step):
            chosen = torch.arange(begin, min(begin + step, self.rows), device=self.tensor.device)
            block = grid[chosen // self.inner, chosen % self.inner]
            yield slice(begin, begin + chosen.numel()), block.to(accumulator_dtype(self.tensor))


def accumulator_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """float64 when one of ``tensors`` is float64, float32 otherwise."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def count_rows(logits: torch.Tensor) -> int:
    """How many rows ``logits`` of shape ``[..., V]`` has; works on fake tensors with symbolic sizes."""
    return math.prod(logits.shape[:-1])


def row_view(logits: torch.Tensor) -> RowView:
    """View ``[..., V]`` as rows without a copy where two strides suffice; otherwise through one contiguous copy."""
    rows, cols = count_rows(logits), logits.shape[-1]
    if logits.is_contiguous():
        return RowView(logits, rows, cols, max(1, rows), 0, cols)
    dims = _merged_leading_dims(logits)
    if (logits.stride(-1) != 1 and cols > 1) or len(dims) > 2:
        logits = logits.contiguous()
        dims = _merged_leading_dims(logits)
    outer_stride = dims[0][1] if len(dims) == 2 else 0
    inner, inner_stride = dims[-1] if dims else (1, 0)
    return RowView(logits, rows, cols, max(1, inner), outer_stride, inner_stride)


def lane_view(logits: torch.Tensor) -> tuple[RowView, bool]:
    """Rows for a kernel that reduces over columns, and whether it may load whole vectors.

    The order of such a reduction follows the width of the loads, which must therefore depend on the vocabulary's length
    alone and never on where a row happens to lie: a length that is a multiple of 16 is read in vectors (rows that are
    not aligned, a rare view, are copied), any other one value by value.
    """
    view = row_view(logits)
    vectors = view.cols % _VECTOR == 0
    strides = view.outer_stride | view.inner_stride
    if vectors and (strides % _VECTOR or view.tensor.data_ptr() % _VECTOR_BYTES):
        view = row_view(view.tensor.clone(memory_format=torch.contiguous_format))
    return view, vectors


def _merged_leading_dims(logits: torch.Tensor) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged
