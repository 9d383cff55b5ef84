"""``autosp plan``: memory, the longest sequence and a roofline time of a step, before anything is launched."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosp.cli.model_spec import MODEL_HELP, check_spec, is_factory, load_example, read_config
from autosp.cli.progress import reporter
from autosp.cli.settings import parse_size
from autosp.errors import ConfigError

if TYPE_CHECKING:
    from autosp.plan.estimate import Hardware, Layered

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(TiB|GiB|MiB|TB|GB|MB)")
_BYTES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "TB": 1e12, "GB": 1e9, "MB": 1e6}
_DTYPES = ("bf16", "bf16-autocast", "fp32")
_FEW = 4  # a model of more layers is traced with few and extended
_MOST = 9  # layers that differ (dense ones before experts) are looked for among so many


@dataclass
class Row:
    """One way to use the GPUs."""

    dp: int
    sp: int
    tp: int
    budget: float
    longest: int
    fits: bool
    bytes: float
    parts: dict[str, float]
    moment: str
    seconds: float
    compute_seconds: float
    communication_seconds: float
    flops: float
    bytes_sent: float
    tokens_per_second_per_gpu: float


def plan(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=False)] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the run.")] = 8,
    memory: Annotated[str, typer.Option(help="Memory of one GPU: 80GiB, 141GB.")] = "80GiB",
    seq_len: Annotated[str, typer.Option(help="Tokens of the sequence that you want: 64k, 1M.")] = "64k",
    sp: Annotated[
        list[int] | None,
        typer.Option(
            "--sp",
            help="Ranks that share a sequence; may be repeated. Default: all divisors of --gpus that are powers of 2.",
        ),
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(
            "--tp",
            help="Ranks that share the LM head (vocab_parallel_lm_head); may be repeated. Default: 1.",
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="Memory budgets of the activations, comma-separated, 1 to 0.")] = "1,0.1",
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="The model's own activation checkpointing, every layer.")
    ] = False,
    fuse_loss: Annotated[bool, typer.Option("--fuse-loss", help='With "fuse_linear_cross_entropy": "always".')] = False,
    dtype: Annotated[str, typer.Option(help="bf16, bf16-autocast (fp32 weights) or fp32.")] = "bf16",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw-fp32 (states and master weights), sgd or none.")
    ] = "adamw-fp32",
    sharding: Annotated[
        str, typer.Option(help="What all ranks share (ZeRO): none, optimizer, gradients, parameters.")
    ] = "none",
    rows: Annotated[int, typer.Option(min=1, help="Sequences a step of each data-parallel group.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, help="Build the model with so many layers.")] = None,
    tflops: Annotated[float, typer.Option(min=0.001, help="Peak of one GPU for the roofline.")] = 771,
    bandwidth: Annotated[str, typer.Option(help="Bytes a second of its memory.")] = "4.15TB",
    link: Annotated[str, typer.Option(help="Bytes a second that a GPU sends to the others.")] = "350GB",
    headroom: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the memory left free.")] = 0.05,
    picture: Annotated[Path | None, typer.Option(help="Draw longest sequence against GPUs into this PNG.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the tables.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Memory by part, the longest sequence that fits and a roofline time, for each way to use the GPUs.

    Compiles a step for one rank under fake tensors: no GPU is needed and no weights are made. Exit code 1: --seq-len
    fits in no way.
    """
    hardware_of = {"memory": memory, "bandwidth": bandwidth, "link": link}
    numbers = {name: parse_memory(text, option=f"--{name}") for name, text in hardware_of.items()}
    length = parse_size(seq_len, option="--seq-len")
    budgets = _budgets(budget)
    groups = _groups(sp, tp, gpus)
    _check_choice("--dtype", dtype, _DTYPES)
    _check_choice("--optimizer", optimizer, ("adamw", "adamw-fp32", "sgd", "none"))
    _check_choice("--sharding", sharding, ("none", "optimizer", "gradients", "parameters"))
    if picture is not None and (picture.suffix != ".png" or not picture.parent.is_dir()):
        raise ConfigError(f"--picture {picture}: a .png file in a folder that exists is expected")
    check_spec(model, weights=False)
    if is_factory(model) and layers is not None:
        raise ConfigError("--layers is for transformers models; a factory makes the model that it makes")
    speaks = reporter(not json_output, to_stderr=True)
    with speaks.stage("Importing torch and transformers"):
        from autosp.cli.models import check_length
        from autosp.plan.estimate import Hardware
    if not is_factory(model):
        check_length(_text_config(model), length)
    hardware = Hardware(flops=tflops * 1e12, headroom=headroom, **numbers)
    settings = {"fuse_linear_cross_entropy": "always"} if fuse_loss else {}
    counts = _layer_counts(model, layers)
    found: list[Row] = []
    for ranks, size in groups:
        for share in budgets:
            with speaks.stage(f"Compiling for sp {ranks}, tp {size}, budget {share:g}"):
                layered = _trace(model, ranks, size, share, counts, rows, dtype, checkpoint, settings, length)
            how = {"optimizer": optimizer, "sharding": sharding, "replicas": gpus}
            found.append(_row(layered, hardware, length, gpus, (ranks, size), share, rows, how))
    best = max((row for row in found if row.fits), key=lambda row: row.tokens_per_second_per_gpu, default=None)
    config = _config(best, settings, best.tp > 1 and _tied(model)) if best is not None else None
    notes = _notes(model, length, checkpoint, sharding)
    if json_output:
        out = {"length": length, "hardware": asdict(hardware), "rows": [asdict(row) for row in found]}
        print(json.dumps({**out, "config": config, "notes": notes}, indent=1))
    else:
        _show(found, best, config, length, hardware)
        for note in notes:
            print(note)
    if picture is not None:
        _draw(found, picture, model, memory)
    raise typer.Exit(0 if best is not None else 1)


