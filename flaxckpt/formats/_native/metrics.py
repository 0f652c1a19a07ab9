"""The metrics of a checkpoint, which are written anew when the rest of it stays."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from flaxckpt import _steps, _storage, errors
from flaxckpt._types import JSON
from flaxckpt.formats._native import items, orbax_json
from flaxckpt.formats._native.items import METRICS, METRICS_DIGESTS


def digests_of(*texts: bytes) -> bytes:
    """The content of `metrics/digests`, if one of `texts` is that of the metrics."""
    digests = [_storage.local.digest(text) for text in texts]
    return orbax_json.dumps({METRICS: digests})


def are_digests(text: bytes, file: Path) -> bool:
    """Whether the content of `metrics/digests` is such as is written there.

    Raises:
        DamagedCheckpointError: It is no JSON.
    """
    found = orbax_json.loads(text, file).get(METRICS)
    return isinstance(found, list) and text == orbax_json.dumps({METRICS: found})


def write(path: Path, metrics: Mapping[str, JSON]) -> None:
    """Writes the metrics of the committed checkpoint `path` anew, in one step.

    Raises:
        ValueError: They would be written behind a link out of the checkpoint, or are
            more than readers take.
    """
    _storage.of(path).check_file(path / METRICS / METRICS, path)
    _write(path, metrics)
    _steps.markers.mark_measured(path)


def _write(path: Path, metrics: Mapping[str, JSON]) -> None:
    content = orbax_json.dumps(dict(metrics))
    orbax_json.check_size(content)
    digests = METRICS_DIGESTS.removeprefix(f"{METRICS}/")
    files = {METRICS: content, digests: digests_of(content)}
    # In a single step: Orbax takes a directory without its file for damage.
    is_there = (path / METRICS).is_dir()
    if is_there or not _storage.of(path).add_directory(path / METRICS, files):
        _replace(path, content)


def _replace(path: Path, content: bytes) -> None:
    right = [content]
    with contextlib.suppress(errors.DamagedCheckpointError):
        right.append(items.read_file(path / METRICS / METRICS, path))
    # Both are right until the new ones are there, whenever that is cut off.
    _storage.local.replace(path / METRICS_DIGESTS, digests_of(*right))
    _storage.local.replace(path / METRICS / METRICS, content)
    _storage.local.replace(path / METRICS_DIGESTS, digests_of(content))
