"""Renders a report as an HTML page that loads nothing, and needs no script."""

from __future__ import annotations

import collections
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from flaxckpt._inspect import best_step
from flaxckpt._report import (
    assets,
    data,
    flight_recorder,
    section_origin,
    section_saves,
    section_state,
    section_steps,
    templates,
)
from flaxckpt._report.cards import card, cards
from flaxckpt._report.data import MetricValue, Report
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize

_FIRST: Sequence[Callable[[Report], Section | None]] = (
    section_steps.metrics,
    section_saves.leaves,
    section_steps.steps,
)
_RUN: Sequence[Callable[[Report], Section | None]] = (
    section_saves.saves,
    section_origin.integrity,
    section_origin.lineage,
    section_origin.dataset,
)
_STATE: Sequence[Callable[[Report], Section | None]] = (
    section_state.change,
    section_state.sizes,
)
"""The sections: across the page, and in its two columns on wide screens."""


def page(report: Report) -> str:
    """Returns the page."""
    name = PurePosixPath(report.path).name or report.path
    columns = [_render(sections, report) for sections in (_FIRST, _RUN, _STATE)]
    first, run, state = ([section.markup() for section in c] for c in columns)
    body = html.element(
        "body",
        page_start(),
        html.element(
            "header",
            _header(report, name),
            recorder(report),
            cards(*headline(report)),
            _navigation([section for column in columns for section in column]),
        ),
        html.element(
            "main",
            *first,
            html.element("div", *run, class_="column"),
            html.element("div", *state, class_="column"),
            id="main",
            tabindex=-1,
        ),
        _footer(report),
        html.element("script", html.Markup(assets.script())),
    )
    document = html.element("html", _head(name), body, lang="en")
    return f"<!doctype html>\n{document}\n"


def page_start() -> html.Markup:
    """Returns the start of each page: a link past the header, a switch of colours."""
    return html.join(
        [
            html.element("a", "Skip to the content", href="#main", class_="skip"),
            html.element(
                "button",
                "◐",
                type="button",
                class_="theme control",
                aria_label="Light or dark colours",
                data_tip="Light or dark colours",
            ),
        ]
    )


def _head(name: str) -> html.Markup:
    return html.element(
        "head",
        html.element("meta", charset="utf-8"),
        html.element(
            "meta", http_equiv="Content-Security-Policy", content=assets.policy()
        ),
        html.element(
            "meta", name_="viewport", content="width=device-width, initial-scale=1"
        ),
        html.element("meta", name_="color-scheme", content="light dark"),
        html.element("link", rel="icon", href="data:,"),
        html.element("title", f"{name}: flaxckpt report"),
        html.element("style", html.Markup(assets.style())),
    )


def recorder(report: Report, actions: Mapping[str, str] | None = None) -> html.Markup:
    """Returns the first screen: the verdict, actions and the track over the steps.

    Args:
        report: The data.
        actions: Name of an action -> the command or the Python that it copies, with
            `{step}`; by default those of a run.
    """
    return templates.render(
        "recorder.html",
        verdict=flight_recorder.judge(report),
        data=flight_recorder.chart_data(report),
        step=flight_recorder.choose_step(report) if report.is_run else None,
        actions=flight_recorder.actions(report) if actions is None else actions,
        has_track=report.is_run and bool(report.history),
    )


def _render(
    sections: Sequence[Callable[[Report], Section | None]], report: Report
) -> list[Section]:
    rendered = [section(report) for section in sections]
    return [section for section in rendered if section is not None]


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


def headline(report: Report) -> list[html.Markup]:
    """Returns the cards of a report, the most important first."""
    made = [*_best(report), _newest(report), _steps(report), _integrity(report)]
    made += [_disk(report), _last_save(report)]
    return [each for each in made if each is not None]


def _steps(report: Report) -> html.Markup | None:
    if not report.is_run:
        return None
    count = len(report.steps)
    faults = collections.Counter(report.faults.values())
    saved = len({save.step for save in report.saves if save.outcome == "durable"})
    detail = f"of {saved:,} saved" if saved > count else "all saved steps"
    detail = ", ".join([*(f"{n:,} {what}" for what, n in faults.items()), detail])
    return card("steps", "Steps", f"{count:,}", detail, link="steps", data_value=count)


def _newest(report: Report) -> html.Markup | None:
    newest = next((s for s in report.steps if "latest" in s.marks), None)
    if newest is None:
        return None
    if newest.step is None:
        size = f"{humanize.count(report.leaves, 'leaf', 'leaves')}"
        value = humanize.size(report.total_bytes)
        return card("newest", "Arrays", value, size, data_value=report.total_bytes)
    fault = report.faults.get(newest.step)
    saved = ["saved ", html.moment(newest.created), f", {fault}" if fault else ""]
    return card(
        "newest",
        "Newest step",
        f"{newest.step:,}",
        html.join(saved),
        "bad" if fault else None,
        link=section_steps.row_name(newest.step),
        data_value=newest.step,
    )


