"""`flaxckpt report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _policies

if TYPE_CHECKING:
    from flaxckpt._report import Report

_DEFAULT = "report.html"


@_app.verb
def report(
    path: _app.PathArgument,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"Where the page is written; else {_DEFAULT}.",
            show_default=False,
        ),
    ] = None,
    keep: _policies.KeepOption = None,
    config: _policies.ConfigOption = None,
    group: _policies.GroupOption = None,
    step_a: Annotated[
        int | None,
        typer.Option("--step-a", "-a", min=0, help="Compared; else the one before."),
    ] = None,
    step_b: Annotated[
        int | None,
        typer.Option("--step-b", "-b", min=0, help="With which; else the newest."),
    ] = None,
    diff: Annotated[
        bool | None,
        typer.Option(
            "--diff/--no-diff",
            help="Whether two steps are compared, which reads both;"
            " else up to 2 GB each.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte of all steps.")
    ] = False,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Draws a run on one page of HTML.

    Saves, metrics, what stays and why, sizes, changes, the dataset, lineage, integrity.
    The page loads nothing; an older one is replaced. With --json none is written,
    unless --output says where.
    It exits with 1 if anything is damaged, or could not be read.

    Example:
      flaxckpt report runs/7 -o report.html --keep latest:3
    """
    from flaxckpt import _report

    policies = _policies.policies(keep, config, group)
    file = None if json and output is None else _destination(path, output)
    found = _report.gather(
        path, _report.ReportOptions(policies, step_a, step_b, diff, verify, step_format)
    )
    size = 0 if file is None else _write(file, _report.page(found))
    if json:
        _output.document({"ok": found.is_good, **_output.fields(found)})
    else:
        _show(found, file, size)
    return _app.FINE if found.is_good else _app.FOUND


def _destination(path: str, output: str | None) -> Path:
    """Where the page goes.

    Raises:
        OptionError: It would be written into a checkpoint, over something that is no
            page, or unasked into the run directory.
    """
    from flaxckpt import _storage, formats

    root, file = (
        _storage.local.resolve(path),
        _storage.local.resolve(output or _DEFAULT),
    )
    if output is None and root == file.parent:
        raise errors.OptionError(
            f"{file} would be among the steps of the run: say where the page goes, as"
            " --output FILE"
        )
    if not file.parent.is_dir():
        raise errors.OptionError(f"{file.parent} is no directory: make it first")
    inside = [each for each in file.parents if each == root or root in each.parents]
    if any(formats.recognises(each) for each in inside):
        raise errors.OptionError(
            f"{file} would be in a checkpoint: pass another --output"
        )
    if file.exists() and not _is_page(file):
        raise errors.OptionError(
            f"{file} is there and is no page of HTML, so it is left alone: pass"
            " another --output"
        )
    return file


def _is_page(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return (
            opened.read(64).lstrip().lower().startswith((b"<!doctype html", b"<html"))
        )


def _write(file: Path, page: str) -> int:
    """Writes the page, all of it or nothing, and tells its size."""
    from flaxckpt import _storage

    content = page.encode()
    _storage.local.replace(file, content)
    return len(content)


def _show(found: Report, file: Path | None, size: int) -> None:
    for each in found.integrity:
        if each.state in ("damaged", "unread"):
            what = "is damaged" if each.state == "damaged" else "could not be read"
            name = f"step {each.step}" if each.step is not None else found.path
            _output.line(f"{name} {what}: {each.detail}")
    known, total = found.looked_at, len(found.integrity)
    if known < total:
        _output.line(
            f"the integrity of {known:,} of {total:,} steps was looked at: --verify"
            " reads every byte of all"
            if found.is_run
            else "the integrity of the checkpoint is not known"
        )
    steps = len(found.steps)
    what = f"{steps} {'step' if steps == 1 else 'steps'}"
    _output.line(
        f"wrote {_output.short(str(file))}: {what if found.is_run else '1 checkpoint'},"
        f" {_output.size(size)}"
    )
