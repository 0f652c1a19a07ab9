"""The fenced blocks of documents, and whether a command printed what stands there."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests import ROOT

README_AND_GUIDES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*(\w*)")
NOT_RUN = re.compile(r"\s*<!-- not run(?:: (.+))? -->")
CODE = re.compile(r"# exits with (\d)")
ANYTHING = "…"


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: What stands behind the fence.
        code: Its lines, below as many empty ones as stand above it in the document. So
            a traceback gives the line there.
        is_run: Whether no line `<!-- not run: why -->` stands before it.
        follows: Whether only empty lines are between it and the block before it.
    """

    language: str
    code: str
    is_run: bool
    follows: bool


class Command(NamedTuple):
    """A shell line: the line without its comment, its words, and how it shall exit."""

    line: str
    words: list[str]
    code: int


def blocks(text: str) -> Iterator[Block]:
    fence, language, code = "", "", []
    is_run, follows = True, False
    for number, line in enumerate(text.splitlines()):
        opening = FENCE.match(line)
        if fence:
            if line.strip() == fence:
                yield Block(language, "\n".join(code), is_run, follows)
                fence, is_run, follows = "", True, True
            else:
                code.append(line)
        elif opening:
            fence, language = opening.groups()
            code = [""] * (number + 1)
        elif line.strip():
            is_run, follows = not NOT_RUN.match(line), False


def commands(code: str) -> Iterator[Command]:
    """The commands of a block of the shell; a line may go on behind a backslash."""
    for line in code.replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            exits = CODE.search(line)
            told, _, _ = line.partition(" #")
            yield Command(told.strip(), words, int(exits[1]) if exits else 0)


def is_printed(wanted: str, found: str) -> bool:
    """Whether `found` is what a document says, but for numbers and their units.

    In the document `…` stands for anything in a line, and alone, for any lines.
    """
    lines = wanted.strip("\n").splitlines()
    parts = [r"(?:.*\n)*" if line == ANYTHING else _pattern(line) for line in lines]
    measured = "".join(f"{_measured(line)}\n" for line in found.splitlines())
    return bool(re.fullmatch("".join(parts), measured))


def _pattern(line: str) -> str:
    return re.escape(_measured(line)).replace(ANYTHING, ".*") + "\n"


def _measured(line: str) -> str:
    """A line without numbers, units, and blanks that depend on these."""
    line = re.sub(r"-?\d[\d.:e+-]*( (µs|ms|s|B|kB|MB|GB|TB)\b)?", "#", line)
    line = re.sub(r"^file system .*", "file system", line)
    return " ".join(re.sub("█+", "█", line).split())
