"""``autosp bench step``: a training step beside other ways to share a sequence, each in processes of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from autosp.cli.progress import reporter
from autosp.cli.settings import INNER_BACKENDS, parse_size
from autosp.errors import ConfigError

# Relative; losses of the same tokens by other kernels.
_SAME_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}


def step(
    lengths: Annotated[
        str,
        typer.Option(help="Tokens, comma-separated: 16k,32k. Default: 16k,32k,64k (64 on a CPU).", show_default=False),
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(help='Name of a method, as in the table ("autosp"); may be repeated. Default: all importable.'),
    ] = None,
    nproc: Annotated[
        int, typer.Option(min=1, help="Processes, one GPU each; with 1, autosp and compiled torch alone.")
    ] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps; the median is shown.")] = 5,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers. Default: 16, a Llama of 1.5 billion (1 on a CPU).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    inner_backend: Annotated[str, typer.Option(help="inductor, aot_eager or eager.")] = "inductor",
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Activation checkpointing of every layer.")] = False,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="One step a length, for very long ones; the first length compiles and has no speed."
        ),
    ] = False,
    options: Annotated[
        str, typer.Option(help='JSON of more settings for autosp: \'{"fuse_linear_cross_entropy": "always"}\'.')
    ] = "{}",
    device: Annotated[str, typer.Option(help='"cuda", or "cpu" for a smoke test of a tiny model.')] = "cuda",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write settings, versions and rows to this file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw tokens a second against length here (.png, .svg, .pdf).")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace of a step of rank 0 into this folder, a file a method and length."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """A training step of an unmodified Llama, forward and backward: tokens a second, peak memory, first step, loss.

    "of GEMM peak" is model flops, recomputation not counted, over what a burst of products reaches on the same card.
    """
    from autosp.cli import launch
    from autosp.cli.bench import check_device, check_target

    check_device(device)
    check_target(json_file, "--json")
    check_target(picture, "--picture", (".png", ".svg", ".pdf"))
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"--dtype {dtype}: choose bfloat16 or float32")
    if inner_backend not in INNER_BACKENDS:
        raise ConfigError(f"--inner-backend {inner_backend}: choose {' or '.join(INNER_BACKENDS)}")
    sizes = lengths or ("64" if device == "cpu" else "16k,32k,64k")
    tokens = sorted(parse_size(part, option="--lengths") for part in sizes.split(","))
    more = _options(options)
    if launch.under_launcher():
        raise ConfigError("autosp bench step starts its own processes; run it without torchrun")
    speaks = reporter(True, to_stderr=True)
    with speaks.stage("Importing torch"):
        from autosp.bench import step as measuring
    if device == "cuda":
        _check_gpus(nproc)
    names = _methods(only, nproc, measuring)
    if trace is not None:
        if once or device != "cuda":
            raise ConfigError("--trace records a GPU's step of its own: leave out --once and --device cpu")
        trace.mkdir(parents=True, exist_ok=True)
    rows: list[Any] = []
    for name in names:
        settings = measuring.StepSettings(
            name,
            "",
            tokens,
            steps,
            layers,
            device,
            dtype,
            inner_backend,
            checkpoint,
            more if name == measuring.OURS else {},
            once,
            str(trace.absolute()) if trace is not None else "",
        )
        with speaks.stage(name) as tell:
            found = _run(settings, nproc, debug)
            rows += found
            tell(f"{sum(row.loss is not None for row in found)} of {len(tokens)} lengths")
    note_losses(rows, measuring.OURS, dtype)
    print(table(rows))
    about = {
        "nproc": nproc,
        "steps": steps,
        "layers": layers,
        "dtype": dtype,
        "checkpoint": checkpoint,
        "options": more,
        "once": once,
    }
    if json_file is not None:
        from autosp.bench.losses import environment

        content = {"environment": environment(device), "settings": about, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"written: {json_file}", file=sys.stderr)
    if picture is not None:
        draw(rows, picture)
    failed = [row for row in rows if row.method == measuring.OURS and row.loss is None]
    raise typer.Exit(1 if failed else 0)


def _options(text: str) -> dict[str, Any]:
    from autosp import AutoSPConfig

    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--options is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--options is a JSON {type(found).__name__}; an object is needed")
    AutoSPConfig().with_options(found)
    if "inner_backend" in found:
        raise ConfigError("--options holds inner_backend, which is one for all rows: give --inner-backend")
    return found


def _check_gpus(nproc: int) -> None:
    import torch

    if torch.cuda.device_count() < nproc:
        raise ConfigError(f"--nproc {nproc}: torch sees {torch.cuda.device_count()} GPUs here")


def _methods(only: list[str] | None, nproc: int, measuring: Any) -> list[str]:
    if only and (unknown := [name for name in only if name not in measuring.METHODS]):
        raise ConfigError(f"unknown methods {unknown}; allowed are {list(measuring.METHODS)}")
    alone = (measuring.OURS, measuring.ONE)
    if nproc == 1 and (shared := [name for name in only or () if name not in alone]):
        raise ConfigError(
            f"--nproc 1 has nobody to share a sequence with, which {shared} do; allowed are {list(alone)}"
        )
    names = []
    for name in only or (alone if nproc == 1 else measuring.METHODS):
        if reason := measuring.missing(name):
            print(f"skipped: {name}: {reason}", file=sys.stderr)
        else:
            names.append(name)
    return names


def _run(settings: Any, nproc: int, debug: bool) -> list[Any]:
    """Measure one method in processes of its own; a length that fails is a row that says why, and so are later ones."""
    from autosp.bench.step import StepRow
    from autosp.cli import launch

    with tempfile.TemporaryDirectory(prefix="autosp-bench-") as folder:
        settings.result = str(Path(folder, "rows.json"))
        file = Path(folder, "settings.json")
        file.write_text(json.dumps({**asdict(settings), "debug": debug}))
        failures, number = launch.run_ranks("autosp.bench.step_rank", str(file), nproc=nproc, debug=debug)
        if number is not None:
            raise KeyboardInterrupt
        result = Path(settings.result)
        rows = [StepRow(**row) for row in json.loads(result.read_text())] if result.exists() else []
    if failures:
        _, failure = launch.root_cause(failures)
        text = launch.failure_message(failure) if failure.exitcode > 0 else f"killed by signal {-failure.exitcode}"
        done = {row.length for row in rows}
        left = [length for length in settings.lengths if length not in done]
        rows += [StepRow(settings.method, n, nproc, note=text[:200] if n == left[0] else "not tried") for n in left]
    return rows


def note_losses(rows: list[Any], reference: str, dtype: str) -> None:
    """Say of a row that its loss is not ours at that length: it trains on something else."""
    ours = {row.length: row.loss for row in rows if row.method == reference}
    for row in rows:
        loss = ours.get(row.length)
        if loss is not None and row.loss is not None and abs(row.loss - loss) > _SAME_LOSS[dtype] * abs(loss):
            row.note = f"its loss differs by {row.loss - loss:+.5f}" + (f"; {row.note}" if row.note else "")


def table(rows: list[Any]) -> str:
    """The rows as a Markdown table."""
    names = "method | tokens | ranks | tokens/s/GPU | of GEMM peak | peak GiB | first step s | loss"
    lines = [f"| {names} | |", "|" + "---|" * 9]
    for r in rows:
        cells = [f"{r.tokens_per_second_per_gpu:,.0f}" if r.seconds else "-"]
        cells.append(f"{r.gemm_share:.1%}" if r.gemm_share else "-")
        cells.append(f"{r.peak_bytes / 2**30:.1f}" if r.peak_bytes else "-")
        cells.append(f"{r.first_step_seconds:.1f}" if r.first_step_seconds else "-")
        cells.append(f"{r.loss:.5f}" if r.loss is not None else "-")
        lines.append(f"| {r.method} | {r.length} | {r.ranks} | {' | '.join(cells)} | {r.note} |")
    return "\n".join(lines)


def draw(rows: list[Any], path: Path) -> None:
    """Tokens a second and peak memory of one GPU against the length, one line a method and number of GPUs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    values = [("tokens a second and GPU", lambda row: row.tokens_per_second_per_gpu)]
    if any(row.peak_bytes for row in rows):
        values.append(("peak memory of a GPU, GiB", lambda row: row.peak_bytes and row.peak_bytes / 2**30))
    figure = Figure(figsize=(6.5 * len(values), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, value) in zip(figure.subplots(1, len(values), squeeze=False)[0], values, strict=True):
        for method, ranks in dict.fromkeys((row.method, row.ranks) for row in rows):
            points = [(r.length, value(r)) for r in rows if (r.method, r.ranks) == (method, ranks) and value(r)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{method}, {ranks} GPU{'s' * (ranks > 1)}")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens of the sequence", ylabel=label)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)
    print(f"written: {path}", file=sys.stderr)
