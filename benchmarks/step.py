"""Tokens per second and peak memory of a training step of a Llama on a sequence group, from the unmodified model.

    torchrun --nproc-per-node 2 benchmarks/step.py --lengths 16384,32768,65536 --json out.json

The first step of each length compiles and is reported apart; then the median of the timed ones, forward and backward,
without an optimizer step. The loss is printed so that rows can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from by_hand import ByHand
from overlap import overlap_of

import autosp
from autosp.backend import autosp_backend, compile_times

LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 2**21,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "use_cache": False,
}


def build(device: torch.device, layers: int) -> torch.nn.Module:
    """A Llama of 1.2 billion parameters in bf16, the same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**LLAMA_1B, "num_hidden_layers": layers})
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return model.train()


class Ours:
    """``step(ids)`` runs forward and backward of the unmodified model, compiled by autosp."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.compiled = torch.compile(model, backend=autosp_backend)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.compiled(**autosp.prepare_batch({"input_ids": ids, "labels": ids})).loss
        loss.backward()
        return loss.detach()


def time_length(way: Any, parameters: list[torch.nn.Parameter], length: int, steps: int) -> dict[str, Any]:
    """Median step time, tokens per second per GPU, peak memory and first-step time at one length."""
    device = torch.device("cuda", torch.cuda.current_device())
    ids = torch.randint(0, 128000, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = way.step(ids).item()
    first = time.perf_counter() - start
    times = []
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        start = time.perf_counter()
        way.step(ids)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times or [first])
    peak = torch.cuda.max_memory_allocated() / 2**30
    overlap = overlap_of(lambda: way.step(ids)) if times else {}
    for parameter in parameters:
        parameter.grad = None
    world = dist.get_world_size()
    return {
        "way": type(way).__name__,
        "length": length,
        "loss": loss,
        "seconds": seconds,
        "tokens_per_second_per_gpu": length / seconds / world,
        "peak_gib": peak,
        "first_step_seconds": first,
        **overlap,
        **(compile_times() if isinstance(way, Ours) else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="16384,32768,65536")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing of every layer")
    parser.add_argument("--by-hand", action="store_true", help="Ulysses written by hand instead (see by_hand.py)")
    parser.add_argument(
        "--options", default="{}", help='more settings of autosp, as JSON: {"overlap_communication": false}'
    )
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    settings = {"inner_backend": options.inner_backend, "verify": "compile", **json.loads(options.options)}
    autosp.initialize({"autosp": settings})
    model = build(torch.device("cuda"), options.layers)
    if options.checkpoint:
        model.gradient_checkpointing_enable()
    way = ByHand(model) if options.by_hand else Ours(model)
    rows = []
    for length in map(int, options.lengths.split(",")):
        rows.append({**time_length(way, list(model.parameters()), length, options.steps), **settings})
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(rows, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
