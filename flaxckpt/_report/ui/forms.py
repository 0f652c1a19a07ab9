"""Forms that several views have: which step, which checkpoint, whether to read much."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from html import escape

from flaxckpt._report.data import Report
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Workspace
from flaxckpt._util import html, humanize


def choice(
    label: str,
    name: str,
    options: Sequence[tuple[str, str]],
    chosen: str,
    *,
    disabled: Collection[str] = (),
    **attributes: object,
) -> html.Markup:
    """Returns a list to choose from.

    Args:
        label: The label.
        name: The field of the address.
        options: Pairs of a value and its text.
        chosen: The chosen value.
        disabled: The values that cannot be chosen.
        **attributes: Further attributes of the list.
    """
    entries = [
        html.element(
            "option",
            text,
            value=value,
            selected="" if value == chosen else None,
            disabled="" if value in disabled else None,
        )
        for value, text in options
    ]
    return html.element(
        "label",
        html.element("span", label),
        html.element("select", *entries, name_=name, **attributes),
    )


def lines(label: str, name: str, content: str, example: str) -> html.Markup:
    """Returns a field for several lines of text.

    Args:
        label: The label.
        name: The field of the address.
        content: The text.
        example: The text that is shown while it is empty.
    """
    # A browser drops the first line break. Unlike names, the text is not shortened.
    inside = html.Markup("\n" + escape(content))
    return html.element(
        "label",
        html.element("span", label),
        html.element(
            "textarea",
            inside,
            name_=name,
            rows=max(2, content.count("\n") + 1),
            placeholder=example,
            spellcheck="false",
            autocapitalize="off",
        ),
    )


def hidden(name: str, value: str) -> html.Markup:
    """Returns a field of a form that the reader does not see."""
    return html.element("input", type="hidden", name_=name, value=value)


def step_choice(
    workspace: Workspace, place: Location, label: str, name: str, chosen: int | None
) -> html.Markup:
    """Returns a list of the steps of a run, the newest first.

    Args:
        workspace: The data behind the page.
        place: The run.
        label: The label.
        name: The field of the address.
        chosen: The chosen step.
    """
    return choice(
        label,
        name,
        step_options(workspace.report(place), chosen),
        "" if chosen is None else str(chosen),
    )


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


def good_steps(workspace: Workspace, place: Location) -> list[int]:
    """Returns the steps of a run without known damage, ascending; none of a checkpoint.

    If all are damaged, returns all.
    """
    report = workspace.report(place)
    steps = [step.step for step in report.steps if step.step is not None]
    return [step for step in steps if step not in report.faults] or steps


def step_form(workspace: Workspace, place: Location, step: int | None) -> html.Markup:
    """Returns a form that shows the view for another step of a run."""
    if step is None:
        return html.NOTHING
    return html.element(
        "form",
        hidden("run", place.name),
        step_choice(workspace, place, "Step", "step", step),
        html.element("button", "Show", type="submit"),
        class_="choices",
        data_submit="",
    )


def checkpoint_choice(
    names: Iterable[str],
    label: str,
    name: str,
    chosen: str,
    *,
    empty: Collection[str] = (),
    steps: str = "",
) -> html.Markup:
    """Returns a list of runs, checkpoints and files.

    Args:
        names: Their names.
        label: The label.
        name: The field of the address.
        chosen: The chosen one.
        empty: The runs without steps, which cannot be chosen.
        steps: The field with a step of it, which a change leaves out; the page then has
            the steps of the new choice.
    """
    options = [(n, f"{n} (no steps)" if n in empty else n) for n in names]
    return choice(
        label, name, options, chosen, disabled=empty, data_without=steps or None
    )


def start_with_another(workspace: Workspace) -> str:
    """Returns the command that starts the page with a further state in the lists."""
    others = [*workspace.places.others, *workspace.places.files]
    named = "".join(f" --against {shlex.quote(name)}" for name in others)
    root = shlex.quote(str(workspace.places.root))
    return f"flaxckpt ui {root}{named} --against PATH"


def read_anyway(size: int, url: html.Markup, target: str) -> html.Markup:
    """Returns a button to read many bytes.

    Args:
        size: The bytes.
        url: The address that reads them.
        target: The selector of the element to show the result in.
    """
    text = f"{humanize.size(size)} of arrays have to be read, which takes a while."
    button = html.element(
        "button", "Read them", type="button", hx_get=url, hx_target=target
    )
    return html.element("div", html.element("p", text), button, class_="message note")
