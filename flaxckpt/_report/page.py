"""Renders a report as a static HTML page that loads nothing and runs nothing."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from flaxckpt._report import section_origin, section_saves, section_state, section_steps
from flaxckpt._report.charts import css
from flaxckpt._report.data import Report
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The policy of the page: names in the page cannot run or load anything."""


_SECTIONS: Sequence[Callable[[Report], Section | None]] = (
    section_saves.saves,
    section_steps.metrics,
    section_steps.retention,
    section_state.sizes,
    section_state.change,
    section_origin.dataset,
    section_origin.lineage,
    section_origin.integrity,
)


def page(report: Report) -> str:
    """Returns the page."""
    name = PurePosixPath(report.path).name or report.path
    head = html.element(
        "head",
        html.element("meta", charset="utf-8"),
        html.element(
            "meta", name_="viewport", content="width=device-width, initial-scale=1"
        ),
        html.element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        html.element("meta", name_="color-scheme", content="light dark"),
        html.element("link", rel="icon", href="data:,"),
        html.element("title", f"{name}: flaxckpt report"),
        html.element("style", html.Markup(css.PAGE)),
    )
    rendered = [section(report) for section in _SECTIONS]
    sections = [section for section in rendered if section is not None]
    body = html.element(
        "body",
        html.element(
            "header",
            _header(report, name),
            html.element("div", *_headline(report), class_="cards"),
            _navigation(sections),
        ),
        html.element("main", *[section.markup() for section in sections]),
        _footer(report),
    )
    document = html.element("html", head, body, lang="en")
    return f"<!doctype html>\n{document}\n"


def _header(report: Report, name: str) -> html.Markup:
    kind = "Run" if report.is_run else "Checkpoint"
    formats = f", {', '.join(report.formats)}" if report.formats else ""
    return html.element(
        "div",
        html.element("p", f"{kind} report{formats}", class_="over"),
        html.element("h1", name),
        html.element("p", report.path, class_="path"),
        class_="title",
    )


def _navigation(sections: list[Section]) -> html.Markup:
    links = [
        html.element("a", section.title, href=f"#{section.name}")
        for section in sections
    ]
    return html.element("nav", *links, aria_label="Sections")


def _footer(report: Report) -> html.Markup:
    made = datetime.datetime.fromtimestamp(report.made, datetime.UTC)
    return html.element(
        "footer",
        f"flaxckpt {report.version}, ",
        html.element(
            "time",
            f"{made:%Y-%m-%d %H:%M} UTC",
            datetime=made.isoformat(timespec="seconds"),
        ),
        ". Sizes are in powers of 1000. Other times are in the time zone of the machine"
        " that made this page.",
    )


# ---- the headline -----------------------------------------------------------------


def _headline(report: Report) -> list[html.Markup]:
    cards = [_steps(report), _newest(report), _best(report), _disk(report)]
    cards += [_integrity(report), _last_save(report)]
    return [card for card in cards if card is not None]


def _card(
    name: str,
    title: str,
    value: object,
    detail: object,
    kind: str | None = None,
    **data: object,
) -> html.Markup:
    return html.element(
        "div",
        html.element("p", title, class_="card-title"),
        html.element("p", value, class_="card-value"),
        html.element("p", detail, class_="card-detail"),
        class_=f"card {kind}" if kind else "card",
        data_card=name,
        **data,
    )


def _steps(report: Report) -> html.Markup | None:
    if not report.is_run:
        return None
    count = len(report.steps)
    saved = len({save.step for save in report.saves if save.outcome == "durable"})
    detail = f"of {saved:,} saved" if saved > count else "all saved steps"
    return _card("steps", "Steps", f"{count:,}", detail, data_value=count)


def _newest(report: Report) -> html.Markup | None:
    newest = next((s for s in report.steps if "latest" in s.marks), None)
    if newest is None:
        return None
    if newest.step is None:
        size = f"{humanize.count(report.leaves, 'leaf', 'leaves')}"
        value = humanize.size(report.total_bytes)
        return _card("newest", "Arrays", value, size, data_value=report.total_bytes)
    saved = html.join(("saved ", html.moment(newest.created)))
    return _card(
        "newest", "Newest step", str(newest.step), saved, data_value=newest.step
    )


def _best(report: Report) -> html.Markup | None:
    for name, points in report.metrics.items():
        best = [point for point in points if point.best == "best"]
        if best:
            point = best[-1]
            return _card(
                "best",
                f"Best {name}",
                f"{point.value:.4g}",
                f"at step {point.step}",
                data_value=point.value,
                data_step=point.step,
            )
    for name, points in report.metrics.items():
        point = points[-1]
        if math.isfinite(point.value):
            return _card(
                "last-metric",
                f"Last {name}",
                f"{point.value:.4g}",
                f"at step {point.step}",
                data_value=point.value,
                data_step=point.step,
            )
    return None


def _disk(report: Report) -> html.Markup:
    if report.bytes is None:
        detail = "object stores do not report sizes"
        return _card("bytes", "On the disk", "unknown", detail)
    detail = f"the arrays of one step: {humanize.size(report.total_bytes)}"
    if not report.is_run:
        detail = "all files"
    elif report.shown is None:
        detail = "no step can be read" if report.steps else "no steps yet"
    return _card(
        "bytes",
        "On the disk",
        humanize.size(report.bytes),
        detail,
        data_value=report.bytes,
    )


def _integrity(report: Report) -> html.Markup | None:
    if not report.integrity:
        return None
    count = dict.fromkeys(("damaged", "unread", "verified", "whole", "unknown"), 0)
    for check in report.integrity:
        count[check.state] += 1
    total, checked = len(report.integrity), report.checked_count
    if count["damaged"]:
        value, kind = f"{count['damaged']:,} damaged", "bad"
    elif count["unread"]:
        value, kind = f"{count['unread']:,} unread", "bad"
    elif not checked:
        value, kind = "not checked", "plain"
    elif checked < total:
        value, kind = f"{checked:,} of {total:,} checked", "plain"
    elif count["verified"] == total:
        value, kind = "verified", "good"
    else:
        value, kind = "files complete", "good"
    detail = ", ".join(
        f"{n:,} {_STATES[state]}"
        for state, n in count.items()
        if n and state in _STATES
    )
    if count["whole"]:
        detail += "; arrays not read"
    return _card("integrity", "Integrity", value, detail, kind, data_value=value)


_STATES: dict[str, str] = {
    "verified": "read in full",
    "whole": "with all files and sizes",
    "unknown": "not checked",
}


def _last_save(report: Report) -> html.Markup | None:
    last = next((s for s in reversed(report.saves) if s.outcome == "durable"), None)
    if last is None or last.total_secs is None:
        return None
    blocked = humanize.secs(last.blocked_secs or 0.0)
    return _card(
        "last-save",
        "Last save blocked",
        blocked,
        f"durable after {humanize.secs(last.total_secs)}",
        data_value=last.blocked_secs,
        data_total=last.total_secs,
    )
