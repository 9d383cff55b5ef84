"""Loss and every gradient of a small Llama on NCCL against one process on the same card, at even and uneven lengths.

torchrun --nproc-per-node 2 benchmarks/gpu_parity.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))

import parity
import zoo

import autosp
from autosp.backend import autosp_backend

TOLERANCES = {"float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 3e-2)}


def main() -> None:
    names = sys.argv[1].split(",") if len(sys.argv) > 1 else ["llama", "gpt2"]
    dtypes = sys.argv[2].split(",") if len(sys.argv) > 2 else list(TOLERANCES)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda")
    for name in names:
        for dtype, rtol in map(TOLERANCES.__getitem__, dtypes):
            torch._dynamo.reset()
            autosp.initialize({"autosp": {"inner_backend": "inductor"}})
            model = zoo.build(name).to(device, dtype)
            compiled = torch.compile(model, backend=autosp_backend)
            for length in (64, 65, 70):
                batch = {key: value.to(device) for key, value in zoo.batch(length).items()}
                found = parity.compare(model, compiled, batch, prepare=autosp.prepare_batch)
                if dist.get_rank() == 0:
                    verdict = "ok" if found.worst <= rtol else "MISMATCH"
                    print(f"{name} {dtype} S={length}: {found.loss:.6f} {found.reference:.6f}", end=" ")
                    print(f"worst {found.worst:.1e} {found.worst_name} {verdict}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
