"""Allocations that fail: the library that makes them fail, and how it is told."""

import contextlib
import ctypes
import functools
import threading
from pathlib import Path

import numpy as np

from tests.faults import shim

SOURCE = Path(__file__).with_name("shim.c")
PYTHON, NUMPY, MAPS, THREADS = 1, 2, 4, 8
EVERYTHING = PYTHON | NUMPY | MAPS | THREADS
_GET_HANDLER = 305  # of numpy's C interface: PyDataMem_GetHandler
FOREVER = 2**62


def build():
    """The compiled library; None without a C compiler for Linux."""
    return shim.build(SOURCE)


class Memory:
    """The library in this process, into which it was preloaded."""

    def __init__(self):
        self._library = ctypes.CDLL(None)
        self._library.oom_seen.restype = ctypes.c_long
        self._library.oom_hits.restype = ctypes.c_long
        self._library.oom_arm.argtypes = (
            ctypes.c_int,
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_size_t,
        )
        self._library.oom_install.argtypes = (ctypes.c_void_p,)
        self._library.oom_install(_numpy_handler())

    def arm(self, *, kinds=EVERYTHING, at=0, count=1, smallest=0):
        """Has `count` allocations fail from number `at` on, on all threads.

        Counted are those of these kinds with at least `smallest` bytes.
        """
        self._library.oom_arm(kinds, at, at + count - 1 if at else -1, smallest)

    def disarm(self):
        self._library.oom_disarm()

    @contextlib.contextmanager
    def exempt(self):
        """Nothing fails on this thread in the block."""
        self._library.oom_exempt(1)
        try:
            yield
        finally:
            self._library.oom_exempt(0)

    def exempted(self, function):
        """The function, in which nothing fails."""

        @functools.wraps(function)
        def call(*args):
            with self.exempt():
                return function(*args)

        return call

    def exempt_thread_starts(self):
        """Lets no thread fail before it begins to work, or after its work.

        CPython does not bear it: the thread that starts another waits forever.
        """
        thread, exempt = threading.Thread, self._library.oom_exempt
        run = thread.run

        def run_unprotected(self):
            exempt(0)
            try:
                run(self)
            finally:
                exempt(1)

        thread.run = run_unprotected
        thread.start = self.exempted(thread.start)

    def seen(self):
        return self._library.oom_seen()

    def hits(self):
        return self._library.oom_hits()


def _numpy_handler():
    """The address of the handler that numpy uses on all threads."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api = pointer(np._core.multiarray._ARRAY_API, None)
    functions = ctypes.cast(api, ctypes.POINTER(ctypes.c_void_p))
    get_handler = ctypes.PYFUNCTYPE(ctypes.py_object)(functions[_GET_HANDLER])
    return pointer(get_handler(), b"mem_handler")
