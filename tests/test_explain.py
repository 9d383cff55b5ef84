"""The compile report: what it says of a model, in JSON, in the terminal, as a page in a real browser, to tlparse."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autosp.cli.main import main
from autosp.errors import InputError
from autosp.report.drawing import draw
from autosp.report.page import page
from autosp.report.records import GraphReport, NodeRecord
from autosp.report.text import bytes_text, group_blocks, print_report

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def command(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(["explain", *arguments])
    return int(ended.value.code or 0), out.getvalue()


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The JSON and the page of a Llama of one layer, 64 tokens, 2 ranks."""
    folder = tmp_path_factory.mktemp("explain")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    code, out = command(str(folder / "config.json"), "--seq-len", "64", "--json", "--html", str(folder / "report.html"))
    assert code == 0
    return json.loads(out)["graphs"][0], folder / "report.html"


def report_of(graph: dict[str, Any]) -> GraphReport:
    from autosp.report.records import CollectiveRecord, Gathering, MaskRecord, PassRecord

    kinds: dict[str, Any] = {
        "nodes": NodeRecord, "collectives": CollectiveRecord, "masks": MaskRecord, "gathered": Gathering,
        "passes": PassRecord,
    }  # fmt: skip
    return GraphReport(**{k: [kinds[k](**v) for v in value] if k in kinds else value for k, value in graph.items()})


def test_layouts_and_communication(explained: tuple[dict[str, Any], Path]) -> None:
    graph, _ = explained
    nodes = {node["name"]: node for node in graph["nodes"]}
    (attention,) = [n for n in graph["nodes"] if n["operator"] == "aten.scaled_dot_product_attention.default"]
    assert attention["kind"] == "sharded" and attention["note"].startswith("ulysses: 4/2 heads")
    assert attention["layer"] == "model.layers.0.self_attn" and "sdpa" in attention["location"]
    labels = {n["label"]: n for n in graph["nodes"]}
    assert labels["input_ids"]["kind"] == "replicated" and labels["lm_head.weight"]["operator"] == "parameter"
    there, back = [c for c in graph["collectives"] if c["operator"] == "autosp.all_to_all.default"]
    # q, k, v: (4 + 2 + 2) heads of 8, 32 tokens a rank, bf16; half of it goes to the other rank. Back: 4 heads.
    assert there["forward_bytes"] == there["backward_bytes"] == 8 * 8 * 32 * 2 // 2
    assert back["forward_bytes"] == 4 * 8 * 32 * 2 // 2
    assert there["origin"] == back["origin"] == attention["name"]
    assert there["layer"] == back["layer"] == "model.layers.0.self_attn"
    assert sorted(edge[0] for edge in there["edges"]) == sorted(attention["inputs"])
    assert all(edge[0] == attention["name"] for edge in back["edges"]) and back["edges"]
    (head,) = [c for c in graph["collectives"] if c["reason"].startswith("lm_head.weight meets")]
    # an all-reduce of the gradient, 128 x 32 in bf16: twice half of it
    assert (head["forward_bytes"], head["backward_bytes"]) == (0, 128 * 32 * 2)
    assert [c["operator"] for c in graph["collectives"]][-1] == "autosp.aggregate_loss.default"
    assert all(source in nodes for node in graph["nodes"] for source in node["inputs"])
    assert graph["masks"] == [
        {
            "attention": attention["name"],
            "layer": "model.layers.0.self_attn",
            "became": "causal, no tensor in the model",
            "bytes": 0,
        }
    ]
    assert [p["name"] for p in graph["passes"]][0] == "captured" and graph["passes"][-1]["name"] == "verify"
    texts = {p["name"]: p["text"] for p in graph["passes"]}
    assert "autosp.all_to_all" in texts["localize"] and "shard(dim 1" in texts["infer_layouts"]
    assert list(graph["sizes"].values()) == [64] and not graph["refused"]


def test_in_the_terminal(explained: tuple[dict[str, Any], Path]) -> None:
    from rich.console import Console

    out = io.StringIO()
    print_report(report_of(explained[0]), title="graph", passes=True, console=Console(file=out, width=200))
    text = out.getvalue()
    for part in (
        "model.layers.0",
        "shard(dim 2, s",
        "(ulysses: 4/2 heads",
        "exchange tokens for heads",
        "its gradient is summed over the group",
        "one rank sends",
        "causal, no tensor in the model",
        "after localize",
    ):
        assert part in text
    assert "\x1b[" not in text


