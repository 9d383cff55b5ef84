"""`autosp env`, `check` and `bench step` from their arguments to their exit codes; completion and colours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autosp.bench.step import METHODS, OURS, StepRow
from autosp.cli import bench_step, launch
from autosp.cli import check as check_command
from autosp.cli.check import CheckSettings
from autosp.cli.check_rank import _batch, _cases, _takes_mask
from autosp.cli.main import main
from autosp.errors import ConfigError

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


# --- env


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "graph_breaks")
    assert run("env", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == torch.__version__ and found["environment"]["TORCH_LOGS"] == "graph_breaks"
    assert found["usable"]["gloo"] == "yes" and found["usable"]["torch version"].startswith("yes")
    if not torch.cuda.is_available():
        assert found["usable"]["nccl"] == "no: torch sees no GPU"
    assert all(value == "yes" or value.startswith(("yes: ", "no: ")) for value in found["usable"].values())
    assert run("env") == 0
    assert "usable:" in capsys.readouterr().out


# --- check


def test_cases_are_all_labels_without_a_mask_and_all_masks_once() -> None:
    settings = CheckSettings(None, "", [8], ["all", "one-token"], ["none", "ones", "left-padding"])
    assert list(_cases(settings)) == [
        (8, "all", "none"),
        (8, "one-token", "none"),
        (8, "all", "ones"),
        (8, "all", "left-padding"),
    ]


def test_a_model_without_a_mask_is_known_by_its_forward() -> None:
    import tool_models
    import zoo

    assert not _takes_mask(tool_models.Small()) and _takes_mask(zoo.llama(num_hidden_layers=1))


def test_patterns_of_labels_and_masks() -> None:
    def made(labels: str, mask: str) -> dict[str, Any]:
        ids = torch.arange(16).reshape(2, 8)
        return _batch({"input_ids": ids, "labels": ids.clone()}, labels, mask, torch.nn.Linear(1, 1))

    assert (made("prompt-ignored", "none")["labels"] == -100).sum(1).tolist() == [4, 4]
    assert (made("one-token", "none")["labels"] != -100).sum(1).tolist() == [1, 1]
    assert "attention_mask" not in made("all", "none")
    right, left = made("all", "right-padding"), made("all", "left-padding")
    assert right["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8]
    assert left["attention_mask"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [1] * 8]
    assert (left["labels"] == -100).sum(1).tolist() == [5, 0]
    assert made("all", "ones")["attention_mask"].all()


def test_a_model_in_double_precision_gets_its_inputs_so() -> None:
    inputs = {"inputs_embeds": torch.ones(2, 4, 1), "labels": torch.zeros(2, 4, dtype=torch.long), "use_cache": False}
    models = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).double()
    kinds = [_batch(dict(inputs), "all", "none", model) for model in models]
    assert [kind["inputs_embeds"].dtype for kind in kinds] == [torch.float32, torch.float64]
    assert all(kind["labels"].dtype == torch.long and kind["use_cache"] is False for kind in kinds)


ROW = {
    "mesh": "dp 1 x sp 2", "tokens": 8, "labels": "all", "mask": "none", "loss": 1.0, "loss_error": 0.0,
    "worst_gradient": "w", "gradient_error": 0.0, "output_error": 0.0, "compilations": 1, "seconds": 1.0,
    "refused": "", "missing": [], "dropout_off": True, "tolerance": 1e-5, "verdict": "ok",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({}, 0, "1 of 1 cases agree"),
        ({"verdict": "MISMATCH", "missing": ["bias"]}, 1, "gradients on one side only: bias"),
        ({"verdict": "MISMATCH"}, 1, "--dtype fp64 tells"),
        ({"verdict": "refused", "refused": "aten.cumsum: no"}, 1, "refused: aten.cumsum: no"),
    ],
)
def test_verdicts_and_exit_codes(
    change: dict[str, Any], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CheckSettings] = []

    def ranks(module: str, file: str, *, nproc: int, debug: bool) -> tuple[dict[int, Any], None]:
        settings = CheckSettings(**json.loads(Path(file).read_text()))
        asked.append(settings)
        Path(settings.result).write_text(json.dumps([{**ROW, **change}]))
        return {}, None

    monkeypatch.setattr(launch, "run_ranks", ranks)
    assert run("check", "tool_models:good", "--lengths", "8,9") == code
    printed = capsys.readouterr().out
    printed = " ".join(printed.split())
    assert said in printed and "compared in evaluation mode" in printed and "\x1b[" not in printed
    assert ("--dtype fp64" in printed) is (change == {"verdict": "MISMATCH"})  # rounding leaves no gradient out
    assert asked[0].lengths == [8, 9] and asked[0].configs == [{"sequence_parallel_size": 2}]
    assert run("check", "tool_models:good", "--dtype", "fp64") == code
    assert "--dtype fp64" not in capsys.readouterr().out and asked[-1].dtype == "fp64"
    assert run("check", "tool_models:good", "--json") == code
    assert json.loads(capsys.readouterr().out)["rows"][0]["verdict"] == {**ROW, **change}["verdict"]


def test_own_mesh_comes_after_sp_2(tmp_path: Path) -> None:
    own = tmp_path / "ds.json"
    own.write_text('{"data_parallel_size": 2}')
    assert check_command._configs(str(own), 4) == [{"sequence_parallel_size": 2}, {"data_parallel_size": 2}]
    assert check_command._configs(None, 3) == [{"sequence_parallel_size": 3}]


def test_a_mesh_that_does_not_cover_the_processes_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "ds.json"
    own.write_text('{"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": true}}')
    assert len(check_command._configs(str(own), 2)) == 2
    with pytest.raises(ConfigError, match="do not cover a world of 3"):
        check_command._configs(str(own), 3)


@pytest.mark.parametrize(
    ("exitcode", "message", "code", "said"),
    [
        (2, "wrong", 2, "autosp: error: wrong"),
        (1, "broke", 1, "rank 1 failed: broke"),
        (-9, "", 1, "killed by signal 9"),
    ],
)
def test_ranks_that_fail(
    exitcode: int,
    message: str,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = type("Failure", (), {"exitcode": exitcode, "message": {"message": message}, "timestamp": 0})()
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: ({1: failure}, None))
    assert run("check", "tool_models:good") == code
    assert said in capsys.readouterr().err


WRONG = {
    "labels": (("check", "--labels", "some"), "--labels some: choose all or"),
    "a mask": (("check", "--masks", "half"), "--masks half: choose none or"),
    "a length": (("check", "--lengths", "8,x"), "--lengths got 'x'"),
    "a tolerance": (("check", "--rtol", "3"), "--rtol 3.0: a number between 0 and 1"),
    "a device": (("check", "--device", "tpu"), "--device tpu: choose cpu or cuda"),
    "a model": (("check", "no/such"), "there is no such path"),
    "a mesh": (("check", "--config", "no.json"), "there is no file no.json"),
    "a method": (("bench", "step", "--device", "cpu", "--only", "magic"), "unknown methods ['magic']; allowed are"),
    "a dtype": (("bench", "step", "--device", "cpu", "--dtype", "int8"), "--dtype int8: choose bfloat16 or"),
    "options": (("bench", "step", "--device", "cpu", "--options", "{"), "--options is not valid JSON"),
    "an inner backend of one row": (
        ("bench", "step", "--device", "cpu", "--options", '{"inner_backend": "eager"}'),
        "give --inner-backend",
    ),
    "a list of options": (("bench", "step", "--device", "cpu", "--options", "[]"), "a JSON list; an object is needed"),
    "an option": (("bench", "step", "--device", "cpu", "--options", '{"x": 1}'), "unknown 'x' in torch.compile"),
    "a peer for nobody": (
        ("bench", "step", "--device", "cpu", "--nproc", "1", "--only", "Ulysses by hand, compiled"),
        "--nproc 1 has nobody to share a sequence with, which ['Ulysses by hand, compiled'] do; allowed are ['autosp'",
    ),
    "a trace of a CPU": (("bench", "step", "--device", "cpu", "--trace", "traces"), "--trace records a GPU's step"),
    "a backend": (("bench", "step", "--device", "cpu", "--inner-backend", "x"), "--inner-backend x: choose inductor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_end_with_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[case]
    assert run(*arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1] and lines[-1].startswith("autosp: error: ")


def test_commands_that_start_processes_are_not_started_by_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "under_launcher", lambda: True)
    for arguments in (["check", "tool_models:good"], ["bench", "step", "--device", "cpu"]):
        assert run(*arguments) == 2
        assert "without torchrun" in capsys.readouterr().err


# --- bench step


def test_a_length_that_fails_is_a_row_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autosp.bench import step as measuring

    def ranks(module: str, file: str, *, nproc: int, debug: bool) -> tuple[dict[int, Any], None]:
        settings = json.loads(Path(file).read_text())
        ours = settings["method"] == OURS
        lengths = settings["lengths"] if ours else settings["lengths"][:1]
        share = {"gemm_share": 0.375, "gemm_flops_per_second": 1e12}
        rows = [StepRow(settings["method"], n, nproc, 2.5, 0.5, n / 0.5 / nproc, 2**30, 9.0, **share) for n in lengths]
        measuring.write(Path(settings["result"]), rows)
        failure = type("Failure", (), {"exitcode": 1, "message": {"message": "out of memory"}, "timestamp": 0})()
        return ({} if ours else {0: failure}), None

    monkeypatch.setattr(launch, "run_ranks", ranks)
    monkeypatch.setattr(measuring, "missing", lambda method: "" if method in METHODS[:2] else "not installed")
    files = [str(tmp_path / name) for name in ("step.json", "step.png")]
    arguments = ["--device", "cpu", "--lengths", "64,128,256", "--json", files[0], "--picture", files[1]]
    assert run("bench", "step", *arguments) == 0
    out, err = capsys.readouterr()
    assert "| autosp | 256 | 2 | 256 | 37.5% | 1.0 | 9.0 | 2.50000 | |" in out.replace("|  |", "| |")
    assert "| out of memory |" in out and "| not tried |" in out
    assert "skipped: torch context_parallel: not installed" in err
    assert len(json.loads(Path(files[0]).read_text())["rows"]) == 6
    assert Path(files[1]).read_bytes().startswith(b"\x89PNG")


def test_a_trace_needs_a_step_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_step, "_check_gpus", lambda nproc: None)
    monkeypatch.setattr("autosp.cli.bench.check_device", lambda device: None)
    folder = tmp_path / "traces"
    assert run("bench", "step", "--once", "--only", OURS, "--trace", str(folder)) == 2
    assert "leave out --once and --device cpu" in capsys.readouterr().err and not folder.exists()


@pytest.mark.parametrize(("rank", "folder", "expected"), [(0, "x", "x/{}-64.json.gz"), (1, "x", ""), (0, "", "")])
def test_names_of_traces(rank: int, folder: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a method and length, written by one rank."""
    from autosp.bench import step as measuring

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    files = [
        measuring._trace_file(measuring.StepSettings(name, "", [64], trace=folder), 64)
        for name in (OURS, "Ulysses by hand, compiled")
    ]
    assert files == [expected.format(name) for name in ("autosp", "ulysses_by_hand_compiled")]


