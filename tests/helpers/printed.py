"""What Chromium prints of tables: the pages of a PDF with their headings and rows."""

import re
import zlib

_HEADING = "rgb(1, 254, 3)", b" .0039 .9961 .0118 rg"
_ROW = "rgb(3, 254, 1)", b" .0118 .9961 .0039 rg"
"""A colour, and how a PDF sets it."""


def pages_of_table(page, table):
    """Prints a page, and finds a table on it by the colours of its headings and rows.

    The page is of a context that bypasses the content policy.

    Returns:
        For each printed page with rows of the table, whether it has the headings.
    """
    style = "background: {} !important; print-color-adjust: exact;"
    page.add_style_tag(
        content=f"{table} thead th {{ {style.format(_HEADING[0])} }}"
        f" {table} tbody th {{ {style.format(_ROW[0])} }}"
    )
    drawn = _streams(page.pdf(format="A4", print_background=True))
    return [_HEADING[1] in each for each in drawn if _ROW[1] in each]


def _streams(pdf):
    """Yields the decompressed streams, one of which draws each page."""
    for found in re.finditer(rb"stream\r?\n", pdf):
        try:
            yield zlib.decompressobj().decompress(pdf[found.end() :])
        except zlib.error:  # not compressed, or the end of a stream
            continue
