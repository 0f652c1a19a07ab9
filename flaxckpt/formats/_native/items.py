"""Finds and reads the items and files of a checkpoint in Orbax's layout."""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _arrays, _steps, _storage, errors
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath
from flaxckpt.formats import _signatures
from flaxckpt.formats._native import orbax_json
from flaxckpt.formats._reader import CheckpointMetadata

_log = logging.getLogger(__name__)

STATE, DATASET, METRICS = "state", "dataset", "metrics"
CHECKPOINT = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
AGGREGATE = "checkpoint"
"""The tree in msgpack, of Orbax until 0.6: values, and names of zarr arrays."""

STRINGS = "_strings.json"
SHARDING = "_sharding"
ARRAYS = "array_metadatas/process_0"
DESCRIPTIONS = frozenset((TREE, SHARDING, STRINGS, ARRAYS))
"""Files of the state other than arrays."""

METRICS_DIGESTS = f"{METRICS}/digests"
"""Digests of the metrics, which can be replaced in a committed checkpoint."""

PREFERRED_ITEMS = (STATE, "default", "pytree")
NOT_ITEMS = frozenset((DATASET, METRICS))


def item(path: Path) -> Path | None:
    """Returns the directory with the arrays of the checkpoint `path`; None without it.

    On an object store, only with a commit marker in `path` or, for an item, in its
    parent.
    """
    storage = _storage.of(path)
    if not (storage.is_committed(path) or storage.is_committed(path.parent)):
        return None
    for name in (*PREFERRED_ITEMS, ""):
        if is_tree(path / name):
            return path / name
    if not (path / CHECKPOINT).is_file():
        return None
    items = [
        name
        for name in sorted(_storage.of(path).directories(path))
        if is_tree(path / name) and name not in NOT_ITEMS
    ]
    if not items:
        _check_tree(path)
    if len(items) > 1:
        raise errors.CheckpointFormatError(
            f"{path} holds several items, {errors.printable(', '.join(items))}: load"
            f" one of them by its own path, {errors.printable(str(path / items[0]))}"
        )
    return path / items[0] if items else None


_TREE_HANDLERS = (
    "StandardCheckpointHandler",
    "PyTreeCheckpointHandler",
    "PyTreeHandler",
)
"""Suffixes of Orbax's handler classes for trees of arrays."""

JSON_ITEM = "metadata"
"""The file of a JSON item."""


def is_json_item(path: Path) -> bool:
    """Returns True if `path` looks like an item of Orbax's `JsonSave`."""
    try:
        names = set(_storage.of(path).names(path))
    except NotADirectoryError:
        return False
    is_alone = names <= {JSON_ITEM, CHECKPOINT, _storage.commit_marker.MARKER}
    return is_alone and (path / JSON_ITEM).is_file()


def json_advice(path: Path) -> str:
    """Returns advice on reading a JSON item."""
    file = errors.printable(str(path / JSON_ITEM))
    return f"read it with json.loads(pathlib.Path({file!r}).read_text())"


def item_handlers(path: Path) -> dict[str, Any] | str | None:
    """Returns the recorded Orbax handlers, item -> class, or None.

    A single class for a checkpoint that consists of a single item.
    """
    try:
        handlers = json_file(path / CHECKPOINT, path).get("item_handlers")
    except (errors.DamagedCheckpointError, OSError):
        return None
    return handlers if isinstance(handlers, dict | str) else None


def _check_tree(path: Path) -> None:
    """Raises CheckpointFormatError for an Orbax checkpoint without a tree of arrays.

    Raises:
        CheckpointFormatError: Lists the items and their handlers.
    """
    if _storage.of(path).exists(path / orbax_json.MANIFEST):
        return
    try:
        handlers = json_file(path / CHECKPOINT, path).get("item_handlers")
    except errors.DamagedCheckpointError:
        return
    if isinstance(handlers, str):  # a checkpoint of a single item
        handlers = {"": handlers}
    if not isinstance(handlers, dict) or not handlers:  # as before Orbax 0.11
        names = [
            n for n in _storage.of(path).directories(path) if is_json_item(path / n)
        ]
        handlers = dict.fromkeys(names, "JsonCheckpointHandler")
    kinds = {
        str(name): str(kind).rpartition(".")[2]
        for name, kind in handlers.items()
        if name not in NOT_ITEMS
    }
    if not kinds or any(kind.endswith(_TREE_HANDLERS) for kind in kinds.values()):
        return
    texts = [path / name for name in sorted(kinds) if is_json_item(path / name)]
    rows = [f"{name or '.'}: {kind}" for name, kind in sorted(kinds.items())]
    raise errors.CheckpointFormatError(
        f"{path} holds no tree of arrays; other handlers of Orbax wrote its items:\n"
        f"{errors.rows(rows)}\n"
        + (
            f"What is JSON is a file: {json_advice(texts[0])}"
            if texts
            else "Read it with the Orbax that wrote it."
        )
    )


