"""The fenced blocks of documents, and a comparison with the output of commands."""

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
        language: The name after the fence.
        code: The lines of the block, after as many empty lines as the document has
            lines before it, so that a traceback has the document's line number.
        is_run: True if no line `<!-- not run: why -->` precedes it.
        follows: True if only empty lines separate it from the previous block.
    """

    language: str
    code: str
    is_run: bool
    follows: bool


class Command(NamedTuple):
    """A shell line: without its comment, split into words, and its exit code."""

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
    """Yields the commands of a shell block; a backslash continues a line."""
    for line in code.replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            exits = CODE.search(line)
            command, _, _ = line.partition(" #")
            yield Command(command.strip(), words, int(exits[1]) if exits else 0)


def is_printed(documented: str, printed: str) -> bool:
    """Compares printed with documented text, except numbers and their units.

    In the document, `…` matches anything in a line; alone in a line, any lines.
    """
    lines = documented.strip("\n").splitlines()
    parts = [r"(?:.*\n)*" if line == ANYTHING else _pattern(line) for line in lines]
    normalized = "".join(f"{_normalize(line)}\n" for line in printed.splitlines())
    return bool(re.fullmatch("".join(parts), normalized))


def _pattern(line: str) -> str:
    return re.escape(_normalize(line)).replace(ANYTHING, ".*") + "\n"


def _normalize(line: str) -> str:
    """Removes numbers, units, and spaces that depend on them."""
    line = re.sub(r"-?\d[\d.:e+-]*( (µs|ms|s|B|kB|MB|GB|TB)\b)?", "#", line)
    line = re.sub(r"^file system .*", "file system", line)
    return " ".join(re.sub("█+", "█", line).split())
