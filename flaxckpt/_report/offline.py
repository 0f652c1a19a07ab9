"""Renders a report as an HTML page that loads nothing, and needs no script."""

from __future__ import annotations

from pathlib import PurePosixPath

from flaxckpt._report import assets, content, templates
from flaxckpt._report.data import Report
from flaxckpt._util import html


def page(report: Report) -> str:
    """Returns the page."""
    return templates.render(
        "report.html",
        name=PurePosixPath(report.path).name or report.path,
        policy=assets.policy(),
        style=html.Markup(assets.style()),
        script=html.Markup(assets.script()),
        **content.describe(report),
    )
