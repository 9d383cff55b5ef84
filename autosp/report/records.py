"""The data of a compile report: plain records that JSON carries."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

GIVEN = ("input", "parameter", "constant")


@dataclass
class NodeRecord:
    """One value of the whole program, and the operator that makes it."""

    name: str
    label: str
    """The name that the model knows it by: the path of a parameter, the argument of an input; else as `name`."""
    operator: str
    """"aten.linear.default"; "input", "parameter" and "constant" for what the graph is given."""
    layer: str
    """Path of the module ("model.layers.0.self_attn"), or empty."""
    location: str
    """``file:line, in function: code`` of the model."""
    shape: list[str]
    """Whole sizes; symbols where they are open."""
    dtype: str
    bytes: int
    """Of the whole value, at the sizes of the report."""
    layout: str
    """"shard(dim 1, s27)", "replicate", "partial(sum)", or empty for a value that is no tensor."""
    kind: str
    """"sharded", "replicated", "partial" or "number"."""
    note: str
    """What the operator's rule says about how it runs."""
    inputs: list[str]


@dataclass
class CollectiveRecord:
    """One communication of the program of a rank, or an edge that communicates in the backward."""

    name: str
    operator: str
    origin: str
    """Name of the node of the whole program that it serves."""
    layer: str
    location: str
    reason: str
    shape: list[str]
    dtype: str
    forward_bytes: int
    """Bytes that one rank sends a step in the forward, at the sizes of the report."""
    backward_bytes: int
    edges: list[list[str]]
    """Edges of the whole program that it stands on, each [from, to]."""


@dataclass
class MaskRecord:
    """What became of the mask of one attention."""

    attention: str
    layer: str
    became: str
    bytes: int
    """Of the mask tensor on each rank; 0 where there is none."""


@dataclass
class PassRecord:
    """One pass: its graph as text, and how the operators of the graph changed."""

    name: str
    text: str
    operators: dict[str, int]
    """How often each operator stands in the graph."""
    seconds: float


@dataclass
class Gathering:
    """An operator that ran on the whole sequence for want of an exact form on a shard."""

    operator: str
    location: str
    reason: str
    bytes: int


@dataclass
class GraphReport:
    """One compiled graph."""

    ranks: int
    rank: int
    sizes: dict[str, int]
    """The symbols of the sizes and the numbers that the bytes are counted for."""
    nodes: list[NodeRecord] = field(default_factory=list)
    collectives: list[CollectiveRecord] = field(default_factory=list)
    masks: list[MaskRecord] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    """What passes merged or took away, one sentence each."""
    gathered: list[Gathering] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """operator, location, reason and remedy of the refusal that ended the compilation; empty when there was none."""
    passes: list[PassRecord] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON carries it."""
        return asdict(self)

    @property
    def forward_bytes(self) -> int:
        """Bytes that one rank sends in the forward of a step."""
        return sum(item.forward_bytes for item in self.collectives)

    @property
    def backward_bytes(self) -> int:
        """Bytes that one rank sends in the backward of a step."""
        return sum(item.backward_bytes for item in self.collectives)
