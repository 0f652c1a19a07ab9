"""Every example in docs/cli.md and docs/report.md runs, and prints what is there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import documented
import pytest
from test_cli_process import VERBS

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCS / "cli.md"
BLOCKS = re.compile(r"```sh\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
CODE = re.compile(r"# exits with (\d)")
ANYTHING = "…"


class Example(NamedTuple):
    """Commands, and what they print together."""

    commands: list[str]
    printed: list[str]


def examples(text: str) -> Iterator[Example]:
    for commands, printed in BLOCKS.findall(text):
        yield Example(commands.splitlines(), printed.splitlines())


def as_pattern(lines: list[str]) -> str:
    """What has to be printed: numbers and their units may be others."""
    parts = [r"(?:.*\n)*" if line == ANYTHING else _line(line) for line in lines]
    return "".join(parts)


def _line(line: str) -> str:
    return re.escape(_measured(line)).replace(ANYTHING, ".*") + "\n"


def _measured(line: str) -> str:
    """A line without numbers, units, and blanks that depend on these."""
    line = re.sub(r"-?\d[\d.:e+-]*( (µs|ms|s|B|kB|MB|GB|TB)\b)?", "#", line)
    line = re.sub(r"^file system .*", "file system", line)
    return " ".join(re.sub("█+", "█", line).split())


@pytest.mark.parametrize("name", ["cli.md", "report.md"])
def test_every_example_runs_and_prints_what_is_said(
    tmp_path, monkeypatch, command, name
):
    documented.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    for example in examples((DOCS / name).read_text(encoding="utf-8")):
        printed = ""
        for line in example.commands:
            code = CODE.search(line)
            _, *args = shlex.split(line, comments=True)
            printed += command(*args, code=int(code[1]) if code else 0).output
        found = "".join(f"{_measured(line)}\n" for line in printed.splitlines())
        assert re.fullmatch(as_pattern(example.printed), found), printed


def test_every_verb_is_documented():
    told = DOCUMENT.read_text(encoding="utf-8")
    used = {
        shlex.split(line)[1] for line in re.findall(r"^flaxckpt .*", told, re.MULTILINE)
    }
    assert used == set(VERBS)


def test_what_is_printed_otherwise_is_found():
    pattern = as_pattern(["step  1000", ANYTHING, "3 steps, 1.5 kB"])
    assert re.fullmatch(pattern, "step #\na\nb\n# steps, #\n")
    assert not re.fullmatch(pattern, "step #\na\nb\n# step, #\n")
    assert not re.fullmatch(pattern, "a step #\n# steps, #\n")
