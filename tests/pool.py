"""Rank processes that live for the whole test run.

Starting Python and torch costs more than most distributed tests, so a pool starts each rank once and gives every call
a fresh gloo process group over the first `world_size` of them::

    def body(rank_info, x):              # a function of a module, never a lambda or a nested one
        dist.all_reduce(x)
        return x

    def test_sum(ranks):
        assert ranks.run(body, torch.ones(2), world_size=3)[0].tolist() == [3.0, 3.0]

`fake_group` gives one process a group of any size whose collectives move no data.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pool_worker import Call, Outcome, RankInfo

__all__ = ["RankFailure", "RankInfo", "RankPool", "fake_group"]

MAX_WORLD_SIZE = 8
# Libraries keep some groups of earlier calls alive (FSDP2, DeepSpeed), and with each of them threads of gloo that wake
# up a hundred times a second: past this many a fresh process is cheaper.
MAX_THREADS = 80
LOG_TAIL_BYTES = 12_000


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not come back in time.

    Attributes:
        errors: rank -> the exception it raised; only exceptions that can be pickled are here.
        tracebacks: rank -> the text of its traceback.
        timed_out: whether the time limit ended the call.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errors: dict[int, BaseException] = {}
        self.tracebacks: dict[int, str] = {}
        self.timed_out = False


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path
    log_start: int = field(default=0)

    def threads(self) -> int:
        """Threads of the process; 0 where /proc does not tell."""
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        except OSError:
            return 0

    def tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, self.log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class RankPool:
    """Persistent rank processes; see the module's docstring. Close it with `close` or use it as a context manager.

    Args:
        grace: seconds that the other ranks of a call get after one of them raised, before they are killed.
    """

    def __init__(self, grace: float = 10.0) -> None:
        self.grace = grace
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="autosp-ranks-")
        self._calls = 0
        self._started = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout: float = 120.0,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(rank_info, *args, **kwargs)`` on the first `world_size` ranks; their results in order.

        Args:
            function: importable by module and name from the tests folder or an installed package.
            world_size: 1 to 8.
            timeout: seconds for the whole call; when they are over, every rank's stack is reported and the rank
                processes are killed (the next call starts new ones).
            process_group: False leaves ``init_process_group`` to the function; the variables that torchrun sets
                (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...) are set either way.

        Raises:
            RankFailure: a rank raised, died, or the time limit passed.
            ValueError, TypeError: a world size out of range, or a function that another process cannot import.
        """
        name = _importable_name(function)
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size is {world_size}; a pool runs 1 to {MAX_WORLD_SIZE} ranks")
        payload = pickle.dumps((args, kwargs))
        self._grow(world_size)
        workers = self._workers[:world_size]
        self._calls += 1
        store = os.path.join(self._folder.name, f"store-{self._calls}")
        port = _free_port()
        for rank, worker in enumerate(workers):
            worker.log_start = worker.log.stat().st_size
            call = Call(name, payload, rank, world_size, store, port, process_group, timeout, tuple(sys.path))
            # A worker that died since the last call shows up in _collect as dead.
            with contextlib.suppress(OSError):
                worker.connection.send_bytes(pickle.dumps(call))
        outcomes = self._collect(workers, timeout)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(store)
        if len(outcomes) == world_size and all(outcome.ok for outcome in outcomes.values()):
            self._finish(workers)
            return [pickle.loads(outcomes[rank].payload) for rank in range(world_size)]
        raise self._failure(name, workers, outcomes, timeout)

    def close(self) -> None:
        """End every rank process."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._folder.cleanup()

    def _grow(self, world_size: int) -> None:
        if any(worker.process.poll() is not None or worker.threads() > MAX_THREADS for worker in self._workers):
            self._discard()
        while len(self._workers) < world_size:
            parent, child = Pipe()
            self._started += 1
            log = Path(self._folder.name) / f"rank-{len(self._workers)}-{self._started}.log"
            log.touch()
            environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1")
            environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
            # As an imported module, not as a script: what it pickles must carry the name `pool_worker`.
            serve = f"import pool_worker; pool_worker.main({child.fileno()}, {str(log)!r})"
            process = subprocess.Popen(
                [sys.executable, "-c", serve], env=environment, pass_fds=(child.fileno(),), stdin=subprocess.DEVNULL
            )
            child.close()
            self._workers.append(_Worker(process, parent, log))

    def _collect(self, workers: list[_Worker], timeout: float) -> dict[int, Outcome]:
        """Outcomes by rank until all are in, one is dead, or time is up; ranks that are missing have not answered."""
        rank_of = {worker.connection: rank for rank, worker in enumerate(workers)}
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(workers):
            ready = wait([c for c, rank in rank_of.items() if rank not in outcomes], deadline - time.monotonic())
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    outcome = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    code = workers[rank_of[connection]].process.wait()
                    outcome = Outcome(False, b"", f"the rank process ended with exit code {code}")
                outcomes[rank_of[connection]] = outcome
                if not outcome.ok:
                    deadline = min(deadline, time.monotonic() + self.grace)
        return outcomes

    def _failure(
        self, name: tuple[str, str], workers: list[_Worker], outcomes: dict[int, Outcome], timeout: float
    ) -> RankFailure:
        missing = [rank for rank in range(len(workers)) if rank not in outcomes]
        for rank in missing:
            workers[rank].process.send_signal(signal.SIGUSR1)
        if missing:
            time.sleep(0.5)  # faulthandler writes from the signal handler
        failed = [rank for rank, outcome in sorted(outcomes.items()) if not outcome.ok]
        lines = [f"{name[0]}.{name[1]} on {len(workers)} ranks:"]
        for rank in failed:
            lines += [f"--- rank {rank} raised ---", outcomes[rank].traceback.rstrip()]
        for rank in missing:
            why = "was still running when another rank failed" if failed else f"did not return within {timeout:g} s"
            lines.append(f"--- rank {rank} {why} ---")
        for rank in [*failed, *missing]:
            if tail := workers[rank].tail():
                lines += [f"--- output of rank {rank} ---", tail]
        failure = RankFailure("\n".join(lines))
        failure.timed_out = bool(missing) and not failed
        for rank in failed:
            failure.tracebacks[rank] = outcomes[rank].traceback
            if outcomes[rank].payload:
                failure.errors[rank] = pickle.loads(outcomes[rank].payload)
        if missing or any(worker.process.poll() is not None for worker in workers):
            self._discard()
        else:
            self._finish(workers)
        return failure

    @staticmethod
    def _finish(workers: list[_Worker]) -> None:
        """Have every rank of a call close its process group, now that none needs another any more."""
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.connection.send_bytes(pickle.dumps(None))

    def _discard(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []


@contextlib.contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of any size in this one process, whose collectives move no data.

    Compiled graphs, their collectives and their shapes can be looked at; values that a collective gives mean nothing.
    """
    import pool_worker
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        pool_worker._clean()


def _importable_name(function: Callable[..., Any]) -> tuple[str, str]:
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not qualified or "<" in qualified:
        raise TypeError(
            f"{function!r} cannot be imported by a rank process; give a function at the top level of a test module"
        )
    return module, qualified


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
