"""How steps of a program are written in Triton, and how their derivatives are.

Values of 16-bit dtypes are held in fp32 and rounded after every step, as torch rounds them. Integers stay 64 bits wide
where torch's are, unless their range is known to fit 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..tile_program import Unsupported

_NAMES = {torch.int32: "tl.int32", torch.int64: "tl.int64", torch.float32: "tl.float32"}
HALF = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
Range = tuple[int, int] | None


@dataclass(frozen=True)
class Value:
    """Source text of a value: a name, or a literal (then ``literal`` holds it).

    Args:
        text: the expression.
        dtype: torch's dtype; None for a literal.
        range: smallest and largest value of an integer, where known.
        narrow: an int64 that is held in 32 bits.
        rank: 0 for a tensor of no dimensions.
    """

    text: str
    dtype: torch.dtype | None
    range: Range = None
    narrow: bool = False
    literal: Any = None
    rank: int = 1


def literal(value: Any) -> Value:
    """A bool, integer or float as it stands in a program."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Value(repr(value), None, literal=value)
    if isinstance(value, int):
        return Value(repr(value), None, (value, value), literal=value)
    return Value(_float(value), None, literal=value)


def _float(value: float) -> str:
    """A float as fp32 holds it."""
    if math.isnan(value) or math.isinf(value):
        return f'float("{value}")'
    single = float(torch.tensor(value, dtype=torch.float32))
    if math.isinf(single):
        return f'float("{single}")'
    if single and abs(single) < 2.0**-126:
        raise Unsupported(f"the number {value}, too small for fp32")
    return repr(single)


def fits(span: Range) -> bool:
    return span is not None and span[0] >= -(2**31) and span[1] < 2**31


def cast(x: Value, dtype: torch.dtype, narrow: bool = False) -> str:
    """``x`` in another dtype; an int64 result is held in 32 bits where ``narrow`` says so."""
    if x.dtype is None:
        value = x.literal
        if dtype == torch.bool:
            return repr(bool(value))
        if dtype.is_floating_point:
            return _float(float(value))
        if not isinstance(value, int):
            raise Unsupported(f"{value} among integers")
        return repr(int(value))
    if dtype == torch.bool:
        return x.text if x.dtype == torch.bool else f"({x.text} != 0)"
    held = "tl.int32" if narrow else _NAMES.get(dtype, "tl.float32")
    have = "tl.int32" if x.narrow else _NAMES.get(x.dtype, "tl.float32")
    same = held == have and x.dtype != torch.bool
    text = x.text if same else f"{x.text}.to({held})"
    return f"{text}.to({HALF[dtype]}).to(tl.float32)" if dtype in HALF and x.dtype != dtype else text


def common(a: Value, b: Value) -> torch.dtype:
    """The dtype in which torch compares two values."""
    both = [x.literal if x.dtype is None else torch.empty([1] * x.rank, dtype=x.dtype, device="meta") for x in (a, b)]
    return torch.result_type(*both)


def _comparison(symbol: str) -> Callable[..., str]:
    def write(dtype: torch.dtype, narrow: bool, a: Value, b: Value) -> str:
        both = common(a, b)
        if both == torch.bool:
            both = torch.int32
        if both in HALF and None in (a.dtype, b.dtype):
            raise Unsupported(f"a comparison of {both} with a number")
        small = both == torch.int64 and all(fits(x.range) for x in (a, b))
        return f"({cast(a, both, small)} {symbol} {cast(b, both, small)})"

    return write


def _arithmetic(symbol: str) -> Callable[..., str]:
    def write(dtype: torch.dtype, narrow: bool, a: Value, b: Value) -> str:
        if dtype == torch.bool:
            if symbol == "-":
                raise Unsupported("a difference of booleans")
            return f"({cast(a, dtype)} {'|' if symbol == '+' else '&'} {cast(b, dtype)})"
        return f"({cast(a, dtype, narrow)} {symbol} {cast(b, dtype, narrow)})"

    return write


def _bitwise(symbol: str) -> Callable[..., str]:
    return lambda dtype, narrow, a, b: f"({cast(a, dtype, narrow)} {symbol} {cast(b, dtype, narrow)})"


