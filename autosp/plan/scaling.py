"""Weak and strong scaling by counting: what each rank of a large group sends a step, from the program that it runs.

Compiles a Llama for one rank of a group of any size whose collectives move no data (`autosp.report.fake_run`), and
adds up the communication of its compile report. One process, no GPU, nothing allocated.

For Ulysses the closed form is a rank's part of four all-to-alls a layer, Q, K, V there and the result back,
``2 (Nq + Nkv) D (S / P) (P - 1) / P`` elements in the forward and as many in the backward (Jacobs et al.,
DeepSpeed-Ulysses, 2023); where ``P`` does not divide the heads, what the last rank's own heads make of it. For ring
attention it is the K and V of all other ranks, ``2 Nkv D S (P - 1) / P`` in the forward, which does not fall with ``P``
(Liu et al., Ring Attention, 2023); in the backward they go round once more, and their gradients with them in fp32 and
back to their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..report.fake_run import fake_ranks, fake_tensors, run_step
from ..report.hook import collect
from ..report.records import CollectiveRecord

# Messages that a rank sends for one call of a collective over P ranks, as a multiple of P - 1.
_MESSAGES = {"all_reduce_sum": 2, "enter_sharded": 2, "aggregate_loss": 2}
# Communication inside attention; the rest is gradients of weights and the loss.
_ATTENTION = ("all_to_all", "ring_attention", "all_gather_sequence", "reduce_scatter_sequence")
STRATEGIES = ("ulysses", "ring", "allgather_kv")


@dataclass(frozen=True)
class Shape:
    """A Llama: its attention heads, and sizes that make no difference to attention's traffic."""

    heads: int = 64
    kv_heads: int = 64
    head_dim: int = 128
    layers: int = 2
    vocabulary: int = 1024


@dataclass(frozen=True)
class Count:
    """One rank, one step."""

    attention: str
    ranks: int
    length: int
    """Tokens of the whole sequence."""
    forward_bytes: int
    """Sent by one rank for one layer's attention in the forward."""
    backward_bytes: int
    closed_forward: float
    """Of the closed form, likewise."""
    closed_backward: float
    messages: int
    """Sent by one rank for one layer's attention, forward and backward."""
    other_bytes: int
    """Sent by one rank a step for gradients of weights and the loss, all layers."""
    operators: int
    """Of the program of a rank: what a compiler behind it has to do."""
    seconds: float
    """Of capture, layouts and the program of a rank."""


def closed_form(attention: str, shape: Shape, ranks: int, length: int, size: int = 2) -> tuple[float, float]:
    """Bytes that the last rank sends for one layer's attention in the forward and in the backward.

    Args:
        attention: "ulysses", "ring" or "allgather_kv".
        shape: the model.
        ranks: P.
        length: S, tokens; ``ranks`` divides it.
        size: bytes of an element of activations.
    """
    share = (ranks - 1) / ranks
    keys = 2 * shape.kv_heads * shape.head_dim * length
    if attention == "ulysses":
        rows = shape.head_dim * length / ranks * size
        queries, keys_too = _heads_of_ranks(shape, ranks)
        mine, others = queries[-1] * (ranks - 1), sum(queries[:-1])
        return rows * (sum(keys_too[:-1]) + mine), rows * (keys_too[-1] * (ranks - 1) + others)
    if attention == "allgather_kv":  # gathered, and the gradients reduce-scattered
        return keys * share * size, keys * share * size
    # once around without the way home; gradients in fp32 go all the way home
    return keys * share * size, keys * share * size + keys * max(4, size)


