"""``autosp bench`` runs at toy sizes on a CPU, says which rows it could not measure, and refuses before it measures."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from pool import RankPool

from autosp.bench import attention, linear_loss, losses
from autosp.cli.main import main
from autosp.errors import ConfigError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses._COPY_BYTES, "cpu", 1 << 16)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    return int(ended.value.code or 0)


def test_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    arguments = ["--shape", "3x24", "--dtype", "float32", "--repeats", "2", "--device", "cpu", "--json", str(target)]
    assert run("losses", *arguments, "--picture", str(tmp_path / "out.svg")) == 0
    picture = (tmp_path / "out.svg").read_text()
    assert all(f"<!-- {text} -->" in picture for text in (*losses.PASSES, "autosp", "eager", "3 x 24, float32"))
    written = json.loads(target.read_text())
    rows = written["results"]
    assert {(row["operator"], row["implementation"]) for row in rows} == {
        (operator, name) for operator in losses.PASSES for name in ("autosp", "eager")
    }
    for row in rows:
        assert row["ms"] > 0 and row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
        assert row["extra_mib"] is None
    floors = {row["operator"]: row["floor_ms"] for row in rows}
    assert floors["jsd"] / floors["entropy"] == pytest.approx(7 / 3)
    printed = capsys.readouterr().out
    assert "device=cpu" in printed and "| 3 x 24 | float32 | jsd | autosp |" in printed


def over_a_group_body(info, target):
    losses._COPY_BYTES["cpu"] = 1 << 16
    arguments = ["--shape", "3x24", "--dtype", "float32", "--repeats", "2", "--device", "cpu", "--json", target]
    code = run("losses", "--tp", "2", *arguments, "--operator", "logprobs", "--operator", "jsd")
    assert not torch.distributed.is_initialized()
    return code


def test_losses_over_a_group(ranks: RankPool, tmp_path: Path) -> None:
    """Both ranks measure, under the variables that torchrun sets; one of them writes."""
    target = tmp_path / "out.json"
    assert ranks.run(over_a_group_body, str(target), process_group=False, timeout=60) == [0, 0]
    rows = json.loads(target.read_text())["results"]
    assert [row["operator"] for row in rows] == ["logprobs", "jsd"]
    for row in rows:
        assert row["tp"] == 2 and row["alone_ms"] > 0
        assert row["ratio"] == pytest.approx(row["group_ms"] / row["alone_ms"])


def group_size_body(info):
    return run("losses", "--tp", "3", "--device", "cpu")


def test_another_number_of_ranks_is_refused(ranks: RankPool) -> None:
    assert ranks.run(group_size_body, process_group=False, timeout=60) == [2, 2]


def test_losses_at_the_default_shape_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("losses", "--device", "cpu", "--operator", "entropy", "--peer", "none", "--repeats", "1") == 0
    printed = capsys.readouterr().out
    assert "| 64 x 1000 | bfloat16 | entropy | autosp |" in printed and "eager" not in printed


@pytest.mark.parametrize("operator", losses.PASSES)
def test_peers_compute_the_same(operator: str) -> None:
    x, y, t = torch.randn(3, 24), torch.randn(3, 24), torch.tensor([0, 5, 23])
    ours, theirs = (table[operator](x, y, t) for table in (losses.autosp_functions(), losses.eager_functions()))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_linear_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["F.linear + CE", *linear_loss.own_methods()]
    target = tmp_path / "rows.json"
    arguments = ["--shape", "16x8x50", "--device", "cpu", "--dtype", "float32", "--repeats", "1", "--json", str(target)]
    assert run("linear-loss", *arguments, *[part for name in names for part in ("--only", name)]) == 0
    written = json.loads(target.read_text())
    assert written["dtype"] == "float32" and [row["method"] for row in written["rows"]] == names
    assert all(row["ms"] > 0 and row["extra_gib"] is None for row in written["rows"])
    for row in written["rows"]:
        assert row["over_gemms"] == pytest.approx(row["ms"] / row["gemms_ms"])
        assert row["over_burst"] == pytest.approx(row["ms"] / row["burst_ms"])
    printed = capsys.readouterr().out
    assert all(f"| 16 x 8 x 50 | {name} |" in printed for name in names)


def test_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "rows.json"
    sizes = ["--length", "96", "--heads", "2", "--key-heads", "1", "--size", "8", "--dtype", "float32"]
    assert run("attention", *sizes, "--device", "cpu", "--repeats", "1", "--json", str(target)) == 0
    rows = json.loads(target.read_text())["results"]
    assert [(row["mask"], row["implementation"]) for row in rows] == [
        ("causal", "sdpa"),
        *((mask, name) for mask in attention.MASKS for name in ("autosp", "plain")),
    ]
    floor = rows[0]["forward_ms"] + rows[0]["backward_ms"]
    for row in rows:
        assert row["forward_ms"] > 0 and row["backward_ms"] > 0 and 0 < row["tiles"] <= row["all_tiles"] == 2 * 2
        assert row["ratio"] == pytest.approx((row["forward_ms"] + row["backward_ms"]) / floor)
    printed = capsys.readouterr().out
    assert "heads=2 key_heads=1" in printed and "| 96 | documents | autosp |" in printed and "worst" in printed


@pytest.mark.parametrize("name", attention.MASKS)
def test_masks_are_what_flex_attention_is_given(name: str) -> None:
    """A program and the function beside it show the same, so that both are timed at the same work."""
    length, heads = 40, 2
    mask = attention.MASKS[name](length, heads, torch.device("cpu"))
    q, k, v = (torch.randn(1, heads, length, 8) for _ in range(3))
    h, i, j = torch.arange(heads)[:, None, None], torch.arange(length)[:, None], torch.arange(length)
    scores = q @ k.transpose(-1, -2) * 8**-0.5
    scores = scores if mask.score is None else mask.score(scores, 0, h, i, j)
    weights = torch.softmax(scores.masked_fill(~mask.visible(0, h, i, j), float("-inf")), -1)
    # Queries before the first real key see nothing: zeros here, NaN there.
    torch.testing.assert_close(
        attention._block_attention(mask)(q, k, v), (weights @ v).nan_to_num(), rtol=1e-4, atol=1e-5
    )


def test_a_failing_way_of_attention_is_a_row_and_our_own_failure_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(attention, "_function", lambda *_: fails)
    operands = attention._operands(attention.Shape(1, 1, 1, 8), 8, torch.device("cpu"), torch.float32)
    mask = attention.MASKS["causal"](8, 1, torch.device("cpu"))
    assert attention._measure("flex", mask, operands, 1) == (None, None, "RuntimeError: broken")
    with pytest.raises(RuntimeError, match="broken"):
        attention._measure("autosp", mask, operands, 1)


def test_linear_loss_at_the_default_shape_of_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the methods that compile: they need a C++ compiler and a minute."""
    seen: list[str] = []

    def measured(name: str, function: object, x: linear_loss.Inputs, *rest: object) -> linear_loss.Row:
        seen.append(name)
        return linear_loss.Row(*x.hidden.shape, x.weight.shape[0], name, 1.0, 0.5, 0.6, 2.0, 1.5, None)

    monkeypatch.setattr(linear_loss, "measure", measured)
    monkeypatch.setattr(linear_loss, "burst_rate", lambda *_: 1e12)
    assert run("linear-loss", "--device", "cpu") == 0
    assert "autosp lean" in seen and not [name for name in seen if name.startswith("torch.compile")]
    assert "| 64 x 32 x 1000 | autosp lean |" in capsys.readouterr().out


