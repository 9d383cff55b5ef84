"""The errors that autosp raises on purpose.

Bad settings and bad inputs are ``ValueError`` (``ConfigError`` for the JSON); a graph that cannot be partitioned
exactly is an ``UnsupportedGraphError``; ranks of a group that disagree raise ``RankMismatchError`` on each of them.
"""

from __future__ import annotations


class AutoSPError(Exception):
    """Base of every error that autosp raises on purpose."""


class ConfigError(AutoSPError, ValueError):
    """A setting of the configuration is unknown, has a wrong value, or contradicts another one."""


class InputError(AutoSPError, ValueError):
    """A tensor or argument handed to a public function has a wrong shape, dtype or value."""


class RankMismatchError(AutoSPError, RuntimeError):
    """Ranks of one process group hold different inputs, code or shapes."""


class UnsupportedGraphError(AutoSPError, RuntimeError):
    """A graph holds something that cannot be partitioned exactly.

    Args:
        reason: what was found and why it cannot be sharded.
        operator: name of the operator or of the pass that refuses.
        location: the line of the user's model, as ``file:line, in function``; empty when the graph carries none.
        remedy: what the user can do about it.
    """

    def __init__(self, reason: str, *, operator: str = "", location: str = "", remedy: str = "") -> None:
        self.reason = reason
        self.operator = operator
        self.location = location
        self.remedy = remedy
        lines = [f"{operator}: {reason}" if operator else reason]
        if location:
            lines.append(f"  at {location}")
        if remedy:
            lines.append(f"  {remedy}")
        super().__init__("\n".join(lines))


class InternalError(AutoSPError, AssertionError):
    """An invariant of autosp itself does not hold: a bug of autosp, never of the model."""


def own_error(error: BaseException) -> AutoSPError | None:
    """The error of ours in a chain of causes, if any: Dynamo wraps what a backend raises."""
    current: BaseException | None = error
    while current is not None and not isinstance(current, AutoSPError):
        current = getattr(current, "inner_exception", None) or current.__cause__
    return current
