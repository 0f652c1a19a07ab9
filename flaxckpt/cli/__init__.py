"""The command `flaxckpt`: each verb parses options, calls a function and prints.

Verbs import the modules they call when they run, so that help does not wait for jax.
"""

from __future__ import annotations

import io
import os
import sys

from flaxckpt.cli import (
    convert,
    diff,
    doctor,
    du,
    explain,
    ls,
    pin,
    plan,
    prune,
    report,
    show,
    verify,
)
from flaxckpt.cli._app import INTERRUPTED, app

__all__ = ["app", "main"]

for _verb in (
    ls.ls,
    show.show,
    diff.diff,
    verify.verify,
    plan.plan,
    convert.convert,
    explain.explain,
    prune.prune,
    pin.pin,
    pin.unpin,
    du.du,
    report.report,
    doctor.doctor,
):
    app.command()(_verb)


def main() -> None:
    """Runs the command with `sys.argv`, and exits."""
    # The command needs no accelerator, and another program may be using it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print any name
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="flaxckpt")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
