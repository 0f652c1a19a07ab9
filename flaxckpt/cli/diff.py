"""`flaxckpt diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flaxckpt import errors
from flaxckpt.cli import _app, _output
from flaxckpt.cli._output import Cell, TextColumn
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt._inspect.diff import CheckpointDiff, LeafDiff

_ROWS = 100


@_app.verb
def diff(
    a: Annotated[str, Argument(metavar="A", help="A checkpoint, or a run directory.")],
    b: Annotated[
        str | None,
        Argument(metavar="B", help="Another checkpoint; by default A."),
    ] = None,
    step_a: Annotated[
        int | None,
        Option("--step-a", "-a", min=0, help="Step of A; by default the newest."),
    ] = None,
    step_b: Annotated[
        int | None,
        Option("--step-b", "-b", min=0, help="Step of B; by default the newest."),
    ] = None,
    values: Annotated[
        bool,
        Option("--values/--no-values", help="Whether to read and compare values."),
    ] = True,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Compares two checkpoints leaf by leaf.

    The checkpoints may have different formats, or be two steps of a run.
    Exits with 1 if there is a difference.

    Example:
      flaxckpt diff runs/7 --step-a 1000 --step-b 2000
      flaxckpt diff runs/7 model.safetensors
    """
    from flaxckpt import _inspect

    if b is None and step_a == step_b:
        raise errors.OptionError(
            "diff compares two checkpoints: pass another path, or two steps of this"
            " run as --step-a and --step-b"
        )
    side_a, step_a = _app.locate_step(a, step_a, step_format)
    side_b, step_b = _app.locate_step(a if b is None else b, step_b, step_format)
    result = _inspect.diff.diff(
        side_a, side_b, step_a=step_a, step_b=step_b, values=values
    )
    if json:
        _output.print_document({"equal": result.is_empty, **_output.fields_of(result)})
    else:
        _show(result)
    return _app.SUCCESS if result.is_empty else _app.FINDING


def _show(result: CheckpointDiff) -> None:
    _output.print_line(f"a: {_output.shorten_path(result.a)}")
    _output.print_line(f"b: {_output.shorten_path(result.b)}")
    rows = [_row(path, leaf) for path, leaf in result.changed.items()]
    rows += [[path, Cell("only in a", "red"), "", "", ""] for path in result.only_in_a]
    rows += [
        [path, Cell("only in b", "green"), "", "", ""] for path in result.only_in_b
    ]
    columns = [
        TextColumn("leaf"),
        TextColumn("what differs"),
        TextColumn("elements", is_number=True),
        TextColumn("at most", is_number=True),
        TextColumn("norm", is_number=True),
    ]
    _output.print_table(columns, rows, most=_ROWS)
    _output.print_line(_summary(result))


def _row(path: str, leaf: LeafDiff) -> list[str | Cell]:
    if leaf.kind in ("kind", "shape"):
        return [path, Cell(f"{leaf.a} -> {leaf.b}", "yellow"), "", "", ""]
    what = f"{leaf.a.dtype} -> {leaf.b.dtype}" if leaf.kind == "dtype" else "values"
    if not leaf.different:
        return [path, what, "", "", ""]
    changes = [_output.number(leaf.max_abs), _output.number(leaf.rel_norm)]
    return [path, what, str(leaf.different), *changes]


def _summary(result: CheckpointDiff) -> str:
    if result.is_empty:
        return f"all {len(result.same)} leaves are equal"
    unmatched = len(result.only_in_a) + len(result.only_in_b)
    parts = [
        _output.count(len(result.changed), "leaf differs", "leaves differ"),
        f"{len(result.same):,} are equal",
        f"{unmatched:,} are only in one of them" if unmatched else "",
    ]
    return ", ".join(filter(None, parts))
