"""Histories of run directories in a file system: trainers, readers, a second job.

Each process uses a `Checkpointer`, with all that it does: saves on threads, retention,
uploads from a staging directory. The ledger outside of all processes sees each change
of a name, and checks it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verification.simulation import databases, filesystem, kernel, programs
from verification.simulation.programs import (
    Reader,
    Reading,
    Save,
    Setting,
    Trainer,
    reopen,
)

CONTEXTS = (filesystem.installed,)
"""What to enter before `stand_ins.installed`."""

_STEP = re.compile(r"[0-9]+")
_LEASE_SECS = 60.0

_NO_CONTENT = ("READING-", "PINNED", "MEASURED", "NOT_UPLOADED", "DELETING", "tmp")
"""How files begin that are not read with a step: markers, and probes of the clock."""


class Ledger(programs.Ledger):
    """What was asked for and acknowledged; checks each change of a name.

    Args:
        world: The world.
        files: The file system.
        setting: What all processes agree on.
        parts: The arrays of each state.
    """

    def __init__(
        self,
        world: kernel.World,
        files: filesystem.FileSystem,
        setting: Setting,
        parts: tuple[str, ...] = programs.PARTS,
    ) -> None:
        super().__init__(world, setting, parts)
        self.files = files
        self._writers: dict[str, kernel.Process] = {}  # temporary directory -> who
        self._withdrawn: dict[str, Save] = {}  # by policies: new name -> save
        files.on_change = self._see

    @property
    def may_fail(self) -> bool:
        return bool(self.files.weather.fails)

    may_restore_older = may_fail  # a file that cannot be read counts as damaged

    def check_there(self, save: Save) -> None:
        with self.files.observing():
            self._check_there(save)

    def find_reading(self, path: Path, lease: str) -> Reading | None:
        with self.files.observing():
            try:
                token, inode = self.token(path), path.stat().st_ino
                is_leased = (path / lease).exists()
            except OSError:
                return None
        return Reading(path, token, lease, inode) if token and is_leased else None

    def end_writing(self) -> None:
        """Notes that this process writes into no temporary directory any more."""
        process = self.world.task.process
        writers = self._writers.items()
        self._writers = {path: other for path, other in writers if other is not process}

    # ---- the true content ---------------------------------------------------------

    def token(self, path: Path) -> int | None:
        """Returns the save at a path; None without a step.

        Raises:
            Violation: There is a step, but it is not whole.
        """
        if not path.is_dir() or not any(path.iterdir()):
            return None
        try:
            tokens = {read_token(path, name) for name in self.parts}
            wanted = ("commit_success.txt", "flaxckpt.json", "_CHECKPOINT_METADATA")
            missing = [name for name in wanted if not (path / name).is_file()]
        except (OSError, ValueError) as error:
            raise kernel.Violation(f"{path.name} is listed, but {error}") from None
        if len(tokens) > 1 or missing:
            raise kernel.Violation(
                f"{path.name} is listed, but has parts of saves {tokens}, and lacks"
                f" {missing}"
            )
        return tokens.pop()

    def steps(self, directory: Path) -> dict[int, Path]:
        """Returns the listed steps of a directory."""
        if not directory.is_dir():
            return {}
        paths = sorted(directory.iterdir())
        return {int(p.name): p for p in paths if _STEP.fullmatch(p.name)}

    # ---- each change --------------------------------------------------------------

    def _see(self, name: str, paths: tuple[str, ...]) -> None:
        path = Path(paths[-1])
        if name in ("create", "touch"):
            if path.name.startswith("READING-"):
                self.touched[path.name] = self.world.now
                self.leases[self.world.task.process.pid] = path.name
        elif name == "mkdir":
            # A directory is its writer's once it is locked, thus not while it is empty.
            if "-writing-" in path.parent.name:
                self._writers.setdefault(str(path.parent), self.world.task.process)
        elif name in ("unlink", "remove", "rmdir"):
            self._check_writers(paths[-1])
            if path.name == "PINNED" and (
                save := self._withdrawn.get(str(path.parent))
            ):
                raise kernel.Violation(f"policies delete {save}, which is pinned")
            if self.readings and name != "rmdir" and path.name != "DELETING":
                self._check_readers(path)
        elif name in ("rename", "replace", "exchange"):
            if "-deleted-" in path.name:
                self._check_writers(paths[0])
            self._writers.pop(paths[0], None)
            self._see_rename(Path(paths[0]), path, is_exchange=name == "exchange")

    def _see_rename(self, old: Path, new: Path, *, is_exchange: bool) -> None:
        if new.name == "PINNED":
            self.last_pinned[self.world.task.process.pid] = new.parent
        elif _is_step(new):
            token = self.token(new)
            if token is None:
                raise kernel.Violation(f"{new.name} is empty")
            self.left.pop((new.parent, token), None)
            if is_exchange and (before := self.token(old)) is not None:
                self.left[new.parent, before] = f"replaced by {token}"
            for (directory, other), why in list(self.left.items()):
                is_same = self.saves[other].step == int(new.name)
                if why == "set aside" and directory == new.parent and is_same:
                    self.left[directory, other] = f"replaced by {token}"
        elif _is_step(old):
            token = self.token(new)
            if token is None:
                return
            if "-deleted-" not in new.name:
                is_aside = "-replaced-" in new.name
                self.left[old.parent, token] = "set aside" if is_aside else "undone"
                return
            process = self.world.task.process
            is_main = self.world.task.name == "main"
            asked = self.doing.get(process.pid, "")
            is_explicit = is_main and asked.startswith("delete")
            why = "deleted by a user" if is_explicit else "deleted by policies"
            self.left[old.parent, token] = why
            if not is_explicit:
                self._withdrawn[str(new)] = self.saves[token]
                self._check_policies(old, new, self.saves[token])

    # ---- invariants ---------------------------------------------------------------

    def _check_policies(self, old: Path, aside: Path, save: Save) -> None:
        """Checks that policies may delete a step, which has the name `aside` now."""
        began = self.began.get(self.world.task.process.pid, 0.0)
        if self.disturbing or self.disturbed >= began:
            return
        present = self.steps(old.parent)
        newer = sum(step > save.step for step in present)
        is_near = old.parent == self.setting.staging
        wanted = 1 if is_near else self.setting.latest
        if newer < wanted:
            raise kernel.Violation(
                f"policies delete {save}, with only {newer} newer steps: {present}"
            )
        if is_near and (aside / "NOT_UPLOADED").exists():
            raise kernel.Violation(f"policies delete {save} before its upload")
        others = [self.saves[self.token(path) or 0].loss for path in present.values()]
        if self.setting.has_best and not is_near and save.loss < min(others):
            raise kernel.Violation(f"policies delete {save}, which is the best")

    def _check_writers(self, path: str) -> None:
        """Checks that no process removes what another one writes."""
        before, found, after = path.partition("-writing-")
        directory = f"{before}{found}{after[:8]}"
        writer = self._writers.get(directory)
        if writer in (None, self.world.task.process) or not writer.is_alive:
            return
        if self.files.weather.fails:  # it may have left the directory to others
            return
        if self.files.weather.is_local or not writer.paused_until:
            raise kernel.Violation(
                f"{directory} of {writer} is removed while it writes"
            )

    def _check_readers(self, path: Path) -> None:
        """Checks that no file is removed under a reader."""
        if path.name.endswith(".tmp"):  # of a replacement that has failed
            return
        for reading in self.readings:
            directory = path.parents[len(path.parents) - len(reading.path.parents) - 1]
            is_alive = self.world.now - self.touched[reading.lease] <= _LEASE_SECS
            why = self.left.get((reading.path.parent, reading.token), "")
            if not is_alive or not directory.is_dir() or why.startswith("replaced"):
                continue
            if path.parent == directory and path.name.startswith(_NO_CONTENT):
                continue
            if directory.stat().st_ino == reading.inode:
                raise kernel.Violation(f"{path} is removed under a reader")

    def _check_there(self, save: Save) -> None:
        """Checks that an acknowledged save is there, or was removed on purpose."""
        path = save.directory / str(save.step)
        if self.token(path) == save.token:
            if (path / "DAMAGED").exists():
                raise kernel.Violation(f"{save} is marked as damaged")
            return
        if (save.directory, save.token) not in self.left:
            raise kernel.Violation(f"{save} was acknowledged, and is gone")

    def check_end(self) -> None:
        """Checks the directories after all processes were restarted."""
        with self.files.observing():
            for save in self.saves.values():
                if save.is_acknowledged:
                    self._check_there(save)
            aside = [key for key, why in self.left.items() if why == "set aside"]
            if aside:
                raise kernel.Violation(f"{aside} never got their names back")
            for directory in (self.setting.run, self.setting.staging):
                if directory is not None:
                    self._check_directory(directory)
            is_quiet = not self.disturbing and self.disturbed < 0
            if self.setting.staging is not None and is_quiet:
                self._check_uploaded()

    def _check_directory(self, directory: Path) -> None:
        known = ("events.jsonl", "STAGING_OF")
        for path in sorted(directory.iterdir()):
            if not _STEP.fullmatch(path.name):
                if path.name not in known:
                    raise kernel.Violation(f"{path.name} is left for ever")
                continue
            self.token(path)
            names = {entry.name for entry in path.iterdir()}
            left = {n for n in names if n.startswith(("READING", "DELETING"))}
            left |= {n for n in names if n.endswith(".tmp") or n == "DAMAGED"}
            if left:
                raise kernel.Violation(f"{path.name} has {left} for ever")
            if self.pinned.get(path) and "PINNED" not in names:
                raise kernel.Violation(f"{path.name} has lost its pin")
            far = self.setting.run / path.name
            is_same = self.token(far) == self.token(path)
            if self.pinned.get(path) and is_same and not (far / "PINNED").exists():
                raise kernel.Violation(f"the pin of {path} is never uploaded")

    def _check_uploaded(self) -> None:
        """Checks that acknowledged saves in staging are in the run directory."""
        near, far = self.setting.staging, self.setting.run
        there = self.steps(far)
        for save in self.saves.values():
            has_left = self.left.get((near, save.token), "")
            if (
                save.directory == near
                and save.is_acknowledged
                and not has_left.startswith(("replaced", "deleted by a user"))
                and (far, save.token) not in self.left
                and save.step not in there  # another job may have saved it there
                and (not self.setting.latest or save.step > max(there, default=0))
            ):
                raise kernel.Violation(f"{save} is never uploaded")


def _is_step(path: Path) -> bool:
    return path.parent.name in ("run", "near") and bool(_STEP.fullmatch(path.name))


def read_token(path: Path, name: str) -> int:
    """Returns the save whose array a step has.

    Raises:
        OSError, ValueError: It has none that can be read.
    """
    return databases.read_token(lambda f: (path / "state" / f).read_bytes(), name)


# ---- histories --------------------------------------------------------------------


def draw_weather(world: kernel.World) -> filesystem.Weather:
    """Draws the chances of faults of a file system."""
    random = world.random
    is_local = random.random() < 0.6
    return filesystem.Weather(
        is_local=is_local,
        has_locks=is_local or random.random() < 0.5,
        can_exchange=random.random() < 0.7,
        slow=random.choice((0.0, 0.0, 0.01, 0.05)),
        slowest_secs=random.choice((0.1, 10.0)),
        fails=random.choice((0.0, 0.0, 0.0, 0.002, 0.01)),
    )


def _disturb(world: kernel.World, process: kernel.Process) -> None:
    """Draws what happens to a process: a crash, pauses, a wrong clock."""
    random = world.random
    process.clock_secs = random.uniform(-10_000, 10_000)
    if random.random() < 0.3:
        process.crash_after = random.randrange(600)
    for _ in range(random.choice((0, 0, 1, 2))):
        process.pauses[random.randrange(600)] = random.choice((10, 50, 100, 700))


def history(seed: int, *, is_traced: bool = False) -> list[kernel.Line]:
    """Runs one history; returns its timeline if traced.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    return play(seed, draw_weather, _disturb, is_traced=is_traced)


