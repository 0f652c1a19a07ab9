"""The command, with the options, errors and exit codes shared by all verbs."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, ParamSpec

import typer

from flaxckpt import errors

P = ParamSpec("P")

SUCCESS = 0
FINDING = 1
USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

_FINDING_ERRORS = (
    errors.DamagedCheckpointError,
    errors.SaveFailedError,
    errors.CheckpointTimeoutError,
)
"""Errors that exit with `FINDING`: the command line was correct."""

app = typer.Typer(
    name="flaxckpt",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="A checkpoint, or a run directory.", show_default=False
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A run directory.", show_default=False)
]
StepFormatOption = Annotated[
    str | None,
    typer.Option(
        "--step-format",
        metavar="FORMAT",
        help="Format of step names: model{step}, or zero-padded {step:08d}. By default"
        " read from the journal of the run, else 100, step_100, checkpoint_100.",
        show_default=False,
    ),
]
StepOption = Annotated[
    int | None,
    typer.Option(
        "--step",
        "-s",
        min=0,
        help="Step of a run directory; by default the newest.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout.")
]


def locate_step(
    path: str, step: int | None, step_format: str | None
) -> tuple[str, int | None]:
    """Returns the path and step to read; with `step_format`, the path of the step."""
    if step_format is None:
        return path, step
    from flaxckpt.formats import _locate

    return str(_locate.locate(path, step, step_format=step_format).path), None


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"flaxckpt {importlib.metadata.version('flaxckpt')}")
        raise typer.Exit(SUCCESS)


def _as_help(text: str | None) -> str:
    """Formats a docstring as help text, and keeps line breaks of the example."""
    return (text or "").replace("    Example:", "    \b\n    Example:")


def _command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Inspects, compares, verifies, converts and prunes checkpoints.

    Reads checkpoints of flaxckpt, Orbax, T5X, Flax, EasyLM, safetensors, GGUF and
    numpy (.npz). Needs neither an accelerator nor the model's code.

    Exit codes: 0 success; 1 a difference, damage, or a failed read or write; 2 wrong
    usage.

    Example:
      flaxckpt ls runs/7
    """


app.callback(help=inspect.cleandoc(_as_help(_command.__doc__)))(_command)


def verb(function: Callable[P, int]) -> Callable[P, None]:
    """Makes a function a verb: exits with the return value, or with an error code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with _error_report():
            code = function(*args, **kwargs)
            sys.stdout.flush()
        raise typer.Exit(code)

    run.__doc__ = _as_help(function.__doc__)
    return run


@contextlib.contextmanager
def _error_report() -> Iterator[None]:
    """Prints an error to stderr and exits with the exit code of the error.

    Raises:
        Exit: The block raised an error.
    """
    try:
        yield
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        print("flaxckpt: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except errors.CheckpointError as error:
        print(f"flaxckpt: {error}", file=sys.stderr)
        is_finding = isinstance(error, _FINDING_ERRORS)
        raise typer.Exit(FINDING if is_finding else USAGE_ERROR) from None
    except OSError as error:
        print(f"flaxckpt: {error}", file=sys.stderr)
        raise typer.Exit(FINDING) from None
