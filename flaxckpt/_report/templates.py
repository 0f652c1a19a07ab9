"""Renders the templates of pages; every text in them is escaped and made printable.

A line break before a tag or a block of a template is nothing in the page.
"""

from __future__ import annotations

import datetime
import functools
import math
import re
import shlex
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib import parse

import jinja2
from jinja2 import ext

from flaxckpt import errors
from flaxckpt._report import parts
from flaxckpt._util import html, humanize


class ShownCell(NamedTuple):
    """A cell of a table whose text is not the number that the column is sorted by."""

    shown: object
    value: float


class ShownRow(NamedTuple):
    """A row of a table: attributes, cells, and its class: `bad`, `deleted` or None."""

    data: Mapping[str, object]
    cells: Sequence[object]
    kind: str | None = None


def render(template: str, **values: object) -> html.Markup:
    """Returns the markup of a template, with values for its variables."""
    return html.Markup(_environment().get_template(template).render(**values))


def address(path: str, **fields: object) -> html.Markup:
    """Returns an address of this server, for an attribute; without fields of None."""
    given = {name: str(value) for name, value in fields.items() if value is not None}
    query = parse.urlencode(given, errors="surrogatepass")
    # Percent-encoded, so `&` is the only character to escape. Unlike other texts, an
    # address must not be shortened.
    return html.Markup(f"{path}?{query}".replace("&", "&amp;") if query else path)


class _Lines(ext.Extension):
    def preprocess(
        self, source: str, name: str | None, filename: str | None = None
    ) -> str:
        """Makes comments of line breaks, so that lines keep their numbers."""
        return _BREAK.sub(
            lambda found: "{#" + "\n" * found[0].count("\n") + "#}", source
        )


_BREAK = re.compile(r" *\n\s*(?=[<{])")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=_make_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Lines, ext.do],
    )
    environment.filters |= {
        "attributes": _attributes,
        "clock": humanize.clock,
        "digest": lambda text: zlib.crc32(text.encode(errors="replace")),
        "few": errors.first_few,
        "iso": _iso,
        "leaf": errors.name_leaf,
        "log_share": log_share,
        "median": statistics.median,
        "number": humanize.number,
        "percent": html.percent,
        "plural": humanize.count,
        "printable": errors.printable,
        "python": repr,
        "px": html.px,
        "quoted": shlex.quote,
        "secs": _unless_none(humanize.secs),
        "size": _unless_none(humanize.size),
        "step_name": _step_name,
        "thousands": "{:,}".format,
        "when": humanize.when,
    }
    compact = {"separators": (",", ":"), "allow_nan": False}
    environment.policies["json.dumps_kwargs"] = compact
    environment.tests |= {"finite": math.isfinite, "optimizer": parts.is_optimizer}
    environment.globals |= {
        "address": address,
        "row": ShownRow,
        "sortable": _sortable,
        "used": _find_used,
    }
    return environment


def _make_printable(value: object) -> object:
    return value if hasattr(value, "__html__") else errors.printable(str(value))


def _unless_none(form: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "" if value is None else form(value)


def _sortable(shown: object, value: float | None) -> ShownCell | str:
    """Returns a cell that is sorted by a number; empty without one."""
    return "" if value is None else ShownCell(shown, value)


def _find_used(rows: Sequence[ShownRow], count: int) -> list[int]:
    """Returns the columns in which a row has a text."""
    texts = [[str(getattr(each, "shown", each)) for each in row.cells] for row in rows]
    return [n for n in range(count) if any(row[n] for row in texts)]


def log_share(change: float) -> float:
    """Returns the place of a relative change from 0.001 % to 1000 %, by its logarithm.

    It is 0 for the smallest, and 1 for the largest and those that are not finite.
    """
    return min(1.0, (math.log10(max(change, 1e-5)) + 5) / 6)


def _attributes(given: Mapping[str, object]) -> html.Markup:
    """Returns the attributes of an element, without those that are None."""
    return html.join(
        html.Markup(f' {name}="{html.text(value)}"')
        for name, value in given.items()
        if value is not None
    )


def _iso(seconds: float) -> str:
    exact = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return exact.isoformat(timespec="seconds")


def _step_name(path: str | None) -> str:
    """Returns the name of a checkpoint: `step 1,000`, or its last key."""
    name = (path or "").rstrip("/").rpartition("/")[2]
    return f"step {int(name):,}" if name.isascii() and name.isdigit() else name
