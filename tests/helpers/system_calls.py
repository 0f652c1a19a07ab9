"""System calls that fail for some files, or that are written down."""

import os
from pathlib import Path


def fail(monkeypatch, owner, name, code, ending=""):
    """Lets a call fail for files whose path ends so, until the end of the test.

    Args:
        monkeypatch: The fixture, or a context of it.
        owner: The module or class of the call.
        name: Its name there. Its first argument is a path or a descriptor.
        code: The error, as `errno.EIO`.
        ending: The end of the paths.
    """
    real = getattr(owner, name)

    def call(file, *args, **options):
        if ending and not _path(file).endswith(ending):
            return real(file, *args, **options)
        raise OSError(code, os.strerror(code), None if type(file) is int else str(file))

    monkeypatch.setattr(owner, name, call)


def record(monkeypatch, *names):
    """Returns a list to which each such call of `os` adds its name and its paths."""
    calls = []

    def watch(name):
        real = getattr(os, name)

        def call(*files, **options):
            row = (name, *map(_path, files))
            found = real(*files, **options)
            calls.append(row)
            return found

        monkeypatch.setattr(os, name, call)

    for name in names:
        watch(name)
    return calls


def _path(file):
    if type(file) is int:
        return str(Path(f"/proc/self/fd/{file}").readlink())
    return os.fspath(file)
