"""Damaged and unreadable files, and free ports, for tests of several packages."""

import contextlib
import os
import socket

NOBODY = 65534


def flip_bit(file, at=None, bit=1):
    """Flips a bit of the byte at `at`, by default in the middle of the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= bit
    file.write_bytes(content)


def largest_file(directory):
    """Returns the largest file anywhere in a directory."""
    files = (file for file in directory.rglob("*") if file.is_file())
    return max(files, key=lambda file: file.stat().st_size)


@contextlib.contextmanager
def without_permissions():
    """The process runs without root's permissions in the block."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def free_port():
    """Returns a port on loopback that no server uses."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
