"""Models on the disk as huggingface_hub lays them out in its cache."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


def write_model(
    cache: Path, files: Mapping[str, bytes | Path], *, revision: str = REVISION
) -> Path:
    """Writes files as a model of the cache: blobs, links to them, and `refs/main`.

    Args:
        cache: Directory of the cache.
        files: Relative path -> content, or a file to copy.
        revision: Name of the snapshot.

    Returns:
        The directory of the model.
    """
    model = cache / "models--org--name"
    blobs, snapshot = model / "blobs", model / "snapshots" / revision
    for directory in (blobs, snapshot, model / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = blobs / hashlib.sha256(f"{name} {revision}".encode()).hexdigest()
        if isinstance(content, Path):
            shutil.copy(content, blob)
        else:
            blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (model / "refs" / "main").write_text(revision)
    return model
