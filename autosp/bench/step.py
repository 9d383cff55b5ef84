"""Time and memory of a training step of one model on a sequence group, side by side with other ways to do it.

Every method trains the same unmodified Llama from the same weights on the same tokens, forward and backward, until each
rank holds the gradients of the whole sequence; the loss is kept, so that rows that do not compute the same show. The
first step of a length, which compiles, is timed apart.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from autosp.errors import ConfigError

LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 2**21,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TINY = {
    **LLAMA_1B,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 256,
}
OURS = "autosp"
BY_HAND = "Ulysses by hand, compiled"
ONE = "one GPU, compiled"
CONTEXT_PARALLEL = "torch context_parallel"
DEEPSPEED = "DeepSpeed Ulysses"
DEEPSPEED_AUTOSP = "DeepSpeed AutoSP"
METHODS = (OURS, BY_HAND, ONE, CONTEXT_PARALLEL, DEEPSPEED, DEEPSPEED_AUTOSP)


@dataclass
class StepSettings:
    """What the ranks of one method are told."""

    method: str
    result: str
    lengths: list[int]
    steps: int = 5
    layers: int | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"
    inner_backend: str = "inductor"
    checkpoint: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """More settings of the JSON's "autosp" section, for our own rows."""
    once: bool = False
    """One step a length, for lengths whose step takes minutes: no warm-up and no trace of the collectives."""
    trace: str = ""
    """Folder for Chrome traces of rank 0's step, one a length; "" for none."""


@dataclass
class StepRow:
    """One method at one length; times in seconds, memory in bytes, None where there is none."""

    method: str
    length: int
    ranks: int
    loss: float | None = None
    seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    peak_bytes: int | None = None
    first_step_seconds: float | None = None
    own_seconds: float | None = None
    """Of the first step, autosp's capture and passes; and its waiting for the other ranks' ones."""
    waiting_seconds: float | None = None
    collectives_ms: float | None = None
    """Milliseconds of a step in which the GPU ran collectives, and of those the ones under computation."""
    overlapped_ms: float | None = None
    gemm_flops_per_second: float | None = None
    """Of a burst of square products on one GPU, in the dtype of the step: `autosp.bench.linear_loss.burst_rate`."""
    gemm_share: float | None = None
    """`autosp.bench.model_flops.model_flops` a second and GPU over that rate."""
    note: str = ""


def missing(method: str) -> str:
    """Why a method cannot run here, or empty."""
    for needed in ("transformers", *(["deepspeed"] if "DeepSpeed" in method else [])):
        if importlib.util.find_spec(needed) is None:
            return f"{needed} is not installed"
    if method == DEEPSPEED_AUTOSP and importlib.util.find_spec("deepspeed.compile.init_sp") is None:
        return "this deepspeed has no AutoSP"
    return ""


def run(settings: StepSettings) -> list[StepRow]:
    """Measure one method as one rank of a group that a launcher started; rows are the same on every rank.

    Rows are written to ``settings.result`` as they come, so that a length that fails leaves the ones before.
    """
    import os

    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo")
    from autosp.bench.linear_loss import burst_rate

    rate = burst_rate(device, getattr(torch, settings.dtype))
    model = build(settings, device)
    rows: list[StepRow] = []
    with _method(settings, model) as step:
        for length in settings.lengths:
            rows.append(_measure(settings, model, step, length, device))
            _compare_with_gemm(rows[-1], rate, model)
            if dist.get_rank() == 0:
                write(Path(settings.result), rows)
    dist.destroy_process_group()
    return rows


def _compare_with_gemm(row: StepRow, rate: float, model: Any) -> None:
    from autosp.bench.model_flops import model_flops

    row.gemm_flops_per_second = rate
    if row.seconds:
        row.gemm_share = model_flops(model, row.length) / row.ranks / row.seconds / rate


def write(path: Path, rows: list[StepRow]) -> None:
    """Write the rows as JSON, the file replaced as a whole."""
    import json

    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps([asdict(row) for row in rows]))
    temporary.replace(path)


def build(settings: StepSettings, device: torch.device) -> Any:
    """The Llama in training mode, the same weights on every rank; tiny on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(LLAMA_1B if settings.device == "cuda" else TINY)
    if settings.layers is not None:
        sizes["num_hidden_layers"] = settings.layers
    with device:
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(getattr(torch, settings.dtype))
    if settings.checkpoint:
        model.gradient_checkpointing_enable()
    return model.train()


Step = Callable[[torch.Tensor], torch.Tensor]


def _measure(settings: StepSettings, model: Any, step: Step, length: int, device: torch.device) -> StepRow:
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    ranks = 1 if settings.method == ONE else dist.get_world_size()
    row = StepRow(settings.method, length, ranks)
    if settings.method == ONE and dist.get_rank() != 0:
        dist.barrier()
        return row
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, compiled = [], False
    for number in range(1 if settings.once else settings.steps + 1):
        model.zero_grad(set_to_none=True)
        _wait(device)
        graphs, start = _graphs(), time.perf_counter()
        loss = step(ids)
        _wait(device)
        times.append(time.perf_counter() - start)
        if number == 0:
            row.loss = float(loss)
            compiled = _graphs() > graphs
            if not settings.once or compiled:
                row.first_step_seconds = times.pop()
    if times:
        row.seconds = statistics.median(times)
        row.tokens_per_second_per_gpu = length / row.seconds / ranks
    row.peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    if settings.method == OURS and compiled:
        from autosp.backend import compile_times

        row.own_seconds, row.waiting_seconds = compile_times().get("autosp_s"), compile_times().get("waiting_s")
    if device.type == "cuda" and not settings.once:
        from autosp.bench.overlap import overlap_of

        model.zero_grad(set_to_none=True)
        found = overlap_of(lambda: step(ids), _trace_file(settings, length))
        row.collectives_ms, row.overlapped_ms = found["collectives_ms"], found["overlapped_ms"]
    model.zero_grad(set_to_none=True)
    if settings.method == ONE:
        dist.barrier()
    return row


def _trace_file(settings: StepSettings, length: int) -> str:
    if not settings.trace or dist.get_rank() != 0:
        return ""
    name = settings.method.lower().replace(",", "").replace(" ", "_")
    return str(Path(settings.trace, f"{name}-{length}.json.gz"))


def _graphs() -> int:
    """Graphs that Dynamo has compiled so far; none without a compiler."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _method(settings: StepSettings, model: Any) -> Iterator[Step]:
    makers: dict[str, Callable[[StepSettings, Any], Any]] = {
        OURS: _autosp,
        ONE: _one,
        BY_HAND: _by_hand,
        CONTEXT_PARALLEL: _context_parallel,
        DEEPSPEED: _deepspeed,
        DEEPSPEED_AUTOSP: _deepspeed_autosp,
    }
    if settings.method not in makers:
        raise ConfigError(f"unknown method {settings.method!r}; allowed are {list(makers)}")
    with makers[settings.method](settings, model) as step:
        yield step


