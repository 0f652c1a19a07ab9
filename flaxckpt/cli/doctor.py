"""`flaxckpt doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flaxckpt.cli import _app, _output
from flaxckpt.cli._output import Cell, TextColumn
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt._inspect.doctor import Diagnosis


@_app.verb
def doctor(
    directory: Annotated[
        str, Argument(metavar="DIRECTORY", help="The directory to test.")
    ] = ".",
    max_mb: Annotated[
        int, Option("--max-mb", min=1, metavar="N", help="Maximum megabytes to write.")
    ] = 256,
    max_secs: Annotated[
        float, Option("--max-secs", min=0.0, help="Approximate duration.")
    ] = 2.0,
    json: _app.JsonOption = False,
) -> int:
    """Lists package versions and tests the storage of a directory.

    Writes some files there, syncs, reads and removes them. Exits with 1 if a run could
    not save there.

    Example:
      flaxckpt doctor runs/7
    """
    from flaxckpt import _inspect

    diagnosis = _inspect.doctor.examine(
        directory, max_bytes=max_mb * 10**6, max_secs=max_secs
    )
    if json:
        _output.print_document(
            {"ok": not diagnosis.problems, **_output.fields_of(diagnosis)}
        )
    else:
        _show(diagnosis)
    return _app.FINDING if diagnosis.problems else _app.SUCCESS


def _show(diagnosis: Diagnosis) -> None:
    columns = [TextColumn(""), TextColumn("")]
    _output.print_table(
        columns, [[name, version] for name, version in diagnosis.versions.items()]
    )
    _output.print_line()
    rows: list[list[str | Cell]] = [
        ["directory", diagnosis.directory],
        ["file system", diagnosis.file_system],
        ["free", _output.size(diagnosis.free_bytes)],
    ]
    if diagnosis.sync_secs is not None:
        rows += [
            ["a small file is durable after", _output.secs(diagnosis.sync_secs)],
            ["durable writes", f"{_output.size(diagnosis.write_rate)}/s"],
            ["reads", f"{_output.size(diagnosis.read_rate)}/s"],
        ]
    rows += [
        [name, Cell("yes", "green") if works else Cell("no", "yellow")]
        for name, works in diagnosis.features.items()
    ]
    _output.print_table(columns, [row for row in rows if row[1]])
    for problem in diagnosis.problems:
        _output.print_paragraph(f"problem: {problem}")
