"""Who waits at a terminal sees a bar; nobody else sees anything."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import transforms
from tests.helpers import programs, seams

# Each operation goes on only when it gets a line from the terminal, or, if it is to be
# quiet, when nobody draws any more.
CHILD = """
import contextlib, fcntl, functools, io, os, signal
import subprocess, sys, termios, threading, time
import numpy as np
import pytest
import flaxckpt, flaxckpt.cli
from tests.helpers import seams

directory, is_quiet = sys.argv[1], sys.argv[2] == "quiet"
patch = pytest.MonkeyPatch()
seams.replace(patch, "progress.delay_secs", 0)
go = threading.Event()

def read_lines():
    for line in sys.stdin:
        go.set()

def hold_up(seam):
    real = seams.current(seam)
    @functools.wraps(real)
    def call(*args, **kwargs):
        if is_quiet:
            while any(t.name == "flaxckpt progress" for t in threading.enumerate()):
                time.sleep(0.01)
        else:
            go.wait()
        return real(*args, **kwargs)
    seams.replace(patch, seam, call)

if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if "IN_BACKGROUND" in os.environ:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    other = subprocess.Popen(["sleep", "600"], process_group=0)
    os.tcsetpgrp(0, other.pid)
if not is_quiet:
    threading.Thread(target=read_lines, daemon=True).start()
hold_up("chunk_file.write")
hold_up("chunk_file.read")
hold_up("blockwise.read")
hold_up("disk_usage.on_disk")
state = {"w": np.ones(5_000_000, np.uint8)}

flaxckpt.save(f"{directory}/first", state)
go.clear()
with flaxckpt.Checkpointer(f"{directory}/run") as ckpt:
    ckpt.save(7, state)
go.clear()
with flaxckpt.Checkpointer(f"{directory}/run") as ckpt:
    ckpt.restore(verify=False, memory_map=False)
go.clear()
flaxckpt.load(f"{directory}/first", memory_map=False)
go.clear()
flaxckpt.convert(f"{directory}/first", f"{directory}/m.safetensors")
go.clear()
with contextlib.redirect_stdout(io.StringIO()):
    flaxckpt.cli.app(["ls", f"{directory}/run"], standalone_mode=False)
print("all done", flush=True)
if "IN_BACKGROUND" in os.environ:
    other.kill()
    other.wait()
"""

LABELS = [
    b"saving first",
    b"saving step 7",
    b"loading 7",
    b"loading first",
    b"converting to m.safetensors",
]
HIDE_CURSOR = b"\x1b[?25l"
DEADLINE_SECS = 300


class Terminal:
    """A child process at a terminal of its own."""

    def __init__(self, *arguments, **environment):
        self.master, slave = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"} | environment,
        )
        os.close(slave)
        self.seen = b""
        self.deadline = time.monotonic() + DEADLINE_SECS

    def read_until(self, text=None):
        """Reads until `text` appears, or to the end."""
        start = len(self.seen)
        while text is None or text not in self.seen[start:]:
            left = self.deadline - time.monotonic()
            assert left > 0, self.seen
            if not select.select([self.master], [], [], left)[0]:
                continue
            try:
                content = os.read(self.master, 2**16)
            except OSError:  # how Linux tells that nobody is there any more
                content = b""
            if not content:
                assert text is None, self.seen
                return
            self.seen += content

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.child.kill()
        self.child.wait()
        os.close(self.master)


@pytest.mark.parametrize(
    ("columns", "last"),
    [
        ("100", LABELS[-1]),
        pytest.param("60", "converting …etensors".encode(), marks=pytest.mark.slow),
    ],
)
def test_shows_bar_during_wait_and_erases_it(tmp_path, columns, last):
    with Terminal(tmp_path, "loud", COLUMNS=columns) as terminal:
        for label in (*LABELS[:-1], last):
            terminal.read_until(label)
            terminal.read_until(b"/5.0 MB")
            os.write(terminal.master, b"\n")
        terminal.read_until(b"looking at run")
        terminal.read_until(b"0/1")
        os.write(terminal.master, b"\n")
        terminal.read_until()
        assert terminal.child.wait() == 0
    assert terminal.seen.rstrip().endswith(b"\x1b[2Kall done")
    assert HIDE_CURSOR not in terminal.seen


@pytest.mark.slow
@pytest.mark.parametrize("label", [LABELS[0], LABELS[2]])
def test_ctrl_c_ends_bar_and_keeps_cursor(tmp_path, label):
    with Terminal(tmp_path, "loud") as terminal:
        for earlier in LABELS[: LABELS.index(label)]:
            terminal.read_until(earlier)
            os.write(terminal.master, b"\n")
        terminal.read_until(label)
        os.write(terminal.master, b"\x03")
        terminal.read_until(b"^C")
        os.write(terminal.master, b"\n")  # what was begun may end
        terminal.read_until()
        assert terminal.child.wait() in (-signal.SIGINT, 128 + signal.SIGINT)
    assert b"KeyboardInterrupt" in terminal.seen
    rest = terminal.seen[terminal.seen.rindex(b"KeyboardInterrupt") :]
    assert label not in rest
    assert HIDE_CURSOR not in terminal.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [{"FLAXCKPT_PROGRESS": "0"}, {"TERM": "dumb"}, {"IN_BACKGROUND": "1"}],
    ids=str,
)
def test_shows_no_bar_if_disabled_or_unsupported(tmp_path, environment):
    with Terminal(tmp_path, "quiet", **environment) as terminal:
        terminal.read_until()
        assert terminal.child.wait() == 0
    assert terminal.seen == b"all done\r\n"


@pytest.mark.slow
def test_no_color_variable_shows_bar_without_colours(tmp_path):
    with Terminal(tmp_path, "loud", NO_COLOR="1") as terminal:
        for label in LABELS:
            terminal.read_until(label)
            os.write(terminal.master, b"\n")
        terminal.read_until(b"looking at run")
        os.write(terminal.master, b"\n")
        terminal.read_until()
    assert b"\x1b[3" not in terminal.seen


@pytest.mark.slow
def test_writes_nothing_without_terminal(tmp_path):
    found = programs.run("-c", CHILD, tmp_path, "quiet", timeout=DEADLINE_SECS)
    assert (found.stdout, found.stderr) == ("all done\n", "")


# ---- what is counted ---------------------------------------------------------------


def state():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec("a", None))
    return {
        "split": jax.device_put(jnp.ones((6, 5)), sharding),
        "large": np.ones((3, 1000), np.float64),
        "bf16": jnp.ones(77, jnp.bfloat16),
        "number": 3,
        "empty": np.zeros((0, 3)),
        "text": "abc",
    }


@pytest.mark.parametrize(
    "options",
    [{}, {"chunk_bytes": 700}, {"codec": "zstd"}, {"zarr_version": 2}],
    ids=str,
)
@pytest.mark.parametrize("verify", [True, False])
def test_counts_all_bytes_once(tmp_path, monkeypatch, options, verify):
    counters = []

    @contextlib.contextmanager
    def bar(counter):
        counters.append(counter)
        yield

    seams.replace(monkeypatch, "progress.bar", bar)
    layout = flaxckpt.ArrayLayout(**options)
    half = [transforms.cast("large", "float32")]
    flaxckpt.save(tmp_path / "c", state(), layout=layout, transforms=half)
    size = 4 * 6 * 5 + 8 * 3 * 1000 + 2 * 77 + 8
    flaxckpt.load(tmp_path / "c", state(), verify=verify)
    saved, loaded = counters
    assert saved.done == size > 0
    assert loaded.done == loaded.total > 0
