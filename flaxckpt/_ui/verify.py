"""The view on the integrity of a run: reads every byte of its steps, on request."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from flaxckpt import _report, errors
from flaxckpt._inspect.listing import Step
from flaxckpt._report import Report
from flaxckpt._ui import forms, frame
from flaxckpt._ui.places import Place
from flaxckpt._ui.verifications import Job, Result
from flaxckpt._ui.workspace import Query, Workspace, address
from flaxckpt._util import html, humanize

_ALL = "all"
_MOST_SHOWN = 20
"""Steps whose faults are listed."""

_REFRESH = "every 600ms"


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page that verifies the `step` of a `run`, or all of its steps."""
    place = workspace.places.find(query.text("run"))
    report = workspace.report(place)
    choices = [forms.hidden("run", place.name)]
    if place.is_run:
        is_all = query.text("step") == _ALL
        number = None if is_all else query.number("step")
        choices.append(_step_choice(report, number, is_all=is_all))
    choices.append(html.element("button", "Verify", type="submit"))
    return frame.page(
        workspace,
        f"Verify {place.name}",
        html.element(
            "section",
            html.element("h2", "Is this checkpoint whole?"),
            html.element(
                "p",
                "Reads every byte, and compares the data with the checksums of the"
                " save. Nothing is changed.",
                class_="summary-text",
            ),
            html.element(
                "form",
                *choices,
                class_="choices",
                hx_get="/verify/start",
                hx_target="#verification",
                hx_swap="outerHTML",
            ),
            _status(workspace, place),
        ),
        place=place,
        view="/verify",
        version=frame.current_version(workspace, place),
    )


def start(workspace: Workspace, query: Query) -> html.Markup:
    """Starts to verify the `step` of a `run`, or all steps, the newest first."""
    place = workspace.places.find(query.text("run"))
    report = workspace.feeds.latest(place).report
    steps = report.steps[::-1]
    if place.is_run and query.text("step") != _ALL:
        number = query.number("step")
        if number is None:
            raise errors.OptionError(f"choose a step of {place.name} to verify")
        steps = tuple(step for step in steps if step.step == number)
        if not steps:
            raise errors.CheckpointNotFoundError(f"{place.name} has no step {number}")
    try:
        workspace.verifications.start(place, steps)
    except errors.OptionError as error:
        return _status(workspace, place, frame.message(str(error), "error"))
    return _status(workspace, place)


def stop(workspace: Workspace, query: Query) -> html.Markup:
    """Stops the verification that is running."""
    workspace.verifications.stop()
    return status(workspace, query)


