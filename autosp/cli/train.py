"""``autosp train``: its options, what is checked before any process is started, and the start."""

from __future__ import annotations

import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autosp.cli import launch
from autosp.cli.settings import (
    DTYPES,
    INNER_BACKENDS,
    TrainSettings,
    from_engine_config,
    parse_size,
    read_json,
)
from autosp.errors import AutoSPError, ConfigError

# What a resumed run may change without becoming another run; everything else comes from the run folder.
_FREE_ON_RESUME = ("nproc", "steps", "lr", "save_every", "inner_backend", "debug", "device", "compare")
_SET_UP = "Set-up"
_RUN = "Run"


def train(
    model: Annotated[
        str | None,
        typer.Option(help="Folder, config.json (random weights) or .gguf. Default: a small Llama over bytes."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="File, folder or glob; may be repeated. .txt, .md, .py, .jsonl with a text field. "
            "Default: the Python standard library's own source."
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="DeepSpeed-style JSON: sizes, optimizer, batch, the autosp section.")
    ] = None,
    seq_len: Annotated[
        str, typer.Option(help="Tokens a sequence: 512, 4k, 1m. Default: 512.", show_default=False)
    ] = "",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps in all, those before a resume included. Default: 100.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences a step for each data-parallel group. Default: 2 built in, else 1."),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate of AdamW after 10 steps of warm-up. Default: 2e-3 built in, else 2e-5."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, or bf16 (autocast over fp32 weights). Default: fp32 on CPU, bf16 on GPUs."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, data order and dropout. Default: 0.")] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes on this machine. Default: 2 on CPU, one for each GPU.", rich_help_panel=_RUN
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. Default: cuda where there are GPUs.", rich_help_panel=_RUN)
    ] = None,
    inner_backend: Annotated[
        str | None,
        typer.Option(
            help="What compiles the partitioned graph: inductor, aot_eager or eager. Default: inductor on GPUs, "
            "aot_eager on CPU (Inductor's first compilation takes about a minute there).",
            rich_help_panel=_RUN,
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Run folder. Default: runs/train-<date and time>.", rich_help_panel=_RUN)
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Run folder to go on with, from its newest checkpoint.", rich_help_panel=_RUN)
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            min=0, help="Steps between checkpoints. Default: 0, at the end and on Ctrl-C only.", rich_help_panel=_RUN
        ),
    ] = None,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Compare the first loss with that of one process, and stop where they differ. Default: yes.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_RUN)] = False,
) -> None:
    """Train an unmodified causal language model on a sequence-parallel group.

    With no arguments: a small Llama, on the source of Python's standard library, by 2 processes. Under torchrun (one or
    several machines) the processes that it started are used.
    """
    given = {
        "model": model,
        "data": tuple(data) if data else None,
        "config": config,
        "seq_len": parse_size(seq_len, option="--seq-len") if seq_len else None,
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "dtype": dtype,
        "seed": seed,
        "nproc": nproc,
        "device": device,
        "inner_backend": inner_backend,
        "out": out,
        "resume": resume,
        "save_every": save_every,
        "compare": compare,
        "debug": debug or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    _check_choices(given)
    notes: list[str] = []
    settings = _resumed(given) if resume is not None else _fresh(given, notes)
    raise typer.Exit(_start(settings, notes))


def _check_choices(given: dict[str, Any]) -> None:
    for name, allowed in (("dtype", DTYPES), ("inner_backend", INNER_BACKENDS), ("device", ("cpu", "cuda"))):
        if name in given and given[name] not in allowed:
            hint = " (fp16 would need loss scaling)" if given[name] == "fp16" else ""
            raise ConfigError(f"{_option(name)} {given[name]}: choose {' or '.join(allowed)}{hint}")
    if "lr" in given and not 0 < given["lr"] < 100:
        raise ConfigError(f"--lr {given['lr']}: a positive number is needed, such as 1e-3")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _fresh(given: dict[str, Any], notes: list[str]) -> TrainSettings:
    """Settings of a new run: options come before the JSON, the JSON before the defaults."""
    from autosp.cli import corpus, models

    models.check_model(given.get("model"))
    corpus.find_files(given.get("data", ()))
    engine = read_json(Path(given["config"])) if "config" in given else {}
    from_json, ignored = from_engine_config(engine)
    notes += ignored
    values: dict[str, Any] = {"lr": 2e-3, "batch_size": 2} if "model" not in given else {"lr": 2e-5}
    values.update(_machine(given))
    own_section = engine.get("autosp")
    if isinstance(own_section, dict) and "inner_backend" in own_section:
        values["inner_backend"] = own_section["inner_backend"]
    values.update(from_json)
    values.update({name: value for name, value in given.items() if name != "config"})
    values.setdefault("out", _free_folder())
    folder = Path(values["out"])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not launch.under_launcher():
        raise ConfigError(f"--out {folder} exists: choose another, or go on with it by --resume {folder}")
    if not launch.under_launcher():
        _check_engine_config(engine, values["nproc"])
    return TrainSettings(config=engine, **values)


def _check_engine_config(engine: dict[str, Any], nproc: int) -> None:
    """Raise what ``autosp.initialize`` would raise, before any process is started; rank 0 says what it warns of."""
    from autosp import AutoSPConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoSPConfig.from_json(engine, nproc)


def _free_folder() -> str:
    # under torchrun every rank parses the command; rank 0's answer is the one that all of them take
    base = f"runs/train-{time.strftime('%Y%m%d-%H%M%S')}"
    name, number = base, 2
    while Path(name).exists():
        name, number = f"{base}-{number}", number + 1
    return name


def _resumed(given: dict[str, Any]) -> TrainSettings:
    """Settings of the run to go on with, and the few that may change."""
    from autosp.cli import checkpoint

    folder = Path(given.pop("resume"))
    fixed = sorted(set(given) - set(_FREE_ON_RESUME))
    if fixed:
        names = ", ".join(_option(name) for name in fixed)
        free = ", ".join(_option(name) for name in _FREE_ON_RESUME)
        raise ConfigError(
            f"{names} cannot change on --resume: they come from the run folder (these may change: {free})"
        )
    if (folder / "training_state.json").exists():
        newest = checkpoint.latest(folder.parent)
        if newest is None or newest.name != folder.name:
            raise ConfigError(f"--resume {folder}: only the newest checkpoint of a run goes on; remove the later ones")
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"--resume {folder}: there is no such run folder")
    newest = checkpoint.latest(folder)
    if newest is None or not (folder / "run.json").exists():
        raise ConfigError(f"--resume {folder}: it holds no complete checkpoint to go on from")
    settings = TrainSettings.read(folder / "run.json")
    # a folder that was moved is still the run
    settings = replace(settings, out=str(folder), resume=str(newest), debug=False)
    settings = replace(settings, **given)
    if "nproc" in given or "device" in given:
        machine = _machine({"nproc": settings.nproc, "device": settings.device})
        settings = replace(settings, nproc=machine["nproc"], device=machine["device"])
    done = checkpoint.read_position(newest).step
    if done >= settings.steps:
        raise ConfigError(f"--resume {folder}: it has done its {done} steps; give more, such as --steps {2 * done}")
    return settings


