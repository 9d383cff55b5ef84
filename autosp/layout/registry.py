"""The table of operator rules, and the public way to add one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .call import OpCall, Strategy

Rule = Callable[[OpCall], Strategy]

_RULES: dict[Any, Rule] = {}
_AXIS_RULES: dict[tuple[Any, str], Rule] = {}
_SEEDS: set[Any] = set()


def register_rule(*targets: Any, seeds: bool = False, axis: str | None = None) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of operators.

    Args:
        targets: operator overloads (``torch.ops.aten.mul.Tensor``) or packets (every overload of it).
        seeds: the operator starts sharded computation: when its operands are replicated but known to run over tokens,
            it is computed on this rank's tokens.
        axis: the only mesh axis that the rule is for, where it comes before the operator's general rule.

    Returns:
        A decorator that leaves the rule as it is. A rule takes an ``OpCall`` and returns a ``Strategy``, or raises
        ``Refusal`` when the layouts at hand cannot be kept exactly.
    """

    def decorate(rule: Rule) -> Rule:
        # Whichever is imported first, a rule of the package never replaces one that a user registered.
        is_own = _is_own(rule)
        for overload in _overloads(targets):
            if axis is not None:
                _AXIS_RULES[overload, axis] = rule
                continue
            if is_own and overload in _RULES and not _is_own(_RULES[overload]):
                continue
            _RULES[overload] = rule
            (_SEEDS.add if seeds else _SEEDS.discard)(overload)
        return rule

    return decorate


def _is_own(rule: Rule) -> bool:
    return rule.__module__.startswith(__name__.rpartition(".")[0])


def find_rule(target: Any, axis: str | None = None) -> Rule | None:
    """The rule of an operator overload on a mesh axis, or None."""
    if (target, axis) in _AXIS_RULES:
        return _AXIS_RULES[target, axis]
    if target in _RULES:
        return _RULES[target]
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if torch.Tag.pointwise in target.tags:
        return _RULES.get("pointwise")
    return None


def is_seed(target: Any) -> bool:
    """Whether the operator starts sharded computation."""
    return target in _SEEDS


def register_pointwise_rule(rule: Rule) -> Rule:
    """Register the rule of every operator that torch itself tags as pointwise."""
    _RULES["pointwise"] = rule
    return rule


def _overloads(targets: Iterable[Any]) -> Iterable[Any]:
    for target in targets:
        if isinstance(target, torch._ops.OpOverloadPacket):
            for name in target.overloads():
                yield getattr(target, name)
        else:
            yield target
