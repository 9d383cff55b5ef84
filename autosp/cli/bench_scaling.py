"""``autosp.plan.scaling``: what a rank of a large group sends a step, counted without a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autosp.cli.progress import reporter
from autosp.cli.settings import parse_size
from autosp.errors import ConfigError

_STRATEGIES = ("ulysses", "ring", "allgather_kv")


def scaling(
    ranks: Annotated[str, typer.Option(help="Sizes of the group, comma-separated.")] = "8,16,32,64",
    strong: Annotated[str, typer.Option(help="Tokens of the whole sequence, for strong scaling.")] = "256k",
    weak: Annotated[str, typer.Option(help="Tokens a rank, for weak scaling.")] = "8k",
    attention: Annotated[
        list[str] | None,
        typer.Option(help="ulysses, ring or allgather_kv; may be repeated. Default: all.", show_default=False),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 64,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads; they divide the query heads.")] = 64,
    head_dim: Annotated[int, typer.Option(min=2, help="Size of a head.")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the counts to this file.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw bytes against ranks at a fixed length here (.png, .svg, .pdf).")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Bytes and messages of one rank a step in groups of many ranks, beside the closed form. Needs no GPU.

    Compiles a Llama of two layers for a rank of each group and counts the communication of its program.
    """
    from autosp.cli.bench import check_target

    check_target(json_file, "--json")
    check_target(picture, "--picture", (".png", ".svg", ".pdf"))
    strategies = attention or list(_STRATEGIES)
    for name in strategies:
        if name not in _STRATEGIES:
            raise ConfigError(f"--attention {name}: choose of {', '.join(_STRATEGIES)}")
    sizes = sorted({parse_size(part, option="--ranks", unit="ranks") for part in ranks.split(",")})
    fixed, each = parse_size(strong, option="--strong"), parse_size(weak, option="--weak")
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads}: a multiple of --kv-heads {kv_heads} is expected")
    for size in sizes:
        if size < 2 or fixed % size:
            raise ConfigError(
                f"--ranks {size}: the closed form is for groups of at least 2 whose size divides --strong ({fixed})"
            )
    speaks = reporter(True, to_stderr=True)
    with speaks.stage("Importing torch and transformers"):
        from autosp.plan import scaling as counting
    shape = counting.Shape(heads, kv_heads, head_dim)
    rows = []
    for name in strategies:
        for size in sizes:
            with speaks.stage(f"Compiling {name} for {size} ranks"):
                rows += counting.run([size], strong=fixed, weak=each, strategies=[name], shape=shape)
    print(counting.table(rows))
    if json_file is not None:
        content = {"shape": asdict(shape), "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"written: {json_file}", file=sys.stderr)
    if picture is not None:
        counting.draw(rows, fixed, picture)
        print(f"written: {picture}", file=sys.stderr)
