"""The local page on runs: a read-only web server for one browser.

The views are made of the report's components, on data that is read on demand. Nothing
is written, and only checkpoints named on the command line, or below a directory named
there, are opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._report.ui import places, server

__all__ = ["places", "server"]

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__, __all__)