def _logical(symbol: str) -> Callable[..., str]:
    return lambda dtype, narrow, a, b: f"({cast(a, torch.bool)} {symbol} {cast(b, torch.bool)})"


def _not(dtype: torch.dtype, narrow: bool, x: Value) -> str:
    return f"({x.text} == 0)" if dtype == torch.bool else f"(-1 - {cast(x, dtype, narrow)})"


def _real(template: str) -> Callable[..., str]:
    """A function of one real number, computed in fp32."""

    def write(dtype: torch.dtype, narrow: bool, x: Value) -> str:
        return template.format(cast(x, torch.float32))

    return write


def _divide(dtype: torch.dtype, narrow: bool, a: Value, b: Value, *more: Any) -> str:
    if not dtype.is_floating_point:
        raise Unsupported("a division that rounds")
    return f"({cast(a, dtype)} / {cast(b, dtype)})"


def _floor_divide(dtype: torch.dtype, narrow: bool, a: Value, b: Value) -> str:
    if dtype not in (torch.int32, torch.int64):
        raise Unsupported(f"floor_divide in {dtype}")
    left, right = cast(a, dtype, narrow), cast(b, dtype, narrow)
    if a.range is not None and a.range[0] >= 0 and b.range is not None and b.range[0] > 0:
        return f"({left} // {right})"
    return f"_floor_divide({left}, {right})"


def _where(dtype: torch.dtype, narrow: bool, condition: Value, a: Value, b: Value) -> str:
    return f"tl.where({cast(condition, torch.bool)}, {cast(a, dtype, narrow)}, {cast(b, dtype, narrow)})"


def _extreme(symbol: str) -> Callable[..., str]:
    """NaN wins, as in torch."""

    def write(dtype: torch.dtype, narrow: bool, a: Value, b: Value) -> str:
        left, right = cast(a, dtype, narrow), cast(b, dtype, narrow)
        chosen = f"({left} {symbol} {right})"
        if dtype.is_floating_point and a.dtype is not None:
            chosen = f"({chosen} | ({left} != {left}))"
        return f"tl.where({chosen}, {left}, {right})"

    return write


def _clamp(dtype: torch.dtype, narrow: bool, x: Value, low: Value | None = None, high: Value | None = None) -> str:
    text = cast(x, dtype, narrow)
    for bound, symbol in ((low, ">"), (high, "<")):
        if bound is not None:
            if bound.literal is None:
                raise Unsupported("clamp to bounds that are tensors")
            limit = cast(bound, dtype, narrow)
            keep = f"({text} {symbol} {limit})"
            keep = f"({keep} | ({text} != {text}))" if dtype.is_floating_point else keep
            text = f"tl.where({keep}, {text}, {limit})"
    return text


def _power(dtype: torch.dtype, narrow: bool, x: Value, exponent: Value) -> str:
    text = cast(x, dtype, narrow)
    if exponent.literal == 2:
        return f"({text} * {text})"
    raise Unsupported(f"a power of {exponent.literal}")


def _filled(value: float) -> Callable[..., str]:
    def write(dtype: torch.dtype, narrow: bool, x: Value, *more: Any) -> str:
        if dtype == torch.bool:
            return f"(tl.zeros_like({x.text}) {'==' if value else '!='} 0)"
        return f"(tl.zeros_like({cast(x, dtype, narrow)}) + {cast(literal(value), dtype)})"

    return write


def _identity(dtype: torch.dtype, narrow: bool, x: Value, *more: Any) -> str:
    return cast(x, dtype, narrow)