@contextmanager
def _autosp(settings: StepSettings, model: Any) -> Iterator[Step]:
    import autosp
    from autosp.backend import autosp_backend

    shared = {"verify": "compile"} if dist.get_world_size() > 1 else {}
    section = {**shared, **settings.options, "inner_backend": settings.inner_backend}
    autosp.initialize({"autosp": section}, device_type=settings.device)
    # not by its name, which a checkout that is not installed does not have
    compiled = torch.compile(model, backend=autosp_backend)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = compiled(**autosp.prepare_batch({"input_ids": ids, "labels": ids.clone()})).loss
        loss.backward()
        return loss.detach()

    yield step


@contextmanager
def _one(settings: StepSettings, model: Any) -> Iterator[Step]:
    compiled = torch.compile(model, backend=settings.inner_backend)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = compiled(input_ids=ids, labels=ids.clone()).loss
        loss.backward()
        return loss.detach()

    yield step


def _shifted(ids: torch.Tensor) -> torch.Tensor:
    """The label of each token: the next one, none for the last."""
    return F.pad(ids[:, 1:], (0, 1), value=-100)


def _check_divides(length: int) -> None:
    if length % dist.get_world_size():
        raise ConfigError(f"{length} tokens over {dist.get_world_size()} ranks: this method needs equal parts")


@contextmanager
def _by_hand(settings: StepSettings, model: Any) -> Iterator[Step]:
    """What an expert writes for one model: an attention function with two all-to-alls, everything compiled."""
    from autosp.bench.by_hand import ByHand

    way = ByHand(model, torch.compile(model, backend=settings.inner_backend))

    def step(ids: torch.Tensor) -> torch.Tensor:
        _check_divides(ids.shape[1])
        return way.step(ids)

    yield step


@contextmanager
def _context_parallel(settings: StepSettings, model: Any) -> Iterator[Step]:
    """torch's ring attention: its context manager around the step shards the buffers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(settings.device, (dist.get_world_size(),), mesh_dim_names=("cp",))

    def step(ids: torch.Tensor) -> torch.Tensor:
        ids, labels = ids.clone(), _shifted(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        items = ids.shape[1] - 1
        buffers = [ids, labels, positions]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
            out = model(
                input_ids=ids,
                position_ids=positions,
                shift_labels=labels,
                labels=labels,
                num_items_in_batch=items,
                use_cache=True,  # without it transformers makes a mask, which ring attention does not take
            )
            out.loss.backward()
        loss = out.loss.detach()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_reduce(loss)
        return loss

    yield step


@contextmanager
def _deepspeed(settings: StepSettings, model: Any) -> Iterator[Step]:
    """DeepSpeed's Ulysses for transformers (ALST), eager, its attention alone: no engine, no ZeRO."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    deepspeed.init_distributed("nccl" if settings.device == "cuda" else "gloo")
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", sequence_parallel_size=dist.get_world_size(), micro_batch_size=1, seq_length_is_variable=True
    )
    from autosp.bench.by_hand import sharded_step

    def step(ids: torch.Tensor) -> torch.Tensor:
        _check_divides(ids.shape[1])
        return sharded_step(model, model, ids)

    try:
        yield step
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before


@contextmanager
def _deepspeed_autosp(settings: StepSettings, model: Any) -> Iterator[Step]:
    """DeepSpeed's AutoSP: its passes over the graph of the unmodified model, without its engine; sums by hand."""
    import deepspeed
    from deepspeed.compile.init_sp import init_autosp
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

    deepspeed.init_distributed("nccl" if settings.device == "cuda" else "gloo")
    ranks = dist.get_world_size()
    config = SimpleNamespace(_param_dict={"sequence_parallel_size": ranks})
    compiled = torch.compile(model, backend=init_autosp(config), dynamic=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        _check_divides(ids.shape[1])
        ids, labels, mask = ids.clone(), ids.clone(), torch.ones_like(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        prepare_autosp_inputs(ids, labels, positions, mask, seq_dim=1)
        loss = compiled(input_ids=ids, labels=labels, position_ids=positions, attention_mask=mask).loss
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()

    yield step