def parse_memory(text: str, *, option: str) -> float:
    """Bytes of "80GiB", "141GB", "1.5TB".

    Raises:
        ConfigError: `text` is no such size.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} got {text!r}: give a number with TiB, GiB, MiB, TB, GB or MB, such as 80GiB")
    return float(match[1]) * _BYTES[match[2]]


def _budgets(text: str) -> list[float]:
    try:
        budgets = [float(part) for part in text.split(",")]
    except ValueError:
        budgets = [-1.0]
    if not all(0 <= share <= 1 for share in budgets):
        raise ConfigError(f"--budget got {text!r}: give numbers from 0 to 1, comma-separated, such as 1,0.5,0.1")
    return budgets


def _groups(sp: list[int] | None, tp: list[int] | None, gpus: int) -> list[tuple[int, int]]:
    """Pairs (sp, tp) whose product divides the GPUs."""
    for option, sizes in (("--sp", sp or []), ("--tp", tp or [])):
        if wrong := [ranks for ranks in sizes if ranks < 1 or gpus % ranks]:
            raise ConfigError(f"{option} {wrong[0]}: it must divide --gpus {gpus}")
    powers = [1 << power for power in range(gpus.bit_length()) if gpus % (1 << power) == 0]
    sequences = sorted(set(sp)) if sp else powers
    pairs = [(ranks, size) for size in sorted(set(tp or [1])) for ranks in sequences if gpus % (ranks * size) == 0]
    if not pairs:
        raise ConfigError(f"--sp times --tp must divide --gpus {gpus}; no pair of {sequences} and {tp} does")
    return pairs


def _check_choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option} {value}: choose {' or '.join(allowed)}")


def _trace(
    model: str | None,
    ranks: int,
    tp: int,
    budget: float,
    counts: tuple[list[int | None], int],
    rows: int,
    dtype: str,
    checkpoint: bool,
    settings: dict[str, Any],
    length: int,
) -> Layered:
    import torch

    from autosp.plan.estimate import Layered
    from autosp.plan.trace import trace_step

    def make(count: int | None) -> Any:
        def build() -> Any:
            example = load_example(model, layers=count, weights=False, rows=rows)
            if checkpoint:
                if not hasattr(example.model, "gradient_checkpointing_enable"):
                    raise ConfigError("--checkpoint: the model has no gradient_checkpointing_enable()")
                example.model.gradient_checkpointing_enable()
            return example.model, example.batch

        return build

    few, whole = counts
    kinds = {"bf16": torch.bfloat16, "bf16-autocast": torch.float32, "fp32": torch.float32}
    even = max(2 * ranks, length - length % (2 * ranks))
    traces = {
        count or 0: trace_step(
            make(count),
            length=even,
            ranks=ranks,
            tp=tp,
            dtype=kinds[dtype],
            autocast=dtype == "bf16-autocast",
            budget=budget,
            settings=settings,
        )
        for count in few
    }
    return Layered(traces, whole)


def _layer_counts(model: str | None, layers: int | None) -> tuple[list[int | None], int]:
    """With how many layers to trace, and how many the model has (0: a factory's, traced as it is)."""
    if is_factory(model):
        return [None], 0
    text = _text_config(model)
    whole = layers or text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or []
    if whole <= _FEW:
        return [whole], whole
    return _few_for_many(lambda count: _elements(model, count), list(kinds)[:whole], whole), whole


def _text_config(model: str | None) -> Any:
    return read_config(model).get_text_config()


def _few_for_many(elements: Callable[[int], int], kinds: list[Any], whole: int) -> list[int | None]:
    """Two numbers of layers whose traces tell about ``whole``, or ``whole`` itself where no two do.

    Layers of different kinds take turns: as many are added as one turn has. That the added layers are like all later
    ones is checked by the numbers in the parameters (a model may have dense layers first and experts later).
    """
    turn = next((n for n in range(1, len(kinds)) if kinds == (kinds[:n] * len(kinds))[: len(kinds)]), 0 if kinds else 1)
    total, known = elements(whole), functools.cache(elements)
    for step in (turn, 2 * turn, 4 * turn) if turn else ():
        for few in range(max(2, step), _MOST):
            if few + step >= whole:
                break
            each = known(few + step) - known(few)
            alike = few - step < 1 or known(few) - known(few - step) == each
            if alike and known(few) * step + (whole - few) * each == total * step:
                return [few, few + step]
    return [whole]


def _elements(model: str | None, count: int) -> int:
    """Numbers in the parameters of the model with so many layers; nothing is allocated."""
    import torch

    with torch.device("meta"):
        return sum(p.numel() for p in load_example(model, layers=count, weights=False).model.parameters())


def _row(
    layered: Layered,
    hardware: Hardware,
    length: int,
    gpus: int,
    groups: tuple[int, int],
    budget: float,
    rows: int,
    how: Any,
) -> Row:
    from autosp.plan.estimate import estimate, longest

    ranks, tp = groups
    fixed = any(trace.symbol is None for trace in layered.traces.values())
    # A length that is no multiple is judged by the next one, where the model's length is free: right or too large.
    down = max(2 * ranks, length - length % (2 * ranks))
    even = down if fixed else -(-length // (2 * ranks)) * 2 * ranks
    wanted = estimate(layered, even, hardware=hardware, **how)
    furthest = None if fixed else longest(layered, hardware=hardware, step=2 * ranks, **how)
    room = hardware.memory * (1 - hardware.headroom)
    return Row(
        dp=gpus // (ranks * tp),
        sp=ranks,
        tp=tp,
        budget=budget,
        longest=furthest.length if furthest is not None else 0,
        fits=wanted.total <= room,
        bytes=wanted.total,
        parts=wanted.parts,
        moment=wanted.moment,
        seconds=wanted.seconds,
        compute_seconds=wanted.compute_seconds,
        communication_seconds=wanted.communication_seconds,
        flops=wanted.flops,
        bytes_sent=wanted.sent,
        tokens_per_second_per_gpu=rows * even / wanted.seconds / (ranks * tp) if wanted.seconds else 0.0,
    )


def _tied(model: str | None) -> bool:
    """Whether the model says that its LM head is tied to its embedding."""
    from autosp.plan.trace import is_tied
    from autosp.report.fake_run import fake_tensors

    with fake_tensors():
        return is_tied(load_example(model, layers=None if is_factory(model) else 1, weights=False).model)


def _config(row: Row, settings: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The JSON for ``autosp.initialize``."""
    section = {**settings, **({"activation_memory_budget": row.budget} if row.budget < 1 else {})}
    sizes: dict[str, Any] = {"data_parallel_size": row.dp, "sequence_parallel_size": row.sp}
    if row.tp > 1:
        head = {"autotp_size": row.tp, "vocab_parallel_lm_head": True}
        sizes["tensor_parallel"] = {**head, "vocab_parallel_embedding": True} if tied else head
    return {**sizes, **({"autosp": section} if section else {})}


def _notes(model: str | None, length: int, checkpoint: bool, sharding: str) -> list[str]:
    """What the figures assume that the JSON does not set, and what the model was not made for."""
    notes = []
    if checkpoint:
        notes.append("Call model.gradient_checkpointing_enable() before torch.compile: the JSON does not.")
    if sharding != "none":
        notes.append(f"Your engine (ZeRO, FSDP2) shares the {sharding} over all GPUs: the JSON does not.")
    if not is_factory(model):
        positions = getattr(_text_config(model), "max_position_embeddings", None)
        if isinstance(positions, int) and length > positions:
            notes.append(
                f"The model's configuration has max_position_embeddings {positions}, fewer than {length} tokens: "
                "learned positions end there, rotary ones need scaling."
            )
    return notes


def _show(rows: list[Row], best: Row | None, config: Any, length: int, hardware: Hardware) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from autosp.plan.picture import tokens_text

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{tokens_text(length)} tokens", title_justify="left")
    parts = list(rows[0].parts)
    for name in ("dp", "sp", "tp", "budget", *parts, "GiB in all", "step s", "sent GiB", "tokens/s/GPU", "longest"):
        table.add_column(name, justify="right")
    for row in rows:
        total = f"{row.bytes / 2**30:.1f}"
        table.add_row(
            *(str(row.dp), str(row.sp), str(row.tp), f"{row.budget:g}"),
            *(f"{row.parts[name] / 2**30:.1f}" for name in parts),
            f"[green]{total}[/]" if row.fits else f"[red]{total} too much[/]",
            *(f"{row.seconds:.3g}", f"{row.bytes_sent / 2**30:.3g}", f"{row.tokens_per_second_per_gpu:,.0f}"),
            tokens_text(row.longest) if row.longest else "-",
        )
    console.print(table)
    room = hardware.memory * (1 - hardware.headroom) / 2**30
    console.print(f"Room: {room:.1f} GiB a GPU. Times are a roofline: every kernel at its peak, nothing overlapped.")
    if best is None:
        longest = max(row.longest for row in rows)
        console.print(f"{tokens_text(length)} tokens fit in no way; the longest that fits is {tokens_text(longest)}.")
    else:
        console.print(
            f"Fastest that fits: dp {best.dp} x sp {best.sp} x tp {best.tp}, budget {best.budget:g}. The JSON to use:"
        )
        console.print(json.dumps(config), markup=False, highlight=False, soft_wrap=True)


def _draw(rows: list[Row], path: Path, model: str | None, memory: str) -> None:
    from autosp.plan.picture import draw

    lines: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        if row.longest:
            name = f"budget {row.budget:g}" if row.tp == 1 else f"budget {row.budget:g}, tp {row.tp}"
            lines.setdefault(name, []).append((row.sp * row.tp, row.longest))
    draw(lines, path, title=f"{model or 'built-in small Llama'}, {memory} a GPU")
    print(f"written: {path}", file=sys.stderr)
