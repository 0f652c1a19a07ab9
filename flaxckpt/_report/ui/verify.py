"""The view on the integrity of a run: reads every byte of its steps, on request."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from flaxckpt import errors
from flaxckpt._inspect.listing import Step
from flaxckpt._report import section_origin, tables
from flaxckpt._report.data import Report
from flaxckpt._report.ui import forms, frame
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.verifications import Fault, Finding, Job, Result
from flaxckpt._report.ui.workspace import Query, Workspace, address
from flaxckpt._util import html, humanize

_ALL: Final = "all"
_Chosen: TypeAlias = int | Literal["all"] | None
"""The steps that a page is about; None for a checkpoint, or if none were chosen."""

_MOST_SHOWN = 20
"""Steps whose faults are listed."""

_REFRESH = "every 600ms"


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page that verifies the `step` of a `run`, or all of its steps."""
    place = workspace.places.find(query.text("run"))
    report = workspace.report(place)
    chosen = _chosen(workspace, place, query)
    choices = [forms.hidden("run", place.name)]
    if place.is_run:
        choices.append(_step_choice(report, chosen))
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
            _status(workspace, place, chosen),
        ),
        place=place,
        view="/verify",
        version=workspace.version(place),
    )


def start(workspace: Workspace, query: Query) -> html.Markup:
    """Starts to verify the `step` of a `run`, or all steps, the newest first."""
    place = workspace.places.find(query.text("run"))
    report = workspace.feeds.latest(place).report
    steps = report.steps[::-1]
    chosen = _asked(place, query)
    if place.is_run and chosen is None:
        raise errors.OptionError(f"choose a step of {place.name} to verify")
    if isinstance(chosen, int):
        steps = tuple(step for step in steps if step.step == chosen)
        if not steps:
            raise errors.CheckpointNotFoundError(f"{place.name} has no step {chosen}")
    try:
        workspace.verifications.start(place, steps)
    except errors.OptionError as error:
        return _status(workspace, place, chosen, frame.message(str(error), "error"))
    return _status(workspace, place, chosen)


def stop(workspace: Workspace, query: Query) -> html.Markup:
    """Stops the verification that is running."""
    workspace.verifications.stop()
    return status(workspace, query)