def _best(report: Report) -> list[html.Markup]:
    """Returns a card of each metric that ranks steps, or of the first metric."""
    ranked = {
        name: (points, best)
        for name, points in report.metrics.items()
        if (best := [point for point in points if point.best == "best"])
    }
    made = [
        _best_card(report, name, points, best[-1], is_first=name == next(iter(ranked)))
        for name, (points, best) in [*ranked.items()][:_MOST_BEST]
    ]
    if made:
        return made
    for name, points in report.metrics.items():
        last = data.last_good(points) or points[-1]
        if math.isfinite(last.value):
            detail = _at_step(report, last)
            return [_metric_card("last-metric", f"Last {name}", last, detail)]
    return []


_MOST_BEST = 3


def _best_card(
    report: Report,
    name: str,
    points: Sequence[MetricValue],
    best: MetricValue,
    *,
    is_first: bool,
) -> html.Markup:
    """Returns the card of the best good step, with better ones that are lost."""
    assert best.mode is not None  # a policy ranks by the metric
    faults = report.faults
    values = {p.step: p.value for p in points if math.isfinite(p.value)}
    gone = {point.step for point in points if point.is_deleted}
    found = best_step.find(values, faults, best.mode, gone)
    detail = f"{best_step.end(best.mode)}, {_at_step(report, best)}"
    if best.step in faults:
        detail += "; no good step has a value"
    elif found.damaged is not None:
        step = found.damaged
        fault = best_step.describe_damaged(
            f"{step:,}", values[step], faults[step], is_counted=report.counts(step)
        )
        detail += f"; {fault}"
    elif found.deleted is None:
        detail += f", of {len(values):,} saved"
    else:
        detail += f", of {len(values.keys() - gone):,} that exist"
    if found.deleted is not None:
        step = found.deleted
        detail += f"; {best_step.describe_deleted(f'{step:,}', values[step])}"
    title = f"Best {name}"
    kind = "main best" if is_first else "best"
    if best.step in faults:
        kind = "bad"
    return _metric_card("best", title, best, detail, kind)


def _metric_card(
    card_name: str, title: str, point: MetricValue, detail: str, kind: str = "main"
) -> html.Markup:
    return card(
        card_name,
        title,
        humanize.number(point.value),
        detail,
        kind,
        link=section_steps.row_name(point.step),
        data_value=point.value,
        data_step=point.step,
    )


def _at_step(report: Report, point: MetricValue) -> str:
    """Returns the place of a value, with the state of a step that cannot be read."""
    fault = report.faults.get(point.step)
    return f"at step {point.step:,}" + (f", which is {fault}" if fault else "")


def _disk(report: Report) -> html.Markup:
    if report.bytes is None:
        detail = "object stores do not report sizes"
        return card("bytes", "On the disk", "unknown", detail)
    detail = f"the arrays of one step: {humanize.size(report.total_bytes)}"
    if not report.is_run:
        detail = "all files"
    elif report.shown is None:
        detail = "no step can be read" if report.steps else "no steps yet"
    return card(
        "bytes",
        "On the disk",
        humanize.size(report.bytes),
        detail,
        link="sizes",
        data_value=report.bytes,
    )


def _integrity(report: Report) -> html.Markup | None:
    if not report.integrity:
        return None
    count = dict.fromkeys(("damaged", "unread", "verified", "whole", "unknown"), 0)
    for check in report.integrity:
        count[check.state] += 1
    total, checked = len(report.integrity), report.checked_count
    kind: str | None
    if count["damaged"]:
        value, kind = f"{count['damaged']:,} damaged", "bad"
    elif count["unread"]:
        value, kind = f"{count['unread']:,} unread", "bad"
    elif not checked:
        value, kind = "not looked at", None
    elif checked < total:
        value, kind = f"{checked:,} of {total:,}", None
    elif count["verified"] == total:
        value, kind = "verified", "good"
    else:
        value, kind = "files complete", None
    detail = ", ".join(
        f"{n:,} {_STATES[state]}"
        for state, n in count.items()
        if n and state in _STATES
    )
    if count["whole"]:
        detail += "; arrays not read"
    if kind is None and checked:
        detail = f"steps looked at: {detail}" if checked < total else detail
    return card(
        "integrity",
        "Integrity",
        value,
        detail,
        kind,
        link="integrity",
        data_value=value,
    )


_STATES: dict[str, str] = {
    "verified": "read in full",
    "whole": "with all files and sizes",
    "unknown": "not looked at",
}


def _last_save(report: Report) -> html.Markup | None:
    last = next((s for s in reversed(report.saves) if s.outcome == "durable"), None)
    if last is None or last.total_secs is None:
        return None
    blocked = humanize.secs(last.blocked_secs or 0.0)
    return card(
        "last-save",
        "Last save blocked",
        blocked,
        f"durable after {humanize.secs(last.total_secs)}",
        link="saves",
        data_value=last.blocked_secs,
        data_total=last.total_secs,
    )
