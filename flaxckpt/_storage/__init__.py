"""Bytes under paths, on disks and in object stores: durable writes, locks, leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors
from flaxckpt._storage.storage import Stamp as Stamp
from flaxckpt._storage.storage import of as of
from flaxckpt._storage.storage import stamp as stamp

if TYPE_CHECKING:
    from flaxckpt._storage import (
        bucket,
        files,
        filesystem,
        leases,
        listing,
        modes,
        paths,
        read_errors,
        rename,
        store_requests,
        store_settings,
        temporary,
        transaction,
    )

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
