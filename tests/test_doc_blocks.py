"""Every block of code on the pages is run as it stands, or says in the page's source why it is not."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import doc_pages
import doc_scenes
import pytest
from pool import RankPool

from autosp.config import AutoSPConfig

# Complete scripts, which tests of their integrations run and compare with one process.
SCRIPTS = {
    f"docs/integrations/{page}.md": (page, test)
    for page, test in {
        "accelerate": "test_engine_accelerate",
        "data": "test_engine_data",
        "ddp": "test_engine_ddp",
        "deepspeed": "test_engine_deepspeed",
        "fsdp": "test_engine_fsdp",
        "peft": "test_engine_peft",
        "transformers": "test_engine_transformers",
    }.items()
}


def runnable(page: str) -> list[int]:
    return [number for number, block in enumerate(doc_pages.python_blocks(page)) if not block.reason]


def test_every_python_block_is_run() -> None:
    pages = {block.page for block in doc_pages.all_blocks() if block.info == "python" and not block.reason}
    assert pages == set(doc_scenes.SCENES) | set(SCRIPTS)
    assert not set(doc_scenes.SCENES) & set(SCRIPTS)


@pytest.mark.parametrize("page", doc_scenes.SCENES)
def test_the_blocks_of_a_page_do_what_it_says(ranks: RankPool, page: str, tmp_path: Path) -> None:
    _, world_size = doc_scenes.SCENES[page]
    results = ranks.run(
        doc_scenes.play, page, str(tmp_path), world_size=world_size, process_group=False, timeout=240
    )  # fmt: skip
    for done in results:
        assert sorted(done) == runnable(page)


@pytest.mark.parametrize("page", SCRIPTS)
def test_scripts_of_engines_are_run_by_a_test_of_every_run(page: str) -> None:
    assert runnable(page) == [0]
    name, test = SCRIPTS[page]
    tree = ast.parse((doc_pages.ROOT / "tests" / f"{test}.py").read_text(encoding="utf-8"))
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert f"engine_steps.script_of({name!r})" in calls
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_the_script_of_the_page_")
    ]
    assert any("pytest.mark.slow" not in [ast.unparse(one) for one in node.decorator_list] for node in tests)


def test_every_json_block_is_a_configuration() -> None:
    found = [block for block in doc_pages.all_blocks() if block.info == "json"]
    assert len(found) >= 3
    for block in found:
        content = json.loads(block.text)
        sizes = ("sequence_parallel_size", "data_parallel_size")
        ranks = math.prod(content.get(name, 1) for name in sizes)
        ranks *= content.get("tensor_parallel", {}).get("autotp_size", 1)
        assert AutoSPConfig.from_json(content, ranks).sequence_parallel_size == content["sequence_parallel_size"] > 1


def test_markers_are_few_and_each_has_its_reason() -> None:
    skipped = [block for block in doc_pages.all_blocks() if block.reason]
    # what looks like a marker is one: it stands before a block and gives a reason
    assert [page for page, _ in doc_pages.markers()] == [block.page for block in skipped]
    assert len(skipped) <= 8
    for block in skipped:
        assert len(block.reason.split()) >= 3, (block.page, block.reason)
    assert [block.page for block in skipped if block.info == "python"] == []


def test_markers_and_blocks_are_read() -> None:
    text = (
        "# x\n\n<!-- not run: needs a GPU -->\n```python\nx = 1\n```\n\ntext\n\n"
        "    autosp env\n    autosp env --json\n\n"
        "<!-- not run: another reason -->\n\n    autosp plan \\\n        --gpus 2  # two\n\n"
        "```\nfolder/\n  file\n```\n<!-- not run: -->\n"
    )
    found = doc_pages.blocks_in(text)
    assert [(block.info, block.reason, block.commands) for block in found] == [
        ("python", "needs a GPU", []),
        ("", "", []),
        ("", "", [["autosp", "env"], ["autosp", "env", "--json"]]),
        ("", "another reason", [["autosp", "plan", "--gpus", "2"]]),
    ]


# Seconds, and in this process; the others compile many programs, start processes, or train.
QUICK = ("explain",)


def is_quick(block: doc_pages.Block) -> bool:
    return all(command[0] == "autosp" and command[1] in QUICK for command in block.commands)


def blocks_of_commands() -> list[Any]:
    """Every block of commands that is run."""
    return [
        pytest.param(block, id=f"{block.page}: {' '.join(block.commands[0][:4])}", marks=marks)
        for block in doc_pages.all_blocks()
        if block.commands and not block.reason
        for marks in [() if is_quick(block) else pytest.mark.slow]
    ]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages' commands name."""
    import zoo

    monkeypatch.chdir(tmp_path)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 256}
    zoo.llama(**sizes, max_position_embeddings=2**20).save_pretrained("path/to/model")
    shutil.copy("path/to/model/config.json", "path/to/config.json")
    for name, text in {
        "my_package/__init__.py": "",
        "my_package/models.py": "from tool_models import good as small\n",
        "notes/one.md": "# Notes\n",
        "notes/more/two.md": (doc_pages.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"),
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    shutil.copy(doc_pages.ROOT / "examples" / "ds_config.json", "ds_config.json")
    Path("examples").symlink_to(doc_pages.ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize("block", blocks_of_commands())
def test_the_commands_of_a_block_run(block: doc_pages.Block, reader: Path) -> None:
    for command in block.commands:
        (in_this_process if is_quick(block) else in_a_process)(command)
        for option in ("--html", "--picture"):
            if option in command:
                assert (reader / command[command.index(option) + 1]).stat().st_size > 1000
        if command[1] == "train":  # the pages name the folder by a date
            (made,) = Path("runs").iterdir()
            made.rename("runs/train-20260101-120000")


def in_this_process(command: list[str]) -> None:
    from autosp.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(command[1:])
    assert ended.value.code == 0 and out.getvalue()


def in_a_process(command: list[str]) -> None:
    modules = {"autosp": "autosp.cli.main", "torchrun": "torch.distributed.run"}
    folders = [os.getcwd(), str(doc_pages.ROOT), str(doc_pages.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-m", modules[command[0]], *command[1:]],
        capture_output=True,
        text=True,
        env=environment,
        timeout=330,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout
