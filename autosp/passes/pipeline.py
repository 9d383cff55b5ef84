"""The ordered list of passes from a captured graph to the program of one rank, with one reason a line.

Each entry states what it requires and what it ensures; the order is validated before the first pass runs, so that a
wrong list is an error of this file and never of a user's graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..errors import InternalError
from ..layout import rules  # noqa: F401
from ..layout.axis import Axis
from ..layout.infer import Gathered, Source, infer_layouts
from ..layout.outputs import OutputSpec
from .align_convolutions import align_convolutions_pass
from .express_masks import express_masks_pass, is_expressible
from .functionalize_inplace import functional_form, functionalize_inplace_pass
from .fuse_linear_cross_entropy import fuse_linear_cross_entropy_pass
from .fuse_vocabulary import fuse_vocabulary_pass, has_vocabulary_head
from .localize import localize_graph
from .move_slices_up import move_slices_up_pass
from .peel_repeat_kv import has_grouped_kernel, peel_repeat_kv_pass
from .scatter_views import scatter_views_pass
from .simplify_masks import simplify_masks_pass
from .tile_tokens import tile_tokens_pass
from .verify import collective_list, verify_local_graph_pass


@dataclass
class Work:
    """What the passes share: the graph at hand and what they were told and found."""

    graph: fx.GraphModule
    inputs: Sequence[Any]
    axis: Axis
    sources: Mapping[str, Source]
    parameters: frozenset[str]
    outputs: str
    unsupported: str
    fake_mode: Any
    fuse_linear_cross_entropy: str = "never"
    token_tiles: int = 1
    linear_cross_entropy_memory: str = "auto"
    vocabulary: Axis | None = None
    """The axis of a vocabulary-parallel head; None without one."""
    fuse_vocabulary_head: bool = False
    """Such a head and its loss become one operator, whatever `fuse_linear_cross_entropy` says of other heads."""
    vocabulary_specs: list[OutputSpec] = field(default_factory=list)
    local_inputs: Sequence[Any] = ()
    specs: list[OutputSpec] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    annotated: fx.GraphModule | None = None
    """The whole program with its layouts, which ``localize`` turns into the program of one rank."""
    localized: fx.GraphModule | None = None
    """The program of one rank of the sequence group, before a second axis is followed."""
    observe: Callable[[str, Work], None] = lambda name, work: None
    """Told "captured" before the first pass and the name of each pass after it; must not change a thing."""


@dataclass(frozen=True)
class Pass:
    """One entry of the pipeline."""

    name: str
    run: Callable[[Work], None]
    requires: frozenset[str]
    ensures: frozenset[str]
    reason: str


def _functionalize(work: Work) -> None:
    work.graph = functionalize_inplace_pass(work.graph)


def _scatter_views(work: Work) -> None:
    work.graph = scatter_views_pass(work.graph, functional_form=functional_form)


def _simplify_masks(work: Work) -> None:
    work.graph = simplify_masks_pass(work.graph)


def _peel_repeat_kv(work: Work) -> None:
    if work.axis.size > 1:
        work.graph = peel_repeat_kv_pass(work.graph)
        return
    # Nothing travels: what is gained is their memory, unless torch has no kernel for them but the plain one.
    where = lambda node: has_grouped_kernel(node) or is_expressible(node)  # noqa: E731
    work.graph = peel_repeat_kv_pass(work.graph, where=where)


def _express_masks(work: Work) -> None:
    work.graph = express_masks_pass(work.graph, fake_mode=work.fake_mode)


def _align_convolutions(work: Work) -> None:
    work.graph = align_convolutions_pass(work.graph)


def _fuse_linear_cross_entropy(work: Work) -> None:
    work.graph = fuse_linear_cross_entropy_pass(
        work.graph,
        mode=work.fuse_linear_cross_entropy,
        fake_mode=work.fake_mode,
        memory=work.linear_cross_entropy_memory,
        vocabulary_mode="always" if work.fuse_vocabulary_head else None,
    )


def _infer(work: Work) -> None:
    if work.axis.size == 1:
        return
    work.gathered = infer_layouts(work.graph, axis=work.axis, sources=work.sources, unsupported=work.unsupported)


def _move_slices_up(work: Work) -> None:
    if work.axis.size == 1:
        return
    work.graph = move_slices_up_pass(work.graph)


def _tile_tokens(work: Work) -> None:
    if work.axis.size == 1:
        return
    work.graph = tile_tokens_pass(work.graph, tiles=work.token_tiles)


def _localize(work: Work) -> None:
    work.annotated = work.graph
    if work.axis.size == 1:
        work.specs = [OutputSpec() for _ in work.graph.graph.output_node().args[0]]
        work.localized = work.graph
        return
    work.graph, work.specs = localize_graph(
        work.graph,
        work.local_inputs,
        axis=work.axis,
        parameters=work.parameters,
        outputs=work.outputs,
        fake_mode=work.fake_mode,
    )
    work.localized = work.graph


def _fuse_vocabulary(work: Work) -> None:
    if work.vocabulary is not None:
        work.graph = fuse_vocabulary_pass(work.graph, fake_mode=work.fake_mode)


def _infer_vocabulary(work: Work) -> None:
    if work.vocabulary is not None and has_vocabulary_head(work.graph):
        gathered = infer_layouts(work.graph, axis=work.vocabulary, sources={}, unsupported=work.unsupported)
        work.gathered = [*work.gathered, *gathered]


def _localize_vocabulary(work: Work) -> None:
    if work.vocabulary is not None and has_vocabulary_head(work.graph):
        work.graph, work.vocabulary_specs = localize_graph(
            work.graph,
            work.local_inputs,
            axis=work.vocabulary,
            parameters=frozenset(),
            outputs=work.outputs,
            fake_mode=work.fake_mode,
        )


def _verify(work: Work) -> None:
    work.graph = verify_local_graph_pass(work.graph, axis=work.axis, vocabulary=work.vocabulary)
    work.collectives = collective_list(work.graph)


def _pass(name: str, run: Callable[[Work], None], requires: Sequence[str], ensures: Sequence[str], reason: str) -> Pass:
    return Pass(name, run, frozenset(requires), frozenset(ensures), reason)


PIPELINE: tuple[Pass, ...] = (
    _pass(
        "scatter_views",
        _scatter_views,
        ["captured"],
        ["captured"],
        "a write through a view is a value replaced in part",
    ),
    _pass("functionalize_inplace", _functionalize, ["captured"], ["functional"], "rules see values, not storage"),
    _pass("simplify_masks", _simplify_masks, ["functional"], ["simple"], "a causal mask needs no S x S tensor"),
    _pass("peel_repeat_kv", _peel_repeat_kv, ["functional"], ["simple"], "repeated heads need not travel"),
    _pass("express_masks", _express_masks, ["functional", "simple"], ["simple"], "no mask needs an S x S tensor"),
    _pass(
        "align_convolutions",
        _align_convolutions,
        ["functional"],
        ["simple"],
        "a convolution whose every token keeps its place needs its neighbours' rows only",
    ),
    _pass(
        "fuse_linear_cross_entropy",
        _fuse_linear_cross_entropy,
        ["functional"],
        ["simple"],
        "the logits are the largest activation of a step",
    ),
    _pass(
        "infer_layouts", _infer, ["functional"], ["layouts"], "every value gets its layout, every refusal comes here"
    ),
    _pass(
        "move_slices_up",
        _move_slices_up,
        ["layouts"],
        ["sliced"],
        "whole values used by shards only are made as shards",
    ),
    _pass("tile_tokens", _tile_tokens, ["layouts"], ["tiled"], "an MLP's wide values need not exist for all tokens"),
    _pass("localize", _localize, ["layouts"], ["local"], "the program of one rank, collectives included"),
    _pass(
        "fuse_vocabulary",
        _fuse_vocabulary,
        ["local"],
        ["fused"],
        "written-out formulas over a sharded vocabulary read its logits once",
    ),
    _pass(
        "infer_vocabulary",
        _infer_vocabulary,
        ["local", "fused"],
        ["vocabulary_layouts"],
        "the second axis: the same inference on the program of one rank, from its LM head on",
    ),
    _pass(
        "localize_vocabulary",
        _localize_vocabulary,
        ["vocabulary_layouts"],
        ["vocabulary_local"],
        "this rank's part of the vocabulary, collectives included",
    ),
    _pass(
        "verify", _verify, ["vocabulary_local"], ["verified"], "what a wrong rule would break is checked before it runs"
    ),
)

_WITHOUT_LAYOUTS = (
    "scatter_views",
    "functionalize_inplace",
    "simplify_masks",
    "peel_repeat_kv",
    "express_masks",
    "fuse_linear_cross_entropy",
)
ALONE: tuple[Pass, ...] = tuple(entry for entry in PIPELINE if entry.name in _WITHOUT_LAYOUTS)
"""What a rank without a sequence group runs: the tokens are whole, so nothing needs a layout."""


def check_order(passes: Sequence[Pass], start: Sequence[str] = ("captured",)) -> None:
    """Raise InternalError when a pass requires what no earlier pass ensures."""
    have = set(start)
    for entry in passes:
        missing = entry.requires - have
        if missing:
            raise InternalError(f"pass {entry.name} requires {sorted(missing)}, which no earlier pass ensures")
        have |= entry.ensures


def run_pipeline(work: Work, passes: Sequence[Pass] = PIPELINE) -> Work:
    """Run the passes in order on ``work``; each one's seconds are kept."""
    check_order(passes)
    work.observe("captured", work)
    for entry in passes:
        start = time.perf_counter()
        entry.run(work)
        work.graph.graph.lint()
        work.seconds[entry.name] = time.perf_counter() - start
        work.observe(entry.name, work)
    return work
