"""Renders the templates of pages; every text in them is escaped and made printable."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jinja2

from flaxckpt import errors
from flaxckpt._util import html


def render(template: str, **values: object) -> html.Markup:
    """Returns the markup of a template.

    Args:
        template: The name of the template, `recorder.html`.
        **values: What its variables are.
    """
    return html.Markup(_environment().get_template(template).render(**values))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=_make_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = to_json
    return environment


def _make_printable(value: object) -> object:
    return value if hasattr(value, "__html__") else errors.printable(str(value))


def to_json(value: object) -> html.Markup:
    """Returns JSON for the text of an element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return html.Markup(text)
