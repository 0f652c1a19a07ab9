"""Bytes under paths, on disks and in object stores: durable writes, locks, leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._storage import (
        bucket,
        files,
        filesystem,
        leases,
        listing,
        modes,
        paths,
        permissions,
        rename,
        store_requests,
        store_settings,
        temporary,
        transaction,
    )
    from flaxckpt._storage.storage import Stamp, of, stamp

__all__ = [
    "Stamp",
    "bucket",
    "files",
    "filesystem",
    "leases",
    "listing",
    "modes",
    "of",
    "paths",
    "permissions",
    "rename",
    "stamp",
    "store_requests",
    "store_settings",
    "temporary",
    "transaction",
]

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(
        __name__,
        __all__,
        dict.fromkeys(("Stamp", "of", "stamp"), "storage"),
    )
