"""Time and memory of the LM head with its loss, forward and backward, beside the usual ways to compute it.

Every method gets the same random inputs. There are two floors, of the GEMMs that a method cannot avoid (three of ``2 N
H V`` flops, four for a KL with a frozen teacher). ``burst``: those flops at the rate of a large square GEMM in a burst
of twenty. ``gemms``: those very GEMMs, at the method's own shapes, run back to back as often as the method is, in the
same process; a card that runs GEMMs for more than some tens of milliseconds lowers its clock to stay within its power,
and this floor has that in it as every method has. ``extra`` is the peak of allocated memory beyond inputs and
gradients. A peer that is not importable is skipped and said so.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from autosp.bench.picture import Dot, draw_dots
from autosp.errors import ConfigError

SHAPES = ((8192, 4096, 128256), (16384, 4096, 131072), (8192, 2304, 256000))
GIB = 1 << 30


@dataclass
class Row:
    """One method at one shape; ``extra_gib`` is ``None`` where the device counts no memory.

    Attributes:
        burst_ms, gemms_ms: the two floors. over_burst, over_gemms: ``ms`` divided by them.
    """

    tokens: int
    hidden: int
    vocab: int
    method: str
    ms: float | None
    burst_ms: float
    gemms_ms: float
    over_burst: float | None
    over_gemms: float | None
    extra_gib: float | None
    note: str = ""


@dataclass
class Inputs:
    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    teacher: torch.Tensor
    upstream: torch.Tensor
    teacher_weight: torch.Tensor | None = None
    main_grad: torch.Tensor | None = None

    @staticmethod
    def random(tokens: int, hidden: int, vocab: int, device: torch.device, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

        target = torch.randint(0, vocab, (tokens,), device=device, generator=generator)
        h, w = normal(tokens, hidden).requires_grad_(), (normal(vocab, hidden) * 0.02).requires_grad_()
        upstream = torch.rand(tokens, device=device, generator=generator)
        return Inputs(h, w, target, normal(tokens, hidden), upstream)


Method = Callable[[Inputs], torch.Tensor]


def dense(x: Inputs) -> torch.Tensor:
    return F.cross_entropy(F.linear(x.hidden, x.weight).float(), x.target)


def dense_kl(x: Inputs) -> torch.Tensor:
    assert x.teacher_weight is not None
    student = F.log_softmax(F.linear(x.hidden, x.weight).float(), -1)
    teacher = F.log_softmax(F.linear(x.teacher, x.teacher_weight).float(), -1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def methods() -> tuple[dict[str, tuple[Method, int]], list[str]]:
    """Name to (function, GEMMs of its floor), and the names of peers that are not there."""
    table: dict[str, tuple[Method, int]] = {
        "F.linear + CE": (dense, 3),
        "torch.compile": (torch.compile(dense, dynamic=False), 3),
    }
    missing = []
    for name, make in (("Liger", _liger), ("cut-cross-entropy", _cce), ("DeepSpeed", _deepspeed)):
        try:
            table[name] = (make(), 3)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    table |= own_methods()
    table["torch.compile KL"] = (torch.compile(dense_kl, dynamic=False), 4)
    return table, missing


def own_methods() -> dict[str, tuple[Method, int]]:
    from autosp.custom_ops import linear_loss as ll

    ce = ll.vocab_parallel_linear_cross_entropy

    def direct(x: Inputs) -> torch.Tensor:
        return ce(x.hidden, x.weight, x.target, memory="fast", main_grad=x.main_grad, main_grad_upstream=1.0)

    def kl(x: Inputs) -> torch.Tensor:
        assert x.teacher_weight is not None
        sides = (x.hidden, x.weight, x.teacher, x.teacher_weight)
        return ll.vocab_parallel_linear_kl_div(*sides, reduction="mean", memory="fast")

    return {
        "autosp fast": (lambda x: ce(x.hidden, x.weight, x.target, memory="fast"), 3),
        "autosp lean": (lambda x: ce(x.hidden, x.weight, x.target, memory="lean"), 3),
        "autosp main_grad": (direct, 3),
        "autosp none": (lambda x: ce(x.hidden, x.weight, x.target, reduction="none") @ x.upstream, 3),
        "autosp logprobs": (lambda x: ll.vocab_parallel_linear_logprobs(x.hidden, x.weight, x.target) @ x.upstream, 3),
        "autosp KL": (kl, 4),
    }


def _liger() -> Method:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda x: loss(x.weight, x.hidden, x.target)


def _cce() -> Method:
    from cut_cross_entropy import linear_cross_entropy

    return lambda x: linear_cross_entropy(x.hidden, x.weight, x.target)


def _deepspeed() -> Method:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    def loss_of(module: torch.nn.Linear, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(hidden).float().flatten(0, -2), target.flatten(), reduction="sum")

    def run(x: Inputs) -> torch.Tensor:
        head = torch.nn.Linear(x.weight.shape[1], x.weight.shape[0], bias=False, device="meta")
        head.weight = torch.nn.Parameter(x.weight)
        shards = max(1, x.hidden.shape[0] // 2048)
        hidden, target = x.hidden.unsqueeze(0), x.target.unsqueeze(0)
        total = TiledFusedLogitsLoss.apply(loss_of, head, hidden, target, None, shards, [head.weight], "sum")
        x.weight.grad = head.weight.grad
        return total / x.target.numel()

    return run


def timed(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds of ``call``, by device events where there are any."""
    for _ in range(2):
        call()
    if device.type != "cuda":
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            samples.append(1000 * (time.perf_counter() - start))
        return statistics.median(samples)
    # Not waited for in between: the queue stays full, as it is in a training step.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def burst_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Flops a second of a square GEMM of random data in a short burst."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / (timed(lambda: a @ b, device, 20) / 1000)


