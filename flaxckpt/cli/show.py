"""`flaxckpt show`."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _step_names
from flaxckpt.cli._output import Cell, TextColumn
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt._formats.reader import CheckpointMetadata
    from flaxckpt._inspect.leaf_statistics import LeafStatistics
    from flaxckpt._inspect.subtrees import Subtree

_ROWS_AT_ONCE = 100
_BAR = 40
_FILES = 3


@_app.verb
def show(
    path: _app.PathArgument,
    first: Annotated[
        str | None,
        Argument(metavar="STEP", help=f"Step of a run directory: {_step_names.FORMS}."),
    ] = None,
    leaf: Annotated[
        str | None,
        Argument(
            metavar="LEAF",
            help="A leaf, whose values are read, or a container. STEP may be left out.",
        ),
    ] = None,
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    depth: Annotated[
        int | None,
        Option(
            "--depth",
            "-d",
            min=1,
            metavar="N",
            help="Depth of the tree; by default as deep as fits 100 lines.",
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
      flaxckpt show runs/7 best params/dense/kernel
    """
    from flaxckpt import _inspect, _state
    from flaxckpt._formats import locate

    leaf, step = _choose(path, [w for w in (first, leaf) if w], step, step_format)
    path, step = _app.locate_step(path, step, step_format)
    stored = locate.open_without_classes(path, step)
    metadata = stored.metadata
    if leaf is not None and leaf not in metadata.leaves:
        leaf = leaf.rstrip("/")  # of a container
    if leaf is not None and leaf in metadata.leaves:
        statistics = _inspect.leaf_statistics.leaf_statistics(path, leaf, step=step)
        _show_leaf(statistics, json)
        return _app.SUCCESS
    trees = _inspect.subtrees.subtrees(metadata.leaves, below=leaf or "")
    if not trees:
        missing = _inspect.subtrees.missing_path(metadata, leaf or "")
        raise errors.OptionError(missing)
    if json:
        structure = _state.treedef.to_json(stored.structure)
        document = {**_output.fields_of(metadata), "structure": structure}
        _output.print_document(document if leaf is None else trees)
        return _app.SUCCESS
    if leaf is None:
        _show_head(metadata)
    _show_damage(metadata)
    shown = _inspect.subtrees.shown(trees, depth=depth, rows=_ROWS_AT_ONCE)
    _show_tree(shown)
    if hidden := len(trees) - len(shown):
        deeper = max(tree.depth for tree in trees) - trees[0].depth
        _output.print_line(f"… and {hidden} more below: --depth {deeper} shows all")
    return _app.SUCCESS


def _choose(
    path: str, words: list[str], step: int | None, step_format: str | None
) -> tuple[str | None, int | None]:
    """Returns the leaf and the step that the arguments after the path name.

    A single word that could be either is a leaf if the newest step has it. Raises
    OptionError if the first of two words is not a step, or there are two steps.
    """
    from flaxckpt import _inspect
    from flaxckpt._formats import locate

    named = _step_names.parse(words[0]) if words else None
    if len(words) == 2 and (named is None or step is not None):
        wrong = f"{words[0]} is not a step" if named is None else "there are two steps"
        raise errors.OptionError(f"{wrong}: write flaxckpt show {path} STEP LEAF")
    if named is None or step is not None:
        return (words[0] if words else None), step
    if len(words) == 1:
        with contextlib.suppress(
            errors.CheckpointError
        ):  # of the newest, not of `named`
            located = locate.locate(path, step_format=step_format, warn=False)
            leaves = locate.read_metadata(located.path).leaves
            if _inspect.subtrees.subtrees(leaves, below=words[0]):
                return words[0], step
    number = _step_names.resolve(path, named, step_format)
    return (words[1] if len(words) == 2 else None), number


def _show_head(metadata: CheckpointMetadata) -> None:
    from flaxckpt import _util

    parts = [
        metadata.format,
        "" if metadata.step is None else f"step {metadata.step}",
        _output.when(metadata.created),
        f"{_output.size(metadata.total_bytes)} of arrays",
        "with a dataset's state" if metadata.has_dataset else "",
    ]
    path = _output.shorten_path(metadata.path)
    for line in _util.humanize.with_path(path, ", ".join(filter(None, parts))):
        _output.print_paragraph(line)
    others = (metadata.json, metadata.deleted_items, metadata.damaged_items)
    if len(metadata.items) > 1 or any(others):
        items = [*metadata.items, *(f"{item} (JSON)" for item in metadata.json)]
        items += [f"{item} (deleted)" for item in metadata.deleted_items]
        items += [f"{item} (damaged)" for item in metadata.damaged_items]
        _output.print_paragraph(f"items: {', '.join(items)}")
    for form, count in collections.Counter(metadata.unsupported.values()).items():
        leaves = _output.count(count, "leaf", "leaves")
        _output.print_paragraph(f"cannot be loaded: {leaves} {form}")
    if metadata.metrics:
        _output.print_paragraph(f"metrics: {_output.format_metrics(metadata.metrics)}")
    for origin in metadata.lineage:
        step = "" if origin.step is None else f", step {origin.step}"
        _output.print_paragraph(f"started from {origin.path}{step}")
    for change in metadata.transforms:
        _output.print_paragraph(f"transformed by {change}")


