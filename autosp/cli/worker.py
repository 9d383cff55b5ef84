"""What one rank of a training run does, from the settings to the last checkpoint."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autosp.cli import checkpoint, corpus, metrics, models
from autosp.cli.batches import Batches
from autosp.cli.checkpoint import Position
from autosp.cli.loop import Trainer, peak_bytes
from autosp.cli.parallel import Parallel, start
from autosp.cli.progress import Silent, reporter
from autosp.cli.settings import TrainSettings
from autosp.errors import ConfigError, InputError, InternalError, RankMismatchError, own_error
from autosp.randomness import draws_in_training

_LAST = 10


class StopRequest:
    """Ctrl-C: before the first step is done it ends the process, later it asks for a stop after the current step."""

    def __init__(self) -> None:
        self.requested = False
        self.something_to_save = False

    def install(self) -> None:
        """Take over SIGINT. SIGTERM keeps its action, so that a rank that waits for a dead one can be ended at once."""
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if not self.something_to_save or self.requested:
            raise KeyboardInterrupt
        self.requested = True


def run(settings: TrainSettings) -> None:
    """Train as one rank; the launcher's environment (RANK, WORLD_SIZE, ...) says which.

    Raises:
        AutoSPError: see the message; raised on every rank, or on rank 0 while the others wait for it.
    """
    stop = StopRequest()
    stop.install()
    quiet_libraries()
    speaks = reporter(os.environ.get("RANK") == "0")
    with speaks.stage(f"Joining a group of {os.environ['WORLD_SIZE']}"):
        parallel = start(settings.config, device=settings.device)
    settings = _agree(settings, parallel)
    speaks.line(_describe(settings, parallel))
    trainer, tokenizer = _build(settings, parallel, speaks)
    out = Path(settings.out)
    rows = metrics.Metrics(out / "metrics.jsonl", step=trainer.position.step) if parallel.first else None
    try:
        stopped = _train(trainer, rows, stop, speaks, tokenizer)
    finally:
        if rows is not None:
            rows.close()
    if parallel.first:
        _finish(settings, trainer, speaks, stopped)
    parallel.barrier()
    torch.distributed.destroy_process_group()


def _agree(settings: TrainSettings, parallel: Parallel) -> TrainSettings:
    """Take rank 0's settings: a run folder named by the clock differs between machines that parse the command alone."""
    settings = TrainSettings.from_dict(parallel.from_first(asdict(settings)), origin="rank 0's settings")
    out = Path(settings.out)
    if parallel.first:
        if settings.resume is None and (out / "metrics.jsonl").exists():
            raise ConfigError(f"--out {out} holds a run: choose another, or go on with it by --resume {out}")
        out.mkdir(parents=True, exist_ok=True)
        settings.write(out / "run.json")
    parallel.barrier()
    seen = parallel.gather((out / "run.json").exists())
    if not all(seen):
        raise InputError(f"--out {out}: rank {seen.index(False)} does not see it; use storage that all machines share")
    return settings


def _describe(settings: TrainSettings, parallel: Parallel) -> str:
    backend = "GPU (NCCL)" if settings.device == "cuda" else "CPU process (gloo)"
    return (
        f"{settings.model or 'built-in small Llama'}: {parallel.world} x {backend}, "
        f"dp {parallel.dp_size} x sp {parallel.sp_size}, {settings.seq_len} tokens a sequence, {settings.dtype}, "
        f"inner backend {settings.inner_backend}"
    )


