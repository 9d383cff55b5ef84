"""What the documentation says is so: links, paths, names, tables, printed graphs, and the example of a rule."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import toys
import zoo
from pool import RankInfo, RankPool

import autosp
from autosp.errors import InternalError, UnsupportedGraphError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "autosp|docs|tests|examples|benchmarks"


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


def blocks(page: Path, info: str) -> list[str]:
    """Fenced blocks of a page whose info string is ``info``."""
    return re.findall(rf"^```{re.escape(info)}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(text: str, folder: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://|mailto:", target):
            continue
        path, _, fragment = target.partition("#")
        file = folder / path if path else None
        if file is not None and not file.exists():
            broken.append(target)
        elif fragment:
            linked = file.read_text(encoding="utf-8") if file is not None else text
            if fragment not in {anchor(h) for h in re.findall(r"^#+ (.+)$", linked, re.M)}:
                broken.append(target)
    return broken


def missing_paths(text: str) -> list[str]:
    named = re.findall(rf"(?<![\w/.\-])(?:{FOLDERS})/[\w./\-]*\w/?", text)
    return [path for path in named if not (ROOT / path).exists()]


def missing_names(text: str) -> list[str]:
    """Dotted names of autosp in code that lead nowhere."""
    code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)])
    return [name for name in set(re.findall(r"(?<![\w.])autosp(?:\.\w+)+", code)) if not resolves(name)]


def resolves(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@every_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page.read_text(encoding="utf-8"), page.parent) == []


@every_page
def test_paths_that_are_named_exist(page: Path) -> None:
    assert missing_paths(page.read_text(encoding="utf-8")) == []


@every_page
def test_names_of_the_package_exist(page: Path) -> None:
    assert missing_names(page.read_text(encoding="utf-8")) == []


@every_page
def test_operators_that_are_named_exist(page: Path) -> None:
    custom_ops = importlib.import_module("autosp.custom_ops")
    for module in pkgutil.iter_modules(custom_ops.__path__):
        importlib.import_module(f"autosp.custom_ops.{module.name}")
    named = set(re.findall(r"autosp::(\w+)(?![\w*])", page.read_text(encoding="utf-8")))
    assert {name for name in named if not hasattr(torch.ops.autosp, name)} == set()


@every_page
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


def test_the_checks_find_what_they_should() -> None:
    text = (
        "# A b\n[x](no.md) [y](#a-b) [z](#c) [w](https://x.org/y)\n`autosp/nothing.py` `autosp.nothing` `autosp.config`"
    )
    assert broken_links(text, ROOT) == ["no.md", "#c"]
    assert missing_paths(text) == ["autosp/nothing.py"]
    assert missing_names(text) == ["autosp.nothing"]


def test_the_table_of_passes_is_the_pipeline() -> None:
    from autosp.passes.pipeline import PIPELINE

    text = (ROOT / "docs/passes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\w ]+) → ([\w ]+) \|", text, re.M)
    expected = [(p.name, " ".join(sorted(p.requires)), " ".join(sorted(p.ensures))) for p in PIPELINE]
    assert rows == expected


def test_the_models_of_the_readme_are_those_that_are_tested() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| Models[^|]*\|(.*)\|$", text, re.M)
    named = {re.sub(r"[^a-z0-9]", "", name.lower()) for name in re.findall(r"\*\*(.+?)\*\*", row)}
    assert named == set(zoo.MODELS)


def imported(path: Path) -> ModuleType:
    """The module of a file outside the import path."""
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return sys.modules[path.stem]


def example() -> ModuleType:
    return imported(ROOT / "examples" / "add_operator_rule.py")


def run_graph(model: torch.nn.Module, length: int) -> None:
    """Compile and run a model of ids and labels over a group that moves no data."""
    autosp.initialize({"autosp": {"inner_backend": "eager"}}, device_type="cpu")
    ids = torch.zeros(2, length, dtype=torch.int64)
    torch.compile(model, backend="autosp", dynamic=False)(input_ids=ids, labels=ids.clone())


def refusal(model: torch.nn.Module) -> BaseException:
    """The error of autosp that ends a compilation, taken out of the one that Dynamo makes of it."""
    with pytest.raises(Exception) as caught:
        run_graph(model, 16)
    return getattr(caught.value, "inner_exception", caught.value)


def seeded(kind: type[toys.Toy]) -> toys.Toy:
    torch.manual_seed(0)
    return kind()


class LossOnly(toys.Toy):
    """A toy that returns no logits."""

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        return super().forward(*args, **more).loss


def run_fused(rank_info: RankInfo, kind: type[toys.Toy], mode: str) -> list[parity.Result]:
    from autosp import backend

    autosp.initialize({"autosp": {"inner_backend": "aot_eager", "fuse_linear_cross_entropy": mode}})
    model = seeded(kind)
    run_pipeline, operators = backend.run_pipeline, set()

    def watched(work: Any) -> Any:
        done = run_pipeline(work)
        operators.update(str(node.target) for node in done.graph.graph.nodes)
        return done

    with mock.patch.object(backend, "run_pipeline", watched):
        results = compare_fused(model, mode)
    assert "autosp.linear_cross_entropy_sums.default" in operators
    assert "aten.cross_entropy_loss.default" not in operators
    return results


def compare_fused(model: torch.nn.Module, mode: str) -> list[parity.Result]:
    compiled = torch.compile(model, backend="autosp")
    results = []
    for length in (16, 17):
        batch = toys.batch(length)
        loss_of = lambda out: out if isinstance(out, torch.Tensor) else out.loss  # noqa: E731
        results.append(parity.compare(model, compiled, batch, prepare=autosp.prepare_batch, loss_of=loss_of))
    if mode == "always":
        assert compiled(**autosp.prepare_batch(toys.batch(16))).logits is None
    return results


@pytest.mark.parametrize(
    ("kind", "mode"),
    [pytest.param(LossOnly, "auto", marks=pytest.mark.slow), pytest.param(toys.Toy, "always", marks=pytest.mark.slow)],
)
def test_the_head_fused_into_the_loss_is_exact(ranks: RankPool, kind: type[toys.Toy], mode: str) -> None:
    for results in ranks.run(run_fused, kind, mode, timeout=240):
        for result in results:
            result.check()


Line = tuple[str, str, str]


def graph_lines(gm: torch.fx.GraphModule) -> Iterator[Line]:
    from autosp.layout.infer import LAYOUT

    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            layout = node.meta.get(LAYOUT)
            yield str(node.target), str(list(value.shape)), "" if layout is None else str(layout)


def shown_lines(block: str) -> list[Line]:
    """``name = op(args)  # [sizes]  layout`` lines of a page."""
    found = re.findall(r"^\w+ = ([\w.]+)\(.*\) +# (\[.*?\]) *(.*)$", block, re.M)
    assert len(found) == sum(line.strip() not in ("", "...") for line in block.splitlines()), "a line of another form"
    return found