def warn_of_others(path: Path, taken: Path) -> None:
    """Logs a warning about trees of the checkpoint other than the item `taken`."""
    if taken == path:
        return
    others = [
        errors.printable(str(path / name))
        for name in sorted(_storage.of(path).directories(path))
        if name not in NOT_ITEMS and name != taken.name and is_tree(path / name)
    ]
    if others:
        _log.warning(
            "of %s only the item %s is taken; load the others by their own paths: %s",
            path,
            errors.printable(taken.name),
            ", ".join(others[: errors.ROWS_SHOWN]),
        )


def is_tree(path: Path) -> bool:
    """Returns True if `path` holds a tree of arrays."""
    return (path / TREE).is_file() or bool(_signatures.first_keys(path / AGGREGATE))


def read_file(
    path: Path, checkpoint: Path, *, max_bytes: int = orbax_json.MAX_BYTES
) -> bytes:
    """Returns the content of a required file of a checkpoint.

    Raises:
        DamagedCheckpointError: The file is missing, too large, or outside of the
            checkpoint.
    """
    try:
        _storage.of(path).check_file(path, checkpoint)
        return _storage.of(path).read(path, max_bytes=max_bytes)
    except ValueError as error:
        raise errors.DamagedCheckpointError(str(error)) from None
    except (FileNotFoundError, NotADirectoryError):
        raise errors.DamagedCheckpointError(
            f"{path} is missing; restore another step"
        ) from None


def json_file(path: Path, checkpoint: Path) -> dict[str, Any]:
    """Returns the object in a required JSON file of a checkpoint.

    Raises:
        DamagedCheckpointError: The file is missing, or does not hold a JSON object.
    """
    return orbax_json.loads(read_file(path, checkpoint), path)


def check_digest(path: Path, recorded: object, content: bytes | None = None) -> None:
    """Compares a file with its recorded digest, if any.

    Args:
        path: The file.
        recorded: The digest, or None.
        content: Content of the file, if already read; a file of any size is read.

    Raises:
        DamagedCheckpointError: The digests differ, or the file is missing.
    """
    if recorded is None:
        return
    found: str | None = None
    if content is not None:
        found = _storage.files.digest(content)
    else:
        with contextlib.suppress(FileNotFoundError):
            found = _storage.of(path).digest_file(path, max_bytes=sys.maxsize)
    if found != recorded:
        raise errors.DamagedCheckpointError(
            f"{path} has changed since it was saved: wanted {recorded}, found"
            f" {found or 'no such file'}; restore another step"
        )


def read_strings(
    item: Path,
    checkpoint: Path,
    infos: Sequence[LeafInfo],
    digests: Mapping[str, str],
) -> dict[LeafPath, str]:
    """Returns the values of the string leaves: leaf path -> string."""
    wanted = [info for info in infos if info.kind == "string"]
    if not wanted:
        return {}
    path = item / STRINGS
    raw = read_file(path, checkpoint)
    check_digest(path, digests.get(f"{STATE}/{STRINGS}"), raw)
    data = orbax_json.loads(raw, path)
    try:
        return {
            info.path: orbax_json.string_at(data, orbax_json.param_name(info.keys))
            for info in wanted
        }
    except KeyError as error:
        raise errors.DamagedCheckpointError(
            f"{path} lacks the string {error}; restore another step"
        ) from None


def read_metrics(path: Path) -> dict[str, float]:
    """Returns the numeric metrics of the checkpoint `path`.

    A damaged file of metrics is logged and counts as empty, so that the state remains
    readable.
    """
    try:
        return numbers_in(metrics_in(path))
    except errors.DamagedCheckpointError as error:
        _log.warning("the metrics of %s are lost: %s", path, error)
        return {}


def metrics_in(path: Path) -> dict[str, Any]:
    """Returns the content of the metrics file of the checkpoint `path`.

    Empty for a checkpoint without metrics.

    Raises:
        DamagedCheckpointError: The file is missing, malformed, or differs from its
            recorded digests.
    """
    file = path / METRICS / METRICS
    if not _storage.of(file).exists(file):
        if (told := _has_had_metrics(path)) and not _storage.of(file).exists(file):
            raise errors.DamagedCheckpointError(
                f"{file} is missing, and {told} says that there were metrics; add all"
                " metrics of the step anew"
            )
        return {}
    content = read_file(file, path)
    if not _is_known(path, content):
        again = read_file(file, path)  # a writer may replace the file at this moment
        if again == content or not _is_known(path, again):
            raise errors.DamagedCheckpointError(
                f"{file} has changed since it was written, or {METRICS_DIGESTS} has"
            )
        content = again
    return orbax_json.loads(content, file)


