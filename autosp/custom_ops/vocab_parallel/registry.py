"""Registration of the operators in the ``autosp`` namespace.

``torch.library.Library`` and not ``custom_op``: the latter's checks on every call cost more host time than the kernels
take on the device for a batch of ordinary size. What those checks protect is covered by ``opcheck`` in the tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("autosp", "FRAGMENT")


def register(
    schema: str,
    implementation: Callable,
    fake: Callable,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
) -> torch._ops.OpOverload:
    """Define an operator for every device, with its fake and, where given, its autograd formula.

    Args:
        schema: name and signature, as ``torch.library`` writes them.
        implementation: what runs, below autograd.
        fake: shapes and dtypes of the outputs from fake tensors.
        backward, setup_context: as ``torch.library.register_autograd`` takes them.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autosp::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"autosp::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    return getattr(torch.ops.autosp, name).default