WRITERS: dict[str, Callable[..., str]] = {
    **{name: _comparison(sign) for name, sign in
       (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))},
    **{name: _arithmetic(sign) for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"))},
    **{name: _bitwise(sign) for name, sign in
       (("bitwise_and", "&"), ("__and__", "&"), ("bitwise_or", "|"), ("__or__", "|"), ("bitwise_xor", "^"),
        ("__xor__", "^"))},
    **{name: _logical(sign) for name, sign in (("logical_and", "&"), ("logical_or", "|"), ("logical_xor", "^"))},
    "rsub": lambda dtype, narrow, a, b: _arithmetic("-")(dtype, narrow, b, a),
    "bitwise_not": _not, "logical_not": lambda dtype, narrow, x: f"({x.text} == 0)",
    "neg": lambda dtype, narrow, x: f"(0 - {cast(x, dtype, narrow)})" if not dtype.is_floating_point
    else f"({cast(x, dtype)} * -1.0)",
    "abs": lambda dtype, narrow, x: f"tl.abs({cast(x, dtype, narrow)})",
    "exp": _real("tl.exp({})"), "log": _real("tl.log({})"), "sqrt": _real("tl.sqrt({})"), "tanh": _real("_tanh({})"),
    "sigmoid": _real("(1.0 / (1.0 + tl.exp({} * -1.0)))"), "reciprocal": _real("(1.0 / {})"),
    "div": _divide, "true_divide": _divide, "floor_divide": _floor_divide, "where": _where,
    "masked_fill": lambda dtype, narrow, x, hidden, value: _where(dtype, narrow, hidden, value, x),
    "minimum": _extreme("<"), "maximum": _extreme(">"), "clamp": _clamp, "pow": _power,
    "zeros_like": _filled(0), "ones_like": _filled(1), "to": _identity,
}  # fmt: skip


def range_of(name: str, args: list[Any]) -> Range:
    """The range of an integer result, where it follows from those of the operands."""
    spans = [x.range for x in args if isinstance(x, Value)]
    if not spans or any(span is None for span in spans):
        return None
    (a, b), (c, d) = spans[0], spans[1] if len(spans) > 1 else spans[0]
    if name == "add":
        return a + c, b + d
    if name in ("sub", "rsub"):
        return (a - d, b - c) if name == "sub" else (c - b, d - a)
    if name == "mul":
        return min(a * c, a * d, b * c, b * d), max(a * c, a * d, b * c, b * d)
    if name == "neg":
        return -b, -a
    if name == "abs":
        return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))
    if name == "floor_divide" and c > 0:
        return min(a // c, a // d), max(b // c, b // d)
    return None


# Name -> for each operand the factor of the upstream gradient, from the operands' and the result's texts in fp32; None
# where nothing flows. An operator that is not here has no derivative that a kernel could compute.
DERIVATIVES: dict[str, Callable[..., list[str | None]]] = {
    "add": lambda y, a, b: ["", ""],
    "sub": lambda y, a, b: ["", "* -1.0"],
    "rsub": lambda y, a, b: ["* -1.0", ""],
    "mul": lambda y, a, b: [f"* {b}", f"* {a}"],
    "div": lambda y, a, b: [f"/ {b}", f"* (-1.0 * {y}) / {b}"],
    "neg": lambda y, a: ["* -1.0"],
    "abs": lambda y, a: [f"* tl.where({a} > 0, 1.0, tl.where({a} < 0, -1.0, 0.0))"],
    "exp": lambda y, a: [f"* {y}"],
    "log": lambda y, a: [f"/ {a}"],
    "sqrt": lambda y, a: [f"/ (2.0 * {y})"],
    "tanh": lambda y, a: [f"* (1.0 - {y} * {y})"],
    "sigmoid": lambda y, a: [f"* {y} * (1.0 - {y})"],
    "reciprocal": lambda y, a: [f"* (-1.0 * {y}) * {y}"],
    "pow": lambda y, a, b: [f"* (2.0 * {a})", None],
    "to": lambda y, a, *more: ["", *(None for _ in more)],
}


def selected(name: str, args: list[Value]) -> list[tuple[int, str]] | None:
    """For operators that hand one of their operands on: ``(operand, condition under which it is)``; None for others."""
    texts = [cast(x, torch.float32) if x.dtype != torch.bool else x.text for x in args if x is not None]
    if name == "where":
        return [(1, texts[0]), (2, f"({texts[0]} == 0)")]
    if name == "masked_fill":
        return [(0, f"({texts[1]} == 0)")]
    if name in ("zeros_like", "ones_like"):
        return []
    if name == "clamp":
        bounds = [(x, sign) for x, sign in zip(args[1:], (">=", "<="), strict=False) if x is not None]
        inside = [f"({texts[0]} {sign} {cast(x, torch.float32)})" for x, sign in bounds]
        return [(0, " & ".join(inside) or f"({texts[0]} == {texts[0]})")]
    return None
