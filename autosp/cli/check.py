"""``autosp check``: one process against a group, over lengths, masks and patterns of labels."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from autosp.cli import launch
from autosp.cli.model_spec import MODEL_HELP, check_spec
from autosp.cli.settings import DTYPES, INNER_BACKENDS, parse_size, read_json
from autosp.errors import ConfigError

LABELS = ("all", "prompt-ignored", "one-token")
MASKS = ("none", "ones", "right-padding", "left-padding")
CHECK_DTYPES = (*DTYPES, "fp64")


@dataclass
class CheckSettings:
    """What the ranks of a check are told."""

    model: str | None
    result: str
    lengths: list[int]
    labels: list[str]
    masks: list[str]
    configs: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 2
    rows: int = 2
    layers: int | None = None
    device: str = "cpu"
    dtype: str = "fp32"
    inner_backend: str = "aot_eager"
    rtol: float | None = None
    debug: bool = False
    masks_asked: bool = False
    """`masks` were given; otherwise a model whose forward names no attention_mask is checked without."""


def check(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=False)] = None,
    lengths: Annotated[str, typer.Option(help="Tokens, comma-separated; an even and an uneven one.")] = "32,33",
    labels: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(LABELS)}; may be repeated. Default: all.")
    ] = None,
    masks: Annotated[list[str] | None, typer.Option(help=f"{', '.join(MASKS)}; may be repeated. Default: all.")] = None,
    config: Annotated[
        str | None, typer.Option(help="DeepSpeed-style JSON of your own mesh, checked after sp 2.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=2, max=64, help="Processes on this machine.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps (SGD) of each case.")] = 2,
    rows: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 2,
    layers: Annotated[int | None, typer.Option(min=1, help="Build the model with so many layers.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda (one GPU a process).")] = "cpu",
    dtype: Annotated[str, typer.Option(help="fp32 or fp64 (errors to 1e-5), or bf16 autocast (to 2e-2).")] = "fp32",
    inner_backend: Annotated[
        str | None, typer.Option(help="inductor, aot_eager or eager. Default: aot_eager on CPU, inductor on GPUs.")
    ] = None,
    rtol: Annotated[float | None, typer.Option(help="Allowed relative error. Default: by dtype.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Compare the compiled model with one process: loss, outputs and every gradient, over two optimizer steps.

    Runs on 2 processes with one sequence group of 2, then on your own mesh (--config). Exit code 0: all agree; 1: a
    difference, or the model is refused; 2: a wrong argument.
    """
    for option, value, allowed in (
        ("--device", [device], ("cpu", "cuda")),
        ("--dtype", [dtype], CHECK_DTYPES),
        ("--inner-backend", [inner_backend or "eager"], INNER_BACKENDS),
        ("--labels", labels or [], LABELS),
        ("--masks", masks or [], MASKS),
    ):
        if wrong := [one for one in value if one not in allowed]:
            raise ConfigError(f"{option} {wrong[0]}: choose {' or '.join(allowed)}")
    if rtol is not None and not 0 < rtol < 1:
        raise ConfigError(f"--rtol {rtol}: a number between 0 and 1 is needed, such as 1e-4")
    check_spec(model, weights=True)
    settings = CheckSettings(
        model=model,
        result="",
        lengths=[parse_size(part, option="--lengths") for part in lengths.split(",")],
        labels=labels or list(LABELS),
        masks=masks or list(MASKS),
        configs=_configs(config, nproc),
        steps=steps,
        rows=rows,
        layers=layers,
        device=device,
        dtype=dtype,
        inner_backend=inner_backend or ("inductor" if device == "cuda" else "aot_eager"),
        rtol=rtol,
        debug=debug,
        masks_asked=masks is not None,
    )
    _check_device(device, nproc)
    raise typer.Exit(_run(settings, nproc, json_output))


def _configs(path: str | None, nproc: int) -> list[dict[str, Any]]:
    """sp 2 over the processes where they are even in number, then the user's mesh."""
    from autosp import AutoSPConfig

    own = read_json(Path(path)) if path is not None else None
    configs: list[dict[str, Any]] = [] if nproc % 2 else [{"sequence_parallel_size": 2}]
    if own is not None:
        AutoSPConfig.from_json(own, nproc)  # refuses sizes that do not cover the processes
        configs.append(own)
    return configs or [{"sequence_parallel_size": nproc}]


