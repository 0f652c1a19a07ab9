"""Kills a training run in the middle of a save, and shows that nothing is lost.

    python -m examples.demo                     # in ./demo-run, one to two minutes
    python -m examples.demo --workdir=/tmp/demo

Trains the transformer of `examples/char_lm.py` in a separate process, and kills the
process with SIGKILL while it writes a checkpoint. A new process continues from the
newest complete checkpoint to the end. Then a twin is trained without interruption, and
the two final checkpoints are compared bit for bit.

A second start continues where the first stopped, or compares the finished runs again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

import flaxckpt
from configs.char_lm import get_config
from examples import char_lm
from flaxckpt.configs import CheckpointConfig

ROOT = Path(__file__).resolve().parent.parent
WRITING = ".orbax-checkpoint-tmp-writing-"
"""The end of the name of a checkpoint that is not committed."""

console = Console(highlight=False)


def main(workdir: Path, config: ConfigDict) -> None:
    """Completes the two runs in `workdir`, and compares them.

    Args:
        workdir: A directory for the runs `killed/` and `twin/`, and a note of the kill.
        config: The settings of `examples/char_lm.py`; ignores its `workdir`.

    Raises:
        SystemExit: The runs differ, or a training process failed.
    """
    killed, twin, note = workdir / "killed", workdir / "twin", workdir / "kill.json"
    workdir.mkdir(parents=True, exist_ok=True)
    console.print(
        f"[bold]flaxckpt demo[/] in {workdir}: {describe(workdir, config)}",
        soft_wrap=True,
    )

    if not note.exists():
        print_heading("Train a small transformer, and kill it in the middle of a save")
        note.write_text(json.dumps({"step": kill_in_a_save(killed, config)}))
    if latest_step(killed) < config.total_steps:
        print_heading(
            "Start it again: it continues from the newest complete checkpoint"
        )
        train(killed, config)
    if latest_step(twin) < config.total_steps:
        print_heading("Train a twin without interruption")
        train(twin, config)
    print_heading("Compare the two final checkpoints, bit for bit")
    compare(killed, twin)
    print_heading("The steps that the killed run keeps, and the reasons")
    show_steps(killed, note, config)
    print_heading("A text that the model has never seen, and its continuation")
    show_text(killed, config)


def describe(workdir: Path, config: ConfigDict) -> str:
    """Describes the state of the two runs in a few words."""
    if not any(workdir.iterdir()):
        return "an empty directory, starting"
    steps = [latest_step(workdir / name) for name in ("killed", "twin")]
    if min(steps) == config.total_steps:
        return "both runs are finished, comparing them again"
    was_killed = "killed" if (workdir / "kill.json").exists() else "not killed yet"
    return (
        f"found one run at step {steps[0]} ({was_killed}) and its twin at step"
        f" {steps[1]} of {config.total_steps}, continuing"
    )


# --- Training processes ---------------------------------------------------------


def train(directory: Path, config: ConfigDict, *, kill_in: int | None = None) -> None:
    """Runs `examples/char_lm.py` in a process, and shows its output.

    Args:
        directory: The directory of the run.
        config: The settings of the run.
        kill_in: The process is killed in the middle of a save of this step, or later.

    Raises:
        SystemExit: The process failed and was not killed.
    """
    settings = {**config.to_dict(), "workdir": str(directory.resolve())}
    every = settings.pop("checkpoint")["every_steps"]
    settings["checkpoint.every_steps"] = every
    command = [sys.executable, "-u", "-m", "examples.char_lm"]
    command += ["--config=configs/char_lm.py", "--verbosity=-1"]  # warnings only
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # so that Ctrl-C stops this process first
    ) as process:
        if kill_in is not None:
            halfway = (process, directory, kill_in)
            threading.Thread(target=kill_halfway, args=halfway).start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                console.print(f"  [dim]│[/] {escape(line.rstrip())}", soft_wrap=True)
        except KeyboardInterrupt:
            process.kill()
            raise
    was_killed = kill_in is not None and process.returncode == -signal.SIGKILL
    if process.returncode and not was_killed:
        sys.exit(f"the training process failed with exit code {process.returncode}")


def unfinished_save(directory: Path, first: int) -> Path | None:
    """Returns the directory of an unfinished save of step `first` or later, or None."""
    unfinished = directory.glob(f"*{WRITING}*")
    return next((path for path in unfinished if saved_step(path) >= first), None)


def saved_step(unfinished: Path) -> int:
    """Returns the step of an unfinished save."""
    return int(unfinished.name.partition(WRITING)[0])


def kill_halfway(process: subprocess.Popen[str], directory: Path, first: int) -> None:
    """Kills `process` when it has written half of a save of step `first` or later."""
    half = 0  # of the files of a checkpoint
    while process.poll() is None:
        if not half:
            half = count_files(newest_checkpoint(directory)) // 2
            time.sleep(0.002)
            continue
        unfinished = unfinished_save(directory, first)
        if unfinished and count_files(unfinished) >= half:
            process.kill()
            return
        time.sleep(0.0005)


def kill_in_a_save(directory: Path, config: ConfigDict) -> int:
    """Continues the run, and kills it while it writes a checkpoint.

    Returns:
        The step whose save was interrupted.

    Raises:
        SystemExit: Every save was committed before the kill.
    """
    every = config.checkpoint.every_steps
    first = config.total_steps // (2 * every) * every
    # An unfinished save exists if the demo itself was stopped here.
    while not (unfinished := unfinished_save(directory, first)):
        if latest_step(directory) >= config.total_steps:
            sys.exit(
                "every save was faster than the kill: remove the workdir and start"
                " again"
            )
        train(directory, config, kill_in=first)
    step, newest = saved_step(unfinished), newest_checkpoint(directory)
    assert int(newest.name) < step
    console.print(
        f"  [red]SIGKILL[/] in the save of step {step}: {count_files(unfinished)} of"
        f" {count_files(newest)} files are in {unfinished.name}.\n  This is no"
        f" checkpoint: the newest is still step {newest.name}.",
        soft_wrap=True,
    )
    return step


def count_files(directory: Path) -> int:
    """Returns the number of files in `directory`; 0 if it does not exist."""
    return sum(len(files) for _, _, files in os.walk(directory))


def newest_checkpoint(directory: Path) -> Path:
    """Returns the path of the newest committed step of a run."""
    return directory / str(latest_step(directory))


def latest_step(directory: Path) -> int:
    """Returns the newest committed step of a run; 0 if there is none."""
    if not directory.exists():
        return 0
    with flaxckpt.Checkpointer(directory, read_only=True) as ckpt:
        return ckpt.latest_step() or 0


# --- Output ---------------------------------------------------------------------


def print_heading(text: str) -> None:
    """Prints the heading of a part of the demo."""
    console.print(f"\n[bold cyan]{text}[/]")


def compare(killed: Path, twin: Path) -> None:
    """Compares the final states of two runs bit by bit, and prints a table.

    Raises:
        SystemExit: They differ.
    """
    # Loaded without an abstract state, so that every leaf on disk is compared.
    ours, theirs = final_bits(killed), final_bits(twin)
    differing = [n for n in ours | theirs if ours.get(n) != theirs.get(n)]
    table = Table("part", "leaves", "bytes", "resumed = never interrupted", box=SIMPLE)
    for part in dict.fromkeys(map(part_of, ours)):
        leaves = [name for name in ours if part_of(name) == part]
        unequal = sum(part_of(name) == part for name in differing)
        verdict = f"[red]no: {unequal} leaves differ[/]" if unequal else "[green]yes[/]"
        size = sum(len(ours[name].value) for name in leaves)
        table.add_row(part, f"{len(leaves)}", f"{size:,}", verdict)
    console.print(table)
    if differing:
        sys.exit(f"the runs differ in {len(differing)} leaves: {differing[:8]}")
    console.print("  [green]Equal in every bit: the kill has changed nothing.[/]")


class Bits(NamedTuple):
    """A leaf as values that `==` compares bit by bit."""

    dtype: str
    shape: tuple[int, ...]
    value: bytes


def final_bits(directory: Path) -> dict[str, Bits]:
    """Returns all leaves of a run's newest checkpoint, and its dataset position."""
    bits = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(flaxckpt.load(directory)):
        array = jnp.asarray(leaf)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        bits[name] = Bits(str(array.dtype), array.shape, np.asarray(array).tobytes())
    dataset = newest_checkpoint(directory) / "dataset"
    position = (dataset / "process_0-of-1.json").read_bytes()
    return {**bits, "dataset": Bits("json", (), position)}


