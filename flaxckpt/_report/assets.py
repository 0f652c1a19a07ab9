"""The style sheet and the script of a page, and the policy that allows only them."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"


@functools.cache
def style() -> str:
    """Returns the style sheet of the components, and of uPlot."""
    return read("uPlot.min.css", "report.css")


@functools.cache
def script() -> str:
    """Returns the scripts of the components, and uPlot, which draws the curves."""
    return read("uPlot.iife.min.js", "report.js", "charts.js")


def read(*names: str) -> str:
    """Returns files that pages load, without comments, empty lines and indentation."""
    texts = [(_FOLDER / name).read_text(encoding="utf-8") for name in names]
    return re.sub(r"(?m)^ *(//.*|/\*.*\*/)?\n|^ +", "", "\n".join(texts))


def source_hash(text: str) -> str:
    """Returns the source of a content security policy for an inline text."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def policy() -> str:
    """Returns the content security policy of a page that loads nothing.

    Its style sheet and script are allowed by their hashes.
    """
    return (
        f"default-src 'none'; style-src {source_hash(style())};"
        f" script-src {source_hash(script())}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
