"""`flaxckpt ui`."""

from __future__ import annotations

import importlib.util
import sys
import threading
import webbrowser
from typing import Annotated

from flaxckpt import errors
from flaxckpt.cli import _app, _output
from flaxckpt.cli._parameters import Argument, Option

_NEEDED = ("starlette", "uvicorn")


@_app.verb
def ui(
    path: Annotated[
        str,
        Argument(
            metavar="PATH",
            help="A run directory, a checkpoint, or a directory of runs.",
        ),
    ],
    port: Annotated[
        int, Option("--port", "-p", min=0, help="The port; 0 for any free one.")
    ] = 0,
    browser: Annotated[
        bool,
        Option("--browser/--no-browser", help="Whether to open the page in a browser."),
    ] = True,
    against: Annotated[
        list[str] | None,
        Option(
            "--against",
            metavar="PATH",
            help="A further checkpoint or run to compare with, or to restore into; or"
            " a JSON file with a state, for plans. May be repeated.",
        ),
    ] = None,
    json: _app.JsonOption = False,
) -> int:
    """Shows runs in the browser, on a local page that only reads.

    Serves the page on 127.0.0.1 until Ctrl-C, and prints its address, which has a
    secret token. Needs the extra packages of flaxckpt[ui].

    Example:
      flaxckpt ui runs/7
      flaxckpt ui runs --no-browser --port 8700
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise errors.OptionError(
            f"flaxckpt ui needs {' and '.join(missing)}: pip install flaxckpt[ui]"
        )
    from flaxckpt._report.ui import server

    def show(address: str) -> None:
        if json:
            _output.print_document({"address": address})
        else:
            _output.print_line(address)
            _output.print_line("Ctrl-C ends the page.")
        sys.stdout.flush()
        if browser:  # on a thread, because some browsers run in the terminal
            opening = threading.Thread(
                target=webbrowser.open, args=(address,), daemon=True
            )
            opening.start()

    server.serve(path, port=port, others=against or (), on_ready=show)
    return _app.SUCCESS
