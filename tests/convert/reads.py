"""What a conversion reads of its source."""

from tests.helpers import seams


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
