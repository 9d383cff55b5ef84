"""Time the vocabulary-parallel losses over a tensor-parallel group, beside the same local shard without a group.

What a group adds is one small collective and the combination of the ranks' statistics. Every rank holds ``rows x
vocab`` logits of its own in both cases, so the two times would be equal if that cost nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autosp.errors import ConfigError

from .losses import DTYPES, PASSES, autosp_functions, check_names, measure

_REPEATS = 10


def check_world(tp: int) -> None:
    """Whether this process is one of ``tp`` ranks that torchrun has started.

    Raises:
        ConfigError: it is not; the message has the command.
    """
    world = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if world != str(tp):
        found = "this process is no rank of torchrun's" if world is None else f"torchrun has started {world}"
        raise ConfigError(
            f"--tp {tp} needs {tp} ranks, one a shard of the vocabulary, and {found}; run "
            f"torchrun --nproc-per-node {tp} -m autosp.cli.main bench losses --tp {tp}"
        )


@contextlib.contextmanager
def tensor_parallel_group(device: str) -> Iterator[torch.device]:
    """The default group over all ranks (NCCL or gloo), and this rank's device; the group is destroyed at the end."""
    where = torch.device(device, int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
        dist.init_process_group("nccl", device_id=where)
    else:
        dist.init_process_group("gloo")
    try:
        yield where
    finally:
        dist.destroy_process_group()


def run(
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    operators: Sequence[str],
    device: torch.device,
    repeats: int = _REPEATS,
) -> list[dict[str, Any]]:
    """Measure on every rank of the default group; the figures are those of the slowest rank, the same on all.

    Args:
        shapes: ``(rows, local vocabulary)`` pairs.
        dtypes: names among ``DTYPES``.
        operators: keys of ``PASSES``.
        device: this rank's.
        repeats: timed runs, of which the median is taken.

    Returns:
        Rows with keys rows, vocab (a rank's), dtype, operator, tp, alone_ms, group_ms and ratio (group over alone).

    Raises:
        ConfigError: an unknown dtype or operator; nothing is measured then.
    """
    check_names("operators", operators, tuple(PASSES))
    check_names("dtypes", dtypes, DTYPES)
    alone, grouped = autosp_functions(), autosp_functions(dist.group.WORLD)
    results = []
    for rows, vocab in shapes:
        for dtype in dtypes:
            generator = torch.Generator(device).manual_seed(dist.get_rank())
            student, teacher = (
                torch.randn(rows, vocab, device=device, dtype=getattr(torch, dtype), generator=generator)
                for _ in range(2)
            )
            # The targets are global ids, the same on all ranks; alone they are ids of the local shard.
            shared = torch.Generator(device).manual_seed(0)
            target = torch.randint(0, vocab, (rows,), device=device, generator=shared)
            everywhere = torch.randint(0, vocab * dist.get_world_size(), (rows,), device=device, generator=shared)
            for operator in operators:
                times = []
                for functions, ids in ((alone, target), (grouped, everywhere)):
                    dist.barrier()
                    times.append(measure(functions[operator], student, teacher, ids, repeats)[0])
                slowest = torch.tensor(times, device=device, dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                alone_ms, group_ms = slowest.tolist()
                results.append(
                    {
                        "rows": rows,
                        "vocab": vocab,
                        "dtype": dtype,
                        "operator": operator,
                        "tp": dist.get_world_size(),
                        "alone_ms": alone_ms,
                        "group_ms": group_ms,
                        "ratio": group_ms / alone_ms,
                    }
                )
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| rows x local vocab | dtype | operator | tp=1 ms | tp ms | ratio |", "|---|---|---|---|---|---|"]
    for row in results:
        lines.append(
            f"| {row['rows']} x {row['vocab']} | {row['dtype']} | {row['operator']} | {row['alone_ms']:.3f} |"
            f" {row['group_ms']:.3f} (tp={row['tp']}) | {row['ratio']:.3f} |"
        )
    return "\n".join(lines)
