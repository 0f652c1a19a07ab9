"""The command as a process: its start, its end, and pipes."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib

import click
import numpy as np
import pytest

import flaxckpt
from flaxckpt import cli
from flaxckpt.cli import app, main
from tests import ROOT
from tests.helpers import any_policy, programs

VERBS = app.list_commands(click.Context(app))
PYPROJECT = ROOT / "pyproject.toml"
COMMAND = [sys.executable, "-m", "flaxckpt"]

PROBE = """
import json, os, sys
from flaxckpt.cli import main
sys.argv[1:] = json.loads(os.environ["ARGS"])
try:
    main()
finally:
    print(json.dumps([*sys.modules]), file=sys.stderr)
"""


def run(*args, **environment):
    return programs.run("-m", "flaxckpt", *args, code=None, **environment)


def modules_of(*args):
    """Returns the modules that a process of the command imports."""
    found = programs.run("-c", PROBE, ARGS=json.dumps(args))
    return set(json.loads(found.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    ("guess", "verb"), [*cli._GUESSED.items(), ("vrify", "verify"), ("Diff", "diff")]
)
def test_suggests_verb_for_names_in_other_tools(command, guess, verb):
    assert verb in VERBS
    told = command.refuses(guess, "runs/7")
    assert f"no verb {guess!r}: did you mean flaxckpt {verb}?" in told


def test_rejects_unknown_verb(command):
    refused = command.refuses("xyzzy")
    assert refused == "flaxckpt: there is no verb 'xyzzy': see flaxckpt --help\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ls", "--jsn", "run"], "there is no option --jsn: did you mean --json?"),
        (
            ["convert", "run", "x", "--dtype", "bfloat16"],
            "there is no option --dtype: did you mean --cast '.*=bfloat16'?",
        ),
        (
            ["diff", "a", "--filter", "w"],
            "there is no option --filter: did you mean --only?",
        ),
        (
            ["ls", "--dtype", "run"],
            "there is no option --dtype: see flaxckpt ls --help",
        ),
        (["ls", "-z", "run"], "there is no option -z: see flaxckpt ls --help"),
        (["--foo", "ls"], "there is no option --foo: see flaxckpt --help"),
        (
            ["plan", "run"],
            "TARGET is missing: write flaxckpt plan [OPTIONS] PATH TARGET\n"
            "TARGET is the state to restore into: another",
        ),
        (
            ["plan", "run", "run", "--missing", "eror"],
            "--missing must be error or init, found 'eror': did you mean error?",
        ),
        (
            ["plan", "run", "run", "--optimizer", "no"],
            "--optimizer must be match, exact or reinit, found 'no'",
        ),
        (
            ["du", "run", "--depth", "0"],
            "--depth must be a whole number of at least 1, found '0'",
        ),
        (
            ["doctor", "run", "--max-secs", "soon"],
            "--max-secs must be a number of at least 0, found 'soon'",
        ),
        (
            ["show", "run", "--step", "newset"],
            "--step must be a number, latest, best, or best:METRIC, found 'newset'",
        ),
        (
            ["ls", "run", "a", "b"],
            "ls takes PATH, found also 'a', 'b'; see flaxckpt ls --help",
        ),
        (["ls", "--newest"], "option '--newest' requires an argument"),
        (["ls", "--json=3", "run"], "option '--json' does not take a value"),
    ],
)
def test_usage_errors_say_what_to_write(command, words, told):
    assert command.refuses(*words).startswith(f"flaxckpt: {told}")


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_does_not_import_heavy_modules(verb):
    found = modules_of(*([verb] if verb else []), "--help")
    assert {"jax", "flax", "tensorstore", "numpy", "rich"}.isdisjoint(found)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_json_and_example_in_help(verb, command):
    text = command(verb, "--help").stdout
    assert "--json" in text
    assert f"\n  Example:\n    flaxckpt {verb} " in text
    [line] = [
        one for one in command("--help").stdout.splitlines() if f"  {verb} " in one
    ]
    assert not line.endswith("...")


@pytest.mark.parametrize("verb", sorted({*VERBS} - {"doctor"}))
def test_every_verb_requires_its_arguments(verb, command):
    result = command(verb, code=2)
    assert f" is missing: write flaxckpt {verb} " in result.stderr


@pytest.mark.slow
def test_help_and_error_name_all_policies(here):
    examples = [option for _, option, _ in any_policy.in_guide()]
    assert "latest:3" in examples
    helped = " ".join(run("ls", "--help").stdout.split())
    refused = run("ls", "run", "--keep", "newest").stderr
    for text in (helped, refused):
        assert [example for example in examples if example not in text] == []


def test_process_exits_with_0_1_or_2(here):
    found = run("verify", "run", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["ok"]
    assert run("diff", "run", "w.msgpack").returncode == 1
    found = run("ls", "nowhere")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("flaxckpt: there is no checkpoint at ")
    assert run("ls").returncode == 2
    assert run("bogus").returncode == 2
    assert run("--version").stdout.startswith("flaxckpt ")


def test_warns_once_about_newer_damaged_step(here):
    (here / "run/300/DAMAGED").write_text("{}")
    for args in (["show", "run"], ["show", "run", "latest"], ["plan", "run", "orbax"]):
        [warning] = run(*args).stderr.splitlines()
        assert "a newer step is left out, and step 200 is used" in warning
        assert "pass its number as --step to try it anyway" in warning
    shown = run("show", "run", 300)
    assert "DAMAGED" in shown.stdout
    assert shown.stderr == ""
    for step in (100, 200):
        (here / f"run/{step}/DAMAGED").write_text("{}")
    shown = run("show", "run", 200)
    assert (shown.returncode, shown.stderr) == (0, "")


@pytest.mark.parametrize("streams", ["1", "2", "1 2"])
def test_runs_with_streams_that_the_caller_has_closed(here, streams):
    closed = " ".join(f"{stream}>&-" for stream in streams.split())
    text = f"{sys.executable} -m flaxckpt ls . {closed}"
    done = subprocess.run(text, shell=True, cwd=here, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("saved" in done.stdout) == (streams == "2")


def test_closed_pipe_ends_command_without_message(here):
    flaxckpt.save("big", {f"layer_{i}": np.ones(1) for i in range(3000)})
    show = subprocess.Popen(
        [*COMMAND, "show", "big", "--depth", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    show.stdout.readline()
    show.stdout.close()
    errors = show.stderr.read()
    show.stderr.close()
    assert (show.wait(), errors) == (141, b"")


def test_ctrl_c_prints_one_line_and_exits_with_130(here):
    code = (
        "import sys, time\n"
        "from flaxckpt._inspect import doctor\n"
        "def wait(*args, **given):\n"
        "    print('waits', flush=True)\n"
        "    time.sleep(60)\n"
        "doctor.examine = wait\n"
        "sys.argv = ['flaxckpt', 'doctor']\n"
        "from flaxckpt.cli import main\n"
        "main()\n"
    )
    process = programs.start("-c", code)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.strip() == "flaxckpt: interrupted"


def test_uses_accelerator_only_on_request():
    code = (
        "import os; from flaxckpt import cli;"
        "cli.app = lambda **_: print(os.environ['JAX_PLATFORMS']);"
        "cli.main()"
    )
    bare = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    for given, wanted in (({}, "cpu"), ({"JAX_PLATFORMS": "cuda"}, "cuda")):
        found = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=bare | given,
        )
        assert found.stdout == f"{wanted}\n"


def test_console_script_calls_main():
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    module, _, name = project["scripts"]["flaxckpt"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_shells_complete_verbs():
    script = run(_FLAXCKPT_COMPLETE="bash_source").stdout
    assert "_FLAXCKPT_COMPLETE=bash_complete" in script
    words = {"COMP_WORDS": "flaxckpt p", "COMP_CWORD": "1"}
    found = run(_FLAXCKPT_COMPLETE="bash_complete", **words)
    assert found.stdout.split() == ["plain,plan", "plain,prune", "plain,pin"]


@pytest.mark.slow
def test_show_escapes_characters_outside_encoding(here):
    flaxckpt.save("odd", {"größe": np.arange(30.0)})
    found = run("show", "odd", "größe", PYTHONIOENCODING="ascii")
    assert found.returncode == 0
    assert "\\xf6" in found.stdout


# ---- on a terminal ---------------------------------------------------------------


@pytest.mark.parametrize("width", [50, 80, 120])
def test_tables_fit_terminal_without_losing_text(here, command, monkeypatch, width):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    name = "a_name_of_more_letters_than_a_terminal_has_columns" * 3
    flaxckpt.save("long", {"layers": {name: np.ones(2), "[b]": np.ones(3)}})
    lines = [_plain(line) for line in command.text("show", "long")]
    assert all(len(line) <= width for line in lines[1:])
    assert name in "".join("".join(line.split()[:1]) for line in lines[2:] if line)


def test_output_has_no_colors_without_terminal(here, command):
    assert "\x1b" not in command("ls", "run").stdout


def _plain(line):
    return re.sub("\x1b\\[[0-9;]*m", "", line)
