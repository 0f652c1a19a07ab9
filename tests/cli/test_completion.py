"""Completion of paths, steps, metrics and leaves, as click asks and in shells."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from click.shell_completion import ShellComplete

import flaxckpt
from flaxckpt.cli import app
from tests.helpers import programs


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {
        "params": {
            "layers_0": {"attn": {"kernel": np.ones(2)}, "bias": np.ones(2)},
            "layers_1": {"attn": {"kernel": np.ones(2)}, "bias": np.ones(2)},
        },
        "step": 3,
    }
    with flaxckpt.Checkpointer("run") as opened:
        for step in (100, 200, 1000):
            opened.save(step, state, metrics={"eval/loss": 1 / step, "eval/top1": 0.5})
    return tmp_path


def completed(line):
    """Returns the completions of the last word of a command line."""
    *words, incomplete = line.split(" ")
    complete = ShellComplete(app, {}, "flaxckpt", "_FLAXCKPT_COMPLETE")
    return [
        "(a file)" if item.type == "file" else item.value
        for item in complete.get_completions(words, incomplete)
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("di", ["diff"]),
        ("ls ", ["(a file)"]),
        ("diff run ", ["1000", "200", "100", "(a file)"]),
        ("diff run 2", ["200", "(a file)"]),
        ("diff run r", ["(a file)"]),
        ("diff run 100 2", ["200"]),
        ("plan run r", ["(a file)"]),
        ("report run -o ", ["(a file)"]),
        ("show run --step ", ["1000", "200", "100"]),
        ("show run --step 1", ["1000", "100"]),
        ("diff run --step-a 2", ["200"]),
        ("diff elsewhere run -b 2", ["200"]),
        ("diff elsewhere run -a 2", []),
        ("plan elsewhere run --target-step 1", ["1000", "100"]),
        ("pin run 100 2", ["200"]),
        ("explain run 1", ["1000", "100"]),
        ("show run ", ["params/", "step"]),
        ("show run s", ["step"]),
        ("show run pa", ["params/layers_0/", "params/layers_1/"]),
        (
            "show run params/layers_1/",
            ["params/layers_1/attn/", "params/layers_1/bias"],
        ),
        ("show run params/layers_1/a", ["params/layers_1/attn/kernel"]),
        ("show run nothing", []),
        ("show run --step 200 params/layers_0/b", ["params/layers_0/bias"]),
        ("show missing ", []),
        ("show gs://bucket/run ", []),
        ("ls run --sort e", ["eval/loss", "eval/top1"]),
        ("ls run --sort s", ["step", "saved", "size"]),
        ("plan run run --optimizer m", ["match"]),
    ],
)
def test_completes_words(run, line, words):
    assert completed(line) == words


def test_show_accepts_completed_container(run, command):
    assert "layers_1" in command("show", "run", "params/").stdout


def test_completion_does_not_import_jax(run):
    code = (
        "import sys\nfrom flaxckpt.cli import main\n"
        "try: main()\nfinally: print('jax' in sys.modules, file=sys.stderr)"
    )
    found = programs.run(
        *("-c", code),
        code=None,
        _FLAXCKPT_COMPLETE="bash_complete",
        COMP_WORDS="flaxckpt show run params/layers_0/",
        COMP_CWORD="3",
    )
    assert found.stdout.split() == [
        "plain,params/layers_0/attn/",
        "plain,params/layers_0/bias",
    ]
    assert found.stderr == "False\n"


RC = {
    "bash": (
        'PS1="$ "\nbind "set bell-style none"\n'
        'eval "$(_FLAXCKPT_COMPLETE=bash_source flaxckpt)"\necho is ready\n'
    ),
    "zsh": (
        'PS1="$ "\nunsetopt beep zle_bracketed_paste 2>/dev/null\n'
        "autoload -Uz compinit && compinit -u -D\n"
        'eval "$(_FLAXCKPT_COMPLETE=zsh_source flaxckpt)"\necho is ready\n'
    ),
    "fish": (
        "function fish_prompt; echo '$ '; end\n"
        "_FLAXCKPT_COMPLETE=fish_source flaxckpt | source\necho is ready\n"
    ),
}
COMMANDS = {
    "bash": ["bash", "--rcfile", ".rc", "-i"],
    "zsh": ["zsh", "-i"],
    "fish": ["fish", "-i"],
}


ON_TERMINAL = (  # fish needs a controlling terminal
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)


@pytest.mark.parametrize("name", RC)
def test_tab_key_completes_in_shell(run, name):
    if not shutil.which(name):
        pytest.skip(f"needs {name}")
    program = run / "bin" / "flaxckpt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m flaxckpt "$@"\n')
    program.chmod(0o755)
    (run / "config" / "fish").mkdir(parents=True)
    for rc in (".rc", ".zshrc", "config/fish/config.fish"):
        (run / rc).write_text(RC[name])
    parent, child = pty.openpty()
    shell = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, *COMMANDS[name]],
        stdin=child,
        stdout=child,
        stderr=child,
        cwd=run,
        start_new_session=True,
        env=os.environ
        | {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "TERM": "dumb" if name == "bash" else "xterm",
            "ZDOTDIR": str(run),
            "XDG_CONFIG_HOME": str(run / "config"),
            "XDG_DATA_HOME": str(run / "data"),
        },
    )
    os.close(child)
    try:
        read_until(parent, "is ready")
        for typed, shown in (
            ("flaxckpt sh\t", "flaxckpt show "),
            ("ru\t", "run/"),
            (" params/layers_1/b\t", "params/layers_1/bias "),
            ("--step 2\t", "--step 200 "),
        ):
            os.write(parent, typed.encode())
            read_until(parent, shown)
        os.write(parent, b"\n")
        read_until(parent, "norm")  # it has run
    finally:
        shell.kill()
        shell.wait()
        os.close(parent)


def read_until(terminal, text):
    """Reads the output on a terminal until it contains `text`, without colors."""
    output, end = "", time.monotonic() + 60
    while text not in output and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            output += os.read(terminal, 4096).decode(errors="replace")
            output = re.sub(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\(B)", "", output)
    assert text in output
