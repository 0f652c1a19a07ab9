"""The shim, and a directory in memory."""

from tests.faults.conftest import directory, library

__all__ = ["directory", "library"]