def _build(settings: TrainSettings, parallel: Parallel, speaks: Silent) -> tuple[Trainer, Any]:
    """Make the model, the data and the optimizer, from nothing or from the checkpoint to resume."""
    # the function, not its name: the name needs the package to be installed, not merely importable
    from autosp.backend import autosp_backend

    torch.manual_seed(settings.seed)
    resume = Path(settings.resume) if settings.resume else None
    with speaks.stage("Loading the model") as detail:
        model = models.load_model(str(resume) if resume else settings.model)
        models.check_length(model.config, settings.seq_len)
        model.to(parallel.device)
        parallel.broadcast_parameters(model)
        detail(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    # a checkpoint brings its tokenizer: the model that the run began with may be gone
    tokenizer = models.load_tokenizer(str(resume) if resume else settings.model, model.config)
    tokens, digest = _tokens(settings, parallel, tokenizer, speaks)
    position = checkpoint.read_position(resume) if resume else Position(step=0, samples=0, digest=digest)
    if position.digest != digest:
        raise InputError(f"--resume {resume}: the tokens in {settings.out}/data are not those it was trained on")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
    # after the model is made: what is drawn from here on (dropout) differs between data-parallel groups
    torch.manual_seed(settings.seed + 1 + parallel.dp_rank)
    if resume:
        checkpoint.load_optimizer(resume, optimizer, parallel.device)
        if not checkpoint.load_rng(resume, parallel.rank, parallel.world):
            speaks.line("the checkpoint is from another number of processes: dropout draws anew")
    trainer = Trainer(
        settings,
        parallel,
        model=model,
        compiled=torch.compile(model, backend=autosp_backend, options={"inner_backend": settings.inner_backend}),
        optimizer=optimizer,
        batches=Batches(tokens, seq_len=settings.seq_len, seed=settings.seed),
        position=position,
    )
    return trainer, getattr(tokenizer, "tokenizer", None)


def _tokens(settings: TrainSettings, parallel: Parallel, tokenizer: Any, speaks: Silent) -> tuple[Any, str]:
    """Return the run's token ids and their digest; rank 0 makes them where they are not there yet."""
    folder = Path(settings.out, "data")
    if parallel.first and not (folder / "tokens.json").exists():
        with speaks.stage("Reading the data") as detail:
            files = corpus.find_files(settings.data)
            corpus.build_tokens(files, tokenizer, folder, detail)
    parallel.barrier()
    tokens, described = corpus.open_tokens(folder)
    return tokens, described["digest"]


def _train(trainer: Trainer, rows: Any, stop: StopRequest, speaks: Silent, tokenizer: Any) -> bool:
    """Train to the last step or until a stop is asked for; return whether it was the latter."""
    settings, parallel = trainer.settings, trainer.parallel
    rng = checkpoint.rng_state()
    first = _first_step(trainer, speaks, rng)
    stop.something_to_save = True
    stopped = False
    with speaks.training(settings.steps, trainer.position.step - 1) as show:
        row = first
        while True:
            shared = parallel.exchange([float(stop.requested), float(peak_bytes(parallel.device))])
            stopped, peak = bool(shared[:, 0].any()), int(shared[:, 1].max())
            if rows is not None:
                rows.add({**row, "peak_memory_bytes": peak})
            show(trainer.describe(row, peak))
            step = trainer.position.step
            if stopped or step >= settings.steps:
                break
            if settings.save_every and step % settings.save_every == 0:
                _save(trainer, tokenizer)
            row = trainer.step()
    with speaks.stage("Saving the checkpoint"):
        _save(trainer, tokenizer)
    return stopped and trainer.position.step < settings.steps


def _first_step(trainer: Trainer, speaks: Silent, rng: dict[str, Any]) -> dict[str, Any]:
    """Do the step that compiles, its loss compared with the loss in one process before anything is changed."""
    settings, parallel = trainer.settings, trainer.parallel
    reference: float | None = None
    if settings.compare:
        with speaks.stage("Computing the loss in one process"):
            reference = parallel.from_first(trainer.reference_loss())
        if reference is None:
            speaks.line("not compared with one process: the whole sequence does not fit into its memory")

    check_in_step = None
    if reference is not None and draws_in_training(trainer.model):
        with speaks.stage("Computing the loss over the ranks, dropout off"):
            loss = trainer.evaluated_loss()
        speaks.line(trainer.compare(reference, loss))
        # so that the comparison leaves no mark on the run
        _restore(rng)
    elif reference is not None:
        check_in_step = partial(_check_in_step, trainer, speaks, reference)
    begin = time.perf_counter()
    with speaks.stage(f"Compiling and running the first step ({settings.inner_backend})"):
        row = trainer.step(check_in_step)
    _say_compile_times(speaks, time.perf_counter() - begin)
    return row


def _check_in_step(trainer: Trainer, speaks: Silent, reference: float, loss: float) -> None:
    speaks.line(trainer.compare(reference, loss))


def _restore(rng: dict[str, Any]) -> None:
    torch.set_rng_state(rng["cpu"])
    if rng["cuda"] is not None:
        torch.cuda.set_rng_state(rng["cuda"])


def _say_compile_times(speaks: Silent, step_seconds: float) -> None:
    from autosp.backend import compile_times

    own = compile_times().get("autosp_s")
    if own is None:
        # one rank: the plain model was compiled, and there was nothing to partition
        return
    share = own / step_seconds
    speaks.line(f"autosp's own passes took {own:.2f} s of the {step_seconds:.1f} s of the first step ({share:.0%})")


def _save(trainer: Trainer, tokenizer: Any) -> None:
    rng = trainer.parallel.gather(checkpoint.rng_state())
    if trainer.parallel.first:
        checkpoint.save(
            Path(trainer.settings.out),
            trainer.position,
            model=trainer.model,
            tokenizer=tokenizer,
            optimizer=trainer.optimizer,
            rng=rng,
        )
    trainer.parallel.barrier()


def _finish(settings: TrainSettings, trainer: Trainer, speaks: Silent, stopped: bool) -> None:
    out = Path(settings.out)
    with speaks.stage("Drawing the loss"):
        rows = metrics.read(out / "metrics.jsonl")
        metrics.draw(rows, out / "loss.png", title=f"{settings.model or 'small Llama'}, {settings.seq_len} tokens")
    saved = checkpoint.latest(out)
    done = trainer.position.step
    verb = "Stopped" if stopped else "Done"
    last = [row["loss"] for row in rows[-_LAST:]]
    speaks.line(
        f"{verb} at step {done} of {settings.steps}: loss {rows[0]['loss']:.4f} -> {sum(last) / len(last):.4f} "
        f"(mean of the last {len(last)} steps)"
    )
    speaks.line(f"  {out}: metrics.jsonl, loss.png, {saved.name if saved else ''}")
    more = "" if stopped else f" --steps {2 * done}"
    speaks.line(f"Go on with:  autosp train --resume {shlex.quote(str(out))}{more}")


def quiet_libraries() -> None:
    """Keep the progress bars and hints of libraries out of the run's own; nothing is fetched from a network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging

    if os.environ.get("RANK") != "0":
        # the same on every rank, so that once is enough
        warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def exit_code(error: BaseException) -> tuple[BaseException, int]:
    """Return the error that matters in a chain of causes, and the exit code that it stands for.

    Dynamo wraps what a backend raises; ours is inside. 2 is for what the user can mend, 1 for the rest.
    """
    ours = own_error(error)
    if ours is None:
        return error, 1
    return ours, 1 if isinstance(ours, (InternalError, RankMismatchError)) else 2


def main(path: str) -> None:
    """Run one rank whose settings are in the file `path`; the launcher reads the error file where it fails."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    settings = TrainSettings.read(Path(path))
    try:
        run(settings)
    except KeyboardInterrupt:
        # not sys.exit: a rank interrupted inside a collective would wait for the others at the interpreter's end
        os._exit(130)
    except Exception as error:
        write_traceback(settings, error)
        cause, code = exit_code(error)
        handler.record_exception(cause)
        sys.stdout.flush()
        os._exit(code)


def write_traceback(settings: TrainSettings, error: BaseException) -> None:
    """Keep the whole traceback in the run folder; show it as well with ``--debug``."""
    text = "".join(traceback.format_exception(error))
    out = Path(settings.out)
    if out.is_dir():
        (out / f"error-rank{os.environ.get('RANK', '0')}.txt").write_text(text)
    if settings.debug:
        print(text, file=sys.stderr, flush=True)
