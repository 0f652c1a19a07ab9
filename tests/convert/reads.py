"""What a conversion reads of its source, and conversions that stop on the way."""

import contextlib

import pytest

from tests.helpers import seams


class StopError(Exception):
    """What ends a conversion."""


@contextlib.contextmanager
def stopping(share):
    """Yields the progress function that ends a conversion after a share of it."""

    def stop(done, total):
        if 0 < done >= share * total:
            raise StopError

    with pytest.raises(StopError):
        yield stop


def trace_reads(monkeypatch):
    """Returns the names of the pieces that are read from now on."""
    read = []
    _trace(monkeypatch, lambda pieces: read.extend(piece.name for piece in pieces))
    return read


def trace_sizes(monkeypatch):
    """Returns the bytes that are read at a time from now on."""
    sizes = []
    _trace(
        monkeypatch, lambda pieces: sizes.append(sum(piece.nbytes for piece in pieces))
    )
    return sizes


def _trace(monkeypatch, note):
    original = seams.current("blockwise.read")

    def traced(pieces, **options):
        note(pieces)
        return original(pieces, **options)

    seams.replace(monkeypatch, "blockwise.read", traced)
