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


def step(model: Any, ids: torch.Tensor, prepare: Any) -> torch.Tensor:
    loss = model(**prepare({"input_ids": ids, "labels": ids})).loss
    loss.backward()
    return loss.detach()


def time_length(
    model: Any, parameters: list[torch.nn.Parameter], length: int, steps: int, prepare: Any
) -> dict[str, Any]:
    """Median step time, tokens per second per GPU, peak memory and first-step time at one length."""
    device = torch.device("cuda", torch.cuda.current_device())
    ids = torch.randint(0, 128000, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = step(model, ids, prepare).item()
    first = time.perf_counter() - start
    times = []
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(model, ids, prepare)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    for parameter in parameters:
        parameter.grad = None
    seconds = statistics.median(times)
    world = dist.get_world_size()
    return {
        "length": length,
        "loss": loss,
        "seconds": seconds,
        "tokens_per_second_per_gpu": length / seconds / world,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_step_seconds": first,
        **compile_times(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="16384,32768,65536")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing of every layer")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    autosp.initialize({"autosp": {"inner_backend": options.inner_backend, "verify": "compile"}})
    model = build(torch.device("cuda"), options.layers)
    if options.checkpoint:
        model.gradient_checkpointing_enable()
    compiled = torch.compile(model, backend=autosp_backend)
    rows = []
    for length in map(int, options.lengths.split(",")):
        rows.append(time_length(compiled, list(model.parameters()), length, options.steps, autosp.prepare_batch))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(rows, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
