"""What ``autosp plan`` says of a step's peak memory beside what the GPU measures, one row a way to train.

    python -m benchmarks.plan_error --json plan_error.json

Each case is planned with the command itself, without the GPU, while ranks of its own measure it: forward and backward
in bf16, batch 1, no optimizer, Inductor; the peak of the second and third step, the largest of the ranks
(``torch.cuda.max_memory_allocated``). Models have 8 layers, about a billion parameters: compiling takes most of the
time. Cases of more GPUs than there are here are left out and said so; ``--one-rank`` measures the last rank of each by
itself, in torch's "fake" process group, which takes part in collectives without a peer: memory is that of the rank, the
loss means nothing. ``--device cpu`` runs tiny models, to see that all of it works: a CPU counts no memory, so nothing
is measured there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
COMMON = {"max_position_embeddings": 2**20, "use_cache": False}
TINY = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 256, "head_dim": 8, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
FUSED = {"fuse_linear_cross_entropy": "always"}


@dataclass(frozen=True)
class Case:
    """A model and a way to train it."""

    model: dict[str, Any]
    sp: int = 1
    tp: int = 1
    checkpoint: bool = False
    fused: bool = False

    @property
    def gpus(self) -> int:
        return self.sp * self.tp


CASES = {
    "llama": Case(LLAMA),
    "llama, loss fused": Case(LLAMA, fused=True),
    "llama, checkpointing": Case(LLAMA, checkpoint=True),
    "llama, checkpointing, loss fused": Case(LLAMA, checkpoint=True, fused=True),
    "qwen3": Case(QWEN3),
    "llama, sp 2": Case(LLAMA, sp=2),
    "llama, tp 2": Case(LLAMA, tp=2),
}


@dataclass
class Row:
    """Bytes of one case; None where there are none. Seconds are those that planning and measuring took."""

    case: str
    tokens: int
    gpus: int
    planned: float | None = None
    measured: int | None = None
    parts: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    plan_seconds: float | None = None
    seconds: float | None = None
    note: str = ""

    @property
    def error_percent(self) -> float | None:
        """Of the plan, relative to what was measured; positive where the plan says too much."""
        return 100 * (self.planned / self.measured - 1) if self.planned and self.measured else None


def plan_command(case: Case, config: Path, tokens: int) -> list[str]:
    """The command line that a user would give."""
    words = [sys.executable, "-m", "autosp.cli.main", "plan", str(config), "--memory", "139GiB", "--budget", "1"]
    words += ["--gpus", str(case.gpus), "--sp", str(case.sp), "--tp", str(case.tp), "--seq-len", str(tokens)]
    words += ["--optimizer", "none", "--json"]
    return words + ["--checkpoint"] * case.checkpoint + ["--fuse-loss"] * case.fused


def take_plan(row: Row, process: subprocess.Popen[str], begin: float) -> None:
    out, err = process.communicate(timeout=600)
    row.plan_seconds = time.perf_counter() - begin
    if process.returncode not in (0, 1) or not out:  # 1: it does not fit
        row.note += f"plan: {(err.strip().splitlines() or ['no output'])[-1][:200]} "
        return
    (found,) = json.loads(out)["rows"]
    row.planned, row.parts = found["bytes"], found["parts"]


def run_case(name: str, tokens: int, given: argparse.Namespace) -> Row:
    from autosp.cli import launch

    case = CASES[name]
    row = Row(name, tokens, case.gpus)
    with tempfile.TemporaryDirectory(prefix="autosp-plan-error-") as folder:
        config, result = Path(folder, "config.json"), Path(folder, "result.json")
        sizes = TINY if given.device == "cpu" else {"num_hidden_layers": given.layers}
        config.write_text(json.dumps({**case.model, **COMMON, **sizes}))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        begin = time.perf_counter()
        planning = subprocess.Popen(
            plan_command(case, config, tokens),
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        told = {**asdict(case), "config": str(config), "result": str(result), "tokens": tokens}
        told["one_rank"] = given.one_rank and case.gpus > 1
        settings = Path(folder, "settings.json")
        settings.write_text(json.dumps({**told, "device": given.device, "inner_backend": given.inner_backend}))
        nproc = 1 if given.one_rank else case.gpus
        failures, number = launch.run_ranks("benchmarks.plan_error", str(settings), nproc=nproc, debug=given.debug)
        row.seconds = time.perf_counter() - begin
        take_plan(row, planning, begin)
        if number is not None:
            raise KeyboardInterrupt
        if failures:
            row.note += f"measuring: {launch.failure_message(launch.root_cause(failures)[1])[:200]}"
        else:
            found = json.loads(result.read_text())
            row.measured, row.loss = found["peak"], found["loss"]
    return row


def rank_main(path: str) -> None:
    """One rank: measure, and have the launcher read the error file where that fails."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        found = measure(json.loads(Path(path).read_text()))
    except Exception as error:
        handler.record_exception(error)
        sys.stdout.flush()
        os._exit(1)  # the interpreter's end would wait for collectives that the other ranks no longer join
    if os.environ["RANK"] == "0":
        Path(json.loads(Path(path).read_text())["result"]).write_text(json.dumps(found))


