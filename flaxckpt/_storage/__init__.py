"""Bytes under paths, on disks and in object stores: durable writes, locks, leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._storage import (
        client,
        commit_marker,
        files,
        filesystem,
        leases,
        local,
        locks,
        paths,
        permissions,
        rename,
        store_settings,
        symlinks,
        temporary,
        upload,
    )
    from flaxckpt._storage.storage import of

__all__ = [
    "client",
    "commit_marker",
    "files",
    "filesystem",
    "leases",
    "local",
    "locks",
    "of",
    "paths",
    "permissions",
    "rename",
    "store_settings",
    "symlinks",
    "temporary",
    "upload",
]

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__, __all__, {"of": "storage"})
