"""The ``autosp`` command: one typer application, one file a subcommand.

Whatever the user can mend (a wrong option, a missing file, a setting that contradicts another) ends with exit code 2
and one line that says what to do; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer

from autosp.cli import bench, check, env, explain, plan, train
from autosp.errors import AutoSPError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="autosp",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Sequence parallelism for unmodified PyTorch models.",
)

app.command("train", epilog="Example: autosp train --data notes.md --seq-len 4k")(train.train)
app.command("check", epilog="Example: autosp check path/to/config.json --lengths 64,65")(check.check)
app.command("explain", epilog="Example: autosp explain path/to/config.json --sp 4 --html report.html")(explain.explain)
app.command(
    "plan", epilog="Example: autosp plan path/to/config.json --gpus 8 --memory 80GiB --seq-len 1M --picture plan.png"
)(plan.plan)
app.command("env", epilog="Example: autosp env --json")(env.env)
app.add_typer(bench.app, name="bench")


def one_line(error: BaseException) -> str:
    """Return the message of `error` as one line, or its type when it carries no message."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        argv: arguments without the program's name; ``None`` takes ``sys.argv``.

    Raises:
        SystemExit: always; 0 done, 1 a rank failed or a check found a difference, 2 a
            mistake that the user can mend, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="autosp", standalone_mode=False)
    except AutoSPError as error:
        code = _fail(error, one_line(error), debug)
    except KeyboardInterrupt:
        print("autosp: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except Exception as error:
        # click's own usage errors; recognised by what they carry, since typer may bring its own copy of click
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            raise SystemExit(0) from None
        name = getattr(getattr(error, "ctx", None), "command_path", None) or "autosp"
        code = _fail(error, f"{' '.join(error.format_message().split())} (see {name} --help)", debug)
    raise SystemExit(code or 0)


def _fail(error: BaseException, text: str, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    print(f"autosp: error: {text}", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    main()