def _show_damage(metadata: CheckpointMetadata) -> None:
    """Prints the known damage of a checkpoint, found without reading arrays."""
    from flaxckpt import _inspect, _storage

    path = _storage.paths.from_text(metadata.path)
    damage = _inspect.run_view.find_known_damage(path, metadata.step)
    if damage is not None:
        text = f"DAMAGED: {damage}"
        for line in _output.wrap(text, indent="  "):
            print(_output.style_text(Cell(line, "red")))


def _show_tree(trees: Sequence[Subtree]) -> None:
    columns = [
        TextColumn("leaf"),
        TextColumn("type"),
        TextColumn("spec"),
        TextColumn("size", is_number=True),
    ]
    _output.print_table(columns, [_tree_row(tree, trees[0].depth) for tree in trees])


def _tree_row(tree: Subtree, top: int) -> list[str | Cell]:
    name = tree.name if tree.depth > top else tree.shown_path
    indented = "  " * (tree.depth - top) + name
    size = _output.size(tree.bytes)
    if tree.info is None:
        leaves = _output.count(tree.leaves, "leaf", "leaves")
        return [Cell(indented, "bold"), Cell(leaves, "dim"), "", Cell(size, "bold")]
    spec = _output.format_spec(tree.info) or ""
    return [indented, str(tree.info), spec, size if tree.info.dtype else ""]


# ---- one leaf ---------------------------------------------------------------------


def _show_leaf(statistics: LeafStatistics, json: bool) -> None:
    if json:
        _output.print_document(statistics)
        return
    info = statistics.info
    _output.print_line(f"{info.path or '(all)'}: {info}")
    rows: list[tuple[str, Any]] = [
        ("spec", _output.format_spec(info)),
        ("chunks", None if info.chunk_shape is None else list(info.chunk_shape)),
        ("role", info.role and f"{info.role.field} of {info.role.state_class}"),
        *_files(statistics),
    ]
    if info.dtype is None:
        rows.append(("value", statistics.values))
    else:
        rows += _numbers(statistics)
    facts = [[name, str(value)] for name, value in rows if value is not None]
    _output.print_table([TextColumn(""), TextColumn("")], facts)
    _show_histogram(statistics)


def _files(statistics: LeafStatistics) -> list[tuple[str, Any]]:
    """Returns the first files of a leaf, and the bytes in them."""
    rows = [
        ("file", f"{name}, bytes {start} to {end - 1}")
        for name, (start, end) in itertools.islice(statistics.files.items(), _FILES)
    ]
    more = len(statistics.files) - _FILES
    return [*rows, ("", f"and {more} more files")] if more > 0 else rows


def _numbers(statistics: LeafStatistics) -> list[tuple[str, Any]]:
    names = ("min", "max", "mean", "std", "norm")
    rows = [(name, _output.number(getattr(statistics, name))) for name in names]
    few = (
        None
        if statistics.values is None
        else ", ".join(map(_output.number, statistics.values))
    )
    return [
        ("elements", f"{statistics.count:,}"),
        ("zeros", f"{statistics.zeros:,}"),
        ("not finite", _not_finite(statistics)),
        *(rows if statistics.min is not None else ()),
        ("values", few),
    ]


def _not_finite(statistics: LeafStatistics) -> str | None:
    if not statistics.nans and not statistics.infs:
        return None
    return f"{statistics.nans} NaN, {statistics.infs} infinite"


def _show_histogram(statistics: LeafStatistics) -> None:
    most = max(statistics.histogram, default=0)
    if len(statistics.histogram) < 2:
        return
    edges = [*map(_output.number, statistics.edges)]
    bins = zip(edges, edges[1:], map(str, statistics.histogram), strict=False)
    columns = [TextColumn(title, True) for title in ("from", "to", "count")]
    rows = [list[str | Cell](each) for each in bins]
    room = _output.terminal_width() - _output.table_width(columns, rows) - 2
    longest = min(_BAR, max(1, room)) if _output.is_terminal() else _BAR
    for row, count in zip(rows, statistics.histogram, strict=True):
        bar = "█" * max(bool(count), round(count / most * longest))
        row.append(Cell(bar, "cyan"))
    _output.print_table([*columns, TextColumn("")], rows)
