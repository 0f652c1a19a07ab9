"""The library that makes system calls fail, as `tests/faults` builds it."""

from tests.faults.conftest import library

__all__ = ["library"]