def _machine(given: dict[str, Any]) -> dict[str, Any]:
    """What follows from the hardware: device, number of processes, precision and inner backend."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = given.get("device") or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")
    nproc = given.get("nproc") or (gpus if device == "cuda" else 2)
    if launch.under_launcher():
        nproc = _local_processes(given.get("nproc"))
    if device == "cuda" and nproc > gpus:
        raise ConfigError(
            f"--nproc {nproc}: there are {gpus} GPUs here, and each process needs its own; use --device cpu"
        )
    on_gpu = device == "cuda"
    return {
        "device": device,
        "nproc": nproc,
        "dtype": "bf16" if on_gpu else "fp32",
        "inner_backend": "inductor" if on_gpu else "aot_eager",
    }


def _local_processes(asked: int | None) -> int:
    started = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if asked is not None and asked != started:
        raise ConfigError(f"--nproc {asked}: torchrun has started {started} processes here; leave --nproc out")
    return started


def _start(settings: TrainSettings, notes: list[str]) -> int:
    if launch.under_launcher():
        return _as_rank(settings, notes)
    for note in notes:
        print(f"note: {note}")
    print(f"autosp train: starting {settings.nproc} processes; run folder {settings.out}", flush=True)
    if settings.device == "cuda" and settings.nproc == 1:
        print("note: one GPU, so that nothing is split; --device cpu --nproc 2 shows the splitting", flush=True)
    folder = Path(settings.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        settings.write(folder / "run.json")
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror}; choose another folder") from None
    return launch.launch(settings)


def _as_rank(settings: TrainSettings, notes: list[str]) -> int:
    """Be one rank of a group that somebody else's launcher started."""
    from autosp.cli import worker

    rank = int(os.environ["RANK"])
    if rank == 0:
        for note in notes:
            print(f"note: {note}")
    try:
        worker.run(settings)
    except KeyboardInterrupt:
        os._exit(launch.EXIT_INTERRUPTED)
    except Exception as error:
        worker.write_traceback(settings, error)
        cause, code = worker.exit_code(error)
        kind = "" if isinstance(cause, AutoSPError) else f"{type(cause).__name__}: "
        print(f"autosp: error on rank {rank}: {kind}{' '.join(str(cause).split())}", file=sys.stderr, flush=True)
        # not an exception: the interpreter's end would wait for collectives that the other ranks no longer join
        os._exit(code)
    return 0
