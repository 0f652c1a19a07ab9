"""`flaxckpt show`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flaxckpt import errors
from flaxckpt.cli import _app, _output
from flaxckpt.cli._output import Cell, TextColumn

if TYPE_CHECKING:
    from flaxckpt._inspect.leaf_statistics import LeafStatistics
    from flaxckpt._run.disk_usage import Subtree
    from flaxckpt.formats._reader import CheckpointMetadata

_ROWS_AT_ONCE = 100
_BAR = 40


@_app.verb
def show(
    path: _app.PathArgument,
    leaf: Annotated[
        str | None,
        typer.Argument(
            metavar="LEAF",
            help="A leaf, whose values are read, or a container.",
            show_default=False,
        ),
    ] = None,
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    depth: Annotated[
        int | None,
        typer.Option(
            "--depth",
            "-d",
            min=1,
            help="Depth of the tree; by default as deep as fits 100 lines.",
            show_default=False,
        ),
    ] = None,
    json: _app.JsonOption = False,
) -> int:
    """Shows the tree of a checkpoint, or a leaf.

    The tree shows types, shapes, partition specs and sizes, without reading arrays. For
    a leaf, shows statistics and a histogram.

    Example:
      flaxckpt show runs/7 --depth 2
      flaxckpt show runs/7 params/dense/kernel
    """
    from flaxckpt import _checkpoint, _inspect, _run

    path, step = _app.checkpoint(path, step, step_format)
    found = _checkpoint.restore.metadata(path, step=step)
    if leaf is not None and leaf in found.leaves:
        statistics = _inspect.leaf_statistics.leaf_statistics(path, leaf, step=step)
        _show_leaf(statistics, json)
        return _app.FINE
    trees = _run.disk_usage.subtrees(found.leaves, below=leaf or "")
    if not trees:
        raise errors.OptionError(_run.disk_usage.missing_path(found, leaf or ""))
    if json:
        _output.document(found if leaf is None else trees)
        return _app.FINE
    if leaf is None:
        _show_head(found)
    shown = _run.disk_usage.shown(trees, depth=depth, rows=_ROWS_AT_ONCE)
    _show_tree(shown)
    if hidden := len(trees) - len(shown):
        deeper = max(tree.depth for tree in trees) - trees[0].depth
        _output.line(f"… and {hidden} more below: --depth {deeper} shows all")
    return _app.FINE


def _show_head(found: CheckpointMetadata) -> None:
    told = [
        found.format,
        "" if found.step is None else f"step {found.step}",
        _output.when(found.created),
        f"{_output.size(found.total_bytes)} of arrays",
        "with a dataset's state" if found.has_dataset else "",
    ]
    _output.line(f"{_output.short(found.path)}: {', '.join(filter(None, told))}")
    if found.metrics:
        _output.line(f"metrics: {_output.metrics(found.metrics)}")
    for origin in found.lineage:
        step = "" if origin.step is None else f", step {origin.step}"
        _output.line(f"started from {origin.path}{step}")
    for change in found.transforms:
        _output.line(f"transformed by {change}")


def _show_tree(trees: Sequence[Subtree]) -> None:
    columns = [
        TextColumn("leaf"),
        TextColumn("type"),
        TextColumn("spec"),
        TextColumn("size", is_number=True),
    ]
    _output.table(columns, [_tree_row(tree, trees[0].depth) for tree in trees])


def _tree_row(tree: Subtree, top: int) -> list[str | Cell]:
    name = tree.path.rpartition("/")[2] if tree.depth > top else tree.path
    indented = "  " * (tree.depth - top) + (name or "(all)")
    size = _output.size(tree.bytes)
    if tree.info is None:
        leaves = f"{tree.leaves} {'leaf' if tree.leaves == 1 else 'leaves'}"
        return [Cell(indented, "bold"), Cell(leaves, "dim"), "", Cell(size, "bold")]
    spec = "" if tree.info.spec is None else _output.spec(tree.info.spec)
    return [indented, str(tree.info), spec, size if tree.info.dtype else ""]


# ---- one leaf ---------------------------------------------------------------------


def _show_leaf(found: LeafStatistics, json: bool) -> None:
    if json:
        _output.document(found)
        return
    info = found.info
    _output.line(f"{info.path or '(all)'}: {info}")
    rows: list[tuple[str, Any]] = [
        ("spec", None if info.spec is None else _output.spec(info.spec)),
        ("chunks", None if info.chunk_shape is None else list(info.chunk_shape)),
        ("role", info.role and f"{info.role.field} of {info.role.state_class}"),
    ]
    if info.dtype is None:
        rows.append(("value", found.values))
    else:
        rows += _numbers(found)
    facts = [[name, str(value)] for name, value in rows if value is not None]
    _output.table([TextColumn(""), TextColumn("")], facts)
    _show_histogram(found)


def _numbers(found: LeafStatistics) -> list[tuple[str, Any]]:
    names = ("min", "max", "mean", "std", "norm")
    rows = [(name, _output.number(getattr(found, name))) for name in names]
    few = None if found.values is None else ", ".join(map(_output.number, found.values))
    return [
        ("elements", f"{found.count}, of which {found.zeros} are 0"),
        ("not finite", _not_finite(found)),
        *(rows if found.min is not None else ()),
        ("values", few),
    ]


def _not_finite(found: LeafStatistics) -> str | None:
    if not found.nans and not found.infs:
        return None
    return f"{found.nans} NaN, {found.infs} infinite"


def _show_histogram(found: LeafStatistics) -> None:
    most = max(found.histogram, default=0)
    if len(found.histogram) < 2:
        return
    rows: list[list[str | Cell]] = [
        [
            _output.number(low),
            _output.number(high),
            str(count),
            Cell("█" * max(bool(count), round(count / most * _BAR)), "cyan"),
        ]
        for low, high, count in zip(
            found.edges, found.edges[1:], found.histogram, strict=False
        )
    ]
    columns = [
        TextColumn("from", True),
        TextColumn("to", True),
        TextColumn("count", True),
    ]
    _output.table([*columns, TextColumn("")], rows)