def _check_device(device: str, nproc: int) -> None:
    if device == "cpu":
        return
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < nproc:
        raise ConfigError(f"--device cuda with --nproc {nproc}: torch sees {gpus} GPUs here; use --device cpu")


def _run(settings: CheckSettings, nproc: int, json_output: bool) -> int:
    if launch.under_launcher():
        raise ConfigError(
            "autosp check starts its own processes; run it without torchrun, or call autosp.check in your own script"
        )
    with tempfile.TemporaryDirectory(prefix="autosp-check-") as folder:
        settings.result = str(Path(folder, "result.json"))
        file = Path(folder, "settings.json")
        file.write_text(json.dumps(asdict(settings)))
        if json_output:
            os.environ["AUTOSP_QUIET"] = "1"
        try:
            failures, number = launch.run_ranks("autosp.cli.check_rank", str(file), nproc=nproc, debug=settings.debug)
        finally:
            os.environ.pop("AUTOSP_QUIET", None)
        if number is not None:
            print(f"autosp: stopped by {signal.Signals(number).name}", file=sys.stderr)
            return 128 + number
        if failures:
            return _report_failure(failures)
        rows = json.loads(Path(settings.result).read_text())
    if json_output:
        print(json.dumps({"settings": {**asdict(settings), "result": None, "nproc": nproc}, "rows": rows}, indent=1))
    else:
        _show(rows, settings.dtype)
    return 0 if all(row["verdict"] == "ok" for row in rows) else 1


def _report_failure(failures: dict[int, Any]) -> int:
    rank, failure = launch.root_cause(failures)
    text = launch.failure_message(failure)
    if failure.exitcode == 2:
        print(f"autosp: error: {text}", file=sys.stderr)
        return 2
    what = f"was killed by signal {-failure.exitcode}" if failure.exitcode < 0 else f"failed: {text}"
    print(f"autosp: error: rank {rank} {what}; --debug shows the traceback", file=sys.stderr)
    return 1


def _show(rows: list[dict[str, Any]], dtype: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("mesh", "tokens", "labels", "mask", "loss", "loss error", "worst gradient", "error"):
        table.add_column(name, justify="right" if name in ("tokens", "loss") else "left")
    for name in ("compiled", "s", "verdict"):
        table.add_column(name, justify="right" if name != "verdict" else "left")
    colours = {"ok": "green", "MISMATCH": "bold red", "refused": "yellow"}
    for row in rows:
        error = max(row["gradient_error"], row["output_error"])
        cells = ["", "", "", ""]
        if not row["refused"]:
            cells = [f"{row['loss']:.6g}", f"{row['loss_error']:.1e}", row["worst_gradient"], f"{error:.1e}"]
        verdict = f"[{colours[row['verdict']]}]{row['verdict']}[/]"
        more = [str(row["compilations"]), f"{row['seconds']:.1f}", verdict]
        table.add_row(row["mesh"], str(row["tokens"]), row["labels"], row["mask"], *cells, *more)
    console.print(table)
    for reason in dict.fromkeys(row["refused"] for row in rows if row["refused"]):
        console.print(f"refused: {reason}", markup=False, highlight=False, soft_wrap=True)
    for row in rows:
        if row["missing"]:
            console.print(f"gradients on one side only: {', '.join(row['missing'])}", markup=False, highlight=False)
    if any(row["dropout_off"] for row in rows):
        console.print("The model has dropout: compared in evaluation mode.", highlight=False)
    if dtype == "fp32" and any(row["verdict"] == "MISMATCH" and not row["missing"] for row in rows):
        console.print(
            "Rounding alone can do this where a model decides by it: which side of zero a ReLU's input is on, which "
            "expert a token goes to. --dtype fp64 tells: a difference that is there too is none of rounding.",
            highlight=False,
        )
    good = sum(row["verdict"] == "ok" for row in rows)
    allowed = max(row["tolerance"] for row in rows)
    console.print(
        f"{good} of {len(rows)} cases agree with one process (relative errors up to {allowed:.0e}).", highlight=False
    )