@pytest.mark.slow
def test_one_process_alone_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    arguments = ["--device", "cpu", "--dtype", "float32", "--inner-backend", "aot_eager", "--steps", "1"]
    assert run("bench", "step", *arguments, "--nproc", "1", "--only", OURS, "--json", str(file)) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["method"], row["ranks"], row["length"], row["note"]) == (OURS, 1, 64, "")
    assert row["seconds"] > 0 and row["tokens_per_second_per_gpu"] > 0 and row["loss"] > 0


@pytest.mark.slow
def test_every_way_computes_the_same_loss(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    arguments = ["--device", "cpu", "--dtype", "float32", "--inner-backend", "aot_eager", "--steps", "1"]
    names = [OURS, "Ulysses by hand, compiled", "one GPU, compiled", "DeepSpeed Ulysses"]
    only = [part for name in names for part in ("--only", name)]
    assert run("bench", "step", *arguments, *only, "--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["method"] for row in rows] == names and all(row["seconds"] > 0 for row in rows)
    assert max(row["loss"] for row in rows) - min(row["loss"] for row in rows) < 1e-5
    for row in rows:
        assert 0 < row["gemm_share"] < 1 and row["gemm_flops_per_second"] > 1e9


@pytest.mark.parametrize("tied", [False, True])
def test_model_flops_are_those_of_the_products(tied: bool) -> None:
    """Counted by torch, which does not know that a causal mask leaves half of attention's products."""
    import zoo
    from torch.utils.flop_counter import FlopCounterMode

    from autosp.bench.model_flops import model_flops

    model = zoo.llama(attn_implementation="eager", tie_word_embeddings=tied)
    length, config = 64, model.config
    with FlopCounterMode(display=False) as counter:
        model(input_ids=(ids := torch.zeros(1, length, dtype=torch.int64)), labels=ids).loss.backward()
    hidden = 6 * config.num_hidden_layers * config.hidden_size * length**2
    assert model_flops(model, length) == pytest.approx(counter.get_total_flops() - hidden, rel=1e-3)


def test_a_row_that_trains_on_something_else_is_noted() -> None:
    rows = [StepRow(name, 8, 2, loss=loss) for name, loss in ((OURS, 5.0), ("x", 5.00001), ("y", 5.1), ("z", None))]
    bench_step.note_losses(rows, OURS, "float32")
    assert [row.note for row in rows] == ["", "", "its loss differs by +0.10000", ""]


def test_the_table_of_a_failed_row() -> None:
    assert bench_step.table([StepRow("x", 8, 2, note="why")]).endswith("| x | 8 | 2 | - | - | - | - | - | why |")


# --- with real processes


@pytest.mark.processes
@pytest.mark.slow
def test_check_finds_a_wrong_rule_and_tells_of_a_refusal(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "COLUMNS": "200"}
    for name, dtype, code in (("good", "fp32", 0), ("good", "fp64", 0), ("wrong", "fp64", 1), ("refused", "fp32", 1)):
        arguments = ["--lengths", "8", "--masks", "none", "--labels", "all", "--inner-backend", "eager", "--json"]
        arguments += ["--dtype", dtype]
        done = subprocess.run(
            [sys.executable, "-m", "autosp.cli.main", "check", f"tool_models:{name}", *arguments],
            capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        (row,) = json.loads(done.stdout)["rows"]
        assert row["verdict"] == {"good": "ok", "wrong": "MISMATCH", "refused": "refused"}[name]
        if (name, dtype) == ("good", "fp64"):
            assert 0 < max(row["loss_error"], row["gradient_error"], row["output_error"]) < 1e-12


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({}, 2),
        ({"vocab_parallel_embedding": True}, 0),
        ({"vocab_parallel_embedding": True, "vocab_parallel_ce_backend": "fused_linear"}, 0),
    ],
)
def test_check_over_a_head_that_ranks_share(tmp_path: Path, more: dict[str, Any], code: int) -> None:
    """sp 2, then sp 2 x tp 2, of the built-in model, whose embedding is tied to its head."""
    head = {"autotp_size": 2, "vocab_parallel_lm_head": True, **more}
    (tmp_path / "ds.json").write_text(json.dumps({"sequence_parallel_size": 2, "tensor_parallel": head}))
    arguments = ["--lengths", "9", "--masks", "none", "--labels", "all", "--inner-backend", "eager", "--layers", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "autosp.cli.main", "check", "--config", "ds.json", "--nproc", "4", *arguments, "--json"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if code:
        assert "is tied to" in done.stderr and "vocab_parallel_embedding" in done.stderr
        return
    rows = json.loads(done.stdout)["rows"]
    assert [row["mesh"] for row in rows] == ["dp 2 x sp 2", "dp 1 x sp 2 x tp 2"]
    assert all(row["verdict"] == "ok" and 0 < row["gradient_error"] < 1e-5 for row in rows)
    assert "got no model" not in done.stderr


# --- of all commands


@pytest.mark.parametrize("command", [("check",), ("explain",), ("plan",), ("env",), ("bench", "step"), ("train",)])
def test_help_has_an_example(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Example: autosp" in text and "\x1b[" not in text


def test_shell_completion() -> None:
    environment = {**os.environ, "_AUTOSP_COMPLETE": "complete_bash", "COMP_WORDS": "autosp che", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from autosp.cli.main import main; main()"],
        capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.strip() == "check", done.stderr
