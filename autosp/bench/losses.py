"""Time the vocabulary-parallel losses, forward + backward, beside the copy bandwidth of the same device and peers.

The floor of an operator is the bytes of its passes over the logits (each pass reads or writes them once) over the
measured copy bandwidth. "ms" is the device's time; "host ms" what the host spends on the launches. "extra" is the peak
of allocated memory beyond the inputs, outputs and gradients. Needs no network; a peer that cannot be imported is
skipped and said so.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from autosp.bench.picture import Dot, draw_dots
from autosp.custom_ops import vocab_parallel as vp
from autosp.errors import ConfigError

SHAPES = ((8192, 75968), (4096, 151936))
DTYPES = ("bfloat16", "float32", "float16")
PEERS = ("eager", "compile", "liger")
# Passes over one tensor of logits, gradient to the student only. KL: two reads forward, two reads and a write backward.
PASSES = {
    "logprobs": 3,
    "entropy": 3,
    "cross_entropy": 3,
    "token_stats": 3,
    "forward_kl": 5,
    "reverse_kl": 5,
    "jsd": 7,
}
_PAIRS = ("forward_kl", "reverse_kl", "jsd")
_WARMUP, _REPEATS = 3, 10
_QUEUED_COPIES = 4  # of 2 GiB: some 4 ms on the fastest card at hand
_COPY_BYTES = {"cuda": 2 << 30, "cpu": 32 << 20}


def autosp_functions(tp_group: Any = None) -> dict[str, Callable]:
    """The operators under test, each ``(student, teacher, target) -> tensor`` or a tuple of differentiable ones."""

    def token_stats(x, _, t):
        stats = vp.vocab_parallel_token_stats(x, t, tp_group)
        return stats.logprob, stats.entropy, stats.lse

    return {
        "logprobs": lambda x, _, t: vp.vocab_parallel_logprobs(x, t, tp_group),
        "entropy": lambda x, _, t: vp.vocab_parallel_entropy(x, tp_group),
        "cross_entropy": lambda x, _, t: vp.vocab_parallel_cross_entropy(x, t, tp_group),
        "token_stats": token_stats,
        "forward_kl": lambda x, y, _: vp.vocab_parallel_kl_div(x, y, False, tp_group),
        "reverse_kl": lambda x, y, _: vp.vocab_parallel_kl_div(x, y, True, tp_group),
        "jsd": lambda x, y, _: vp.vocab_parallel_jsd(x, y, 0.5, tp_group),
    }


def eager_functions() -> dict[str, Callable]:
    """The same in plain PyTorch, computed in float32."""

    def logprobs(x, _, t):
        return F.log_softmax(x.float(), -1).gather(-1, t[:, None]).squeeze(-1)

    def entropy(x, _, t):
        logp = F.log_softmax(x.float(), -1)
        return -(logp.exp() * logp).sum(-1)

    def kl(p, q):
        log_p, log_q = F.log_softmax(p.float(), -1), F.log_softmax(q.float(), -1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def jsd(x, y, _):
        log_p, log_q = F.log_softmax(x.float(), -1), F.log_softmax(y.float(), -1)
        mixed = torch.logaddexp(log_p, log_q) - 0.6931471805599453
        return 0.5 * ((log_p.exp() * (log_p - mixed)).sum(-1) + (log_q.exp() * (log_q - mixed)).sum(-1))

    def token_stats(x, _, t):
        logp = F.log_softmax(x.float(), -1)
        lse = torch.logsumexp(x.float(), -1)
        return logp.gather(-1, t[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1), lse

    return {
        "logprobs": logprobs,
        "entropy": entropy,
        "cross_entropy": lambda x, _, t: F.cross_entropy(x.float(), t),
        "token_stats": token_stats,
        "forward_kl": lambda x, y, _: kl(y, x),
        "reverse_kl": lambda x, y, _: kl(x, y),
        "jsd": jsd,
    }


def liger_functions() -> dict[str, Callable]:
    """Liger's cross entropy where it is installed; empty otherwise."""
    if importlib.util.find_spec("liger_kernel") is None:
        print("skipped: liger (not installed)", file=sys.stderr)
        return {}
    from liger_kernel.transformers.functional import liger_cross_entropy

    return {"cross_entropy": lambda x, _, t: liger_cross_entropy(x, t)}


