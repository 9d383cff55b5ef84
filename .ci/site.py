"""What the site holds that is written nowhere: tables made from the sources and the tests when it is built.

A page says ``<!-- generated: options -->`` where a table goes; mkdocs calls `on_page_markdown` for each page. Nothing
here imports torch: settings come from pydantic's fields, the rest is read from syntax trees.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autosp"
_ERRORS = ("ConfigError", "InputError", "RankMismatchError", "UnsupportedGraphError", "Refusal", "InternalError")
_HOLE = "…"


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """mkdocs: put the tables in, and leave out links to files that are no part of the site."""
    depth = page.file.src_uri.count("/") if page is not None else 0
    for name, make in TABLES.items():
        markdown = markdown.replace(f"<!-- generated: {name} -->", make())
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./){{{depth + 1}}}[^)]*\)", r"\1", markdown)


def options_table() -> str:
    """Every setting with its type, default and docstring."""
    sys.path.insert(0, str(ROOT))
    from autosp.config import _TENSOR_PARALLEL_FIELDS, OPTION_NAMES, AutoSPConfig

    keys = {field: f"tensor_parallel.{key}" for key, field in _TENSOR_PARALLEL_FIELDS.items()}
    keys.update({name: f"autosp.{name}" for name in OPTION_NAMES})
    keys.update(deepcompile="compile.deepcompile", compile_passes="compile.passes")
    lines = ["| key in the JSON | default | values | |", "|---|---|---|---|"]
    for name, field in AutoSPConfig.model_fields.items():
        values = str(field.annotation).replace("typing.", "").replace("|", "\\|")
        values = re.sub(r"^<class '(\w+)'>$", r"\1", values)
        about = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{keys.get(name, name)}` | `{field.default!r}` | `{values}` | {about} |")
    return "\n".join(lines)


def error_messages() -> list[tuple[str, str, str]]:
    """Every error that the package raises: class, text with … where something is filled in, and ``file:line``."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _ERRORS and node.args:
                text = literal(node.args[0])
                if text.strip(f"{_HOLE} :;,.") and isinstance(node.func, ast.Name):
                    found.append((node.func.id, text, f"{path.relative_to(ROOT)}:{node.lineno}"))
    return found


def literal(node: ast.expr) -> str:
    """The text of a string expression, … for each part that is not in the source."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) if isinstance(part, ast.Constant) else _HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return _HOLE


def errors_table() -> str:
    """Every message, sorted by its text, so that a search of the page finds it."""
    lines = ["| message | error | raised in |", "|---|---|---|"]
    for name, text, place in sorted(error_messages(), key=lambda item: item[1].strip(_HOLE + " ").lower()):
        shown = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
        lines.append(f"| `{shown}` | `{name}` | `{place.split(':')[0]}` |")
    return "\n".join(lines)


def rules() -> Iterator[tuple[str, str, str]]:
    """Operators with a rule: family, operator, and what the rule's docstring says first."""
    for path in sorted((PACKAGE / "layout" / "rules").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if not isinstance(decorator, ast.Call) or getattr(decorator.func, "id", "") != "register_rule":
                    continue
                about = (ast.get_docstring(node) or "").split("\n\n")[0]
                for argument in decorator.args:
                    for operator in _operators(argument, constants):
                        yield path.stem, operator, " ".join(about.split())


def _operators(node: ast.expr, constants: dict[str, ast.expr]) -> list[str]:
    if isinstance(node, ast.Starred):
        node = constants.get(getattr(node.value, "id", ""), node.value)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
        items = node.keys if isinstance(node, ast.Dict) else node.elts
        return [name for item in items if item is not None for name in _operators(item, constants)]
    if isinstance(node, ast.Attribute):
        return [ast.unparse(node).replace("torch.ops.", "").removesuffix(".default")]
    return []


def operators_table() -> str:
    """Operators by family, those of one rule in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for family, operator, about in rules():
        rows.setdefault((family, about), []).append(operator)
    lines = ["| family | operators | on a shard |", "|---|---|---|"]
    for (family, about), names in rows.items():
        listing = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
        lines.append(f"| {family} | {listing} | {about.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def supported_table() -> str:
    """What the tests try, file by file: the file's first sentence and what each test says."""
    lines = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        about = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
        tests = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
        names = [_sentence(test) for test in tests]
        if names:
            lines += [f"### {path.stem.removeprefix('test_').replace('_', ' ')}", "", about, ""]
            lines += [f"- {name}" for name in names] + [""]
    models = ", ".join(f"`{name}`" for name in model_classes())
    return f"Models of transformers, unmodified: {models}.\n\n" + "\n".join(lines)


def _sentence(test: ast.FunctionDef) -> str:
    text = test.name.removeprefix("test_").replace("_", " ")
    slow = any("slow" in ast.unparse(decorator) for decorator in test.decorator_list)
    return text + (" (slow tier)" if slow else "")


def model_classes() -> list[str]:
    """The classes that ``tests/zoo.py`` builds."""
    tree = ast.parse((ROOT / "tests" / "zoo.py").read_text(encoding="utf-8"))
    return [
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "_make"
        and isinstance(node.args[0], ast.Constant)
    ]


TABLES: dict[str, Callable[[], str]] = {
    "options": options_table,
    "errors": errors_table,
    "operators": operators_table,
    "supported": supported_table,
}
