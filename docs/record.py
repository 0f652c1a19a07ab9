"""Records a terminal in which a run is killed, resumed and explained, as a picture.

python docs/record.py writes docs/recording.svg. The shell and the kill are real;
pauses longer than `LONGEST_PAUSE_SECS` are cut. Without animation, the picture shows
all lines.
"""

from __future__ import annotations

import html
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples/notebooks/kill_and_resume.ipynb"
COLUMNS = 88
PROMPT = "\x1b[32m$\x1b[0m "
TYPED_SECS = 0.03
LONGEST_PAUSE_SECS = 1.0
LAST_SECS = 6.0
COMMANDS = [
    "python train.py run &  # saves every 10 steps, keeps the newest 3",
    "kill_while_saving 40   # kill -9, as soon as the save of step 40 has begun",
    "ls run",
    "python train.py run    # the same command again",
    "flaxckpt explain run 30",
    "flaxckpt diff run twin # a run that nobody killed",
]
KILL = '() { until ls run 2>&1 | grep -q "$1.*tmp"; do :; done; kill -9 $!; }'
"""The body of a function of the shell."""

COLORS = {
    "31": "#ff7b72",
    "32": "#56d364",
    "33": "#e3b341",
    "34": "#79c0ff",
    "35": "#d2a8ff",
    "36": "#56d4dd",
}
CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Piece(NamedTuple):
    """Text that appears at once, in one style.

    Attributes:
        secs: The time at which it appears.
        text: The text.
        style: The numbers of the terminal's style.
    """

    secs: float
    text: str
    style: tuple[str, ...]


def main() -> None:
    """Writes the picture."""
    with tempfile.TemporaryDirectory() as directory:
        cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        program = next(
            c for c in cells if c["source"][:1] == ["%%writefile train.py\n"]
        )
        Path(directory, "train.py").write_text("".join(program["source"][1:]))
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "TERM": "xterm-256color",
            "COLUMNS": str(COLUMNS),
            "TABSIZE": "0",  # of ls: spaces
            "PS1": PROMPT,
            "BASH_FUNC_kill_while_saving%%": KILL,
        }
        train = [sys.executable, "train.py", "twin"]
        subprocess.run(
            train, cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL
        )
        lines = read_lines(record(directory, environment))
    (ROOT / "docs/recording.svg").write_text(draw(lines), encoding="utf-8")


def record(directory: str, environment: dict[str, str]) -> list[tuple[float, str]]:
    """Returns what a shell shows as the commands are typed: seconds and text."""
    terminal, inside = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "--noediting", "-i"],
        cwd=directory,
        env=environment,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    )
    shown: list[tuple[float, str]] = []
    read(terminal, shown)
    for command in COMMANDS:
        for character in f"{command}\n":
            os.write(terminal, character.encode())
            time.sleep(TYPED_SECS)
            read(terminal, shown, until_prompt=character == "\n")
    os.write(terminal, b"exit\n")
    shell.wait()
    return shown[:-1]


def read(
    terminal: int, shown: list[tuple[float, str]], until_prompt: bool = True
) -> None:
    """Adds what the terminal shows, up to the next prompt or to the end of now."""
    while select.select([terminal], [], [], 60 if until_prompt else 0)[0]:
        shown.append((time.monotonic(), os.read(terminal, 65536).decode()))
        if shown[-1][1].endswith(PROMPT):
            return


def read_lines(shown: list[tuple[float, str]]) -> list[list[Piece]]:
    """Returns the lines of a terminal, in pieces with the times of their appearance."""
    lines: list[list[Piece]] = [[]]
    secs, before = 0.0, shown[0][0]
    style: tuple[str, ...] = ()
    for now, text in shown:
        secs += min(now - before, LONGEST_PAUSE_SECS)
        before = now
        for number, part in enumerate(text.replace("\r", "").split("\n")):
            if number:
                lines.append([])
            at = 0
            for control in [*CONTROL.finditer(part), None]:
                plain = part[at : control.start() if control else None]
                if plain:
                    lines[-1].append(Piece(round(secs, 2), plain, style))
                if control:
                    at = control.end()
                    if control[0].endswith("m"):
                        codes = [c for c in control[0][2:-1].split(";") if c not in "0"]
                        style = (*style, *codes) if codes else ()
    return lines


def draw(lines: list[list[Piece]]) -> str:
    """Returns the picture of the lines."""
    last = max(piece.secs for line in lines for piece in line) + LAST_SECS
    width, height = COLUMNS * 8.43 + 32, len(lines) * 20 + 32
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}"'
        ' font-family="ui-monospace,SFMono-Regular,Menlo,DejaVu Sans Mono,monospace"'
        ' font-size="14" fill="#e6edf3" role="img">',
        "<title>A run is killed in the middle of a save, resumed and explained</title>",
        '<rect width="100%" height="100%" rx="8" fill="#0d1117">',
        f'<animate id="t" attributeName="opacity" values="1;1" dur="{last:.2f}s"'
        ' begin="0s;t.end"/></rect>',
    ]
    for row, line in enumerate(lines):
        column = 0
        for piece in line:
            color = next((COLORS[c] for c in piece.style if c in COLORS), None)
            looks = f' fill="{color}"' if color else ""
            looks += ' font-weight="bold"' if "1" in piece.style else ""
            x = 16 + column * 8.43
            parts.append(
                f'<text x="{x:.1f}" y="{row * 20 + 30}" xml:space="preserve"{looks}>'
                f"{html.escape(piece.text)}"
                f'<set attributeName="opacity" to="0" begin="t.begin"'
                f' dur="{piece.secs + 0.01:.2f}s"/></text>'
            )
            column += len(piece.text)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
