"""Short descriptions of a checkpoint's metadata: a text, and a card for notebooks."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from flaxckpt import _util, errors

if TYPE_CHECKING:
    from flaxckpt._formats.reader import CheckpointMetadata
    from flaxckpt._util.html import Markup

_METRICS = 4
_BRANCHES = 12


def as_text(metadata: CheckpointMetadata) -> str:
    """Returns the metadata in one to four lines, without leaf paths."""
    name = f"<CheckpointMetadata {metadata.path}"
    lines = _util.humanize.with_path(name, _headline(metadata))
    lines += [f"  metrics: {_format_metrics(metadata)}"] if metadata.metrics else []
    notes = "; ".join(_notes(metadata))
    lines += [f"  {errors.one_line(notes)}"] if notes else []
    return "\n".join(errors.printable(line) for line in lines) + ">"


def as_card(metadata: CheckpointMetadata) -> str:
    """Returns an HTML card with the metrics and the branches of the state."""
    head = [_headline(metadata), *_notes(metadata)]
    parts = [_util.html.element("div", line, style=_util.card.SOFT) for line in head]
    names = list(metadata.metrics)
    rows = [
        _util.card.row([name, _util.humanize.number(metadata.metrics[name])], (1,))
        for name in names[:_BRANCHES]
    ]
    if rows:
        parts.append(_util.card.table(*rows))
    parts.append(_branch_table(metadata))
    name = PurePosixPath(metadata.path).name
    return _util.card.frame(f"Checkpoint {name}", metadata.path, *parts)


def _branch_table(metadata: CheckpointMetadata) -> Markup:
    counts: dict[str, list[int]] = {}
    for path, info in metadata.leaves.items():
        count = counts.setdefault(path.partition("/")[0], [0, 0])
        count[0] += info.kind != "empty"
        count[1] += info.stored_bytes
    header = _util.card.row(["branch", "leaves", "size"], (1, 2), tag="th")
    rows = [
        _util.card.row(
            [errors.name_leaf(name), f"{n:,}", _util.humanize.size(size)], (1, 2)
        )
        for name, (n, size) in list(counts.items())[:_BRANCHES]
    ]
    if more := len(counts) - len(rows):
        rows.append(_util.card.row([f"… and {more} more", "", ""], (1, 2)))
    return _util.card.table(header, *rows) if rows else _util.html.NOTHING


def _headline(metadata: CheckpointMetadata) -> str:
    saved = _util.humanize.when(metadata.created)
    number = sum(info.kind != "empty" for info in metadata.leaves.values())
    leaves = _util.humanize.count(number, "leaf", "leaves")
    parts = [
        metadata.format,
        "" if metadata.step is None else f"step {metadata.step}",
        f"saved {saved}" if saved else "",
        f"{leaves}, {_util.humanize.size(metadata.total_bytes)}",
    ]
    return ", ".join(filter(None, parts))


def _format_metrics(metadata: CheckpointMetadata) -> str:
    texts = [
        f"{name}={_util.humanize.number(value)}"
        for name, value in list(metadata.metrics.items())[:_METRICS]
    ]
    more = len(metadata.metrics) - len(texts)
    return ", ".join([*texts, f"… {more} more"] if more else texts)


def _notes(metadata: CheckpointMetadata) -> list[str]:
    """Returns what only some checkpoints have, each in a few words."""
    items = [*metadata.items, *metadata.json]
    origin = metadata.lineage[0] if metadata.lineage else None
    listed = {
        "items": items if len(items) > 1 else [],
        "damaged": list(metadata.damaged_items),
        "deleted": list(metadata.deleted_items),
        "custom": list(metadata.custom),
        "transformed by": list(metadata.transforms),
        "started from": [] if origin is None else [origin.path],
    }
    notes = [
        f"{name}: {errors.first_few(each)}" for name, each in listed.items() if each
    ]
    if metadata.has_dataset:
        notes.append("with the state of a dataset")
    if count := len(metadata.unsupported):
        leaves = _util.humanize.count(count, "leaf", "leaves")
        notes.append(f"{leaves} that cannot be loaded")
    return notes
