"""From text files to one flat file of token ids that every rank maps into memory."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from autosp.errors import InputError

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
_SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
# third-party packages differ from machine to machine, and test data holds files that are broken on purpose
_SKIPPED_IN_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "lib2to3"}


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    @property
    def name(self) -> str:
        """What it is called in the description of the tokens."""

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each document, its end mark included."""


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte, then `end_id` after each document where there is one."""

    vocab_size: int
    end_id: int | None
    name: str = "bytes"

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Return the bytes of each document as ids 0 to 255, its end mark included."""
        end = np.array([] if self.end_id is None else [self.end_id], dtype=np.uint32)
        return [np.concatenate([np.frombuffer(text, dtype=np.uint8).astype(np.uint32), end]) for text in documents]


@dataclass(frozen=True)
class PretrainedTokenizer:
    """A transformers tokenizer; text that is not UTF-8 is read with replacement characters."""

    tokenizer: Any
    vocab_size: int
    name: str

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each document, the tokenizer's end-of-sequence id included where it has one."""
        texts = [text.decode("utf-8", errors="replace") for text in documents]
        # verbose=False: a document longer than the model's context is cut into windows later, so no warning is due
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return [np.array(ids if end is None else [*ids, end], dtype=np.uint32) for ids in encoded]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Return the text files that `patterns` (files, folders, globs) name, sorted, each once.

    With no pattern these are the source files of the running Python's standard library.

    Raises:
        InputError: a pattern matches nothing, or names a file of a kind that is not read.
    """
    if not patterns:
        return _standard_library_files()
    found: dict[Path, None] = {}
    for pattern in patterns:
        for path in _expand(pattern):
            found[path.resolve()] = None
    return sorted(found)


def _expand(pattern: str) -> list[Path]:
    names = [pattern] if os.path.exists(pattern) else sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    if not names:
        raise InputError(f"--data {pattern}: there is no such file or folder, and as a glob it matches nothing")
    files: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            files += _files_below(path, _SKIPPED_FOLDERS)
        elif path.suffix in SUFFIXES:
            files.append(path)
        elif len(names) == 1:
            raise InputError(f"--data {name}: {path.suffix or 'a file without suffix'} is not read; use {_suffixes()}")
    if not files:
        raise InputError(f"--data {pattern}: it holds no {_suffixes()} file")
    return files


def _suffixes() -> str:
    return ", ".join(SUFFIXES[:-1]) + " or " + SUFFIXES[-1]


def _files_below(folder: Path, skipped: set[str], suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    files = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        files += [Path(root, name) for name in sorted(names) if name.endswith(suffixes) and not name.startswith(".")]
    return files


def _standard_library_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = _files_below(folder, _SKIPPED_FOLDERS | _SKIPPED_IN_STANDARD_LIBRARY, (".py",))
    if not files:
        raise InputError(f"the standard library in {folder} has no .py files to train on: give text with --data")
    return sorted(files)


def read_documents(path: Path) -> Iterator[bytes]:
    """Yield the documents of a file: the file itself, or for .jsonl the "text" of each line.

    Raises:
        InputError: the file cannot be read, or a .jsonl line is no object with a "text" string.
    """
    try:
        if path.suffix != ".jsonl":
            yield path.read_bytes()
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, f"{path}:{number}")
    except OSError as error:
        raise InputError(f"--data {path} cannot be read: {error.strerror}") from None


def _text_of(line: bytes, where: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON: {error}") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{where} has no "text" string: each line must be an object such as {{"text": "..."}}')
    return text.encode("utf-8", errors="replace")


def build_tokens(
    files: Sequence[Path], tokenizer: Tokenizer, folder: Path, report: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Tokenize `files` into ``folder/tokens.bin`` and describe it in ``folder/tokens.json``.

    Both appear whole or not at all: the description is renamed into place last.

    Args:
        files: the text files, in the order in which they are to be laid out.
        tokenizer: gives ids below its ``vocab_size``.
        folder: where to write; made when missing.
        report: called now and then with how far it is.

    Returns:
        The description: ``dtype``, ``count``, ``digest`` (of the ids), ``files``, ``tokenizer``.

    Raises:
        InputError: a file cannot be read, or there is no text in any of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    digest, count = hashlib.sha256(), 0
    temporary = folder / ".tokens.bin.tmp"
    with temporary.open("wb") as out:
        for batch, files_done in _batches(files):
            for ids in tokenizer.encode(batch):
                data = ids.astype(dtype).tobytes()
                digest.update(data)
                out.write(data)
                count += len(ids)
            report(f"{files_done} of {len(files)} files, {count:,} tokens")
        out.flush()
        os.fsync(out.fileno())
    if count == 0:
        temporary.unlink()
        raise InputError(f"--data: the {len(files)} files hold no text")
    temporary.replace(folder / "tokens.bin")
    described = {
        "dtype": dtype.str,
        "count": count,
        "digest": digest.hexdigest(),
        "files": len(files),
        "tokenizer": tokenizer.name,
    }
    note = folder / ".tokens.json.tmp"
    note.write_text(json.dumps(described, indent=2) + "\n")
    note.replace(folder / "tokens.json")
    return described


def _batches(files: Sequence[Path], size: int = 1 << 20) -> Iterator[tuple[list[bytes], int]]:
    """Group documents to about `size` bytes, so that a fast tokenizer works in parallel and progress is smooth."""
    batch: list[bytes] = []
    held = 0
    for number, path in enumerate(files, 1):
        for text in read_documents(path):
            if text:
                batch.append(text)
                held += len(text)
            if held >= size:
                yield batch, number
                batch, held = [], 0
    if batch:
        yield batch, len(files)


def open_tokens(folder: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Map ``folder/tokens.bin`` into memory.

    Returns:
        The ids (one dimension, unsigned) and their description.

    Raises:
        InputError: the folder holds no complete set of tokens.
    """
    try:
        described = json.loads((folder / "tokens.json").read_text())
        tokens = np.memmap(folder / "tokens.bin", dtype=np.dtype(described["dtype"]), mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"the tokens in {folder} cannot be read ({error}): start the run anew") from None
    if len(tokens) != described["count"]:
        raise InputError(f"{folder}/tokens.bin has {len(tokens)} tokens, {described['count']} were written: start anew")
    return tokens, described