def measure(told: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes of the second and third step, the largest of all ranks (None on a CPU), and the loss."""
    import torch
    import torch.distributed as dist

    import autosp
    from autosp.backend import autosp_backend
    from autosp.cli.model_spec import load_example

    on_gpu = told["device"] == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    with device:
        example = load_example(told["config"], weights=False)
    model = example.model.to(torch.bfloat16)
    if told["checkpoint"]:
        model.gradient_checkpointing_enable()
    if told["one_rank"]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        ranks = told["sp"] * told["tp"]
        dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    section = {"inner_backend": told["inner_backend"], **(FUSED if told["fused"] else {})}
    if told["sp"] * told["tp"] > 1:
        section["verify"] = "compile"
    config: dict[str, Any] = {"sequence_parallel_size": told["sp"], "autosp": section}
    if told["tp"] > 1:
        config["tensor_parallel"] = {"autotp_size": told["tp"], "vocab_parallel_lm_head": True}
    autosp.initialize(config, model=model, device_type=told["device"])
    compiled = torch.compile(model, backend=autosp_backend)
    torch.manual_seed(1)
    batch = {name: value.to(device) for name, value in example.batch(told["tokens"]).items()}
    for number in range(3):
        model.zero_grad(set_to_none=True)
        if on_gpu and number == 1:
            torch.cuda.reset_peak_memory_stats()
        step_loss = compiled(**autosp.prepare_batch(dict(batch))).loss
        step_loss.backward()
        loss = step_loss.item()
        del step_loss
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else 0, device=device)
    if dist.is_initialized():
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        dist.destroy_process_group()
    return {"peak": int(peak) or None, "loss": loss}


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""

    def number(value: float | None, text: str) -> str:
        return "-" if value is None else text.format(value)

    lines = ["| case | tokens | GPUs | planned GiB | measured GiB | error | |", "|" + "---|" * 7]
    for row in rows:
        planned, measured = (value and value / 2**30 for value in (row.planned, row.measured))
        cells = [number(planned, "{:.2f}"), number(measured, "{:.2f}"), number(row.error_percent, "{:+.1f}%")]
        lines.append(f"| {row.case} | {row.tokens} | {row.gpus} | {' | '.join(cells)} | {row.note} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be repeated; default: all that fit")
    parser.add_argument("--length", default="", help="tokens; default: 16k (64 on a CPU)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--inner-backend", default="", help="default: inductor (eager on a CPU)")
    parser.add_argument("--one-rank", action="store_true", help="one rank of each case, without the others")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", default="")
    parser.add_argument("--debug", action="store_true", help="show what the ranks' launcher says")
    given = parser.parse_args(arguments)
    import torch

    from autosp.bench.losses import environment
    from autosp.cli.settings import parse_size

    on_cpu = given.device == "cpu"
    given.inner_backend = given.inner_backend or ("eager" if on_cpu else "inductor")
    tokens = parse_size(given.length or ("64" if on_cpu else "16k"), option="--length")
    here = 2 if on_cpu else torch.cuda.device_count()
    rows = []
    for name in given.case or CASES:
        if CASES[name].gpus > here and not given.one_rank:
            print(f"left out: {name}: {CASES[name].gpus} GPUs are needed, torch sees {here}", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows.append(run_case(name, tokens, given))
        print(f"  {rows[-1].seconds:.0f} s, planned in {rows[-1].plan_seconds:.0f} s", file=sys.stderr, flush=True)
        if given.json:
            about = {key: getattr(given, key) for key in ("device", "layers", "inner_backend", "one_rank")}
            content = [{**asdict(row), "error_percent": row.error_percent} for row in rows]
            Path(given.json).write_text(json.dumps({"settings": about, "rows": content}, indent=1) + "\n")
    if given.json and rows:
        whole = {"environment": environment(given.device), **json.loads(Path(given.json).read_text())}
        Path(given.json).write_text(json.dumps(whole, indent=1) + "\n")
    print(table(rows))
    return int(not rows or any(row.note for row in rows))


if __name__ == "__main__":
    from autosp.cli.launch import under_launcher

    if under_launcher():
        rank_main(sys.argv[1])
    else:
        raise SystemExit(main(sys.argv[1:]))