def status(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the progress of the verification, and the results so far."""
    return _status(workspace, workspace.places.find(query.text("run")))


def _step_choice(report: Report, chosen: int | None, *, is_all: bool) -> html.Markup:
    """Returns a list of the steps of a run, and all of them together.

    Args:
        report: The report on the run.
        chosen: The chosen step, or None.
        is_all: True if all are chosen.
    """
    numbered = [step for step in report.steps[::-1] if step.step is not None]
    sizes = [step.bytes for step in numbered if step.bytes is not None]
    total = f", {humanize.size(report.bytes)}" if report.bytes and sizes else ""
    options = forms.step_options(report, chosen)
    options.insert(1, (_ALL, f"all {humanize.count(len(numbered), 'step')}{total}"))
    value = _ALL if is_all else "" if chosen is None else str(chosen)
    return forms.choice("Step", "step", options, value)


# ---- the status -------------------------------------------------------------------


def _status(
    workspace: Workspace, place: Place, message: html.Markup = html.NOTHING
) -> html.Markup:
    """Returns the part of the page that is replaced while a verification runs."""
    report = workspace.feeds.latest(place).report
    results = workspace.verifications.results(place, report)
    job = workspace.verifications.job
    parts = [message]
    is_running = job is not None and job.is_running
    if job is not None and is_running:
        parts.append(_progress(job, place))
    elif job is not None and job.place == place:
        is_current = all(results.get(r.step.step) is r for r in job.results)
        parts.append(_outcome(job, place, is_current=is_current))
    parts += _faults(results)
    parts += _remedies(place, report, results)
    if results:
        known = workspace.report(place)
        section = _report.section_origin.integrity(known, verify=html.NOTHING)
        assert section is not None  # there is a result
        parts.append(html.element("p", section.summary, class_="summary-text"))
        parts += section.body
    return html.element(
        "div",
        *parts,
        id="verification",
        aria_live="polite",
        hx_get=address("/verify/status", run=place.name) if is_running else None,
        hx_trigger=_REFRESH if is_running else None,
        hx_swap="outerHTML" if is_running else None,
    )


def _progress(job: Job, place: Place) -> html.Markup:
    """Returns the progress of a job, with a button that stops it."""
    step, done, total = job.current
    share = len(job.results) + (min(1.0, done / total) if total else 0.0)
    text = f"Verifying {_name(job.place, step)}: {humanize.size(done)}"
    if total:
        text += f" of {humanize.size(total)}"
    if len(job.steps) > 1:
        text += f"; {len(job.results):,} of {len(job.steps):,} steps done"
    bad = [result for result in job.results if result.integrity.is_bad]
    if bad:
        text += f", {len(bad):,} with faults"
    button = html.element(
        "button",
        "Stopping …" if job.is_stopped else "Stop",
        type="button",
        disabled="" if job.is_stopped else None,
        hx_get=address("/verify/stop", run=place.name),
        hx_target="#verification",
        hx_swap="outerHTML",
    )
    return html.element(
        "div",
        html.element("p", text),
        html.element(
            "progress",
            value=f"{share / len(job.steps):.4f}",
            max=1,
            aria_label="Progress of the verification",
        ),
        button,
        class_="verifying",
    )


def _name(place: Place, step: Step | None) -> str:
    if step is None or step.step is None:
        return place.name
    return f"step {step.step:,} of {place.name}"


def _outcome(job: Job, place: Place, *, is_current: bool) -> html.Markup:
    """Returns the result of a job in a sentence; green if every byte was good.

    Args:
        job: The job, which has ended.
        place: The run or the checkpoint.
        is_current: False if a step was saved again or deleted since.
    """
    states = [result.integrity.state for result in job.results]
    is_bad = any(result.integrity.is_bad for result in job.results)
    is_whole = states == ["verified"] * len(job.steps)
    text = _sentence(job, place)
    if unchecked := sum(result.unchecked for result in job.results):
        arrays = humanize.count(unchecked, "leaf or file", "leaves or files")
        text += f" {arrays} without checksums: only read."
    if not is_current:
        text += " Since then, steps were saved again or deleted."
    kind = "bad" if is_bad else "good" if is_whole and is_current else "open"
    parts = [html.element("p", text, class_=f"outcome {kind}")]
    if job.error is not None:
        parts.append(frame.message(f"The verification failed: {job.error}", "error"))
    elif job.is_stopped and not is_whole:
        parts.append(frame.message("It was stopped, and the others were not read."))
    return html.join(parts)


def _sentence(job: Job, place: Place) -> str:
    read = sum(result.integrity.bytes_checked for result in job.results)
    secs = sum(result.secs for result in job.results)
    facts = f"{humanize.size(read)} read in {humanize.secs(secs)}"
    bad = [result for result in job.results if result.integrity.is_bad]
    good = sum(result.integrity.state == "verified" for result in job.results)
    total = len(job.steps)
    if bad:
        return f"{_verdict(bad, job)}; {facts}."
    if good < total:
        count = f"{good:,} of {total:,} steps verified" if total > 1 else "Not verified"
        return f"{count}; {facts}."
    if total > 1:
        return f"All {total:,} steps are whole: {facts}."
    return f"{_capital(_name(place, job.steps[0]))} is whole: {facts}."


def _verdict(bad: Sequence[Result], job: Job) -> str:
    damaged = [r for r in bad if r.integrity.state == "damaged"]
    if len(job.steps) == 1:
        name = _capital(_name(job.place, bad[0].step))
        return f"{name} {'is damaged' if damaged else 'could not be read'}"
    parts = []
    for results, what in (
        (damaged, "damaged"),
        ([r for r in bad if r not in damaged], "could not be read"),
    ):
        if results:
            names = [f"{result.step.step:,}" for result in results]
            shown = errors.first_few(names, 8)
            parts.append(
                f"{len(results):,} of {len(job.steps):,} steps {what}: {shown}"
            )
    return "; ".join(parts)


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" if text.startswith("step ") else text


# ---- the remedies -----------------------------------------------------------------


def _remedies(
    place: Place, report: Report, results: Mapping[int | None, Result]
) -> list[html.Markup]:
    """Returns the commands that mark damaged steps of a run, and unmark good ones."""
    marked = {s.step for s in report.steps if s.damage is not None}
    states = {n: results[n].integrity.state for n in results if n is not None}
    damaged = [n for n, s in states.items() if s == "damaged" and n not in marked]
    good = [n for n, s in states.items() if s == "verified" and n in marked]
    made = []
    if damaged:
        made.append(
            _remedy(
                place,
                damaged,
                f"Not marked as damaged yet: {_named(damaged)}. Restores may try an"
                " unmarked step, and policies count it.",
                "marks a step if its state cannot be read. Restores and policies leave"
                " out marked steps",
            )
        )
    if good:
        made.append(
            _remedy(
                place,
                good,
                f"Marked as damaged, although every byte is good: {_named(good)}."
                " Restores and policies leave it out.",
                "removes the mark",
            )
        )
    return made


def _remedy(place: Place, steps: Sequence[int], text: str, effect: str) -> html.Markup:
    """Returns a paragraph with the command that updates the marks of steps."""
    numbers = " ".join(map(str, sorted(steps)))
    if len(steps) > _MOST_NAMED:
        numbers = "--all"
    command = f"flaxckpt verify {shlex.quote(str(place.path))} {numbers} --mark"
    return html.element(
        "div",
        html.element("p", text),
        html.element("pre", command),
        html.element("p", f"In a terminal, this command verifies again, and {effect}."),
        class_="remedy",
    )


def _named(steps: Sequence[int]) -> str:
    names = errors.first_few([f"{step:,}" for step in sorted(steps)], _MOST_NAMED)
    return f"step {names}" if len(steps) == 1 else f"steps {names}"


_MOST_NAMED = 8

# ---- the faults -------------------------------------------------------------------

_COLUMNS = [
    _report.tables.Column("file, and the values in it", is_wide=True),
    _report.tables.Column("fault", is_wide=True),
]


def _faults(results: Mapping[int | None, Result]) -> list[html.Markup]:
    """Returns the faults of each damaged step, the newest first."""
    bad = [result for result in results.values() if result.integrity.is_bad][::-1]
    made = [_faults_of(result) for result in bad[:_MOST_SHOWN]]
    if len(bad) > len(made):
        steps = humanize.count(len(bad) - len(made), "further step")
        text = f"{steps} with faults: verify a step alone to see them."
        made.append(html.element("p", text, class_="note"))
    return made


def _faults_of(result: Result) -> html.Markup:
    number, state = result.step.step, result.integrity.state
    name = "" if number is None else f"Step {number:,}: "
    verdict = "damaged" if state == "damaged" else "could not be read"
    what = result.summary or result.integrity.detail
    rows = [
        _report.tables.Row([fault.place, fault.why], {"data_place": fault.place}, "bad")
        for fault in result.faults
    ]
    caption = humanize.count(len(rows) + result.more_faults, "fault")
    if result.more_faults:
        caption = f"The first {len(rows)} of {caption}"
    table = html.NOTHING
    if rows:
        table = _report.tables.table(caption, _COLUMNS, rows, what="faults")
    return html.element(
        "div",
        html.element("p", html.element("strong", f"{name}{verdict}"), f": {what}"),
        table,
        class_="faults",
        data_step=number,
    )
