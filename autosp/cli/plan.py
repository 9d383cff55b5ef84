from __future__ import annotations
def plan() -> None:
    """x"""