def status(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the progress of the verification, and the results so far."""
    place = workspace.places.find(query.text("run"))
    return _status(workspace, place, _chosen(workspace, place, query))


def _asked(place: Location, query: Query) -> _Chosen:
    """Returns the `step` of a request: a number, or all; None without one."""
    if place.is_run and query.text("step") == _ALL:
        return _ALL
    return query.number("step") if place.is_run else None


def _chosen(workspace: Workspace, place: Location, query: Query) -> _Chosen:
    """Returns the steps to show: of the request, else those verified last, if any."""
    asked, job = _asked(place, query), workspace.verifications.job
    if asked is not None or job is None or job.place != place:
        return asked
    return job.steps[0].step if len(job.steps) == 1 else _ALL


def _step_choice(report: Report, chosen: _Chosen) -> html.Markup:
    """Returns a list of the steps of a run, and all of them together.

    Args:
        report: The report on the run.
        chosen: The chosen step, or all.
    """
    numbered = [step for step in report.steps[::-1] if step.step is not None]
    sizes = [step.bytes for step in numbered if step.bytes is not None]
    total = f", {humanize.size(report.bytes)}" if report.bytes and sizes else ""
    options = forms.step_options(report, chosen if isinstance(chosen, int) else None)
    options.insert(1, (_ALL, f"all {humanize.count(len(numbered), 'step')}{total}"))
    return forms.choice(
        "Step",
        "step",
        options,
        "" if chosen is None else str(chosen),
        hx_get="/verify/status",
        hx_include="closest form",
        hx_target="#verification",
        hx_swap="outerHTML",
    )


# ---- the status -------------------------------------------------------------------


def _status(
    workspace: Workspace,
    place: Location,
    chosen: _Chosen,
    message: html.Markup = html.NOTHING,
) -> html.Markup:
    """Returns the part of the page that is replaced while a verification runs.

    Args:
        workspace: The data behind the page.
        place: The run or the checkpoint.
        chosen: The steps whose results are shown.
        message: A message above.
    """
    report = workspace.feeds.latest(place).report
    found = workspace.verifications.find(place, report)
    results = workspace.verifications.results(place, report)
    shown = results
    if chosen != _ALL:
        shown = {n: result for n, result in results.items() if n == chosen}
    job = workspace.verifications.job
    is_running = job is not None and job.is_running
    parts = [message]
    if job is not None and is_running:
        parts.append(_progress(job, place, chosen))
    else:
        parts.append(_outcome(workspace, place, chosen, found))
    parts += _faults(shown)
    parts += _remedies(place, report, shown)
    known = workspace.report(place)
    section = section_origin.integrity(known, verify=html.NOTHING)
    if found and section is not None:
        parts.append(html.element("p", section.summary, class_="summary-text"))
        parts += section.body
    return html.element(
        "div",
        *parts,
        id="verification",
        aria_live="polite",
        hx_get=address("/verify/status", run=place.name, step=chosen),
        hx_trigger=_REFRESH if is_running else "run-changed from:body",
        hx_swap="outerHTML",
    )


def _progress(job: Job, place: Location, chosen: _Chosen) -> html.Markup:
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
        hx_get=address("/verify/stop", run=place.name, step=chosen),
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


def _name(place: Location, step: Step | None) -> str:
    if step is None or step.step is None:
        return place.name
    return f"step {step.step:,} of {place.name}"


def _outcome(
    workspace: Workspace,
    place: Location,
    chosen: _Chosen,
    found: Mapping[int | None, Finding],
) -> html.Markup:
    """Returns the results of the chosen steps in a sentence.

    It is green if every byte was good, and nothing else is known since.
    """
    steps = {step.step: step for step in workspace.feeds.latest(place).report.steps}
    job = workspace.verifications.job
    if job is not None and not _is_about(job, place, chosen, steps):
        job = None
    verified = list(job.steps) if job is not None else []
    results = list(job.results) if job is not None else []
    if job is None and chosen != _ALL and chosen in found:
        results = [found[chosen].result]
        verified = [results[0].step]
    if not verified:
        return _note_missing(place, chosen, steps)
    news = [
        (step, since)
        for step in (result.step.step for result in results)
        if (since := found[step].news if step in found else "")
    ]
    faults = workspace.report(place).faults
    is_bad = any(result.integrity.is_bad for result in results)
    is_whole = [r.integrity.state for r in results] == ["verified"] * len(verified)
    text = _sentence(place, verified, results, is_current=not news)
    if unchecked := sum(result.unchecked for result in results):
        arrays = humanize.count(unchecked, "leaf or file", "leaves or files")
        text += f" {arrays} without checksums: only read."
    if news:
        text += f" Since then, {_describe(news, len(verified))}."
        is_bad = any(result.step.step in faults for result in results)
    kind = "bad" if is_bad else "good" if is_whole and not news else "open"
    parts = [html.element("p", text, class_=f"outcome {kind}")]
    if job is not None and job.error is not None:
        parts.append(frame.message(f"The verification failed: {job.error}", "error"))
    elif job is not None and job.is_stopped and not is_whole:
        parts.append(frame.message("It was stopped, and the others were not read."))
    return html.join(parts)


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


def _note_missing(
    place: Location, chosen: _Chosen, steps: Collection[int | None]
) -> html.Markup:
    """Returns a note if the chosen step does not exist."""
    if not isinstance(chosen, int) or chosen in steps:
        return html.NOTHING
    return frame.message(f"{place.name} has no step {chosen:,} to verify.")


def _describe(news: Sequence[tuple[int | None, str]], count: int) -> str:
    """Describes the news on steps of which `count` were verified."""
    if count == 1:
        return f"it {news[0][1]}"
    texts = [f"step {step} {since}" for step, since in news if step is not None]
    return errors.first_few(texts, _MOST_NAMED)


def _sentence(
    place: Location,
    steps: Sequence[Step],
    results: Sequence[Result],
    *,
    is_current: bool,
) -> str:
    """Returns what was found, and when.

    Args:
        place: The run or the checkpoint.
        steps: The steps that were to be verified.
        results: The results of these, as far as there are any.
        is_current: False if something newer is known.
    """
    read = sum(result.integrity.bytes_checked for result in results)
    secs = sum(result.secs for result in results)
    facts = f"{humanize.size(read)} read in {humanize.secs(secs)}"
    times = [r.integrity.found for r in results if r.integrity.found is not None]
    at = f"verified at {humanize.clock(max(times, default=None))}" if times else ""
    when = f", {at}" if is_current else f" when {at}"
    be = ("is", "are") if is_current else ("was", "were")
    bad = [result for result in results if result.integrity.is_bad]
    good = sum(result.integrity.state == "verified" for result in results)
    total = len(steps)
    if bad:
        return f"{_verdict(place, bad, total, be[0])}{when if times else ''}; {facts}."
    if good < total:
        count = f"{good:,} of {total:,} steps verified" if total > 1 else "Not verified"
        return f"{count}; {facts}."
    if total > 1:
        return f"All {total:,} steps {be[1]} whole{when}: {facts}."
    return f"{_capital(_name(place, steps[0]))} {be[0]} whole{when}: {facts}."


def _verdict(place: Location, bad: Sequence[Result], total: int, be: str) -> str:
    damaged = [r for r in bad if r.integrity.state == "damaged"]
    if total == 1:
        name = _capital(_name(place, bad[0].step))
        return f"{name} {f'{be} damaged' if damaged else 'could not be read'}"
    parts = []
    for results, what in (
        (damaged, "damaged"),
        ([r for r in bad if r not in damaged], "could not be read"),
    ):
        if results:
            names = [f"{result.step.step:,}" for result in results]
            shown = errors.first_few(names, 8)
            parts.append(f"{len(results):,} of {total:,} steps {what}: {shown}")
    return "; ".join(parts)


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" if text.startswith("step ") else text


# ---- the remedies -----------------------------------------------------------------


def _remedies(
    place: Location, report: Report, results: Mapping[int | None, Result]
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


def _remedy(
    place: Location, steps: Sequence[int], text: str, effect: str
) -> html.Markup:
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
    tables.Column("file, and the values in it", is_wide=True),
    tables.Column("fault", is_wide=True),
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
    """Returns the faults of a step: a sentence, and the faults of each file, folded."""
    number, state = result.step.step, result.integrity.state
    name = "" if number is None else f"Step {number:,}: "
    verdict = "damaged" if state == "damaged" else "could not be read"
    files: dict[str, list[Fault]] = {}
    for fault in result.faults:
        files.setdefault(fault.place.partition(" -> ")[0], []).append(fault)
    what = result.summary or result.integrity.detail
    if files and not result.more_faults:
        count = "one file" if len(files) == 1 else f"{len(files):,} files"
        what = f"{count}; {what}"
    return html.element(
        "div",
        html.element("p", html.element("strong", f"{name}{verdict}"), f": {what}"),
        *[_faults_in(file, faults, len(files) == 1) for file, faults in files.items()],
        _note_more(len(result.faults), result.more_faults),
        class_="faults",
        data_step=number,
    )


def _faults_in(file: str, faults: Sequence[Fault], is_open: bool) -> html.Markup:
    rows = [
        tables.TableRow([f.place, f.why], {"data_place": f.place}, "bad")
        for f in faults
    ]
    title = f"{file}: {humanize.count(len(faults), 'fault')}"
    return html.element(
        "details",
        html.element("summary", title),
        tables.table("Faults", _COLUMNS, rows, what="faults"),
        open="" if is_open and len(faults) <= _MOST_NAMED else None,
    )


def _note_more(shown: int, more: int) -> html.Markup:
    if not more:
        return html.NOTHING
    text = f"The first {shown} of {humanize.count(shown + more, 'fault')}."
    return html.element("p", text, class_="note")
