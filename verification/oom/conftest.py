"""A directory in memory."""

from tests.faults.conftest import directory

__all__ = ["directory"]
