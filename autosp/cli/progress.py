"""What a run says while it works: a live bar on a terminal, plain lines elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_PLAIN_HEARTBEAT = 10.0
_PLAIN_LINE_EVERY = 5.0


@dataclass(frozen=True)
class StepReport:
    """One training step in numbers."""

    step: int
    loss: float
    tokens_per_s: float
    peak_bytes: int
    seconds_left: float
    compiled_in: float | None = None
    """Seconds of a step that compiled, as a run's first does: no speed and no time left follow from it."""


def clock(seconds: float) -> str:
    """Return a duration as ``0:42``, ``12:05`` or ``3:20:00``."""
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def memory(size: float) -> str:
    """Return a number of bytes as MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


class Silent:
    """Says nothing: every rank but 0."""

    def line(self, text: str) -> None:
        """Take a line and drop it."""

    @contextmanager
    def stage(self, text: str) -> Iterator[Any]:
        """Do a piece of work; what it yields takes the progress of it."""
        yield lambda detail: None

    @contextmanager
    def training(self, total: int, done: int) -> Iterator[Any]:
        """Train; what it yields takes the `StepReport` of each step."""
        yield lambda report: None


class Plain(Silent):
    """Lines for a log file: a start, a sign of life each ten seconds, an end.

    Args:
        to_stderr: print to standard error, so that standard output has what was asked for and nothing else.
    """

    def __init__(self, to_stderr: bool = False) -> None:
        self.to_stderr = to_stderr

    def line(self, text: str) -> None:
        """Print one line at once."""
        print(text, flush=True, file=sys.stderr if self.to_stderr else sys.stdout)

    @contextmanager
    def stage(self, text: str) -> Iterator[Any]:
        """Print when a piece of work starts, that it goes on, and how long it took."""
        begin, detail, finished = time.monotonic(), [""], threading.Event()
        self.line(f"{text} ...")

        def beat() -> None:
            while not finished.wait(_PLAIN_HEARTBEAT):
                self.line(
                    f"  still {text[0].lower()}{text[1:]}, {time.monotonic() - begin:.0f} s  {detail[0]}".rstrip()
                )

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield lambda now: detail.__setitem__(0, now)
        finally:
            finished.set()
            thread.join()
        self.line(f"  done in {time.monotonic() - begin:.1f} s  {detail[0]}".rstrip())

    @contextmanager
    def training(self, total: int, done: int) -> Iterator[Any]:
        """Print the first and the last step, and one each few seconds between."""
        last = [0.0]

        def report(now: StepReport) -> None:
            moment = time.monotonic()
            if now.step in (done + 1, total) or moment - last[0] >= _PLAIN_LINE_EVERY:
                last[0] = moment
                self.line(f"step {now.step}/{total}  {_describe(now)}")

        yield report


class Live(Silent):
    """A terminal: spinners for pieces of work and one bar for the training."""

    def __init__(self, console: Any) -> None:
        self.console = console

    def line(self, text: str) -> None:
        """Print one line above whatever is live."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, text: str) -> Iterator[Any]:
        """Spin beside the seconds passed, and leave one line behind."""
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        begin, detail = time.monotonic(), [""]
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(text)

            def show(now: str) -> None:
                detail[0] = now
                progress.update(task, description=f"{text}: {now}")

            yield show
        self.line(f"{text}: {detail[0]}{', ' if detail[0] else ''}{time.monotonic() - begin:.1f} s")

    @contextmanager
    def training(self, total: int, done: int) -> Iterator[Any]:
        """Show the bar."""
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(*columns, console=self.console, expand=True) as progress:
            task = progress.add_task("compiling the first step", total=total, completed=done)

            def report(now: StepReport) -> None:
                progress.update(task, completed=now.step, description=_describe(now))

            yield report


def _describe(now: StepReport) -> str:
    loss, peak = f"loss {now.loss:.4f}", f"peak {memory(now.peak_bytes)}"
    if now.compiled_in is not None:
        return f"{loss}  compiled in {now.compiled_in:.1f} s  {peak}"
    return f"{loss}  {now.tokens_per_s:,.0f} tokens/s  {peak}  {clock(now.seconds_left)} left"


def reporter(speaks: bool, *, to_stderr: bool = False) -> Silent:
    """Return the reporter that fits this process and what it prints to: a terminal or not.

    A command whose result is a report or a table has its progress on standard error; that of a training run, whose
    steps are what it has to tell, is on standard output.
    """
    if not speaks:
        return Silent()
    from rich.console import Console

    console = Console(stderr=to_stderr)
    return Live(console) if console.is_terminal else Plain(to_stderr)
