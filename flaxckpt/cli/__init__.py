"""The command `flaxckpt`: each verb parses, calls a function, prints.

What a verb calls is imported when it runs: its help must not wait for jax.
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
    """Runs the command with the arguments of this process, and ends it."""
    # Nothing here computes, and an accelerator may be in use.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whatever a name is, it is printed
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="flaxckpt")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
