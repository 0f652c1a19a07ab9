"""The command `flaxckpt`: each verb parses options, calls a function and prints.

Verbs import the modules they call when they run, so that help does not wait for jax.
"""

from __future__ import annotations

import difflib
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from flaxckpt import _doors
from flaxckpt.cli import _app, _parameters

__all__ = ["app", "main"]

_MODULES = {
    "ls": "ls",
    "top": "top",
    "show": "show",
    "diff": "diff",
    "verify": "verify",
    "plan": "plan",
    "convert": "convert",
    "explain": "explain",
    "prune": "prune",
    "pin": "pin",
    "unpin": "pin",
    "du": "du",
    "report": "report",
    "ui": "ui",
    "doctor": "doctor",
}
"""Verb -> its module, in the order of the help."""

_GUESSED = {
    "check": "verify",
    "clean": "prune",
    "compare": "diff",
    "delete": "prune",
    "export": "convert",
    "fsck": "verify",
    "gc": "prune",
    "info": "show",
    "inspect": "show",
    "keep": "pin",
    "list": "ls",
    "load": "plan",
    "metadata": "show",
    "migrate": "convert",
    "preview": "plan",
    "remove": "prune",
    "restore": "plan",
    "rm": "prune",
    "serve": "ui",
    "size": "du",
    "status": "ls",
    "steps": "ls",
    "validate": "verify",
    "why": "explain",
}
"""Verb of other tools -> the verb here."""


class _Verbs(click.Group):
    """The verbs; a verb's module is imported when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_MODULES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = _doors.import_module(f"{__name__}.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns a verb, its command and the other arguments.

        Raises:
            UsageError: There is no such verb; the error names the one that is meant.
        """
        name = args[0]
        near = difflib.get_close_matches(name, _MODULES, n=1)
        meant = _GUESSED.get(name) or next(iter(near), None)
        is_option = name.startswith("-")  # click knows which ones there are
        if name not in _MODULES and not is_option and not ctx.resilient_parsing:
            advice = (
                f"did you mean flaxckpt {meant}?" if meant else "see flaxckpt --help"
            )
            raise click.UsageError(f"there is no verb {name!r}: {advice}")
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command line; its errors look like those of the verbs."""
        try:
            code = super().main(args, prog_name, complete_var, False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.UsageError as error:
            _app.print_error(_parameters.describe_error(error))
            code = error.exit_code
        except click.Abort:
            code = _app.INTERRUPTED
        return sys.exit(code) if standalone_mode else code


@click.group(
    "flaxckpt",
    cls=_Verbs,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(
    package_name="flaxckpt", message="%(prog)s %(version)s", help="Print the version."
)
def app() -> None:
    """Parses the verb."""


app.help = _app.as_help(
    """Inspects, compares, verifies, converts and prunes checkpoints.

    Reads checkpoints of flaxckpt, Orbax, T5X, Flax, EasyLM, big_vision, safetensors,
    GGUF and numpy (.npz). Needs neither an accelerator nor the model's code.

    Exit codes: 0 success; 1 a difference, damage, or a failed read or write; 2 wrong
    usage.

    To complete verbs, paths, steps and leaves with the Tab key, put a line into
    ~/.bashrc, ~/.zshrc, or ~/.config/fish/completions/flaxckpt.fish:

    \b
      eval "$(_FLAXCKPT_COMPLETE=bash_source flaxckpt)"
      eval "$(_FLAXCKPT_COMPLETE=zsh_source flaxckpt)"
      _FLAXCKPT_COMPLETE=fish_source flaxckpt | source

    Example:
      flaxckpt ls runs/7
    """
)


def main() -> None:
    """Runs the command with `sys.argv`, and exits."""
    # The command needs no accelerator, and another program may be using it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Python has None for a stream that the caller has closed: `flaxckpt ls run >&-`.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print any name
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:  # prints warnings
        logging.lastResort.setFormatter(_app.MessageFormatter())
        logging.lastResort.addFilter(_app.FirstMessages())
    try:
        app(prog_name="flaxckpt")
    except KeyboardInterrupt:
        sys.exit(_app.INTERRUPTED)
