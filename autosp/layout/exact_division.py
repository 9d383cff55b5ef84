"""Sizes that a view has split off a product, written without the division: ``(s * s) // s`` is ``s``."""

from __future__ import annotations

import functools

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv


def undivided(value: torch.SymInt) -> torch.SymInt:
    """``value`` with each floor division that leaves no remainder, whatever its symbols are, carried out."""
    expr = value.node.expr
    reduced = _reduced(expr)
    if reduced == expr:
        return value
    return value.node.shape_env.create_symintnode(reduced, hint=value.node.hint)


@functools.lru_cache(maxsize=4096)
def _reduced(expr: sympy.Expr) -> sympy.Expr:
    return expr.replace(FloorDiv, _divide) if expr.has(FloorDiv) else expr


def _divide(numerator: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """Polynomials with integer coefficients, one of which divides the other, are exact at every integer."""
    quotient = sympy.cancel(numerator / divisor) if divisor.free_symbols else None
    # Fractions are brought together first: s / 2 + 1 has a denominator that sympy.denom does not see.
    exact = quotient is not None and sympy.denom(sympy.together(quotient)) == 1
    return quotient if exact else FloorDiv(numerator, divisor)
