"""The line of the user's model that a graph node comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def user_location(node: fx.Node | Mapping[str, Any]) -> str:
    """``file:line, in function: code`` of the innermost frame that made the node; empty when the graph carries none."""
    meta = node.meta if isinstance(node, fx.Node) else node
    lines = (meta.get("stack_trace") or "").strip().splitlines()
    for index in reversed(range(len(lines))):
        match = _FRAME.search(lines[index])
        if match:
            code = lines[index + 1].strip() if index + 1 < len(lines) else ""
            where = f"{match.group(1)}:{match.group(2)}, in {match.group(3).strip()}"
            return f"{where}: {code}" if code else where
    return ""