def part_of(leaf_path: str) -> str:
    """Returns the first key of a path: `params` of `params/head/kernel`."""
    return leaf_path.split("/")[0]


def show_steps(directory: Path, note: Path, config: ConfigDict) -> None:
    """Prints a table of all saves and their costs."""
    log = (directory / "saves.jsonl").read_text().splitlines()
    saves = {save["step"]: save for save in map(json.loads, log)}
    killed_at = json.loads(note.read_text())["step"]
    checkpointing = CheckpointConfig.from_mapping(config.checkpoint)
    with checkpointing.checkpointer(directory, read_only=True) as ckpt:
        reasons = ckpt.explain()
    columns = ("step", "kept by", "size", "blocked", "durable after")
    table = Table(*columns, box=SIMPLE)
    for step in sorted(reasons | saves):
        why = ", ".join(reasons.get(step, ())) or "[dim](deleted)[/]"
        if step == killed_at:
            why += " [red]first save killed[/]"
        table.add_row(str(step), why, *format_costs(saves.get(step)))
    console.print(table)


def format_costs(save: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Formats size, blocked time and total time; dashes for a save without a record."""
    if save is None:
        return "-", "-", "-"
    return (
        f"{save['bytes_written'] / 1e6:.2f} MB",
        f"{save['blocked_secs'] * 1e3:.0f} ms",
        f"{save['total_secs'] * 1e3:.0f} ms",
    )


def show_text(directory: Path, config: ConfigDict) -> None:
    """Prints a text of the validation split, and the model's continuation."""
    corpus = char_lm.load_corpus(config.context)
    state = char_lm.create_train_state(config, len(corpus.alphabet))
    params = flaxckpt.load(directory, {"params": state.params})["params"]
    seen = corpus.validation[0, :-1]
    continuation = char_lm.complete(
        state.replace(params=params), seen, jax.random.key(0), length=240
    )
    text = [
        "".join(corpus.alphabet[i] for i in chars) for chars in (seen, continuation)
    ]
    console.print(Panel(f"[dim]{escape(text[0])}[/]{escape(text[1])}", width=80))


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", "demo-run", "Directory of the runs.")

    def _run(argv: list[str]) -> None:
        del argv
        logging.set_verbosity(logging.ERROR)  # the console shows the progress
        try:
            main(Path(_WORKDIR.value), get_config())
        except KeyboardInterrupt:
            sys.exit("\nstopped; run the same command to continue")

    app.run(_run)
