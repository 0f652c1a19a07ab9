"""Renders a report as a static HTML page that loads nothing and runs nothing."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from flaxckpt import _util
from flaxckpt._report import section_origin, section_saves, section_state, section_steps
from flaxckpt._report.charts import css
from flaxckpt._report.data import Report
from flaxckpt._report.section import Section
from flaxckpt._util.html import Markup

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
    head = _util.html.element(
        "head",
        _util.html.element("meta", charset="utf-8"),
        _util.html.element(
            "meta", name_="viewport", content="width=device-width, initial-scale=1"
        ),
        _util.html.element(
            "meta", http_equiv="Content-Security-Policy", content=_POLICY
        ),
        _util.html.element("meta", name_="color-scheme", content="light dark"),
        _util.html.element("link", rel="icon", href="data:,"),
        _util.html.element("title", f"{name}: flaxckpt report"),
        _util.html.element("style", Markup(css.PAGE)),
    )
    made = [section(report) for section in _SECTIONS]
    sections = [section for section in made if section is not None]
    body = _util.html.element(
        "body",
        _util.html.element(
            "header",
            _header(report, name),
            _util.html.element("div", *_headline(report), class_="cards"),
            _navigation(sections),
        ),
        _util.html.element("main", *[section.markup() for section in sections]),
        _footer(report),
    )
    document = _util.html.element("html", head, body, lang="en")
    return f"<!doctype html>\n{document}\n"


def _header(report: Report, name: str) -> Markup:
    what = "Run" if report.is_run else "Checkpoint"
    whose = f", {', '.join(report.formats)}" if report.formats else ""
    return _util.html.element(
        "div",
        _util.html.element("p", f"{what} report{whose}", class_="over"),
        _util.html.element("h1", name),
        _util.html.element("p", report.path, class_="path"),
        class_="title",
    )


def _navigation(sections: list[Section]) -> Markup:
    links = [
        _util.html.element("a", section.title, href=f"#{section.name}")
        for section in sections
    ]
    return _util.html.element("nav", *links, aria_label="Sections")


def _footer(report: Report) -> Markup:
    made = datetime.datetime.fromtimestamp(report.made, datetime.UTC)
    return _util.html.element(
        "footer",
        f"flaxckpt {report.version}, ",
        _util.html.element(
            "time",
            f"{made:%Y-%m-%d %H:%M} UTC",
            datetime=made.isoformat(timespec="seconds"),
        ),
        ". Sizes in powers of 1000. Other times by the clock of the machine that made"
        " this page.",
    )


# ---- the headline -----------------------------------------------------------------


def _headline(report: Report) -> list[Markup]:
    cards = [_steps(report), _newest(report), _best(report), _disk(report)]
    cards += [_integrity(report), _last_save(report)]
    return [card for card in cards if card is not None]


def _card(
    name: str,
    title: str,
    value: object,
    told: object,
    kind: str | None = None,
    **data: object,
) -> Markup:
    return _util.html.element(
        "div",
        _util.html.element("p", title, class_="card-title"),
        _util.html.element("p", value, class_="card-value"),
        _util.html.element("p", told, class_="card-told"),
        class_=f"card {kind}" if kind else "card",
        data_card=name,
        **data,
    )


def _steps(report: Report) -> Markup | None:
    if not report.is_run:
        return None
    count = len(report.steps)
    saved = len({save.step for save in report.saves if save.outcome == "durable"})
    told = f"of {saved:,} that were saved" if saved > count else "all there is"
    return _card("steps", "Steps", f"{count:,}", told, data_value=count)


def _newest(report: Report) -> Markup | None:
    newest = next((s for s in report.steps if "latest" in s.marks), None)
    if newest is None:
        return None
    if newest.step is None:
        size = f"{_util.humanize.count(report.leaves, 'leaf', 'leaves')}"
        value = _util.humanize.size(report.total_bytes)
        return _card("newest", "Arrays", value, size, data_value=report.total_bytes)
    saved = _util.html.join(("saved ", _util.html.moment(newest.created)))
    return _card(
        "newest", "Newest step", str(newest.step), saved, data_value=newest.step
    )


def _best(report: Report) -> Markup | None:
    for name, points in report.metrics.items():
        best = [point for point in points if point.best == "best"]
        if best:
            at = best[-1]
            told = f"at step {at.step}"
            return _card(
                "best",
                f"Best {name}",
                f"{at.value:.4g}",
                told,
                data_value=at.value,
                data_step=at.step,
            )
    for name, points in report.metrics.items():
        at = points[-1]
        if math.isfinite(at.value):
            return _card(
                "last-metric",
                f"Last {name}",
                f"{at.value:.4g}",
                f"at step {at.step}",
                data_value=at.value,
                data_step=at.step,
            )
    return None


def _disk(report: Report) -> Markup:
    if report.bytes is None:
        told = "an object store does not tell"
        return _card("bytes", "On the disk", "unknown", told)
    told = f"a step has {_util.humanize.size(report.total_bytes)} of arrays"
    if not report.is_run:
        told = "all files"
    elif report.shown is None:
        told = "no step can be read" if report.steps else "no steps yet"
    return _card(
        "bytes",
        "On the disk",
        _util.humanize.size(report.bytes),
        told,
        data_value=report.bytes,
    )


def _integrity(report: Report) -> Markup | None:
    if not report.integrity:
        return None
    count = dict.fromkeys(("damaged", "unread", "verified", "whole", "unknown"), 0)
    for each in report.integrity:
        count[each.state] += 1
    total, known = len(report.integrity), report.looked_at
    if count["damaged"]:
        value, kind = f"{count['damaged']:,} damaged", "bad"
    elif count["unread"]:
        value, kind = f"{count['unread']:,} unread", "bad"
    elif not known:
        value, kind = "not checked", "plain"
    elif known < total:
        value, kind = f"{known:,} of {total:,} looked at", "plain"
    elif count["verified"] == total:
        value, kind = "verified", "good"
    else:
        value, kind = "files complete", "good"
    told = ", ".join(
        f"{n:,} {_STATES[state]}"
        for state, n in count.items()
        if n and state in _STATES
    )
    if count["whole"]:
        told += "; arrays not read"
    return _card("integrity", "Integrity", value, told, kind, data_value=value)


_STATES: dict[str, str] = {
    "verified": "read in full",
    "whole": "with all files and sizes",
    "unknown": "not looked at",
}


def _last_save(report: Report) -> Markup | None:
    last = next((s for s in reversed(report.saves) if s.outcome == "durable"), None)
    if last is None or last.total_secs is None:
        return None
    blocked = _util.humanize.secs(last.blocked_secs or 0.0)
    return _card(
        "last-save",
        "Last save blocked",
        blocked,
        f"durable after {_util.humanize.secs(last.total_secs)}",
        data_value=last.blocked_secs,
        data_total=last.total_secs,
    )
