"""What a compiled step costs the host: little Python of this package, and nothing that waits for the device."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import toys
from pool import RankInfo, RankPool
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autosp

PACKAGE = str(Path(autosp.__file__).parent)
# A number that the host reads out of a tensor, or a shape that only the tensor's values tell.
WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal"}


class Deep(nn.Module):
    """The attention and the MLP of a toy, some times over with other weights."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.toys = nn.ModuleList(toys.build(seed=seed) for seed in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = self.toys[0]
        x = first.embed(input_ids)
        for toy in self.toys:
            x = x + toy.attention(toy.norm(x))
            x = x + toy.mlp(toy.norm(x))
        return toys.pad_slice(first, first.head(x), labels)


def python_of_a_step(layers: int, verify: str) -> tuple[Counter[str], set[str]]:
    """Functions of this package that the fourth step calls, tagging its inputs aside, and the operators that wait."""
    torch._dynamo.reset()
    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "verify": verify}})
    compiled = torch.compile(Deep(layers), backend="autosp")
    for _ in range(3):  # the drift of weights is compared at uses 1, 2, 4, 8, ...
        compiled(**autosp.prepare_batch(toys.batch(16))).backward()
    batch = autosp.prepare_batch(toys.batch(16))
    found: Counter[str] = Counter()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1

    sys.setprofile(look)
    try:
        compiled(**batch).backward()
    finally:
        sys.setprofile(None)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        compiled(**autosp.prepare_batch(toys.batch(16))).backward()
    return found, WAITS & {event.key for event in seen.key_averages()}


def body(rank_info: RankInfo) -> list[tuple[Counter[str], set[str]]]:
    return [python_of_a_step(1, "compile"), python_of_a_step(3, "compile"), python_of_a_step(1, "inputs")]


def test_a_step_waits_for_nothing_and_runs_a_handful_of_our_functions(ranks: RankPool) -> None:
    for (one, waits), (three, more_waits), (checked, _) in ranks.run(body, timeout=300):
        assert waits == more_waits == set()
        assert one == three, "as much for many layers as for one"
        assert one["runtime.__call__"] == 1 and sum(one.values()) <= 10, one
        assert not any(name.startswith("agreement.") for name in one), "ranks talk over the host when they compile"
        assert checked["agreement.agree"] == 1, "once a step where inputs are compared"