def _has_had_metrics(path: Path) -> str | None:
    """Returns the file that records metrics of a native checkpoint, or None."""
    if _steps.markers.is_measured(path):
        return _steps.markers.MEASURED
    if not (path / orbax_json.MANIFEST).is_file():  # Orbax records no digests
        return None
    items = json_file(path / CHECKPOINT, path).get("item_handlers")
    return CHECKPOINT if isinstance(items, dict) and METRICS in items else None


def _is_known(path: Path, metrics: bytes) -> bool:
    """Returns True if `metrics` match a recorded digest, or none was recorded."""
    if not _storage.of(path).exists(path / METRICS_DIGESTS):
        return True
    known = json_file(path / METRICS_DIGESTS, path).get(METRICS)
    return isinstance(known, list) and _storage.files.digest(metrics) in known


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers among `metrics`, except numbers too large for a float.

    Nested names are joined by `/`, as in `eval/loss`; the name of a list item is its
    index. If two metrics get the same name, the less nested metric counts.
    """
    found: dict[str, float] = {}
    waiting: collections.deque[tuple[str, Any]] = collections.deque(metrics.items())
    while waiting:
        name, value = waiting.popleft()
        if isinstance(value, dict):
            waiting.extend((f"{name}/{key}", inner) for key, inner in value.items())
        elif isinstance(value, list):
            waiting.extend((f"{name}/{i}", inner) for i, inner in enumerate(value))
        elif isinstance(value, int | float) and _is_float(value):
            found.setdefault(name, float(value))
    return found


def with_metrics(
    metrics: Mapping[str, Any], added: Mapping[str, float]
) -> dict[str, Any]:
    """Returns a copy of a file's `metrics` with the numbers `added`.

    A nested number is replaced in its place, where Orbax looks for it. `numbers_in`
    returns the added numbers under the same names.
    """
    changed = {key: _copy(value) for key, value in metrics.items()}
    for name, number in added.items():
        if name in changed or not _replace_nested(changed, name, number):
            changed[name] = number
    return changed


def _copy(value: Any) -> Any:
    """Returns a copy of nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


def _replace_nested(metrics: dict[str, Any], name: str, number: float) -> bool:
    """Replaces the nested number `name`; returns False if not found."""
    for key, value in metrics.items():
        if not name.startswith(f"{key}/") or not isinstance(value, dict):
            continue
        rest = name.removeprefix(f"{key}/")
        if isinstance(value.get(rest), int | float):
            value[rest] = number
            return True
        if _replace_nested(value, rest, number):
            return True
    return False


def _is_float(value: float) -> bool:
    """Returns False for an integer too large for a float."""
    return not isinstance(value, int) or abs(value) < 2**1023


def checkpoint_info(
    path: Path,
    format_name: str,
    step: int | None,
    infos: Sequence[LeafInfo],
    digests: Mapping[str, str],
) -> CheckpointMetadata:
    found: dict[str, Any] = {}
    if CHECKPOINT in digests or _storage.of(path).exists(path / CHECKPOINT):
        raw = read_file(path / CHECKPOINT, path)
        if CHECKPOINT in digests:
            check_digest(path / CHECKPOINT, digests[CHECKPOINT], raw)
            found = orbax_json.loads(raw, path / CHECKPOINT)
        else:
            # Orbax tolerates invalid content here, and the state does not need it.
            try:
                found = orbax_json.loads(raw, path / CHECKPOINT)
            except errors.DamagedCheckpointError:
                found = {}
    return CheckpointMetadata(
        str(path),
        format_name,
        step,
        {info.path: info for info in infos},
        read_metrics(path),
        _seconds(found.get("init_timestamp_nsecs")),
        _seconds(found.get("commit_timestamp_nsecs")),
        custom_in(found),
        (path / DATASET).is_dir() and not has_let_go_dataset(path),
        sum(_arrays.layout.stored_bytes(info) for info in infos),
    )


def custom_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's own metadata from the metadata of a step or a run.

    Source: `custom` was the field's name in Orbax 0.11.0 to 0.11.5.
    """
    found = metadata.get("custom_metadata", metadata.get("custom"))
    return found if isinstance(found, dict) else {}


def has_let_go_dataset(path: Path) -> bool:
    """Returns True if the dataset state of `path` was deleted on purpose."""
    return (path / _steps.markers.WITHOUT_DATASET).is_file()


def read_created(path: Path) -> float:
    """Returns the time of the start of the save of `path`, in seconds since 1970.

    If not recorded, the modification time of the oldest file.
    """
    try:
        found = json_file(path / CHECKPOINT, path).get("init_timestamp_nsecs")
    except errors.DamagedCheckpointError:
        found = None
    created = _seconds(found)
    if created is None:
        with contextlib.suppress(FileNotFoundError):  # just deleted
            return min(file.lstat().st_mtime for file in path.iterdir())
        return time.time()
    return created


def _seconds(nanoseconds: object) -> float | None:
    if not isinstance(nanoseconds, int | float) or not abs(nanoseconds) < 1e30:
        return None  # not NaN, either
    return nanoseconds / 1e9
