"""The command, with the options, errors and exit codes shared by all verbs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import click

from flaxckpt import errors
from flaxckpt.cli import _parameters
from flaxckpt.cli._parameters import Argument, Option

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

PathArgument = Annotated[
    str,
    Argument(metavar="PATH", help="A checkpoint, or a run directory."),
]
RunArgument = Annotated[str, Argument(metavar="PATH", help="A run directory.")]
StepFormatOption = Annotated[
    str | None,
    Option(
        "--step-format",
        metavar="FORMAT",
        help="Format of step names: model{step}, or zero-padded {step:08d}. By default"
        " read from the journal of the run, else 100, step_100, checkpoint_100.",
    ),
]
StepOption = Annotated[
    int | None,
    Option(
        "--step",
        "-s",
        min=0,
        help="Step of a run directory; by default the newest.",
    ),
]
JsonOption = Annotated[
    bool, Option("--json", help="Print one JSON document on stdout.")
]


def locate_step(
    path: str, step: int | None, step_format: str | None
) -> tuple[str, int | None]:
    """Returns the path and step to read; with `step_format`, the path of the step."""
    if step_format is None:
        return path, step
    from flaxckpt.formats import _locate

    return str(_locate.locate(path, step, step_format=step_format).path), None


def as_help(text: str | None) -> str:
    """Formats a docstring as help text, and keeps line breaks of the example."""
    return (text or "").replace("    Example:", "    \b\n    Example:")


def verb(function: Callable[..., int]) -> click.Command:
    """Makes a function a verb: exits with the return value, or with an error code."""

    @functools.wraps(function)
    def run(**values: Any) -> None:
        with _error_report():
            code = function(**values)
            sys.stdout.flush()
        raise click.exceptions.Exit(code)

    name = function.__name__
    return _parameters.make_command(name, run, function, as_help(function.__doc__))


def command_line(**changed: object) -> str:
    """Returns the running command with other parameters, quoted to paste in a shell.

    Args:
        **changed: Parameter of the verb -> its value; the others stay as they are.
    """
    context = click.get_current_context()
    given = {**context.params, **changed}
    words = ["flaxckpt", context.command.name or ""]
    for parameter in context.command.params:
        words += _parameters.as_words(parameter, given.get(parameter.name or ""))
    return shlex.join(words)


def _printable(text: str) -> str:
    """Returns a text whose lines have no control characters."""
    return "\n".join(map(errors.printable, text.split("\n")))


class PrintableFormatter(logging.Formatter):
    """Formats log messages, which may have names of a checkpoint, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return _printable(super().format(record))


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
        raise click.exceptions.Exit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        print("flaxckpt: interrupted", file=sys.stderr)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except errors.CheckpointError as error:
        print(_printable(f"flaxckpt: {error}"), file=sys.stderr)
        is_finding = isinstance(error, _FINDING_ERRORS)
        raise click.exceptions.Exit(FINDING if is_finding else USAGE_ERROR) from None
    except OSError as error:
        print(_printable(f"flaxckpt: {error}"), file=sys.stderr)
        raise click.exceptions.Exit(FINDING) from None
