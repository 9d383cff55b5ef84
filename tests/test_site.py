"""The site: tables made from the sources are whole, messages are found by their text, commands have their options."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import doc_pages
import pytest
import zoo

from autosp.config import AutoSPConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("autosp_site", ROOT / ".ci" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(site: Any, name: str) -> str:
    return site.on_page_markdown((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))


def test_every_page_of_the_site_exists_and_every_page_is_on_it() -> None:
    named = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    assert named == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_every_error_is_found_by_its_text(site: Any) -> None:
    page = " ".join(rendered(site, "troubleshooting").split())
    messages = site.error_messages()
    assert len(messages) > 150
    for _, text, place in messages:
        assert " ".join(text.split()).replace("|", "\\|").replace("`", "'") in page, place


def test_texts_that_are_explained_are_texts_of_errors(site: Any) -> None:
    """A message that was reworded must be reworded on the page too."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\*\*`(.+?)`\*\*", page, re.M)
    assert len(explained) >= 10
    source = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in (ROOT / "autosp").rglob("*.py")
    )
    assert [text for text in explained if text not in source] == []


def test_messages_are_read_out_of_every_way_to_write_them(site: Any) -> None:
    import ast

    def read(text: str) -> str:
        return site.literal(ast.parse(text, mode="eval").body)

    assert read('"plain"') == "plain" and read('f"a {b} c"') == "a … c"
    assert read('"one " "two"') == "one two" and read('f"x {y}" + "z"') == "x …z" and read("error") == "…"


def test_every_setting_is_on_the_page(site: Any) -> None:
    page = rendered(site, "options")
    for name, field in AutoSPConfig.model_fields.items():
        assert field.description, name
        assert " ".join(field.description.split()).replace("|", "\\|") in page
    assert "`autosp.outputs`" in page and "`tensor_parallel.autotp_size`" in page


def test_every_operator_with_a_rule_is_on_the_page(site: Any) -> None:
    import torch

    import autosp.backend  # noqa: F401 - registers the rules
    from autosp.layout import registry

    page = rendered(site, "operators")
    own = {
        str(target.overloadpacket).replace("._ops", "")
        for target, rule in registry._RULES.items()
        if isinstance(target, torch._ops.OpOverload)
        and rule.__module__.startswith("autosp.")
        and not str(target).startswith(("autosp.", "autosp_test"))  # those that tests of this process registered
    }
    assert len(own) > 60
    missing = sorted(name for name in own if not re.search(rf"`{re.escape(name)}[.`]", page))
    assert missing == []


def test_every_test_and_model_is_on_the_page_of_what_is_supported(site: Any) -> None:
    page = rendered(site, "supported")
    assert len(site.model_classes()) == len(zoo.MODELS)
    for path in (ROOT / "tests").glob("test_*.py"):
        for name in re.findall(r"^def test_(\w+)\(", path.read_text(encoding="utf-8"), re.M):
            assert f"- {name.replace('_', ' ')}" in page, (path.name, name)


def test_links_out_of_the_site_become_text(site: Any) -> None:
    assert site.on_page_markdown("see [`x.py`](../x.py) and [y](y.md)") == "see `x.py` and [y](y.md)"


def commands() -> list[tuple[str, list[str]]]:
    """Every call of ``autosp`` in a block of the pages, run or not, with the page's name."""
    return [
        (block.page, command[1:])
        for block in doc_pages.all_blocks()
        for command in block.commands
        if command[0] == "autosp"
    ]


def test_commands_on_the_pages_have_options_that_exist() -> None:
    """Parsed as the command would, not run."""
    import typer

    from autosp.cli.main import app

    found = commands()
    assert len(found) >= 12 and {arguments[0] for _, arguments in found} >= {
        "bench",
        "train",
        "check",
        "explain",
        "plan",
    }
    for page, arguments in found:
        command, path = typer.main.get_command(app), list(arguments)
        while hasattr(command, "commands"):
            assert path and path[0] in command.commands, (page, arguments)
            command = command.commands[path.pop(0)]
        try:
            command.make_context(arguments[0], path)
        except Exception as error:
            raise AssertionError(f"{page}: autosp {shlex.join(arguments)}: {error}") from error


def test_the_tables_need_no_torch() -> None:
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('made', '.ci/site.py'); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); [make() for make in m.TABLES.values()]; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
