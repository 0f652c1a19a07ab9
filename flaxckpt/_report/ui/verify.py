"""The view on the integrity of a run: reads every byte of its steps, on request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal, TypeAlias

from flaxckpt import _checkpoint, errors
from flaxckpt._report import templates
from flaxckpt._report.content import Content
from flaxckpt._report.data import Report
from flaxckpt._report.integrity import Verification
from flaxckpt._report.ui import frame
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.verifications import Job
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._util import html

_ALL: Final = "all"
_Chosen: TypeAlias = int | Literal["all"] | None
"""The steps that a page is about; None for a checkpoint, or if none were chosen."""

_MOST_SHOWN = 20
"""Steps whose faults are listed."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page that verifies the `step` of a `run`, or all of its steps."""
    return frame.render("ui/verify.html", workspace, **_find_shown(workspace, query))


def start(workspace: Workspace, query: Query) -> html.Markup:
    """Starts to verify the `step` of a `run`, or all steps, the newest first."""
    place = workspace.places.find(query.text("run"))
    steps = workspace.feeds.latest(place).report.steps[::-1]
    chosen = _asked(place, query)
    if place.is_run and chosen is None:
        raise errors.OptionError(f"choose a step of {place.name} to verify")
    if isinstance(chosen, int):
        steps = tuple(step for step in steps if step.step == chosen)
        if not steps:
            raise errors.CheckpointNotFoundError(f"{place.name} has no step {chosen}")
    error = None
    try:
        workspace.verifications.start(place, steps)
    except errors.OptionError as refused:
        error = str(refused)
    shown = _describe(workspace, place, chosen, error)
    return templates.render("ui/verification.html", **shown)


def stop(workspace: Workspace, query: Query) -> html.Markup:
    """Stops the verification that is running."""
    workspace.verifications.stop()
    return status(workspace, query)


def status(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the progress of the verification, and the results so far."""
    return templates.render("ui/verification.html", **_find_shown(workspace, query))


def _asked(place: Location, query: Query) -> _Chosen:
    """Returns the `step` of a request: a number, or all; None without one."""
    if not place.is_run:
        return None
    return _ALL if query.text("step") == _ALL else query.number("step")


def _find_shown(workspace: Workspace, query: Query) -> Content:
    """Describes the steps of the request, else those verified last, if any."""
    place = workspace.places.find(query.text("run"))
    chosen, job = _asked(place, query), workspace.verifications.job
    if chosen is None and job is not None and job.place == place:
        chosen = job.steps[0].step if len(job.steps) == 1 else _ALL
    return _describe(workspace, place, chosen)


def _describe(
    workspace: Workspace, place: Location, chosen: _Chosen, error: str | None = None
) -> Content:
    """Returns the part of the page that is replaced while a verification runs."""
    report = workspace.feeds.latest(place).report
    found = workspace.verifications.find(place, report)
    numbers = [step.step for step in report.steps if chosen in (_ALL, step.step)]
    results = {n: found[n] for n in numbers if n in found and not found[n].news}
    bad = [result for result in results.values() if result.integrity.is_bad][::-1]
    job = workspace.verifications.job
    is_running = job is not None and job.is_running
    known = workspace.report(place)
    ended = None if is_running else _find_outcome(job, place, chosen, found, known)
    return {
        "place": place,
        "error": error,
        "step": chosen,
        "job": job if is_running else None,
        "outcome": ended,
        "faults": [_list_faults(result) for result in bad[:_MOST_SHOWN]],
        "more": max(0, len(bad) - _MOST_SHOWN),
        "remedies": _find_remedies(report, results),
        "report": known,
        "said": {result.step.step for result in bad[:_MOST_SHOWN]},
    }


# ---- the outcome ------------------------------------------------------------------


def _find_outcome(
    job: Job | None,
    place: Location,
    chosen: _Chosen,
    found: Mapping[int | None, Verification],
    known: Report,
) -> Content:
    """Returns the results of the chosen steps, and what is known since.

    They are green if every byte was good, and nothing else is known since.
    """
    steps = {step.step for step in known.steps}
    if job is not None and not _is_about(job, place, chosen, steps):
        job = None
    verified = [] if job is None else [*job.steps]
    results = [] if job is None else [*job.results]
    if job is None and chosen != _ALL and chosen in found:
        results = [found[chosen]]
        verified = [results[0].step]
    numbers = [result.step.step for result in results]
    news = [(n, found[n].news) for n in numbers if n in found and found[n].news]
    is_whole = [r.integrity.state for r in results] == ["verified"] * len(verified)
    is_bad = any(result.integrity.is_bad for result in results)
    if news:
        is_bad = not known.faults.keys().isdisjoint(numbers)
    return {
        "job": job,
        "steps": verified,
        "results": results,
        "news": news,
        "is_whole": is_whole,
        "kind": "bad" if is_bad else "good" if is_whole and not news else "open",
        "is_missing": isinstance(chosen, int) and chosen not in steps,
    }


def _is_about(
    job: Job, place: Location, chosen: _Chosen, steps: Collection[int | None]
) -> bool:
    """Returns True if a job has read the chosen steps of a run, and no others."""
    read = {step.step for step in job.steps}
    if job.place != place:
        return False
    if chosen == _ALL:
        return len(read) > 1 or read == {*steps}
    return read == {chosen}


# ---- faults and remedies ----------------------------------------------------------


def _list_faults(result: Verification) -> Content:
    """Returns the faults of a step: place, its file, the values in it, and why."""
    rows = [(place, *place.partition(" -> ")[::2], why) for place, why in result.faults]
    files = {file for _, file, *_ in rows if file != _checkpoint.verify_report.HERE}
    return {
        "step": result.step.step,
        "files": len(files),
        "what": (files and result.summary) or result.integrity.detail,
        "rows": rows,
        "more": result.more_faults,
    }


def _find_remedies(
    report: Report, results: Mapping[int | None, Verification]
) -> dict[bool, list[int]]:
    """Returns the steps to mark, under True, and the marked ones that are good."""
    marked = {s.step for s in report.steps if s.damage is not None}
    numbers = sorted(n for n in results if n is not None)
    states = {n: results[n].integrity.state for n in numbers}
    damaged = [n for n, s in states.items() if s == "damaged" and n not in marked]
    good = [n for n, s in states.items() if s == "verified" and n in marked]
    return {True: damaged, False: good}
