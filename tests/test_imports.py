"""Who may import whom, how long files are, and that ``import autosp`` is light.

The rules are those of docs/architecture.md: leaves stay leaves, a pass is a function of its graph and its arguments,
and one file each wires the passes and the backend.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autosp

PACKAGE = Path(autosp.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400

# Module (or "package.") -> autosp modules it may import; what a name covers includes everything below it.
ALLOWED = {
    "config": {"errors", "settings_without_effect"},
    "settings_without_effect": {"config"},  # its type alone
    "errors": set(),
    "location": {"errors"},
    "repeat_keys": set(),
    "repeats": {"repeat_keys"},
    "dynamo_settings": {"errors"},
    "inputs": {"dynamo_settings", "mesh", "errors"},
    "agreement": {"errors", "mesh"},
    # measures what a user calls, so it needs nothing of the compiler but the seconds that it took
    "bench.": {"backend", "bench", "custom_ops", "errors"},
    "report.": {"config", "errors", "inputs", "layout", "location", "mesh", "report"},  # looks on, never compiles
    # a plan reads programs as inner.py has them compiled: the same passes, the same settings
    "plan.": {
        "backend",
        "config",
        "custom_ops",
        "errors",
        "gradient_sums",
        "host_copy_order",
        "layers",
        "location",
        "mesh",
        "plan",
        "product_order",
        "report",
    },  # fmt: skip
    "mesh": {"agreement", "config", "dynamo_settings", "errors", "layers", "weights"},
    "weights": {"agreement", "errors", "mesh"},
    "layers.": {"custom_ops", "errors", "layers", "randomness"},
    "layout.": {"errors", "layout", "location"},
    "passes.": {"custom_ops", "errors", "layout", "location", "repeat_keys", "repeats"},
}
# Package -> autosp modules it must never import.
FORBIDDEN = {"custom_ops.": {"passes", "layout", "backend"}}
# Module -> the only modules that may import it.
ONLY_BY = {"passes.": {"passes.pipeline"}, "passes.pipeline": {"alone", "backend"}}
PUBLIC_API_ONLY = ("integrations.", "cli.")
INTERNALS = {"passes", "layout", "capture"}
# What would let a pass or a layout rule look at the run: group names and sizes reach them as arguments.
RUN_STATE = ("torch.distributed", "deepspeed")
RUN_STATE_BELOW = ("torch.distributed.distributed_c10d", "torch.distributed.device_mesh", "deepspeed.")


def name_of(path: Path) -> str:
    """ "layout.rules.view" of autosp/layout/rules/view.py; a package is named with a dot at the end."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) + "." if parts[-1] == "__init__" else ".".join(parts)


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(absolute module or module.name, line, whether it is inside a function or ``if TYPE_CHECKING``) of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late: set[ast.AST] = set()
    for node in ast.walk(tree):
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if guarded or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            late.update(ast.walk(node))
    package = ["autosp", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, node in late
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno, node in late


def own_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of autosp that a file imports anywhere, named as by `name_of`, and the lines."""
    known = {name_of(source).rstrip(".") for source in SOURCES}
    for target, line, _ in imports(path):
        if target != "autosp" and not target.startswith("autosp."):
            continue
        bare = target.removeprefix("autosp").lstrip(".")
        while bare and bare not in known:  # autosp.mesh.current -> mesh
            bare = bare.rpartition(".")[0]
        if bare:
            yield bare, line


def is_kernel(path: Path) -> bool:
    return name_of(path).startswith("custom_ops.") and "kernel" in name_of(path)


def covers(rule: str, module: str) -> bool:
    """Whether `rule` ("layout." or "mesh") speaks of `module`."""
    return module == rule or module.rstrip(".") == rule.rstrip(".") or (rule.endswith(".") and module.startswith(rule))


def within(module: str, tops: set[str]) -> bool:
    return any(module == top or module.startswith(top + ".") for top in tops)


def violations(path: Path) -> list[str]:
    module = name_of(path)
    found = []
    for target, line in own_imports(path):
        place = f"{path.relative_to(ROOT)}:{line} imports autosp.{target}"
        for rule, allowed in ALLOWED.items():
            if covers(rule, module) and not within(target, allowed) and module != "passes.pipeline":
                found.append(f"{place}; allowed: {sorted(allowed)}")
        for rule, forbidden in FORBIDDEN.items():
            if covers(rule, module) and within(target, forbidden):
                found.append(f"{place}; forbidden: {sorted(forbidden)}")
        owners = ONLY_BY.get(target) or (ONLY_BY["passes."] if target.startswith("passes.") else None)
        if owners and module not in owners:
            found.append(f"{place}; only {sorted(owners)} may")
        if any(covers(rule, module) for rule in PUBLIC_API_ONLY) and within(target, INTERNALS):
            found.append(f"{place}; integrations and cli stand on the public API")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_import_rules(path: Path) -> None:
    assert violations(path) == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_passes_and_layout_know_nothing_of_the_run(path: Path) -> None:
    if not name_of(path).startswith(("passes.", "layout.")):
        return
    state = [target for target, _, _ in imports(path) if target in RUN_STATE or target.startswith(RUN_STATE_BELOW)]
    assert state == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_kernel_files_import_triton_and_they_import_little_else(path: Path) -> None:
    found = list(imports(path))
    if is_kernel(path):
        tops = {target.split(".")[0] for target, _, _ in found} - set(sys.stdlib_module_names)
        assert tops <= {"torch", "triton", "autosp"}
        assert all(target.startswith("custom_ops") for target, _ in own_imports(path))
    else:
        assert [f"{target}:{line}" for target, line, late in found if target.startswith("triton") and not late] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def rule_breakers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """`violations` of a little package that breaks rules on purpose."""
    files = {
        "backend.py": "from autosp.passes import pipeline",
        "config.py": "from autosp import mesh",
        "mesh.py": "import autosp.backend",
        "passes/__init__.py": "",
        "passes/pipeline.py": "from autosp.passes.loss import run\nfrom .loss import run",
        "passes/loss.py": "from . import attention",
        "passes/attention.py": "def f():\n    from autosp.mesh import current",
        "custom_ops/loss.py": "from ..layout.types import Layout",
        "layout/types.py": "from autosp.layout import rules",
        "layout/rules.py": "import torch",
        "cli/main.py": "from autosp.passes.pipeline import run",
        "bench/losses.py": "from autosp.mesh import initialize\nfrom autosp.custom_ops import loss",
    }
    package = tmp_path / "autosp"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "PACKAGE", package)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "SOURCES", sorted(package.rglob("*.py")))
    return {name: violations(package / name) for name in files}


def test_the_rules_catch_what_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rule_breakers(tmp_path, monkeypatch)
    broken = {name for name, problems in found.items() if problems}
    in_passes = {"passes/loss.py", "passes/attention.py"}
    assert broken == {"config.py", "mesh.py", "custom_ops/loss.py", "cli/main.py", "bench/losses.py", *in_passes}
    assert (
        "autosp/config.py:1 imports autosp.mesh; allowed: ['errors', 'settings_without_effect']" in found["config.py"]
    )
    assert len(found["bench/losses.py"]) == 1 and "imports autosp.mesh" in found["bench/losses.py"][0]
    assert any("only ['passes.pipeline'] may" in problem for problem in found["passes/loss.py"])


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_autosp_imports_nothing_heavy() -> None:
    loaded = run_python("import sys, autosp; print([m for m in ('torch', 'pydantic', 'triton') if m in sys.modules])")
    assert loaded == "[]"


def test_every_public_name_works_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import autosp\n"
        "print(all(getattr(autosp, name) is not None and name in dir(autosp) for name in autosp.__all__))"
    )
    assert run_python(code) == "True"


def test_public_names_are_known_to_readers_and_checkers_alike() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed - {"annotations", "TYPE_CHECKING", "Any"} == set(autosp.__all__) == set(autosp._HOME)
    with pytest.raises(AttributeError, match="module 'autosp' has no attribute 'nothing'"):
        autosp.nothing  # noqa: B018 - the access is the test


def test_the_bench_command_starts_without_torch() -> None:
    code = (
        "import sys\n"
        "from autosp.cli import bench\n"
        "print([m for m in ('torch', 'triton', 'matplotlib') if m in sys.modules])"
    )
    assert run_python(code) == "[]"
