"""How much of the time of collectives on the GPU lies under computation, from a profile of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _common(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap_of(step: Callable[[], Any], trace: str = "") -> dict[str, float]:
    """Milliseconds of one step in which the GPU ran collectives, computed, and did both at once.

    Args:
        step: runs one forward and backward.
        trace: where a Chrome trace is written; "" for none.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    if trace:
        prof.export_chrome_trace(trace)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    collectives, compute = _union(spans[True]), _union(spans[False])
    both = _common(collectives, compute)
    total = lambda merged: sum(end - start for start, end in merged)  # noqa: E731
    return {
        "collectives_ms": total(collectives) / 1e3,
        "compute_ms": total(compute) / 1e3,
        "overlapped_ms": both / 1e3,
    }
