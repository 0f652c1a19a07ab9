"""`flaxckpt diff`."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Annotated

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _step_names
from flaxckpt.cli._output import Cell, TextColumn
from flaxckpt.cli._parameters import Argument, Option
from flaxckpt.cli._step_names import StepName

if TYPE_CHECKING:
    from flaxckpt._inspect.diff import CheckpointDiff, LeafDiff


@_app.verb
def diff(
    a: Annotated[str, Argument(metavar="A", help="A checkpoint, or a run directory.")],
    b: Annotated[
        str | None,
        Argument(metavar="B", help="Another checkpoint, or a step of A; by default A."),
    ] = None,
    more: Annotated[
        list[str] | None,
        Argument(
            metavar="STEP",
            help="Another step of A, if B is a step; or A STEP B STEP for two runs.",
        ),
    ] = None,
    step_a: Annotated[
        int | None,
        Option(
            "--step-a", "-a", is_step=True, help="Step of A; by default the newest."
        ),
    ] = None,
    step_b: Annotated[
        int | None,
        Option(
            "--step-b", "-b", is_step=True, help="Step of B; by default the newest."
        ),
    ] = None,
    values: Annotated[
        bool, Option("--values/--no-values", help="Whether to read and compare values.")
    ] = True,
    only: Annotated[
        str | None,
        Option(
            "--only",
            metavar="PATTERN",
            help="Leaves to compare: a regular expression on whole leaf paths.",
        ),
    ] = None,
    limit: Annotated[
        int, Option("--limit", "-n", min=1, metavar="N", help="Show N rows at most.")
    ] = 40,
    by_subtree: Annotated[
        bool,
        Option("--by-subtree", help="Show a row per container, as deep as --limit."),
    ] = False,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Compares two checkpoints leaf by leaf.

    The checkpoints may have different formats, or be two steps of a run. Shows the
    leaves branch by branch, the optimizer last, and the largest changes first, after
    the metrics. Exits with 1 if a leaf differs, or a leaf or an item cannot be read;
    metrics may differ.

    Example:
      flaxckpt diff runs/7 1000 2000
      flaxckpt diff runs/7 2000 runs/8 2000
      flaxckpt diff runs/7 -a 1000 -b 2000 --only 'params/.*' --by-subtree
      flaxckpt diff runs/7 model.safetensors
    """
    from flaxckpt import _inspect

    more = more or []
    if b is not None and (step := _find_step(b, has_other=bool(more))) is not None:
        if step_a is not None or step_b is not None:
            raise errors.OptionError(
                f"{b} is a step of {a}: leave --step-a and --step-b out"
            )
        last = _step_names.parse(more[-1]) if more else None
        if len(more) == 2 and last is not None:  # A STEP B STEP
            step_a = _step_names.resolve(a, step, step_format)
            b, step_b = more[0], _step_names.resolve(more[0], last, step_format)
            more = []
        elif not more or (len(more) == 1 and last is not None):
            step_a = _step_names.resolve(a, step, step_format)
            step_b = None if last is None else _step_names.resolve(a, last, step_format)
            b, more = None, []
    if more:
        raise errors.OptionError(
            f"diff compares two checkpoints, got {', '.join([a, f'{b}', *more])}; for"
            " steps of two runs: flaxckpt diff A STEP B STEP"
        )
    if b is None and step_a == step_b:
        raise errors.OptionError(
            "diff compares two checkpoints: pass another path, or two steps of this"
            f" run: flaxckpt diff {a} STEP STEP, or --step-a and --step-b"
        )
    side_a, step_a = _app.locate_step(a, step_a, step_format)
    side_b, step_b = _app.locate_step(a if b is None else b, step_b, step_format)
    result = _inspect.diff.diff(
        side_a, side_b, step_a=step_a, step_b=step_b, values=values, only=only
    )
    if json:
        document = {"equal": result.is_empty, **_output.fields_of(result)}
        _output.print_document({**document, "retyped": result.retyped})
    else:
        _show(result, limit, by_subtree=by_subtree, has_values=values)
    return _app.SUCCESS if result.is_empty else _app.FINDING


def _find_step(b: str, *, has_other: bool) -> int | StepName | None:
    """Returns the step of A that B is; None for the path of a checkpoint."""
    from flaxckpt import _storage

    step = _step_names.parse(b)
    if step is None or (not has_other and _storage.paths.resolve(b).exists()):
        return None
    return step


def _show(
    result: CheckpointDiff, limit: int, *, by_subtree: bool, has_values: bool
) -> None:
    from flaxckpt import _inspect

    _output.print_paragraph(f"a: {_output.shorten_path(result.a)}")
    _output.print_paragraph(f"b: {_output.shorten_path(result.b)}")
    _show_metrics(result, limit)
    rows = _subtree_rows(result, limit) if by_subtree else _leaf_rows(result)
    columns = [
        TextColumn("subtree" if by_subtree else "leaf"),
        TextColumn("leaves", is_number=True),
        TextColumn("differs"),
        TextColumn("elements", is_number=True),
        TextColumn("by at most", is_number=True),
        TextColumn("rel. norm", is_number=True),
    ]
    _output.print_table(columns, rows, limit)
    _show_unreadable(result, limit)
    summary = _inspect.diff.summarize(result)
    if not has_values:
        summary = f"without reading values: {summary}"
    _output.print_paragraph(summary)


