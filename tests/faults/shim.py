"""Faults in file system calls: the library that makes them, and how it is told."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
COUNT, KILL, SHORT = 0, -9, -1
CHANGES, GROWING, READS = 0, 1, 2


def build(source=SOURCE):
    """The compiled library of a source; None without a C compiler for Linux."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not Path("/proc/self/fd").is_dir():
        return None
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    built = Path(tempfile.gettempdir(), f"flaxckpt-shim-{os.getuid()}-{digest}.so")
    if not built.exists():
        made = built.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"],
            check=True,
        )
        made.replace(built)  # several test processes may build it at once
    return built


class Shim:
    """The library in this process, into which it was preloaded."""

    def __init__(self):
        self._library = ctypes.CDLL(None)
        self._library.fault_seen.restype = ctypes.c_long
        self._library.fault_hits.restype = ctypes.c_long
        self._library.fault_arm.argtypes = (
            ctypes.c_char_p,
            ctypes.c_long,
            *(ctypes.c_int,) * 3,
        )

    def arm(self, directory, *, at=0, what=COUNT, sticky=False, counted=CHANGES):
        """Has call `at` below a directory fail; or all from there on, if sticky.

        Counted are calls that change something, or only those that a full disk would
        refuse, or those that read.
        """
        self._library.fault_arm(os.fsencode(directory), at, what, sticky, counted)

    def disarm(self):
        self._library.fault_disarm()

    def seen(self):
        return self._library.fault_seen()

    def hits(self):
        return self._library.fault_hits()

    def record(self, descriptor):
        """Writes down all calls from now on."""
        self._library.fault_record(descriptor)

    def note(self, text):
        """Writes a text between them."""
        self._library.fault_note(text.encode())
