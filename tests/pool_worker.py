"""The rank process of `pool.RankPool`: waits for a call, runs it in a fresh process group, sends the outcome back.

Torch is imported by the first call. A rank that succeeds keeps its process group until the parent has heard from every
rank (closing it earlier could break a collective that a slower rank has not finished); one that raises closes it at
once, so that ranks which wait for it fail too instead of hanging.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankInfo:
    """What a function that runs in the pool learns about its place: its rank, the world size and the device."""

    rank: int
    world_size: int
    device: str = "cpu"


@dataclass(frozen=True)
class Call:
    """One call to one rank. `function` is ``(module, qualified name)``; the process group meets at `store_path`."""

    function: tuple[str, str]
    payload: bytes
    rank: int
    world_size: int
    store_path: str
    port: int
    process_group: bool
    timeout: float
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What one rank brings back: a pickled value, or an exception (pickled if it can be) with its traceback text."""

    ok: bool
    payload: bytes
    traceback: str = ""


def _resolve(function: tuple[str, str]) -> Any:
    found: Any = importlib.import_module(function[0])
    for part in function[1].split("."):
        found = getattr(found, part)
    return found


def _to_cpu(value: Any) -> Any:
    """The value with every tensor detached and on the CPU, so that any process can unpickle it."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils import _pytree as pytree

    def one(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            raise TypeError("a rank returned a DTensor; return its .full_tensor() or .to_local() instead")
        if isinstance(leaf, torch.Tensor):
            return torch.empty_like(leaf, device="cpu").copy_(leaf.detach()) if leaf.device.type != "meta" else leaf
        return leaf

    with torch.no_grad():
        return pytree.tree_map(one, value)


def _start(call: Call) -> None:
    """Bring the process to the state of a freshly started rank."""
    os.environ.update(
        RANK=str(call.rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_RANK=str(call.rank),
        LOCAL_WORLD_SIZE=str(call.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
    )
    for entry in call.sys_path:
        if entry not in sys.path:
            sys.path.append(entry)
    import torch
    import torch.distributed as dist

    if os.environ.get("AUTOSP_TEST_REPEATS"):
        import repeats_check

        repeats_check.start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if call.process_group:
        from datetime import timedelta

        dist.init_process_group(
            "gloo",
            store=dist.FileStore(call.store_path, call.world_size),
            rank=call.rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.timeout),
        )


def _clean() -> None:
    """Undo what a call leaves behind: groups, compiled code, caches keyed by equal meshes, autosp's current state."""
    if "torch" not in sys.modules:
        return
    import torch
    import torch.distributed as dist

    if "autosp.mesh" in sys.modules:
        sys.modules["autosp.mesh"].reset()
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # reset() keeps them, and tests count graphs with them
    if "torch.distributed.tensor" in sys.modules:
        # A DeviceMesh of an earlier call equals one of the next call, but its groups are gone.
        from torch.distributed.tensor import DTensor

        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
        from torch.distributed.tensor import _redistribute

        _redistribute._gen_transform_infos.cache_clear()
        if clear := getattr(_redistribute, "clear_redistribute_planner_cache", None):
            clear()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    _forget_compiled_code()
    gc.collect()
    _keep_imports()


# Loaded modules when they were last put out of the collector's sight.
_modules_kept = 0


def _keep_imports() -> None:
    """What imports have made stays for good, and no collection need walk it: a quarter of a second of every call.

    Done only when much was imported, and after a collection: what is kept is never collected if it becomes garbage.
    """
    global _modules_kept
    if len(sys.modules) - _modules_kept >= 100:
        if not _modules_kept:
            atexit.register(gc.unfreeze)  # extension modules report what is not let go of at the end
        gc.freeze()
        _modules_kept = len(sys.modules)


def _forget_compiled_code() -> None:
    """Let go of what Dynamo left in the globals of compiled functions' modules; it deletes the names itself later.

    It keeps a compiled program alive, and with it the mesh and its groups: hundreds of gloo threads by the end of a
    run, each of which wakes up a hundred times a second.
    """
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", {})
        for name in [name for name in namespace if name.startswith("__compiled_fn_")]:
            namespace[name] = None


def run_call(call: Call) -> Outcome:
    """Run one call; the caller cleans up after a success."""
    try:
        _start(call)
        args, kwargs = pickle.loads(call.payload)
        result = _resolve(call.function)(RankInfo(call.rank, call.world_size), *args, **kwargs)
        return Outcome(True, pickle.dumps(_to_cpu(result)))
    except BaseException as error:  # SystemExit in a test function must not end the worker
        text = traceback.format_exc()
        try:
            payload = pickle.dumps(error)
            pickle.loads(payload)
        except Exception:
            payload = b""
    _clean()
    return Outcome(False, payload, text)


def main(fd: int, log_path: str) -> None:
    """Serve calls until the parent closes the connection."""
    log = open(log_path, "w", buffering=1)  # noqa: SIM115 - stays open as long as the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pool
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Compiling makes many objects that live, and walking them every 700 new ones takes a fifteenth of the time.
    gc.set_threshold(100_000, 20, 100)
    connection = Connection(fd)
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        if call is None:
            _clean()
            continue
        outcome = run_call(call)
        sys.stdout.flush()
        connection.send_bytes(pickle.dumps(outcome))
    os._exit(0)
