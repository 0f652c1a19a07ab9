"""The view on the integrity of a run: reads every byte of its steps, on request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, TypeAlias

from flaxckpt import errors
from flaxckpt._inspect.run_search import Location
from flaxckpt._report import templates
from flaxckpt._report.content import Content
from flaxckpt._report.ui import frame
from flaxckpt._report.ui.verifications import Job
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._util import html

_ALL: Final = "all"
_Chosen: TypeAlias = int | Literal["all"] | None
"""The steps that a page is about; None for a checkpoint, or if none were chosen."""


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
    steps = {step.step for step in report.steps}
    job, running = workspace.verifications.job, None
    if job is not None and job.is_running:
        job, running = None, job
    elif job is not None and not _is_about(job, place, chosen, steps):
        job = None
    results = [found[chosen]] if chosen != _ALL and chosen in found else []
    current = [each for each in found.values() if not each.news]
    return {
        "place": place,
        "error": error,
        "step": chosen,
        "report": workspace.report(place),
        "running": running,
        "job": job,
        "verified": [each.step for each in results] if job is None else job.steps,
        "results": results if job is None else [*job.results],
        "news": {step: each.news for step, each in found.items() if each.news},
        "current": [r for r in current if chosen in (_ALL, r.step.step)],
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
