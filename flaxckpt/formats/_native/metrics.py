"""Metrics of a committed checkpoint, replaced without a change to other files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from flaxckpt import _steps, _storage, errors
from flaxckpt._types import JSON
from flaxckpt.formats._native import items, orbax_json
from flaxckpt.formats._native.items import METRICS, METRICS_DIGESTS


def digests_of(*texts: bytes) -> bytes:
    """Returns the content of `metrics/digests` that accepts any of `texts`."""
    digests = [_storage.files.digest(text) for text in texts]
    return orbax_json.dumps({METRICS: digests})


def are_digests(text: bytes, file: Path) -> bool:
    """Returns True if `text` is valid content of `metrics/digests`.

    Raises:
        DamagedCheckpointError: `text` is not a JSON object.
    """
    found = orbax_json.loads(text, file).get(METRICS)
    return isinstance(found, list) and text == orbax_json.dumps({METRICS: found})


def write(path: Path, metrics: Mapping[str, JSON]) -> None:
    """Replaces the metrics of the committed checkpoint `path` atomically.

    Raises:
        ValueError: The path of the metrics leads out of the checkpoint through a
            symlink, or the metrics are too large for readers.
    """
    _storage.of(path).check_file(path / METRICS / METRICS, path)
    _write(path, metrics)
    _steps.markers.mark_measured(path)


def _write(path: Path, metrics: Mapping[str, JSON]) -> None:
    content = orbax_json.dumps(dict(metrics))
    orbax_json.check_size(content)
    digests = METRICS_DIGESTS.removeprefix(f"{METRICS}/")
    files = {METRICS: content, digests: digests_of(content)}
    # Atomically: Orbax reports a directory without the file as damage.
    is_there = (path / METRICS).is_dir()
    if is_there or not _storage.of(path).add_directory(path / METRICS, files):
        _replace(path, content)


def _replace(path: Path, content: bytes) -> None:
    right = [content]
    with contextlib.suppress(errors.DamagedCheckpointError):
        right.append(items.read_file(path / METRICS / METRICS, path))
    # Both digests count until the new metrics are written, even after an interruption.
    _storage.of(path).replace(path / METRICS_DIGESTS, digests_of(*right))
    _storage.of(path).replace(path / METRICS / METRICS, content)
    _storage.of(path).replace(path / METRICS_DIGESTS, digests_of(content))