def test_picture(tmp_path: Path) -> None:
    row = linear_loss.Row(16, 8, 50, "autosp fast", 1.0, 0.5, 0.6, 2.0, 1.5, 0.25)
    linear_loss.draw([row], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    row.extra_gib = None
    with pytest.raises(ConfigError, match="run on a GPU"):
        linear_loss.draw([row], tmp_path / "none.png")


def test_a_failing_peer_is_a_row_and_our_own_failure_is_not() -> None:
    def fails(x: linear_loss.Inputs) -> torch.Tensor:
        raise RuntimeError("broken")

    inputs = linear_loss.Inputs.random(4, 8, 10, torch.device("cpu"), torch.float32)
    row = linear_loss.measure("Peer", fails, inputs, (0.5, 0.6), 1)
    assert row.ms is None and row.note == "RuntimeError: broken"
    with pytest.raises(RuntimeError, match="broken"):
        linear_loss.measure("autosp fast", fails, inputs, (0.5, 0.6), 1)


CPU = ("--device", "cpu")
WRONG = {
    "another device": (("losses", "--device", "tpu"), "--device is 'tpu'; allowed are"),
    "two sizes of three": (("linear-loss", "--shape", "4x8", *CPU), "TOKENSxHIDDENxVOCABULARY of positive numbers"),
    "a size of zero": (("losses", "--shape", "0x8", *CPU), "such as 8192x75968"),
    "an operator": (("losses", "--operator", "softmax", *CPU), "unknown operators ['softmax']; allowed are"),
    "a peer": (("losses", "--peer", "other", *CPU), "unknown peers ['other']; allowed are"),
    "a dtype": (("losses", "--dtype", "int8", *CPU), "unknown dtypes ['int8']"),
    "a dtype of the head": (("linear-loss", "--dtype", "int8", *CPU), "unknown dtype 'int8'; allowed are"),
    "a method": (("linear-loss", "--only", "nothing", *CPU), "unknown methods ['nothing']; allowed are"),
    "a folder that is not there": (("losses", "--json", "no/such/file.json", *CPU), "in a folder that exists"),
    "a picture of a CPU": (("linear-loss", "--picture", "p.png", *CPU), "which only a GPU counts"),
    "a picture of no format": (("linear-loss", "--picture", "p.txt", *CPU), "allowed endings are .png"),
    "a picture of losses of no format": (("losses", "--picture", "p.gif", *CPU), "allowed endings are .png"),
    "a picture over a group": (("losses", "--tp", "2", "--picture", "p.png", *CPU), "with --tp there is one"),
    "ranks that nobody started": (("losses", "--tp", "2", *CPU), "torchrun --nproc-per-node 2 -m autosp.cli.main"),
    "a peer over a group": (("losses", "--tp", "2", "--peer", "eager", *CPU), "--peer eager has no effect"),
    "a mask": (("attention", "--mask", "square", *CPU), "unknown masks ['square']; allowed are"),
    "a way of attention": (("attention", "--only", "xformers", *CPU), "unknown implementations ['xformers']"),
    "a dtype of attention": (("attention", "--dtype", "int8", *CPU), "unknown dtypes ['int8']"),
    "heads": (("attention", "--heads", "4", "--key-heads", "3", *CPU), "key heads have to divide the heads"),
    "an option": (("losses", "--shpae", "1x2"), "No such option: --shpae"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_end_with_one_line(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise AssertionError("refused before anything is measured")

    monkeypatch.setattr(losses, "copy_bandwidth", unreachable)
    monkeypatch.setattr(linear_loss, "burst_rate", unreachable)
    monkeypatch.setattr(attention, "_time", unreachable)
    arguments, message = WRONG[case]
    assert run(*arguments) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert message in printed[-1] and printed[-1].startswith("autosp: error: ")
    assert all(line.startswith("skipped: ") or line == "Measuring ..." for line in printed[:-1])


@pytest.mark.parametrize("command", ["losses", "linear-loss", "attention"])
def test_no_gpu(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(command) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "no CUDA device" in line and "--device cpu" in line


@pytest.mark.parametrize("command", ["losses --shape", "linear-loss --shape", "attention --length"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.split()[0], "--help") == 0
    assert f"autosp bench {command}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["losses", "linear_loss", "attention"])
def test_the_files_of_a_checkout_are_the_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(ROOT / "benchmarks" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [file, "--device", "tpu"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(file, run_name="__main__")
    assert ended.value.code == 2 and "--device is 'tpu'" in capsys.readouterr().err