def is_subsequence(part: list[Line], whole: list[Line]) -> bool:
    rest = iter(whole)
    return all(line in rest for line in part)


def test_printed_graphs_come_from_a_run(
    fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from autosp import backend
    from autosp.passes import pipeline

    page = ROOT / "docs/passes.md"
    (tmp_path / "page_model.py").write_text(blocks(page, "python")[0], encoding="utf-8")
    found: dict[str, list[Line]] = {}

    def keep(entry: pipeline.Pass) -> pipeline.Pass:
        def run(work: pipeline.Work) -> None:
            found.setdefault("captured", list(graph_lines(work.graph)))
            entry.run(work)
            found[entry.name] = list(graph_lines(work.graph))

        return pipeline.Pass(entry.name, run, entry.requires, entry.ensures, entry.reason)

    kept = [keep(entry) for entry in pipeline.PIPELINE]
    monkeypatch.setattr(backend, "run_pipeline", lambda work: pipeline.run_pipeline(work, kept))
    fake_ranks(2, rank=1)
    run_graph(imported(tmp_path / "page_model.py").Model(), 16)
    shown = 0
    for stage, lines in found.items():
        for block in blocks(page, f"text {stage}"):
            shown += 1
            assert is_subsequence(shown_lines(block), lines), (stage, lines)
    assert shown == len(re.findall(r"^```text", page.read_text(encoding="utf-8"), re.M))


def run_example(rank_info: RankInfo, length: int, inner: str) -> tuple[float, float, float]:
    autosp.initialize({"autosp": {"inner_backend": inner}}, device_type="cpu")
    return example().compare(length)


@pytest.mark.parametrize(("world_size", "length"), [pytest.param(2, 33, marks=pytest.mark.slow), (3, 7)])
def test_the_example_of_a_rule_is_exact(ranks: RankPool, inner: str, world_size: int, length: int) -> None:
    for found, expected, worst in ranks.run(run_example, length, inner, world_size=world_size, timeout=240):
        assert abs(found - expected) <= 1e-5 * abs(expected)
        assert worst <= 1e-5


def test_without_the_rule_the_example_is_refused(
    fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autosp.layout import registry

    model = example().Model()
    monkeypatch.delitem(registry._RULES, torch.ops.demo.rotate.default)
    fake_ranks(2)
    error = refusal(model)
    assert isinstance(error, UnsupportedGraphError)
    (shown,) = blocks(ROOT / "docs/add_an_operator_rule.md", "text refused")
    assert str(error).replace(f"{ROOT}/", "") == shown.rstrip("\n")


def layout_of(function: Callable[..., Any], shapes: list[list[int]], placements: list[Any]) -> Any:
    """The layout that the rules give a call of one operator on operands in given layouts."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from autosp.layout.axis import Axis
    from autosp.layout.infer import LAYOUT, Source, infer_layouts

    importlib.import_module("autosp.layout.rules")
    gm = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*[torch.zeros(shape) for shape in shapes])
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    sources = {name: Source(placement) for name, placement in zip(names, placements, strict=True)}
    infer_layouts(gm, axis=Axis("sp", 2, 0, "group"), sources=sources)
    (call,) = [node for node in gm.graph.nodes if str(node.target).startswith("demo.")]
    return call.meta[LAYOUT]


def test_the_rules_of_the_example_know_every_dimension() -> None:
    from autosp.layout.placement import PARTIAL, REPLICATE, same_placement, shard_of_dim

    module = example()
    shape = [4, 8, 2, 6]

    def rotated(x: Any, positions: Any) -> Any:
        return layout_of(lambda a, p: module.rotate(a, p, 10.0), [shape, shape[:2]], [x, positions])

    for dim in range(3):
        cut = shard_of_dim(shape, dim)
        assert same_placement(rotated(cut, REPLICATE), cut)
    assert same_placement(rotated(REPLICATE, REPLICATE), REPLICATE)
    with pytest.raises(UnsupportedGraphError, match="mixes the two halves"):
        rotated(shard_of_dim(shape, 3), REPLICATE)
    with pytest.raises(UnsupportedGraphError, match="its positions are sharded"):
        rotated(REPLICATE, shard_of_dim(shape[:2], 1))

    rows = [4, 8, 6]
    summed = [layout_of(module.energy, [rows], [shard_of_dim(rows, dim)]) for dim in range(3)]
    assert same_placement(summed[0], shard_of_dim([4, 6], 0))
    assert same_placement(summed[1], PARTIAL)
    assert same_placement(summed[2], shard_of_dim([4, 6], 1))
    assert same_placement(layout_of(module.energy, [rows], [REPLICATE]), REPLICATE)


def test_an_operator_tagged_as_pointwise_needs_no_rule() -> None:
    from autosp.layout.placement import REPLICATE, same_placement, shard_of_dim

    library = torch.library.Library("demo", "FRAGMENT")
    library.define("twice(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.pointwise,))
    library.impl("twice", lambda x, y: x * 2 + y, "CompositeExplicitAutograd")
    cut = shard_of_dim([4, 8, 6], 1)
    found = layout_of(lambda x, y: torch.ops.demo.twice(x, y), [[4, 8, 6], [6]], [cut, REPLICATE])
    assert same_placement(found, cut)


def test_a_rule_that_promises_wrong_sizes_is_an_internal_error(
    fake_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autosp.layout import registry

    model = example().Model()
    wrong = lambda call: autosp.Strategy(inputs={"x": call["x"].shard}, output=call["x"].shard)  # noqa: E731
    monkeypatch.setitem(registry._RULES, torch.ops.demo.energy.default, wrong)
    fake_ranks(2)
    error = refusal(model)
    assert isinstance(error, InternalError)
    assert str(error).startswith("demo.energy.default: local result (2, 32)")


def test_the_rules_of_the_page_are_those_of_the_example() -> None:
    source = (ROOT / "examples/add_operator_rule.py").read_text(encoding="utf-8")
    rules = [block for block in blocks(ROOT / "docs/add_an_operator_rule.md", "python") if "register_rule" in block]
    assert len(rules) == 2
    assert [block for block in rules if block not in source] == []