def test_layers_that_are_alike_are_shown_once() -> None:
    def node(name: str, layer: str, operator: str = "aten.linear.default") -> NodeRecord:
        return NodeRecord(name, name, operator, layer, "", ["4"], "float32", 16, "replicate", "replicated", "", [])

    nodes = [node("e", "model.embed")]
    nodes += [
        node(f"l{i}", f"model.layers.{i}.mlp", "aten.relu.default" if i == 2 else "aten.linear.default")
        for i in range(4)
    ]
    blocks = group_blocks(nodes)
    assert [b.title for b in blocks] == ["model.embed", "model.layers.0", "model.layers.2"]
    assert blocks[1].like == ["model.layers.1", "model.layers.3"]
    assert [bytes_text(n) for n in (0, 12, 2048, 3 * 2**30)] == ["0", "12 B", "2 KiB", "3 GiB"]


def test_boxes_stand_below_what_they_are_made_from_and_never_on_each_other(
    explained: tuple[dict[str, Any], Path],
) -> None:
    picture = draw(report_of(explained[0]))
    at = {box["name"]: (box["x"], box["y"]) for box in picture["boxes"]}
    assert len(set(at.values())) == len(at) == len(picture["boxes"])
    assert all(at[edge["from"]][1] < at[edge["to"]][1] for edge in picture["edges"])
    assert sum(bool(edge["collectives"]) for edge in picture["edges"]) > 10


def test_an_empty_page_is_refused() -> None:
    with pytest.raises(InputError, match="no graph to show"):
        page([], title="x")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    with sync_api.sync_playwright() as playwright:
        try:
            running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Exception as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield running
        running.close()


def test_the_page_in_a_browser(explained: tuple[dict[str, Any], Path], browser: Any) -> None:
    graph, file = explained
    shown = browser.new_page(viewport={"width": 1300, "height": 800})
    problems: list[str] = []
    shown.on("pageerror", lambda error: problems.append(str(error)))
    shown.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    asked: list[str] = []
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(file.as_uri())
    assert asked == [file.as_uri()], "one self-contained file"
    # a box for each value that is made or read; three colours; marks on the edges that communicate
    assert shown.locator(".box").count() == len(draw(report_of(graph))["boxes"])
    colours = {
        kind: shown.locator(f".box.{kind} rect").first.evaluate("e => getComputedStyle(e).fill")
        for kind in ("sharded", "replicated")
    }
    assert colours["sharded"] != colours["replicated"]
    assert shown.locator(".mark").count() == shown.locator(".line.moved").count() > 10
    # zoom by the wheel, fit by a key
    before = shown.locator("#svg").get_attribute("viewBox")
    shown.mouse.move(600, 400)
    shown.mouse.wheel(0, -300)
    shown.wait_for_function("old => document.getElementById('svg').getAttribute('viewBox') !== old", arg=before)
    zoomed = [float(part) for part in shown.locator("#svg").get_attribute("viewBox").split()]
    assert zoomed[2] < float(before.split()[2])
    shown.mouse.down()
    shown.mouse.move(650, 460)
    shown.mouse.up()
    moved = [float(part) for part in shown.locator("#svg").get_attribute("viewBox").split()]
    assert moved[0] < zoomed[0] and moved[1] < zoomed[1] and moved[2] == zoomed[2]
    # search marks, and finds by layer
    shown.fill("#search", "lm_head")
    assert shown.locator(".box.hit").count() >= 2 and "found" in shown.locator("#hits").inner_text()
    # a click tells layout, line and communication
    shown.locator('.box[data-name="scaled_dot_product_attention"]').dispatch_event("click")
    told = shown.locator("#detail").inner_text()
    assert "ulysses: 4/2 heads" in told and "exchange tokens for heads" in told
    # passes as before and after
    shown.click("#tab-passes")
    shown.click("#pass-localize")
    assert "all_to_all" in shown.locator("#after").inner_text()
    assert "all_to_all" not in shown.locator("#before").inner_text()
    assert shown.locator("#after .new").count() > 0
    shown.click("#tab-communication")
    assert "One rank of 2 sends" in shown.locator("#communication p").inner_text()
    assert shown.locator("#communication tbody tr").count() == len(graph["collectives"])
    shown.click("#tab-operators")
    shown.locator("#operators tbody tr").first.click()
    assert shown.locator("#picture.on").count() == 1
    assert problems == []


def test_a_refused_model_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = command("tool_models:refused", "--seq-len", "16", "--dtype", "fp32")
    assert code == 1
    # the report alone is on standard output
    stages = ["Importing torch and transformers", "Compiling", "Refused; compiling with what is refused gathered"]
    said = capsys.readouterr().err
    assert all(f"{stage} ...\n" in said and stage not in out for stage in stages)
    text = " ".join(out.split())
    assert "refused: aten.cumsum.default" in text and "tool_models.py" in text
    assert 'gathered (unsupported: "gather")' in text and "graph 2 of 2" in text


