"""Peak memory of a training step of an unmodified Llama on one GPU: its loss as it is written, and fused with the head.

    python benchmarks/head_memory.py --tokens 16384 --json out.json

The model has the head of Llama-3-8B (hidden 4096, vocabulary 128256) over a trunk of few layers, in bf16. "peak" is the
most memory that a forward and backward holds beyond the weights; "loss part" is that less what the trunk has saved when
its forward ends, so the gradient of the head (1 GiB) counts as part of it on every line.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autosp
from autosp.backend import autosp_backend

GIB = 2**30
WAYS: dict[str, dict[str, str]] = {
    "as written": {"fuse_linear_cross_entropy": "never"},
    "fused, fast": {"fuse_linear_cross_entropy": "always", "linear_cross_entropy_memory": "fast"},
    "fused, lean": {"fuse_linear_cross_entropy": "always", "linear_cross_entropy_memory": "lean"},
}


def build(device: str, layers: int, hidden: int, vocabulary: int, tokens: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=7 * hidden // 2, vocab_size=vocabulary, max_position_embeddings=tokens,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


class Memory:
    """Bytes beyond those at the start; zeros where the device counts none."""

    def __init__(self, device: str) -> None:
        self.counts = device == "cuda"
        gc.collect()
        if self.counts:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()

    def now(self) -> float:
        return (torch.cuda.memory_allocated() - self.start) / GIB if self.counts else 0.0

    def peak(self) -> float:
        return (torch.cuda.max_memory_allocated() - self.start) / GIB if self.counts else 0.0


def saved_by_the_trunk(model: LlamaForCausalLM, ids: torch.Tensor, inner: str) -> float:
    """GiB that the forward of the trunk, compiled alone, leaves for its backward, the hidden states included."""
    trunk = torch.compile(model.model, backend=inner)
    for _ in range(2):
        memory = Memory(ids.device.type)
        hidden = trunk(input_ids=ids).last_hidden_state
        saved = memory.now()
        hidden.sum().backward()
        model.zero_grad(set_to_none=True)
        del hidden
    return saved


def measure(model: LlamaForCausalLM, ids: torch.Tensor, settings: dict[str, str], inner: str) -> dict[str, Any]:
    torch._dynamo.reset()
    autosp.initialize({"autosp": {**settings, "inner_backend": inner}}, device_type=ids.device.type)
    compiled: Callable[..., Any] = torch.compile(model, backend=autosp_backend)
    for _ in range(2):
        memory = Memory(ids.device.type)
        out = compiled(input_ids=ids, labels=ids)
        out.loss.backward()
        peak, loss = memory.peak(), out.loss.item()
        gradient = model.lm_head.weight.grad.float().norm().item()
        model.zero_grad(set_to_none=True)
        del out
    return {"peak_gib": peak, "loss": loss, "head_gradient_norm": gradient}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    model = build(options.device, options.layers, options.hidden, options.vocabulary, options.tokens)
    ids = torch.randint(0, options.vocabulary, (1, options.tokens), device=options.device)
    saved = saved_by_the_trunk(model, ids, options.inner_backend)
    rows = []
    print(
        f"the trunk saves {saved:.2f} GiB\n\n| loss | peak GiB | loss part GiB | loss | norm of the head's gradient |"
    )
    print("|---|---|---|---|---|")
    for name, settings in WAYS.items():
        row = {"way": name, **measure(model, ids, settings, options.inner_backend), "trunk_saves_gib": saved}
        row["loss_part_gib"] = row["peak_gib"] - saved
        rows.append(row)
        print(
            f"| {name} | {row['peak_gib']:.2f} | {row['loss_part_gib']:.2f} | {row['loss']:.6f} |"
            f" {row['head_gradient_norm']:.6f} |",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
