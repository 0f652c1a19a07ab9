"""Markers of a step: small files with a status, for example a pin."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from flaxckpt import _storage, errors
from flaxckpt._types import JSON, LeafPath

if TYPE_CHECKING:
    from flaxckpt._storage.stored_value import WrittenMarker

_T = TypeVar("_T")

PIN = "PINNED"
"""Marker of a step that all policies keep; a convention of T5X."""

TEMPORARY = "TEMPORARY"
"""Marker of a step to delete as soon as there is a newer step."""

_ITEM_DELETED = "ITEM_DELETED."
"""Beginning of the marker of an item that was deleted on purpose; the item follows."""

_DATASET = "dataset"
DATASET_DELETED = "DATASET_LET_GO"
"""Marker of the item `dataset`, by its name in release 0.1."""

MEASURED = "MEASURED"
"""Marker of a step with metrics added after the save."""

DAMAGED = "DAMAGED"
"""Marker of a damaged step, which is not listed; contains the reason in JSON."""

NOT_UPLOADED = "NOT_UPLOADED"
"""Marker of a step to keep in the staging directory, with content in JSON: the run
directory lacks the step, or the latest markers and metrics of the step."""

_CHANGES = "CHANGES"
"""Marker of a step in a staging directory; contains the number of its changes until the
latest upload, if any: see `UploadMarker.changes`."""

OF_UPLOADS = (_CHANGES, NOT_UPLOADED)
"""Markers of what is uploaded of a step; the second is of later changes, if any."""

PARTS = "PARTS"
"""Marker of a step of which each process of a job has a part, in a directory of its
own; contains `StepParts` in JSON."""

_COPIES = "COPIES."
"""Beginning of the marker of a step whose parts had durable copies at other processes;
their number follows."""

_CONTENT = b"1\n"

_MAX_BYTES = 2**16
_MAX_PARTS_BYTES = 2**26
_MAX_REASON = 1000


class Status(NamedTuple):
    """Status of a step by the names of the files beside the arrays.

    Attributes:
        items: The names of the entries in the step, which include the items.
        deleted_items: The items that were, or will be, deleted on purpose.
        readers: The readers of the step, as `host:pid`.
        waiting: The step is in a staging directory, and still to be uploaded.
        copies: Number of other processes that had a durable copy of each part.
    """

    pinned: bool
    temporary: bool
    items: frozenset[str]
    deleted_items: frozenset[str]
    readers: tuple[str, ...]
    waiting: bool
    copies: int


def status(path: Path, names: Collection[str]) -> Status:
    """Returns the status of the step at `path`, whose entries have `names`."""
    reading = [name for name in names if name.startswith(_storage.leases.READING)]
    return Status(
        PIN in names,
        TEMPORARY in names,
        frozenset(names),
        deleted_items(names),
        tuple(map(_storage.leases.reader, _storage.leases.unexpired(path, reading))),
        NOT_UPLOADED in names,
        count_copies(names),
    )


def count_copies(names: Collection[str]) -> int:
    """Returns how many other processes have copies, by the names of the markers."""
    found = [re.fullmatch(re.escape(_COPIES) + r"(\d{1,9})", name) for name in names]
    return max((int(match[1]) for match in found if match), default=0)


def mark_copied(path: Path, copies: int) -> None:
    """Records how many durable copies the parts of the step at `path` have."""
    for name in _storage.of(path).names(path):
        if name.startswith(_COPIES):
            (path / name).unlink(missing_ok=True)
    if copies:
        _write(path, f"{_COPIES}{copies}", _CONTENT)


def is_marker(name: str) -> bool:
    beginnings = (_storage.leases.READING, _ITEM_DELETED, _COPIES)
    return name in _NAMES or name.startswith(beginnings)


def is_copied(name: str) -> bool:
    return name in (DATASET_DELETED, MEASURED) or name.startswith(_ITEM_DELETED)


_NAMES = frozenset(
    (
        PIN,
        TEMPORARY,
        DATASET_DELETED,
        MEASURED,
        DAMAGED,
        *OF_UPLOADS,
        PARTS,
        _storage.leases.DELETING,
    )
)


def for_new_step(final: Path, *, temporary: bool) -> dict[str, bytes]:
    """Returns the markers of a new step: file name -> content.

    A pin belongs to the name, `final`: in an object store, it is kept where it is.
    """
    markers = {TEMPORARY: _CONTENT} if temporary else {}
    return markers | (pin_of(final) if _storage.of(final).can_rename else {})


def pin_of(path: Path) -> dict[str, bytes]:
    """Returns the marker of a pinned step, for a copy; empty without a pin."""
    return {PIN: _CONTENT} if is_pinned(path) else {}


def is_pinned(path: Path) -> bool:
    return _has(path, PIN)


def is_temporary(path: Path) -> bool:
    """Returns True for a step to delete as soon as a newer step exists."""
    return _has(path, TEMPORARY)


def pin(path: Path) -> WrittenMarker:
    """Keeps the step at `path` until unpinned; a pin that failed can be undone."""
    # Two processes may pin a step: neither takes the other's pin for its own.
    content = f"{secrets.token_hex(8)}\n".encode()
    mode = _storage.modes.of_directory(path)
    return _storage.of(path).write_marker(path / PIN, content, mode=mode)


def unpin(path: Path) -> None:
    _remove(path, PIN)


def make_permanent(path: Path) -> None:
    _remove(path, TEMPORARY)


def mark_item_deleted(path: Path, item: str) -> None:
    if not is_item_deleted(path, item):
        _write(path, deletion_marker(item), _CONTENT)


def is_item_deleted(path: Path, item: str) -> bool:
    """Returns True if an item of the step at `path` was deleted on purpose."""
    return _has(path, deletion_marker(item))


def deleted_items(names: Collection[str]) -> frozenset[str]:
    """Returns the items deleted on purpose, by the names of the entries in a step."""
    deleted = {
        name.removeprefix(_ITEM_DELETED)
        for name in names
        if name.startswith(_ITEM_DELETED)
    }
    return frozenset(deleted | ({_DATASET} if DATASET_DELETED in names else set()))


def deletion_marker(item: str) -> str:
    """Returns the name of the marker of an item that was deleted on purpose."""
    return DATASET_DELETED if item == _DATASET else f"{_ITEM_DELETED}{item}"


def is_measured(path: Path) -> bool:
    """Returns True for a step with metrics added after the save."""
    return _storage.of(path).exists(path / MEASURED)


def mark_measured(path: Path) -> None:
    """Records that metrics were added to the step at `path`; add the metrics first."""
    if not is_measured(path):
        _write(path, MEASURED, _CONTENT)


def is_damaged(path: Path) -> bool:
    return _storage.of(path).exists(path / DAMAGED)


def mark_damaged(
    path: Path, reason: str, leaves: Collection[LeafPath] | None = None
) -> None:
    """Marks a step as damaged, durably: lists leave it out.

    The time of an earlier mark stays; `leaves` that cannot be read are recorded, if
    few.
    """
    row: dict[str, JSON] = {
        "reason": reason[:_MAX_REASON],
        "time": damage_time(path) or time.time(),
    }
    content = json.dumps(row).encode()
    if leaves is not None:
        whole = json.dumps({**row, "leaves": sorted(leaves)}).encode()
        content = whole if len(whole) <= _MAX_BYTES else content
    _write(path, DAMAGED, content)


def unmark_damaged(path: Path) -> None:
    """Removes the damage marker: lists include the step at `path` again."""
    _remove(path, DAMAGED)


def damage_time(path: Path) -> float | None:
    """Returns the seconds since 1970 in a marker of damage; 0 if not recorded."""
    if not is_damaged(path):
        return None
    when = _read_damage(path, "time")
    return float(when) if isinstance(when, int | float) else 0.0


def damage_reason(path: Path) -> str:
    """Returns the reason in the marker of a damaged step, or a substitute."""
    reason = _read_damage(path, "reason")
    if reason is None:
        return "its marker gives no reason"
    return errors.printable(str(reason)[:_MAX_REASON])


def damaged_leaves(path: Path) -> frozenset[LeafPath] | None:
    """Returns the leaves of a damaged step that cannot be read; None if unknown."""
    leaves = _read_damage(path, "leaves")
    return frozenset(map(str, leaves)) if isinstance(leaves, list) else None


def _read_damage(path: Path, field: str) -> Any:
    """Returns a field of a marker of damage; None if it cannot be read."""
    try:
        return _read_json(path / DAMAGED)[field]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


class UploadMarker(NamedTuple):
    """Content of an upload marker; `change` is a random text, new with each change.

    Attributes:
        overwrite: Whether to replace an entry of the same name in the run directory.
        removed: Markers removed from the step, but perhaps not in the run directory.
        settled: Whether the step had been uploaded, or left in staging, before its
            latest change. A different step of its number in the run directory is newer.
        changes: Number of changes of the step since its save. Processes that have made
            the same changes have the same number.
    """

    overwrite: bool = False
    removed: tuple[str, ...] = ()
    change: str = ""
    settled: bool = False
    changes: int = 0

    def content(self) -> bytes:
        """Returns the content of the marker, with a new `change`."""
        row = self._replace(change=secrets.token_hex(8))._asdict()
        return json.dumps(row).encode()


def read_upload_marker(path: Path) -> UploadMarker | None:
    try:
        row = _read_json(path / NOT_UPLOADED)
        return UploadMarker(
            bool(row["overwrite"]),
            tuple(map(str, row["removed"])),
            str(row["change"]),
            bool(row.get("settled", False)),
            int(row.get("changes", 0)),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return UploadMarker()  # an unreadable marker counts, too


def is_marked_for_upload(path: Path) -> bool:
    return read_upload_marker(path) is not None


def is_settled(path: Path) -> bool:
    """Returns True for a step uploaded, or left in staging, before the last change."""
    marker = read_upload_marker(path)
    return marker is None or marker.settled


def mark_for_upload(path: Path, removed: Collection[str] = ()) -> None:
    """Marks the step at `path` as still to be uploaded, or as changed again."""
    marker = read_upload_marker(path) or UploadMarker(settled=True)
    marker = marker._replace(
        removed=tuple(sorted({*marker.removed, *removed})),
        changes=count_changes(path) + 1,
    )
    _write(path, NOT_UPLOADED, marker.content())


def unmark_upload(path: Path) -> None:
    if changes := count_changes(path):
        _write(path, _CHANGES, b"%d\n" % changes)
    _remove(path, NOT_UPLOADED)


def count_changes(path: Path) -> int:
    """Returns the number of changes of the step at `path` since its save."""
    marker = read_upload_marker(path) or UploadMarker()
    try:
        return max(marker.changes, int(_read_json(path / _CHANGES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return marker.changes


class StepParts(NamedTuple):
    """The files of arrays that each process has written, with their sizes in bytes.

    `own` is the process of this directory; None if others have saved all parts.
    """

    own: int | None
    files: tuple[dict[str, int], ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The files of all parts."""
        return {name: size for part in self.files for name, size in part.items()}

    def content(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    def without(self, items: Collection[str]) -> StepParts:
        """Returns the parts without the files of deleted items."""
        kept = [
            {name: size for name, size in part.items() if top(name) not in items}
            for part in self.files
        ]
        return self._replace(files=tuple(kept))

    def select(self, files: Mapping[str, _T]) -> dict[str, _T]:
        """Returns those of the files of the step that must be in this directory."""
        parts = enumerate(self.files)
        absent = {name for n, part in parts if n != self.own for name in part}
        return {name: file for name, file in files.items() if name not in absent}


def top(name: str) -> str:
    """Returns the item of a file, by its path in the step."""
    return name.partition("/")[0]


def read_parts(path: Path) -> StepParts | None:
    """Returns the parts of a step, or None; raises DamagedCheckpointError."""
    if _storage.of(path).costs_requests:
        return None
    try:
        with _storage.read_errors.explain_errors(path / PARTS):
            content = (path / PARTS).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return parse_parts(content)
    except ValueError as error:
        raise errors.DamagedCheckpointError(
            f"{path / PARTS} is damaged: {error}; restore another step"
        ) from None


def parse_parts(content: bytes) -> StepParts:
    """Returns the parts in a marker; raises ValueError for malformed content."""
    try:
        row = json.loads(content[:_MAX_PARTS_BYTES])
        files = tuple(
            {str(name): int(size) for name, size in part.items()}
            for part in row["files"]
        )
        own = None if row["own"] is None else int(row["own"])
        parts = StepParts(own, files)
        if parts.own is not None and not 0 <= parts.own < len(files):
            raise ValueError(f"process {parts.own} of {len(files)}")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(errors.one_line(error)) from None
    return parts


def _has(path: Path, name: str) -> bool:
    file = path / name
    if _storage.paths.is_remote(file):
        return file.is_file()
    return _storage.files.is_file(file)


def _read_json(file: Path) -> Any:
    return json.loads(_storage.of(file).read(file, max_bytes=_MAX_BYTES))


def _write(path: Path, name: str, content: bytes) -> None:
    """Writes a marker with the mode of the step's files."""
    mode = _storage.modes.of_directory(path)
    _storage.of(path).replace(path / name, content, mode=mode)


def _remove(path: Path, name: str) -> None:
    try:
        (path / name).unlink()
        # Without the marker, another thread may delete the step at once.
        _storage.of(path).sync_directory(path)
    except FileNotFoundError:
        return