def test_passes_and_report_reach_the_structured_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tlparse reads; without a reader no payload is made."""
    from autosp.report import hook

    seen: dict[str, str] = {}

    def take(kind: str, *, metadata_fn: Any, payload_fn: Any) -> None:
        seen[metadata_fn()["name"]] = payload_fn()

    monkeypatch.setattr(hook, "trace_structured", take)
    code, _ = command("tool_models:good", "--seq-len", "16", "--dtype", "fp32", "--json")
    assert code == 0
    assert list(seen)[0] == "autosp_00_captured" and "aten.embedding" in seen["autosp_00_captured"]
    localized = next(text for name, text in seen.items() if name.endswith("_localize"))
    assert "autosp.aggregate_loss" in localized
    assert json.loads(seen["autosp_report"])["ranks"] == 2


@pytest.mark.slow
def test_tlparse_shows_the_artifacts(tmp_path: Path) -> None:
    """The real tlparse over a real trace, as the page says to use them."""
    program = shutil.which("tlparse") or shutil.which("tlparse", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("tlparse is not installed")
    traces, shown = tmp_path / "folder", tmp_path / "shown"
    root = Path(__file__).parent.parent
    environment = {**os.environ, "TORCH_TRACE": str(traces), "PYTHONPATH": f"{root}:{root / 'tests'}"}
    arguments = ["explain", "tool_models:good", "--seq-len", "16", "--dtype", "fp32", "--json"]
    command_line = [sys.executable, "-m", "autosp.cli.main", *arguments]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    read = [program, "--all-ranks-html", str(traces), "-o", str(shown), "--no-browser"]
    told = subprocess.run(read, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    (index,) = shown.rglob("rank_0/index.html")
    links = set(re.findall(r'href="([^"]*autosp_[^"]*)"', index.read_text(encoding="utf-8")))
    from autosp.passes.pipeline import PIPELINE

    stages = [f"{number:02d}_{name}" for number, name in enumerate(["captured", *(one.name for one in PIPELINE)])]
    for stage in [*stages, "report"]:
        assert any(f"autosp_{stage}" in link for link in links), (stage, links)
    assert all((index.parent / link).stat().st_size > 0 for link in links)
    (report,) = [link for link in links if "autosp_report" in link]
    # the graphs before and after each pass are artifacts of their own there
    expected = {**json.loads(done.stdout)["graphs"][0], "passes": []}
    assert json.loads((index.parent / report).read_text()) == expected
    (local,) = [link for link in links if "_localize_" in link and "vocabulary" not in link]
    assert "autosp.aggregate_loss" in (index.parent / local).read_text()


def test_nobody_listens_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from autosp.report import build, hook

    def unreachable(*_: Any) -> None:
        raise AssertionError("built while nobody listens")

    for name in ("build_report", "pass_record", "masks_of"):
        monkeypatch.setattr(build, name, unreachable)
    # Without a trace torch asks for no payload (pytest's own log capture would have it ask).
    monkeypatch.setattr(hook, "trace_structured", lambda *_, **__: None)
    work: Any = type("Work", (), {"seconds": {}, "graph": None})()
    hook.observe_pass("captured", work)
    hook.observe_program(work)
    hook.observe_refusal(ValueError("x"), work)


WRONG = {
    "a model that is not there": (("nowhere",), "there is no such path"),
    "a module that is not there": (("no_such_module:f",), "no_such_module cannot be imported"),
    "a name that is not there": (("tool_models:nothing",), "tool_models has no 'nothing'"),
    "what is no function": (("tool_models:NOT_CALLABLE",), "is a int; a function without arguments"),
    "what returns no model": (("tool_models:no_model",), "it returned a str; a model, or"),
    "no module": ((":factory",), "there is no such path; give a folder, a config.json or package.module:factory"),
    "a function that fails": (
        ("tool_models:failing",),
        'the function failed with KeyError: "a mistake of the user\'s"',
    ),
    "batches that fail": (
        ("tool_models:failing_batches",),
        "its function of batches failed at 4096 tokens with KeyError",
    ),
    "batches that are none": (("tool_models:no_batches",), "its function of batches returned a list; a mapping"),
    "a page in no folder": (("tool_models:good", "--html", "no/such/page.html"), "a file in a folder that exists"),
    "a dtype": (("tool_models:good", "--dtype", "int8"), "--dtype int8: choose bf16 or fp32"),
    "a length": (("tool_models:good", "--seq-len", "many"), "--seq-len got 'many'"),
    "layers of a factory": (("tool_models:good", "--layers", "2"), "--layers is for transformers models"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_end_with_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[case]
    code, _ = command(*arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and message in lines[-1] and lines[-1].startswith("autosp: error: ")


def test_dtypes_are_put_back() -> None:
    assert torch.get_default_dtype() == torch.float32
