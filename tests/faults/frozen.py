"""Times and random names that depend on what a process does, not on when.

So two processes that do the same leave the same on the disk, which is looked at once.
"""

import itertools
import secrets
import time
import zlib

_second = 0
_names = itertools.count()


def start(began):
    """Stops the clock at a time in seconds, and counts random names from now on."""
    time.time = lambda: began + _second
    time.time_ns = lambda: int(time.time()) * 10**9
    secrets.token_hex = lambda size: f"{next(_names):0{2 * size}x}"


def set_second(second):
    """Sets the clock to so many seconds after its beginning."""
    global _second
    _second = second


def restart_names(text):
    """Counts names from the beginning again, one that depends on a text."""
    global _names
    _names = itertools.count(zlib.crc32(text.encode()) & 0xFFFF0000)
