"""Python programs in processes of their own."""

import os
import subprocess
import sys
import textwrap

from tests import ROOT


def run(*words, code=0, cwd=None, timeout=600, **environment):
    """Runs Python with these arguments; asserts its exit code, unless that is None.

    The program finds the modules of this checkout. Returns the completed process.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        env=_checkout() | environment,
    )
    told = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert code in (None, done.returncode), told
    return done


def run_text(text, *words, **options):
    """Runs a program that is given as text, which may be indented."""
    return run("-W", "ignore", "-c", textwrap.dedent(text), *words, **options)


def start(*words):
    """Starts Python with these arguments, its streams being pipes of text."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_checkout(),
    )


def start_text(text, *words):
    """Starts a program that is given as text, which may be indented."""
    return start("-c", textwrap.dedent(text), *words)


def _checkout():
    """Returns the environment in which programs find the modules of this checkout."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}
