"""The steps that forms offer."""

from __future__ import annotations

from flaxckpt._report.data import Report
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Workspace


def step_options(report: Report, chosen: int | None) -> list[tuple[str, str]]:
    """Returns the steps of a run with their marks and known damage, newest first.

    Args:
        report: The report on the run.
        chosen: The chosen step. It is in the list even if the run does not have it, as
            browsers would show, and send, the first step of the list instead.
    """
    options, shown = [], report.marks
    if chosen is not None and chosen not in shown:
        is_known = any(step.step == chosen for step in report.history)
        why = "deleted" if is_known else "not in this run"
        options.append((str(chosen), f"{chosen:,}, {why}"))
    for step in report.steps[::-1]:
        if step.step is not None:
            marks = [mark.text for mark in shown[step.step]]
            options.append((str(step.step), ", ".join((f"{step.step:,}", *marks))))
    return options


def good_steps(report: Report) -> list[int]:
    """Returns the steps of a run without known damage, ascending; none of a checkpoint.

    If all are damaged, returns all.
    """
    steps = [step.step for step in report.steps if step.step is not None]
    return [step for step in steps if step not in report.faults] or steps


def steps_of(
    workspace: Workspace, place: Location, chosen: int | None
) -> list[tuple[str, str]] | None:
    """Returns the steps to choose from; None for a checkpoint outside of a run."""
    if not place.is_run:
        return None
    return step_options(workspace.report(place), chosen)
