"""``autosp explain``: the compile report of a model, in the terminal, as an HTML page, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autosp.cli.model_spec import MODEL_HELP, check_spec, load_example
from autosp.cli.progress import reporter
from autosp.cli.settings import parse_size, read_json
from autosp.errors import AutoSPError, ConfigError

_HALF = {"bf16": "bfloat16", "fp32": "float32"}


def explain(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=False)] = None,
    sp: Annotated[int, typer.Option("--sp", min=2, help="Ranks that share a sequence.")] = 2,
    seq_len: Annotated[str, typer.Option(help="Tokens a sequence, for the bytes: 4096, 64k, 1M.")] = "4k",
    rows: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Build the model with so many layers. Default: as its configuration says.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="DeepSpeed-style JSON with your settings.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32: of the weights, for the bytes.")] = "bf16",
    html: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page to this file.")] = None,
    passes: Annotated[bool, typer.Option("--passes", help="Print the graph after each pass as well.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """What became of every layer and operator: layouts, communication with its bytes, masks, refusals.

    Compiles the model for one rank without weights, data or GPUs. A model that is refused is compiled once more with
    what is refused gathered, so that the report shows all of it. Exit code 1: the model is refused.
    """
    if dtype not in _HALF:
        raise ConfigError(f"--dtype {dtype}: choose {' or '.join(_HALF)}")
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise ConfigError(f"--html {html}: a file in a folder that exists is expected")
    length = parse_size(seq_len, option="--seq-len")
    check_spec(model, weights=False)
    settings = read_json(Path(config)) if config is not None else {}
    speaks = reporter(not json_output, to_stderr=True)
    with speaks.stage("Importing torch and transformers"):
        import torch

        from autosp.report.text import print_report
    graphs: list[Any] = []
    error = _compile(model, settings, sp, length, rows, layers, getattr(torch, _HALF[dtype]), speaks, graphs)
    reports = [graph.as_dict() for graph in graphs]
    if json_output:
        print(json.dumps({"model": model or "built-in small Llama", "graphs": reports}, indent=1))
    else:
        for number, graph in enumerate(graphs, 1):
            print_report(graph, title=f"graph {number} of {len(graphs)}", passes=passes)
    if html is not None:
        from autosp.report.page import write_page

        write_page(html, graphs, title=f"{model or 'built-in small Llama'} on {sp} ranks, {length} tokens")
        print(f"written: {html}", file=sys.stderr)
    raise typer.Exit(1 if error is not None else 0)


def _compile(
    model: str | None,
    settings: dict[str, Any],
    sp: int,
    length: int,
    rows: int,
    layers: int | None,
    dtype: Any,
    speaks: Any,
    graphs: list[Any],
) -> AutoSPError | None:
    """Compile into `graphs`; return the refusal where there was one."""
    section = dict(settings.get("autosp", {}))
    settings = {**settings, "sequence_parallel_size": sp}
    settings.pop("data_parallel_size", None)
    settings.pop("mesh_param", None)
    refusal: AutoSPError | None = None
    for unsupported in (section.get("unsupported", "error"), "gather"):
        section = {**section, "unsupported": unsupported, "inner_backend": "eager", "verify": "compile"}
        with speaks.stage("Compiling" if refusal is None else "Refused; compiling with what is refused gathered"):
            found, error = _compile_once(model, {**settings, "autosp": section}, sp, length, rows, layers, dtype)
        graphs.extend(found)
        if error is None or refusal is not None:
            break
        refusal = error
    return refusal


def _compile_once(
    model: str | None, settings: dict[str, Any], sp: int, length: int, rows: int, layers: int | None, dtype: Any
) -> tuple[list[Any], AutoSPError | None]:
    import torch

    from autosp.backend import autosp_backend
    from autosp.report.fake_run import fake_ranks, fake_tensors, run_step
    from autosp.report.hook import collect

    with fake_ranks(sp, settings), collect() as graphs, fake_tensors(dtype):
        example = load_example(model, layers=layers, weights=False, rows=rows)
        compiled = torch.compile(example.model, backend=autosp_backend)
        try:
            run_step(example.model, compiled, example.batch(length), backward=False)
        except Exception as error:
            from autosp.cli.worker import exit_code

            cause, _ = exit_code(error)
            if not isinstance(cause, AutoSPError):
                raise
            if not any(graph.refused for graph in graphs):
                raise cause from None
            return graphs, cause
    return graphs, None
