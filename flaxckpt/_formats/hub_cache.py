"""Directories of models in the cache of the Hugging Face Hub.

A model is a directory `models--org--name`: the file `refs/main` names a revision,
`snapshots/<revision>` holds links, and `blobs` the files that the links lead to.

Source: "Understand caching" in the guides of huggingface_hub.
"""

from __future__ import annotations

from pathlib import Path

from flaxckpt import _storage, errors

_PREFIX = "models--"
_SNAPSHOTS = "snapshots"
_BLOBS = "blobs"
_MAIN = "refs/main"
_MAX_REVISION_BYTES = 1000


def find_snapshot(path: Path) -> Path | None:
    """Returns the snapshot of the main revision of a model in the cache, else None."""
    if not is_model(path):
        return None
    try:
        model = path.resolve(strict=True)
        file = model / _MAIN
        if file.resolve(strict=True) != file:  # a link may lead anywhere
            return None
        text = _storage.of(file).read(file, max_bytes=_MAX_REVISION_BYTES)
        revision = text.decode("ascii").strip()
        if not revision or revision.strip(".") == "" or not _is_plain(revision):
            return None
        found = model / _SNAPSHOTS / revision
        is_inside = found.resolve(strict=True) == found
    except PermissionError:
        raise
    except (OSError, RuntimeError, ValueError, errors.DamagedCheckpointError):
        return None
    return path / _SNAPSHOTS / revision if is_inside and found.is_dir() else None


def is_model(path: Path) -> bool:
    """Returns True if `path` has the name and the directories of a cached model."""
    if not _storage.of(path).can_map or not path.name.startswith(_PREFIX):
        return False
    return (path / _SNAPSHOTS).is_dir()


def describe_model(path: Path) -> str | None:
    """Describes a cached model that has no readable main snapshot; else None."""
    if not is_model(path):
        return None
    snapshot = find_snapshot(path)
    if snapshot is not None:
        names = sorted(child.name for child in snapshot.iterdir())
        return (
            f"a model of the Hugging Face cache, and its snapshot {snapshot.name} holds"
            f" no safetensors: it has {errors.first_few(names) or 'nothing'}. Download"
            " model.safetensors"
        )
    snapshots = sorted((path / _SNAPSHOTS).iterdir())
    advice = "download a revision" if not snapshots else f"pass {snapshots[0]}"
    return (
        f"a model of the Hugging Face cache whose {_MAIN} names no snapshot in"
        f" {_SNAPSHOTS}/: {advice}"
    )


def check_link(file: Path) -> None:
    """Raises DamagedCheckpointError for a link, unless it is to the model's `blobs`."""
    real = file.resolve(strict=True)
    home = file.parent.resolve()
    if real.parent not in (home, _find_blobs(home)):
        raise errors.DamagedCheckpointError(
            f"{file} is a link to {real}, outside of its directory: copy that file here"
        )


def _find_blobs(directory: Path) -> Path | None:
    for snapshots in directory.parents:
        model = snapshots.parent
        if snapshots.name == _SNAPSHOTS and model.name.startswith(_PREFIX):
            return model / _BLOBS
    return None


def _is_plain(name: str) -> bool:
    return all(char.isalnum() or char in "._-" for char in name)
