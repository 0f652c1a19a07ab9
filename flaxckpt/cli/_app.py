"""The command, with the options, errors and exit codes shared by all verbs."""

from __future__ import annotations

import ast
import contextlib
import functools
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NoReturn

import click

from flaxckpt import errors
from flaxckpt.cli import _output, _parameters, _step_names
from flaxckpt.cli._parameters import Argument, Option

SUCCESS = 0
FINDING = 1
USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

POLL_SECS = 1.0
"""Least seconds between two looks of a verb that shows a run until Ctrl-C."""

_SHARE_OF_TIME = 0.2
"""The largest part of the time that such a verb spends on reading the run."""

_FINDING_ERRORS = (
    errors.DamagedCheckpointError,
    errors.SaveFailedError,
    errors.CheckpointTimeoutError,
    errors.StoreError,
)
"""Errors that exit with `FINDING`: the command line was correct."""

PathArgument = Annotated[
    str, Argument(metavar="PATH", help="A checkpoint, or a run directory.")
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
        is_step=True,
        help=f"Step of a run directory: {_step_names.FORMS}. By default the newest.",
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
    from flaxckpt._formats import locate

    return str(locate.locate(path, step, step_format=step_format).path), None


def as_help(text: str | None) -> str:
    """Formats a docstring as help text, and keeps line breaks of the example."""
    return (text or "").replace("    Example:", "    \b\n    Example:")


def verb(function: Callable[..., int]) -> click.Command:
    """Makes a function a verb: exits with the return value, or with an error code."""

    @functools.wraps(function)
    def run(**values: Any) -> None:
        with _error_report():
            command = click.get_current_context().command
            _check_paths(command, values)
            code = function(**_step_names.resolve_all(command, values))
            sys.stdout.flush()
        raise click.exceptions.Exit(code)

    name = function.__name__
    return _parameters.make_command(name, run, function, as_help(function.__doc__))


def command_line(**changed: object) -> str:
    """Returns the running command with parameters `changed`, quoted to paste."""
    context = click.get_current_context()
    given = {**context.params, **changed}
    words = ["flaxckpt", context.command.name or ""]
    for parameter in context.command.params:
        words += _parameters.as_words(parameter, given.get(parameter.name or ""))
    return shlex.join(words)


_READ = ("path", "a", "src", "target")
"""Arguments that are checkpoints or runs which exist, in all verbs."""


def _check_paths(command: click.Command, values: Mapping[str, Any]) -> None:
    """Raises CheckpointNotFoundError for a checkpoint or run that does not exist."""
    from flaxckpt import _formats, _storage

    for parameter in command.params:
        path = values.get(parameter.name or "")
        is_read = isinstance(parameter, click.Argument) and parameter.name in _READ
        if is_read and path and not _storage.paths.resolve(path).exists():
            _formats.detect(path)  # raises


def repeat(look: Callable[[], object]) -> NoReturn:
    """Looks at a run again and again, until an exception such as that of Ctrl-C."""
    while True:
        start = time.monotonic()
        look()
        spent = time.monotonic() - start
        time.sleep(max(POLL_SECS, spent / _SHARE_OF_TIME))


_PYTHON = re.compile(
    r"""(?<![\w./-])(\w+)=(\[[^\]]*\]+|\([^)]*\)|True|False|"[^"]*"|'[^']*'|\d+|…)?"""
)
"""An argument of Python in a message, with its value."""

_QUOTES = "\"'"

_TRANSFORM = re.compile(r"""\b(rename|drop|cast)\(((?:[^()"']|"[^"]*"|'[^']*')*)\)""")
"""A call of a transform that has an option, with its arguments."""

_TEXT = re.compile(r"""r?(?:"[^"]*"|'[^']*')""")


def _name_options(message: str, command: click.Command) -> str:
    """Returns a message with options of a command for the arguments of Python.

    Arguments in a call, `load(path, step=3)`, stay.
    """
    options = {
        parameter.name: parameter
        for parameter in command.params
        if isinstance(parameter, click.Option)
    }

    def name_transform(found: re.Match[str]) -> str:
        if found[1] not in options or _is_in_call(message[: found.start()]):
            return found[0]
        words = [ast.literal_eval(text) for text in _TEXT.findall(found[2])]
        value = shlex.quote("=".join(words)) if words else options[found[1]].metavar
        return f"--{found[1]} {value}{' --lossy' * ('lossy=True' in found[2])}"

    def name(found: re.Match[str]) -> str:
        argument, value = found[1], found[2] or ""
        if _is_in_call(message[: found.start()]):
            return found[0]
        if argument in ("transforms", "source_transforms") and "rename" in options:
            named = value.strip("[]").replace(", --", " --")
            return named if "--" in named else "--rename, --drop or --cast"
        if argument not in options:
            return found[0]
        option = options[argument]
        if value in ("True", "False"):
            flags = option.opts if value == "True" else option.secondary_opts
            return flags[0] if flags else found[0]
        return f"{option.opts[0]} {value.strip(_QUOTES)}".rstrip(" …")

    message = _TRANSFORM.sub(name_transform, message)
    return _PYTHON.sub(name, message)


def _is_in_call(before: str) -> bool:
    """Returns True if a text ends between the parentheses of a call."""
    depth = 0
    for at in range(len(before) - 1, -1, -1):
        depth += (before[at] == ")") - (before[at] == "(")
        if depth < 0:
            return at > 0 and (before[at - 1].isalnum() or before[at - 1] == "_")
    return False


def _printable(text: str) -> str:
    """Returns a text whose lines have no control characters."""
    return "\n".join(map(errors.printable, text.split("\n")))


class MessageFormatter(logging.Formatter):
    """Formats log messages for a terminal, with the options of the running command.

    Messages may have names of a checkpoint.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        context = click.get_current_context(silent=True)
        if context is not None:
            message = _name_options(message, context.command)
        return _printable(message)


class FirstMessages(logging.Filter):
    """Passes each message once: some verbs open a checkpoint several times."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


def print_error(message: str) -> None:
    """Prints an error to stderr, wrapped to the terminal."""
    lines = _output.wrap_errors(_printable(f"flaxckpt: {message}"))
    print("\n".join(lines), file=sys.stderr)


@contextlib.contextmanager
def _error_report() -> Iterator[None]:
    """Prints an error to stderr and exits with the exit code of the error."""
    try:
        yield
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        print("flaxckpt: interrupted", file=sys.stderr)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except errors.CheckpointError as error:
        command = click.get_current_context().command
        print_error(_name_options(str(error), command))
        is_finding = isinstance(error, _FINDING_ERRORS)
        raise click.exceptions.Exit(FINDING if is_finding else USAGE_ERROR) from None
    except OSError as error:
        print_error(str(error))
        raise click.exceptions.Exit(FINDING) from None
