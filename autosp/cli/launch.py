"""Starting the ranks of one machine through torch's elastic launcher, and saying what became of them."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from autosp.cli.checkpoint import latest
from autosp.cli.settings import TrainSettings

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
# A rank that is interrupted finishes its step and saves: more than elastic's own 30 s, for the sake of large models.
_SAVING_SECONDS = "120"


def under_launcher() -> bool:
    """Whether torchrun, or whatever sets its variables, has started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def launch(settings: TrainSettings) -> int:
    """Start ``settings.nproc`` ranks, wait for them, and return the exit code.

    Returns:
        0 when all ranks are done; 2 when a rank found a mistake that the user can mend; 130 after Ctrl-C (the ranks
        have saved); 1 when a rank failed or was killed. The others are ended by then, and one message says why.
    """
    settings_file = Path(settings.out, "run.json")
    failures, number = run_ranks("autosp.cli.rank", str(settings_file), nproc=settings.nproc, debug=settings.debug)
    if number is not None:
        return _report_signal(settings, number)
    return _report_failure(settings, failures) if failures else 0


def run_ranks(module: str, argument: str, *, nproc: int, debug: bool) -> tuple[dict[int, Any], int | None]:
    """Run ``python -m module argument`` as each of ``nproc`` ranks of this machine, and wait for them.

    Returns:
        elastic's failures by rank (empty when all are done), and the number of the signal that ended the launcher or
        None. In either case every rank has ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not debug:
        _silence_elastic()
    _set_environment(nproc)
    with tempfile.TemporaryDirectory(prefix="autosp-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=Path(logs).name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, argument)
        except ChildFailedError as error:
            return error.failures, None
        except SignalException as error:
            return {}, error.sigval
    return {}, None


def _silence_elastic() -> None:
    """Drop elastic's own report, dozens of lines for each failure, of which ours says what matters.

    Each of its modules sets the level of a logger of its own, so that the level of the parent has no effect.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _set_environment(nproc: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    # read when tqdm is imported, thus before any rank is
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SAVING_SECONDS)
    # so that the ranks import the package that runs now, installed or not
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = package_root + (os.pathsep + inherited if inherited else "")


def _report_failure(settings: TrainSettings, failures: dict[int, Any]) -> int:
    rank, failure = root_cause(failures)
    if failure.exitcode == 2:
        print(f"autosp: error: {failure_message(failure)}", file=sys.stderr)
        return 2
    if failure.exitcode == EXIT_INTERRUPTED:
        return _report_signal(settings, signal.SIGINT)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (often the system's answer to too little memory)" if name == "SIGKILL" else ""
        what = f"was killed by {name}{hint}"
    else:
        what = f"failed: {failure_message(failure)}"
    trace = Path(settings.out, f"error-rank{rank}.txt")
    more = f"; traceback in {trace}" if trace.exists() and failure.exitcode > 0 else ""
    print(f"autosp: error: rank {rank} {what}; the other ranks were stopped{more}", file=sys.stderr)
    _say_how_to_go_on(settings)
    return EXIT_FAILED


def root_cause(failures: dict[int, Any]) -> tuple[int, Any]:
    """Return the rank and failure that came first in meaning.

    A killed rank makes the others fail on a broken connection, often noticed before the kill; so a signal other than
    the launcher's own SIGTERM comes before a Python error, and among those a mistake of the user before a broken
    connection.
    """

    def weight(item: tuple[int, Any]) -> tuple[int, float]:
        failure = item[1]
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            order = 0
        elif failure.exitcode == 2:
            order = 1
        elif failure.exitcode > 0 and not is_broken_connection(failure_message(failure)):
            order = 2
        else:
            order = 3 if failure.exitcode > 0 else 4
        return order, failure.timestamp

    return min(failures.items(), key=weight)


def is_broken_connection(message: str) -> bool:
    """Whether an error message is the echo of another rank's end."""
    return any(part in message for part in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))


def failure_message(failure: Any) -> str:
    """What a rank said when it failed, as one line."""
    # elastic gives a string for a signal, and what the rank recorded, a dictionary, for an exception
    recorded = failure.message
    text = " ".join(str(recorded.get("message") if isinstance(recorded, dict) else recorded).split())
    # elastic puts the type's name in front; for an error of ours the text alone says it
    name, _, rest = text.partition(": ")
    return rest if rest and name.endswith("Error") and name.isidentifier() and failure.exitcode == 2 else text


def _report_signal(settings: TrainSettings, number: int) -> int:
    name = signal.Signals(number).name
    if name != "SIGINT":
        print(f"autosp: stopped by {name}", file=sys.stderr)
        _say_how_to_go_on(settings)
        return 128 + number
    if latest(Path(settings.out)) is None:
        print("autosp: interrupted before the first step was done: there was nothing to save", file=sys.stderr)
    return EXIT_INTERRUPTED


def _say_how_to_go_on(settings: TrainSettings) -> None:
    saved = latest(Path(settings.out))
    if saved is None:
        print("no checkpoint was written yet; --save-every N writes one each N steps", file=sys.stderr)
    else:
        command = f"autosp train --resume {shlex.quote(settings.out)}"
        print(f"the last checkpoint is {saved}; go on with:  {command}", file=sys.stderr)
