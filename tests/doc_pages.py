"""Blocks of the documentation's pages, and the comment that says of one why it is not run.

`<!-- not run: reason -->` on the line before a block keeps it from being run. Readers do not see it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_MARKER = r"(?:^<!-- not run: (?P<reason>[^\n]*?) -->\n\n?)?"
_FENCED = re.compile(_MARKER + r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
_INDENTED = re.compile(_MARKER + r"(?<=\n\n)(?P<text>(?: {4}[^\n]+\n)+)", re.M)
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:autosp|torchrun|make|python|pytest) ")


@dataclass(frozen=True)
class Block:
    """A block of a page: its info string, what stands in it, and why it is not run, or empty."""

    page: str
    info: str
    text: str
    reason: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, where the block is one of commands: all its lines are."""
        lines = [line.strip() for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        if self.info or not lines or not all(_COMMAND.match(line) for line in lines):
            return []
        return [shlex.split(line, comments=True) for line in lines]


def page_name(page: Path) -> str:
    """As pages are named here: ``docs/tools.md``."""
    return page.relative_to(ROOT).as_posix()


def blocks_in(text: str, page: str = "") -> list[Block]:
    """Fenced blocks, and indented ones outside them, in the order of their kinds."""
    found = [Block(page, m["info"], m["text"], m["reason"] or "") for m in _FENCED.finditer(text)]
    rest = _FENCED.sub("", text)
    return found + [Block(page, "", m["text"], m["reason"] or "") for m in _INDENTED.finditer(rest)]


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page in the repository."""
    return blocks_in((ROOT / page).read_text(encoding="utf-8"), page)


def python_blocks(page: str) -> list[Block]:
    """The Python blocks of a page in their order."""
    return [block for block in blocks_of(page) if block.info == "python"]


def all_blocks() -> list[Block]:
    """The blocks of every page."""
    return [block for page in PAGES for block in blocks_of(page_name(page))]


def markers() -> list[tuple[str, str]]:
    """Page and text of everything that looks like a marker, whether it stands before a block or not."""
    found = [(page_name(p), re.findall(r"<!--\s*(.*?)-->", p.read_text(encoding="utf-8"), re.S)) for p in PAGES]
    return [(page, text.strip()) for page, texts in found for text in texts if "run" in text]
