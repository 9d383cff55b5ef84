"""``autosp bench``: time and memory of losses and of a step, beside the floor of the card and other ways.

torch and the measuring code are imported by a command when it runs, so that ``autosp --help`` stays quick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosp.cli import bench_scaling, bench_step
from autosp.cli.progress import Plain
from autosp.errors import ConfigError

if TYPE_CHECKING:
    import torch

# What --device cpu measures when no shape is given: it shows that everything runs, not how fast.
_CPU_LOSSES = ((64, 1000),)
_CPU_LINEAR = ((64, 32, 1000),)
_CPU_ATTENTION = (256,)

PICTURES = (".png", ".svg", ".pdf")

# Lines even on a terminal: the thread of a live bar would take part in what is measured.
_MEASURING = Plain(to_stderr=True)

app = typer.Typer(
    no_args_is_help=True,
    help="Time and memory of losses and of a training step, beside floors and other implementations.",
)

app.command("step", epilog="Example: autosp bench step --nproc 2 --lengths 16k,32k --json step.json")(bench_step.step)

app.command("scaling", epilog="Example: autosp bench scaling --ranks 8,16,32,64 --picture scaling.png")(
    bench_scaling.scaling
)

Device = Annotated[str, typer.Option(help='"cuda", or "cpu" for a smoke test at tiny shapes.')]
Json = Annotated[Path | None, typer.Option("--json", help="Write device, versions and rows to this file.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs; the median is shown.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command(
    "losses",
    epilog="Example: autosp bench losses --shape 8192x75968 --dtype bfloat16 --json losses.json --picture losses.png",
)
def losses(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="ROWSxVOCABULARY; may be repeated. Default: 8192x75968 and 4096x151936 (64x1000 on a CPU)."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="bfloat16, float32 or float16; may be repeated. Default: bfloat16 and float32."),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(
            help="logprobs, entropy, cross_entropy, token_stats, forward_kl, reverse_kl or jsd; may be repeated. "
            "Default: all."
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help='eager, compile, liger or "none"; may be repeated. Default: all that are importable (eager on a CPU).'
        ),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            min=1,
            help="Over a group of that many ranks, each with a whole shape, beside the same shard without a group: "
            "torchrun --nproc-per-node 2 -m autosp.cli.main bench losses --tp 2.",
        ),
    ] = 1,
    device: Device = "cuda",
    repeats: Repeats = 10,
    json_file: Json = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the time over the floor of each operator here (.png, .svg, .pdf).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Losses over logits: forward + backward against the bytes that they cannot avoid to move."""
    where = check_device(device)
    check_target(json_file, "--json")
    check_target(picture, "--picture", PICTURES)
    shapes = [_sizes(text, ("ROWS", "VOCABULARY")) for text in shape or ()]
    from autosp.bench import losses as measuring

    on_cpu = where.type == "cpu"
    if tp > 1:
        if picture is not None:
            raise ConfigError("--picture draws implementations side by side; with --tp there is one: leave out either")
        _losses_over_a_group(shapes or (_CPU_LOSSES if on_cpu else measuring.SHAPES[:1]), dtype, operator, peer, tp,
                             device, repeats, json_file)  # fmt: skip
        return
    peers = [] if peer == ["none"] else peer or (["eager"] if on_cpu else list(measuring.PEERS))
    with _MEASURING.stage("Measuring"):
        rows = measuring.run(
            shapes or (_CPU_LOSSES if on_cpu else measuring.SHAPES),
            dtype or measuring.DTYPES[:2],
            operator or tuple(measuring.PASSES),
            peers,
            device,
            repeats,
        )
    about = measuring.environment(device)
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    print(measuring.table(rows))
    _write(json_file, {"environment": about, "results": rows})
    if picture is not None:
        measuring.draw(rows, picture)
        print(f"written: {picture}", file=sys.stderr)


def _losses_over_a_group(
    shapes: Sequence[tuple[int, int]], dtype: list[str] | None, operator: list[str] | None, peer: list[str] | None,
    tp: int, device: str, repeats: int, json_file: Path | None,
) -> None:  # fmt: skip
    """``losses --tp``: this process is one rank; rank 0 prints."""
    from autosp.bench import losses, losses_tp

    if peer not in (None, ["none"]):
        raise ConfigError(
            f"--tp measures autosp with and without a group; --peer {' --peer '.join(peer)} has no effect"
        )
    losses_tp.check_world(tp)
    with losses_tp.tensor_parallel_group(device) as where:
        import torch.distributed as dist

        first = dist.get_rank() == 0
        operators = operator or tuple(losses.PASSES)
        rows = losses_tp.run(shapes, dtype or losses.DTYPES[:2], operators, where, repeats)
        if first:
            about = losses.environment(device)
            print(" ".join(f"{key}={value}" for key, value in about.items()))
            print(losses_tp.table(rows))
            _write(json_file, {"environment": about, "results": rows})