def _heads_of_ranks(shape: Shape, ranks: int) -> tuple[list[int], list[int]]:
    """Query heads that each rank attends with, and with them the key and value heads that those read."""
    bounds = [(p * shape.heads // ranks, (p + 1) * shape.heads // ranks) for p in range(ranks)]
    repeats = shape.heads // shape.kv_heads
    read = [len({head // repeats for head in range(low, high)}) for low, high in bounds]
    queries = [high - low for low, high in bounds]
    return queries, [q + 2 * k for q, k in zip(queries, read, strict=True)]


def count(
    attention: str, ranks: int, length: int, shape: Shape | None = None, dtype: torch.dtype = torch.bfloat16
) -> Count:
    """Compile for the last of ``ranks`` ranks and add up what it sends.

    Raises:
        UnsupportedGraphError: the strategy cannot serve the shape on so many ranks.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..backend import autosp_backend, compile_times

    shape = shape or Shape()
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=-(-256 // shape.heads) * shape.heads,  # a multiple of the heads, which transformers asks for
        intermediate_size=512,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=length,
        use_cache=False,
    )
    settings = {"attention": attention, "inner_backend": "eager", "verify": "compile"}
    ds_config = {"sequence_parallel_size": ranks, "autosp": settings}
    with fake_ranks(ranks, ds_config, rank=ranks - 1), collect() as graphs, fake_tensors(dtype):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(1, length, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(length)[None]}
        run_step(model, torch.compile(model, backend=autosp_backend), batch, backward=False)
        seconds = compile_times()["autosp_s"]
    (graph,) = graphs
    inside = [item for item in graph.collectives if _kind(item) in _ATTENTION and ".self_attn" in item.layer]
    others = [item for item in graph.collectives if item not in inside]
    forward = sum(item.forward_bytes for item in inside) // shape.layers
    backward = sum(item.backward_bytes for item in inside) // shape.layers
    return Count(
        attention, ranks, length, forward, backward,
        *closed_form(attention, shape, ranks, length, dtype.itemsize),
        messages=sum(_messages(item, ranks) for item in inside) // shape.layers,
        other_bytes=sum(item.forward_bytes + item.backward_bytes for item in others),
        operators=len(graph.passes[-1].text.splitlines()),
        seconds=seconds,
    )  # fmt: skip


def _kind(item: CollectiveRecord) -> str:
    return item.operator.split(".")[1]


def _messages(item: CollectiveRecord, ranks: int) -> int:
    kind = _kind(item)
    each = _MESSAGES.get(kind, 1) * (ranks - 1)
    calls = bool(item.forward_bytes) + bool(item.backward_bytes)
    if kind == "ring_attention":  # K and V in one message; their gradients travel on, and one step further
        return each + (2 * each + 1 if item.backward_bytes else 0)
    return each * calls


def run(
    ranks: Sequence[int],
    *,
    strong: int,
    weak: int,
    strategies: Sequence[str] = STRATEGIES,
    shape: Shape | None = None,
) -> list[Count]:
    """Strong scaling at ``strong`` tokens in all, weak scaling at ``weak`` tokens a rank, for each strategy."""
    rows = []
    for attention in strategies:
        for size in ranks:
            rows += [count(attention, size, length, shape) for length in dict.fromkeys((strong, weak * size))]
    return rows


def table(rows: Sequence[Count]) -> str:
    """The counts as a Markdown table."""
    lines = [
        "| attention | ranks | tokens | MiB a layer forward | closed form | backward | closed form | messages | "
        "gradients, loss, MiB | operators | own compile time, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = (row.forward_bytes, row.closed_forward, row.backward_bytes, row.closed_backward)
        lines.append(
            f"| {row.attention} | {row.ranks} | {row.length} | "
            + " | ".join(f"{size / 2**20:.2f}" for size in sizes)
            + f" | {row.messages} | {row.other_bytes / 2**20:.1f} | {row.operators} | {row.seconds:.1f} |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Count], strong: int, path: Path) -> None:
    """Bytes that a rank sends for a layer at a fixed length against the number of ranks, counted and closed form."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for attention in dict.fromkeys(row.attention for row in rows):
        points = [row for row in rows if row.attention == attention and row.length == strong]
        ranks = [row.ranks for row in points]
        counted = [(row.forward_bytes + row.backward_bytes) / 2**20 for row in points]
        closed = [(row.closed_forward + row.closed_backward) / 2**20 for row in points]
        (line,) = axes.plot(ranks, counted, "o", label=f"{attention}, counted")
        axes.plot(ranks, closed, "--", color=line.get_color(), label=f"{attention}, closed form")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row.ranks for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="ranks that share one sequence", ylabel="MiB that a rank sends for a layer's attention, a step")
    axes.set_title(f"Strong scaling at {strong} tokens")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format=path.suffix[1:], dpi=120)
    temporary.replace(path)
