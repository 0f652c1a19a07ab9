"""Damaged and unreadable files, and free ports, for tests of several packages."""

import contextlib
import os
import socket

NOBODY = 65534


def flip_bit(file, at=None, bit=1):
    """Changes a byte of a file: the one at `at`, by default in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= bit
    file.write_bytes(content)


def largest_file(directory):
    """The largest file anywhere in a directory."""
    files = (file for file in directory.rglob("*") if file.is_file())
    return max(files, key=lambda file: file.stat().st_size)


@contextlib.contextmanager
def without_permissions():
    """Drops root's permission to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