@app.command(
    "linear-loss",
    epilog="Example: autosp bench linear-loss --shape 8192x4096x128256 --json rows.json --picture linear_loss.png",
)
def linear_loss(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="TOKENSxHIDDENxVOCABULARY; may be repeated. Default: 8192x4096x128256, 16384x4096x131072 and "
            "8192x2304x256000 (64x32x1000 on a CPU)."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    only: Annotated[
        list[str] | None,
        typer.Option(
            help='Name of a method, as in the table ("autosp fast"); may be repeated. Default: all that are '
            "importable (without torch.compile on a CPU)."
        ),
    ] = None,
    device: Device = "cuda",
    repeats: Repeats = 10,
    json_file: Json = None,
    picture: Annotated[Path | None, typer.Option(help="Draw time against memory here (.png, .svg, .pdf).")] = None,
    debug: Debug = False,
) -> None:
    """The LM head with its loss: forward + backward against the GEMMs that it cannot avoid."""
    where = check_device(device)
    on_cpu = where.type == "cpu"
    check_target(json_file, "--json")
    check_target(picture, "--picture", PICTURES)
    if picture is not None and on_cpu:
        raise ConfigError("--picture draws memory figures, which only a GPU counts; leave out --device cpu")
    shapes = [_sizes(text, ("TOKENS", "HIDDEN", "VOCABULARY")) for text in shape or ()]
    import torch

    from autosp.bench import linear_loss as measuring
    from autosp.bench.losses import DTYPES

    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; allowed are {list(DTYPES)}")
    names = only or [n for n in measuring.methods()[0] if not (on_cpu and n.startswith("torch.compile"))]
    with _MEASURING.stage("Measuring"):
        rows = measuring.run(
            tuple(shapes) or (_CPU_LINEAR if on_cpu else measuring.SHAPES),
            tuple(names),
            device,
            getattr(torch, dtype),
            repeats,
        )
    name = "cpu" if on_cpu else torch.cuda.get_device_name(where)
    print(f"{name}, torch {torch.__version__}, {dtype}, median of {repeats}\n")
    print(measuring.table_text(rows))
    about = {"device": name, "torch": torch.__version__, "dtype": dtype, "rows": [asdict(row) for row in rows]}
    _write(json_file, about)
    if picture is not None:
        measuring.draw(rows, picture)
        print(f"written: {picture}", file=sys.stderr)


@app.command("attention", epilog="Example: autosp bench attention --length 16384 --length 65536 --json attention.json")
def attention(
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens; may be repeated. Default: 16384 and 65536 (256 on a CPU)."),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            help="causal, window, documents, chunks, padding, prefix or alibi; may be repeated. Default: all."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help='autosp, plain (autosp without its kernels) or flex; may be repeated. Default: all ("flex" not on a '
            "CPU, where it has no backward). Causal scaled_dot_product_attention always runs."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch rows.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    key_heads: Annotated[int, typer.Option(min=1, help="Key and value heads; they divide the query heads.")] = 8,
    size: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "cuda",
    repeats: Repeats = 10,
    json_file: Json = None,
    debug: Debug = False,
) -> None:
    """Attention by kind of mask: forward and backward beside causal attention of torch."""
    where = check_device(device)
    check_target(json_file, "--json")
    from autosp.bench import attention as measuring
    from autosp.bench.losses import environment

    on_cpu = where.type == "cpu"
    names = only or [name for name in measuring.IMPLEMENTATIONS if not (on_cpu and name == "flex")]
    with _MEASURING.stage("Measuring"):
        rows = measuring.run(
            length or (_CPU_ATTENTION if on_cpu else measuring.LENGTHS),
            mask or tuple(measuring.MASKS),
            names,
            measuring.Shape(batch, heads, key_heads, size),
            dtype,
            device,
            repeats,
        )
    about = environment(device) | {"batch": batch, "heads": heads, "key_heads": key_heads, "size": size, "dtype": dtype}
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    print(measuring.table(rows))
    print(measuring.summary(rows))
    _write(json_file, {"environment": about, "results": measuring.as_dicts(rows)})


def check_device(name: str) -> torch.device:
    """The device that --device names, or a ConfigError where there is none."""
    if name not in ("cuda", "cpu"):
        raise ConfigError(f'--device is {name!r}; allowed are "cuda" and "cpu"')
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no CUDA device, and figures of a CPU say nothing about the bars; run where there is one, or "
            "give --device cpu for a smoke test at tiny shapes"
        )
    return torch.device(name)


def _sizes(text: str, names: Sequence[str]) -> tuple[Any, ...]:
    parts = text.lower().split("x")
    if len(parts) != len(names) or not all(part.isdigit() and int(part) > 0 for part in parts):
        example = "8192x75968" if len(names) == 2 else "8192x4096x128256"
        raise ConfigError(f"--shape is {text!r}; {'x'.join(names)} of positive numbers is expected, such as {example}")
    return tuple(map(int, parts))


def check_target(path: Path | None, option: str, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that could not be written, before minutes of measuring."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{option} is {str(path)!r}; a file in a folder that exists is expected")
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(f"{option} is {str(path)!r}; allowed endings are {', '.join(suffixes)}")


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path}", file=sys.stderr)