def check_names(what: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not allowed."""
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise ConfigError(f"unknown {what} {unknown}; allowed are {list(allowed)}")


def implementations(peers: Sequence[str]) -> dict[str, dict[str, Callable]]:
    """``{name: {operator: function}}`` of autosp and the peers asked for.

    Raises:
        ConfigError: an unknown peer.
    """
    known = {"eager": eager_functions, "compile": eager_functions, "liger": liger_functions}
    check_names("peers", peers, PEERS)
    chosen = {"autosp": autosp_functions()}
    for peer in peers:
        functions = known[peer]()
        if peer == "compile":
            functions = {name: torch.compile(function, dynamic=False) for name, function in functions.items()}
        chosen[peer] = functions
    return chosen


def milliseconds(function: Callable[[], Any], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median time of ``function`` after a warm-up; device events on a GPU, the host's clock on a CPU.

    On a GPU every run is queued behind a copy that takes longer than the launches, as in a training step, where the
    device is behind the host: the figure is the device's time, with the launches hidden. ``host_milliseconds`` has the
    others.
    """
    for _ in range(_WARMUP):
        function()
    times = []
    if device.type == "cpu":
        for _ in range(repeats):
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times)
    queue = torch.empty(2, _COPY_BYTES["cuda"], dtype=torch.uint8, device=device)
    events = [[torch.Event(device, enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        torch.accelerator.synchronize(device)
        for _ in range(_QUEUED_COPIES):
            queue[0].copy_(queue[1])
        start.record()
        function()
        end.record()
    torch.accelerator.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def host_milliseconds(function: Callable[[], Any], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median time that the host spends in ``function`` with an idle device: what its launches cost."""
    times = []
    for _ in range(repeats):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large device-to-device copy, counting bytes read and written."""
    count = _COPY_BYTES.get(device.type, _COPY_BYTES["cuda"])
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / (milliseconds(lambda: target.copy_(source), device, 20) * 1e-3)


def measure(function: Callable, student, teacher, target, repeats: int = _REPEATS) -> tuple[float, float, float | None]:
    """``(device ms of forward + backward, host ms, extra MiB)``; the memory is None where the device has no count."""
    device = student.device
    student.requires_grad_()

    def outputs():
        result = function(student, teacher, target)
        return result if isinstance(result, tuple) else (result,)

    upstream = [torch.randn_like(output) for output in outputs()]

    def step():
        results = outputs()
        return torch.autograd.grad(results, student, upstream)[0], results

    elapsed = milliseconds(step, device, repeats)
    host = host_milliseconds(step, device, repeats)
    extra = None
    if device.type == "cuda":
        # Bytes as requested: the allocator's rounding of the gradient is not the operator's.
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        gradient, results = step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
        extra = (peak - before - gradient.nbytes - sum(output.nbytes for output in results)) / 2**20
    return elapsed, host, extra


def run(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    operators: Sequence[str] = tuple(PASSES),
    peers: Sequence[str] = PEERS,
    device: str | None = None,
    repeats: int = _REPEATS,
) -> list[dict[str, Any]]:
    """Measure and return one row per shape, dtype, operator and implementation.

    Args:
        shapes: ``(rows, vocabulary)`` pairs.
        dtypes: names among ``DTYPES``.
        operators: keys of ``PASSES``.
        peers: "eager", "compile" and/or "liger".
        device: "cuda", "cpu", ...; default: the accelerator if there is one.
        repeats: timed runs, of which the median is taken.

    Returns:
        Rows with keys rows, vocab, dtype, operator, implementation, ms, host_ms, floor_ms, ratio and extra_mib.

    Raises:
        ConfigError: an unknown dtype, operator or peer; nothing is measured then.
    """
    check_names("operators", operators, tuple(PASSES))
    check_names("dtypes", dtypes, DTYPES)
    check_names("peers", peers, PEERS)
    where = torch.device(device) if device else (torch.accelerator.current_accelerator() or torch.device("cpu"))
    bandwidth = copy_bandwidth(where)
    chosen = implementations(peers)
    results = []
    for rows, vocab in shapes:
        for dtype_name in dtypes:
            dtype = getattr(torch, dtype_name)
            generator = torch.Generator(where).manual_seed(0)
            make = lambda: torch.randn(rows, vocab, device=where, dtype=dtype, generator=generator)  # noqa: B023, E731
            student, teacher = make(), make() if set(operators) & set(_PAIRS) else None
            target = torch.randint(0, vocab, (rows,), device=where, generator=generator)
            floors = {
                operator: PASSES[operator] * rows * vocab * dtype.itemsize / bandwidth * 1e3 for operator in operators
            }
            for operator in operators:
                for name, functions in chosen.items():
                    if operator not in functions:
                        continue
                    elapsed, host, extra = measure(functions[operator], student, teacher, target, repeats)
                    results.append(
                        {
                            "rows": rows,
                            "vocab": vocab,
                            "dtype": dtype_name,
                            "operator": operator,
                            "implementation": name,
                            "ms": elapsed,
                            "host_ms": host,
                            "floor_ms": floors[operator],
                            "ratio": elapsed / floors[operator],
                            "extra_mib": extra,
                        }
                    )
            del student, teacher
    return results


def environment(device: str | None = None) -> dict[str, Any]:
    """What the numbers depend on: device, versions and the measured copy bandwidth."""
    where = torch.device(device) if device else (torch.accelerator.current_accelerator() or torch.device("cpu"))
    triton = importlib.util.find_spec("triton") and __import__("triton").__version__
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton,
        "copy_tb_per_s": copy_bandwidth(where) / 1e12,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| rows x vocab | dtype | operator | implementation | ms | floor ms | ratio | extra MiB | host ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        extra = "-" if row["extra_mib"] is None else f"{row['extra_mib']:.2f}"
        lines.append(
            f"| {row['rows']} x {row['vocab']} | {row['dtype']} | {row['operator']} | {row['implementation']} |"
            f" {row['ms']:.3f} | {row['floor_ms']:.3f} | {row['ratio']:.2f} | {extra} | {row['host_ms']:.2f} |"
        )
    return "\n".join(lines)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Time over the floor of each operator, one dot an implementation, one panel a shape and dtype."""
    dots = [
        Dot(f"{row['rows']} x {row['vocab']}, {row['dtype']}", row["implementation"], row["operator"], row["ratio"])
        for row in results
    ]
    draw_dots(dots, path, xlabel="", ylabel="time / its bytes at copy bandwidth", panel_size=(4.5, 4.5))