def _show_metrics(result: CheckpointDiff, limit: int) -> None:
    """Prints the metrics of both checkpoints, and an empty line; nothing for none."""
    if not result.metrics:
        return
    rows = [
        [name, *[text or "-" for text in _output.same_decimals(values)]]
        for name, values in result.metrics.items()
    ]
    columns = [
        TextColumn("metric"),
        TextColumn("a", is_number=True),
        TextColumn("b", is_number=True),
    ]
    _output.print_table(columns, rows, limit)
    _output.print_line()


def _show_unreadable(result: CheckpointDiff, limit: int) -> None:
    """Prints a line for each leaf or item that could not be compared."""
    lost = {**result.damaged_items, **result.unreadable}
    lines = [f"  {errors.name_leaf(path)}: {why}" for path, why in lost.items()]
    if lines:
        _output.print_line("cannot be read, and so may differ:")
    for line in lines[:limit]:
        print("\n".join(_output.wrap(line, indent="    ")))
    _output.print_more(len(lines), limit, f"--limit {len(lines)} shows all")


def _leaf_rows(result: CheckpointDiff) -> list[list[str | Cell]]:
    rows = [_row(errors.name_leaf(path), leaf) for path, leaf in result.changed.items()]
    for paths, text, style in (
        (result.only_in_a, "only in a", "red"),
        (result.only_in_b, "only in b", "green"),
    ):
        rows += [
            [errors.name_leaf(path), "", Cell(text, style), "", "", ""]
            for path in paths
        ]
    return rows


def _row(name: str, leaf: LeafDiff) -> list[str | Cell]:
    if leaf.kind in ("kind", "shape"):
        return [name, "", Cell(f"{leaf.a} -> {leaf.b}", "yellow"), "", "", ""]
    types = f"{leaf.a.dtype} -> {leaf.b.dtype}" if leaf.kind == "dtype" else ""
    if leaf.a.kind == "string":
        types = "text"
    types = ", ".join(filter(None, (types, leaf.note)))
    if not leaf.different:
        return [name, "", types, "", "", ""]
    changes = [_number(leaf.max_abs), _number(leaf.rel_norm)]
    elements = f"{leaf.different:,} of {leaf.elements:,}"
    return [name, "", types, elements, *changes]


def _number(value: float) -> str:
    return _output.number(float(value), 4)  # integers may be exact


# ---- subtrees ---------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Subtree:
    """The differences below a container, or of a leaf outside of all."""

    leaves: int = 0
    differing: int = 0
    only: int = 0
    elements: int = 0
    max_abs: float = 0.0
    rel_norm: float = 0.0

    def add(self, leaf: LeafDiff | None, *, is_only: bool) -> None:
        """Adds a leaf; None if it does not differ, or is in one checkpoint only."""
        self.leaves += 1
        self.only += is_only
        self.differing += is_only or leaf is not None
        if leaf is not None:
            self.elements += leaf.different
            self.max_abs = max(self.max_abs, leaf.max_abs)
            self.rel_norm = max(self.rel_norm, leaf.rel_norm)


def _subtree_rows(result: CheckpointDiff, limit: int) -> list[list[str | Cell]]:
    """Returns a row for each subtree with differences, as deep as fits `limit`."""
    depth, subtrees = 1, _subtrees(result, 1)
    while len(deeper := _subtrees(result, depth + 1)) <= limit:
        if deeper.keys() == subtrees.keys():
            break
        depth, subtrees = depth + 1, deeper
    return [
        [
            errors.name_leaf(path),
            f"{subtree.differing:,} of {subtree.leaves:,}",
            Cell(f"{subtree.only:,} only in one" if subtree.only else "", "yellow"),
            f"{subtree.elements:,}" if subtree.elements else "",
            _number(subtree.max_abs) if subtree.elements else "",
            _number(subtree.rel_norm) if subtree.elements else "",
        ]
        for path, subtree in subtrees.items()
    ]


def _subtrees(result: CheckpointDiff, depth: int) -> dict[str, _Subtree]:
    """Returns the subtrees of `depth` with differences, in the order of the leaves.

    A subtree is a container, or a leaf outside of all. Leaves that cannot be read count
    as leaves that do not differ.
    """
    subtrees: dict[str, _Subtree] = collections.defaultdict(_Subtree)
    only = dict.fromkeys((*result.only_in_a, *result.only_in_b))
    for path in (*result.changed, *only, *result.same, *result.unreadable):
        containers = path.split("/")[:-1]
        subtree = "/".join(containers[:depth]) or path
        subtrees[subtree].add(result.changed.get(path), is_only=path in only)
    return {path: subtree for path, subtree in subtrees.items() if subtree.differing}
