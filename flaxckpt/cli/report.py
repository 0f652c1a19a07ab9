"""`flaxckpt report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _policies
from flaxckpt.cli._parameters import Option

if TYPE_CHECKING:
    from flaxckpt._report import Report

_DEFAULT = "report.html"
_SUFFIXES = (".html", ".htm", "")


@_app.verb
def report(
    path: _app.PathArgument,
    output: Annotated[
        str | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"The file to write; by default {_DEFAULT}.",
        ),
    ] = None,
    keep: _policies.KeepOption = None,
    config: _policies.ConfigOption = None,
    group: _policies.GroupOption = None,
    step_a: Annotated[
        int | None,
        Option(
            "--step-a",
            "-a",
            is_step=True,
            help="Step to compare; by default the previous.",
        ),
    ] = None,
    step_b: Annotated[
        int | None,
        Option(
            "--step-b",
            "-b",
            is_step=True,
            help="Step to compare with; by default the newest.",
        ),
    ] = None,
    diff: Annotated[
        bool | None,
        Option(
            "--diff/--no-diff",
            help="Whether to compare two steps, which reads both; by default if each"
            " has up to 2 GB.",
        ),
    ] = None,
    verify: Annotated[
        bool, Option("--verify", help="Read every byte of all steps.")
    ] = False,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Writes a report of a run as an HTML page.

    Shows metrics, the steps and why they are kept or were deleted, saves, integrity,
    changes, sizes, the dataset and lineage. The page loads no other files, and replaces
    an older report. With --json, writes a page only if --output is given.
    Exits with 1 if a step is damaged or unreadable.

    Example:
      flaxckpt report runs/7 -o report.html --keep latest:3
    """
    from flaxckpt import _report

    policies = _policies.parse_policies(keep, config, group)
    file = None if json and output is None else _destination(path, output)
    data = _report.gather(
        path, _report.ReportOptions(policies, step_a, step_b, diff, verify, step_format)
    )
    size = 0 if file is None else _write(file, _report.page(data))
    if json:
        _output.print_document({"ok": not data.faults, **_output.fields_of(data)})
    else:
        _show(data, file, size)
    return _app.FINDING if data.faults else _app.SUCCESS


def _destination(path: str, output: str | None) -> Path:
    from flaxckpt import _formats, _storage

    root = _storage.paths.resolve(path)
    file = _storage.paths.resolve(output or _DEFAULT)
    if output is None and root == file.parent:
        raise errors.OptionError(
            f"{file} would be among the steps of the run: pass another path as"
            " --output FILE"
        )
    if not file.parent.is_dir():
        raise errors.OptionError(f"{file.parent} is not a directory: create it first")
    inside = [at for at in file.parents if at == root or root in at.parents]
    if any(_formats.recognises(directory) for directory in inside):
        raise errors.OptionError(
            f"{file} would be in a checkpoint: pass another --output"
        )
    if file.exists() and not _is_page(file):
        raise errors.OptionError(
            f"{file} exists and is not an HTML page, so it is not replaced: pass"
            " another --output"
        )
    if file.suffix.lower() not in _SUFFIXES:
        raise errors.OptionError(
            f"a report is an HTML page: name it {file.stem}.html, not {file.name}; a"
            " browser prints it as PDF"
        )
    return file


def _is_page(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        start = stream.read(64).lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html"))


def _write(file: Path, page: str) -> int:
    """Writes the page atomically and returns the size in bytes."""
    from flaxckpt import _storage

    content = page.encode()
    _storage.of(file).replace(file, content)
    return len(content)


def _show(data: Report, file: Path | None, size: int) -> None:
    for check in data.integrity:
        if check.state in ("damaged", "unread"):
            fault = "is damaged" if check.state == "damaged" else "could not be read"
            name = f"step {check.step}" if check.step is not None else data.path
            _output.print_paragraph(f"{name} {fault}: {check.detail}")
    total = len(data.integrity)
    checked = total - data.states["unknown"]
    if checked < total:
        _output.print_paragraph(
            f"{checked:,} of {total:,} steps were looked at: --verify reads every byte"
            " of all steps"
            if data.is_run
            else "the integrity of the checkpoint was not looked at"
        )
    steps = _output.count(len(data.steps), "step") if data.is_run else "1 checkpoint"
    path = _output.shorten_path(str(file))
    _output.print_line(f"wrote {path}: {steps}, {_output.size(size)}")