def play(
    seed: int,
    draw: Callable[[kernel.World], filesystem.Weather],
    disturb: Callable[[kernel.World, kernel.Process], None],
    *,
    is_traced: bool,
    latest: Sequence[int] = (0, 1, 2),
    operations: Mapping[str, int] = programs.OPERATIONS,
) -> list[kernel.Line]:
    """Runs a history whose faults are drawn by these functions.

    Args:
        seed: The seed.
        draw: Returns the chances of faults of the file system.
        disturb: Draws what happens to a process.
        is_traced: Whether to keep the timeline.
        latest: What retention may keep, as `Setting.latest`.
        operations: What trainers do, as `programs.OPERATIONS`.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    with (
        programs.quiet(),
        filesystem.directory("files") as root,
        kernel.World(seed, is_traced=is_traced) as world,
    ):
        files = filesystem.FileSystem(world, root, draw(world))
        random = world.random
        near = root / "near" if random.random() < 0.3 else None
        setting = Setting(
            root / "run", near, random.choice(latest), random.random() < 0.3
        )
        ledger = Ledger(world, files, setting)
        for index in range(random.randint(2, 3)):
            program = Reader(ledger)
            if index == 0 or random.random() < 0.6:
                own = near if index == 0 else None
                program = Trainer(ledger, random.randint(1, 4), own, operations)
            after = random.choice((0.0, 1.0, 30.0)) * random.random()
            process = world.start(f"p{index}", program, after=after)
            disturb(world, process)
        world.record(f"{setting}")
        world.record(f"{files.weather}")
        try:
            world.run()
            files.weather = files.weather._replace(slow=0.0, fails=0.0)
            world.run_last(lambda: reopen(ledger))
            ledger.check_end()
        finally:
            files.close()
        return world.timeline
