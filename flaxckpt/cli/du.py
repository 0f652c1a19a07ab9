"""`flaxckpt du`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flaxckpt.cli import _app, _output
from flaxckpt.cli._output import TextColumn
from flaxckpt.cli._parameters import Option

if TYPE_CHECKING:
    from flaxckpt._inspect.listing import DiskUsage


@_app.verb
def du(
    path: _app.PathArgument,
    step: _app.StepOption = None,
    depth: Annotated[
        int, Option("--depth", "-d", min=1, metavar="N", help="Depth of the tree.")
    ] = 2,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Shows disk usage by step, and array sizes by subtree.

    The subtrees belong to one step. A file that several steps share counts for the
    first of them.

    Example:
      flaxckpt du runs/7 --depth 3
    """
    from flaxckpt import _inspect

    usage = _inspect.listing.disk_usage(
        path, step=step, depth=depth, step_format=step_format
    )
    if json:
        _output.print_document(usage)
    else:
        _show(usage)
    return _app.SUCCESS


def _show(usage: DiskUsage) -> None:
    columns = [
        TextColumn("step", is_number=True),
        TextColumn("files", is_number=True),
        TextColumn("not shared", is_number=True),
    ]
    rows = [
        [
            "" if step.step is None else str(step.step),
            _output.size(step.bytes),
            _output.size(step.own),
        ]
        for step in usage.steps
    ]
    _output.print_table(columns, rows)
    if usage.bytes is None:
        _output.print_line("object stores do not report the sizes of files")
    else:
        _output.print_paragraph(f"{_output.size(usage.bytes)} on the disk")
    if usage.subtrees:
        _output.print_line()
        path = _output.shorten_path(usage.shown or "")
        _output.print_paragraph(f"arrays of {path}, uncompressed:")
    _output.print_table(
        [
            TextColumn("subtree"),
            TextColumn("leaves", True),
            TextColumn("size", is_number=True),
        ],
        [
            [tree.shown_path, str(tree.leaves), _output.size(tree.bytes)]
            for tree in usage.subtrees
        ],
    )