def gemm_floor(x: Inputs, gemms: int, repeats: int) -> float:
    """Milliseconds of the GEMMs of a loss and nothing else: logits (``gemms - 2`` times), then both gradients."""
    hidden, weight = x.hidden.detach(), x.weight.detach()
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    grads = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        for _ in range(gemms - 2):
            torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=grads[0])
        torch.mm(logits.t(), hidden, out=grads[1])

    return timed(run, hidden.device, repeats)


def step(function: Method, x: Inputs) -> None:
    x.hidden.grad = x.weight.grad = None
    function(x).backward()


def extra_memory(function: Method, x: Inputs, device: torch.device) -> float | None:
    """GiB of the peak beyond inputs and gradients."""
    if device.type != "cuda":
        return None
    x.hidden.grad = x.weight.grad = None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step(function, x)
    torch.cuda.synchronize(device)
    gradients = sum(t.grad.numel() * t.grad.element_size() for t in (x.hidden, x.weight) if t.grad is not None)
    return (torch.cuda.max_memory_allocated(device) - before - gradients) / GIB


def measure(name: str, function: Method, x: Inputs, floors: tuple[float, float], repeats: int) -> Row:
    """One row, with the floors (burst, gemms) in ms. A peer's failure is its result; our own failure ends the run."""
    device = x.hidden.device
    (tokens, hidden), vocab = x.hidden.shape, x.weight.shape[0]
    row = Row(tokens, hidden, vocab, name, None, *floors, None, None, None)
    x.main_grad = torch.zeros(x.weight.shape, device=device) if "main_grad" in name else None
    x.teacher_weight = (x.weight.detach() * 1.5).contiguous() if "KL" in name else None
    try:
        row.ms = timed(lambda: step(function, x), device, repeats)
        row.extra_gib = extra_memory(function, x, device)
        row.over_burst, row.over_gemms = (row.ms / floor for floor in floors)
    except Exception as error:
        if name.startswith("autosp"):
            raise
        row.note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:60]}"
    finally:
        x.hidden.grad = x.weight.grad = x.main_grad = x.teacher_weight = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return row


def run(
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
    only: tuple[str, ...] = (),
    device: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 10,
) -> list[Row]:
    """Measure every method at every shape ``(tokens, hidden, vocabulary)``.

    Args:
        only: names of methods to run; empty for all.
        device: ``"cuda"`` or ``"cpu"``; the GPU when there is one.

    Raises:
        ConfigError: ``only`` names no method; nothing is measured then.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    table, missing = methods()
    for name in missing:
        print(f"skipped: {name}", file=sys.stderr)
    unknown = [name for name in only if name not in table]
    if unknown:
        raise ConfigError(f"unknown methods {unknown}; allowed are {list(table)}")
    rate = burst_rate(where, dtype)
    print(f"GEMM rate in a burst: {rate / 1e12:.0f} TFLOP/s", file=sys.stderr)
    rows = []
    for shape in shapes:
        inputs = Inputs.random(*shape, where, dtype)
        chosen = {name: method for name, method in table.items() if not only or name in only}
        flops = 2 * shape[0] * shape[1] * shape[2]
        floors = {n: (1000 * n * flops / rate, gemm_floor(inputs, n, repeats)) for n in {n for _, n in chosen.values()}}
        for name, (function, gemms) in chosen.items():
            rows.append(measure(name, function, inputs, floors[gemms], repeats))
        del inputs
    return rows


def table_text(rows: list[Row]) -> str:
    heads = ("N x H x V", "method", "ms", "GEMMs ms", "/ GEMMs", "burst ms", "/ burst", "extra GiB", "")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for r in rows:
        ms = "-" if r.ms is None else f"{r.ms:.2f}"
        gemms, burst = ("-" if ratio is None else f"{ratio:.2f}x" for ratio in (r.over_gemms, r.over_burst))
        extra = "-" if r.extra_gib is None else f"{r.extra_gib:.2f}"
        floors = f"{r.gemms_ms:.2f} | {gemms} | {r.burst_ms:.2f} | {burst}"
        lines.append(f"| {r.tokens} x {r.hidden} x {r.vocab} | {r.method} | {ms} | {floors} | {extra} | {r.note} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Time against memory, one dot a method, one panel a shape.

    Raises:
        ConfigError: no row has a memory figure, which only a GPU counts.
    """
    # What computes the same number: the mean of the cross entropies.
    other = ("KL", "none", "logprobs")
    dots = [
        Dot(f"N={r.tokens} H={r.hidden} V={r.vocab}", r.method, max(r.extra_gib, 0.01), r.over_gemms)
        for r in rows
        if r.over_gemms and r.extra_gib is not None and not r.method.endswith(other)
    ]
    if not dots:
        raise ConfigError("no row has both a time and a memory figure; run on a GPU for the picture")
    draw_dots(
        dots,
        path,
        xlabel="GiB beyond inputs and gradients",
        ylabel="time / its three GEMMs alone",
        panel_size=(5.5, 4.5),
    )
