"""What a conversion reads of its source."""

from tests.helpers import seams


def trace_reads(monkeypatch):
    """Returns the names of the pieces that are read from now on."""
    read, original = [], seams.current("blockwise.read")

    def traced(pieces, **options):
        read.extend(piece.name for piece in pieces)
        return original(pieces, **options)

    seams.replace(monkeypatch, "blockwise.read", traced)
    return read
