"""What one rank of a larger group computes and holds, on one GPU: a step of its own program, with nobody to send to.

    python benchmarks/one_rank.py --ranks 2 --lengths 16k,512k,1M --checkpoint --options '{"token_tiles": 8}'

torch's "fake" process group takes part in every collective without a peer, so time and memory are those of the rank
but for what the links take, and the values that should arrive are whatever the buffers hold: the loss means nothing.
The first length compiles. The model and the methods are those of ``autosp bench step``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosp.bench import step as steps
from autosp.cli.settings import parse_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", default="16k,64k")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--options", default='{"fuse_linear_cross_entropy": "always"}', help="settings of autosp")
    parser.add_argument("--method", default=steps.OURS, choices=(steps.OURS, steps.BY_HAND))
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    lengths = [parse_size(part, option="--lengths") for part in given.lengths.split(",")]
    settings = steps.StepSettings(
        given.method, "", lengths, layers=given.layers, device=given.device, inner_backend=given.inner_backend,
        checkpoint=given.checkpoint, options=json.loads(given.options), once=True,
    )  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=given.ranks - 1, world_size=given.ranks)
    device = torch.device(given.device)
    model = steps.build(settings, device)
    print("| ranks | tokens | tokens/s/GPU | seconds | peak GiB | first step s | ours of it |", flush=True)
    print("|" + "---|" * 7, flush=True)
    rows = []
    with steps._method(settings, model) as step:
        for length in lengths:
            row = steps._measure(settings, model, step, length, device)
            rows.append(asdict(row))
            cells = [row.tokens_per_second_per_gpu, row.seconds, row.peak_bytes and row.peak_bytes / 2**30]
            cells += [row.first_step_seconds, row.own_seconds if row.first_step_seconds else None]
            shown = " | ".join("-" if cell is None else f"{cell:,.1f}" for cell in cells)
            print(f"| {given.ranks} | {length} | {shown} |", flush=True)
            if given.json:
                with open(given.json, "w") as file:
                    json.dump({"settings": vars(given), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
