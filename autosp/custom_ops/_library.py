"""Registration of autosp's operators: one node each before dispatch, functional collectives below autograd.

Each operator gets a schema, a fake, a plain implementation and an Autograd-key implementation. Before dispatch the
operator is a single node of the graph; once autograd is traced its Autograd-key implementation runs and what remains
are functional collectives, which Inductor can reorder and overlap. No node of the final graph is opaque.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("autosp", "DEF")


def define(schema: str, *, forward: Callable[..., Any], fake: Callable[..., Any], autograd: Callable[..., Any]) -> Any:
    """Define ``autosp::<schema>`` and return its overload.

    Args:
        schema: the schema without the namespace.
        forward: computes the result without autograd.
        fake: gives the result's shape and dtype.
        autograd: computes the result with autograd.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    LIBRARY.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"autosp::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.autosp, name).default


def process_group(group: str) -> Any:
    """The process group of a name, as functional collectives themselves resolve it."""
    return torch.distributed.distributed_c10d._resolve_process_group(group)


def group_size(group: str) -> int:
    """Number of ranks of a group given by name."""
    return torch.distributed.distributed_c10d._resolve_process_group(group).size()


def group_rank(group: str) -> int:
    """This process's place in a group given by name."""
    return torch.distributed.distributed_c10d._resolve_process_group(group).rank()
