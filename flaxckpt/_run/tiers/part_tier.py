"""The tier of steps in directories of the processes of a job, with copies at peers."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flaxckpt import _checkpoint, _distributed, _steps, _storage, _util, errors
from flaxckpt._run import events as run_events
from flaxckpt._run import run_index
from flaxckpt._run.tiers import part_copies, parts
from flaxckpt._run.tiers.copier import Copier, CopyTask
from flaxckpt._run.tiers.part_copies import Copied, Sources
from flaxckpt._run.tiers.parts import Held, Lost
from flaxckpt._types import PathLike

if TYPE_CHECKING:
    from flaxckpt._distributed.agreement import Processes
    from flaxckpt._distributed.operation import Operation
    from flaxckpt._distributed.peer_files import FileServer, Peer

_log = logging.getLogger(__name__)

_LOOKS = 20
_LOOK_SECS = 1.0


class PeerOptions(NamedTuple):
    """Options of the exchange of parts with other processes.

    Attributes:
        copies: Number of copies of each part at others.
        failure_domain: Returns the name of what fails together with a process; None for
            its host.
        network: The network between the processes, such as `10.1.0.0/16`; None for the
            one by which process 0 is reached.
        certificate: The file of the certificate for TLS; None without TLS.
    """

    copies: int = 0
    failure_domain: Callable[[int], str] | None = None
    network: str | None = None
    certificate: PathLike | None = None

    def check(self) -> PeerOptions:
        """Returns these options, or raises OptionError."""
        _util.arguments.check_int("staging_copies", self.copies, least=0)
        if self.failure_domain is not None:
            _util.arguments.check_function(
                "failure_domain",
                self.failure_domain,
                "of the process index that returns a name",
            )
        if self.network is not None:
            try:
                ipaddress.ip_network(self.network)
            except ValueError as error:
                raise errors.OptionError(
                    f"peer_network must be a network such as '10.1.0.0/16': {error}"
                ) from None
        if self.certificate is not None:
            try:
                _distributed.peer_files.check_certificate(str(self.certificate))
            except OSError as error:
                raise errors.OptionError(
                    f"peer_certificate={self.certificate!r} cannot be used: {error}."
                    " Pass a PEM file with a certificate that is valid now, for servers"
                    " and clients, and its private key, the same at all processes"
                ) from None
        return self


class PartTier:
    """The parts in the directory of this process, and those of its peers.

    Args:
        root: The directory of this process.
        directory: The run directory.
        index: The steps in `root`.
        step_format: Format of the names of steps.
        events: Stream for the events of copies.
        options: Options of the copies.
        mode: Mode of new directories; None for the umask's.

    Attributes:
        whole: The steps that a restore could choose, when the processes last agreed.
        lost: The steps of which parts were missing then; a save replaces them.
        has_agreed: Whether the processes have agreed since the run was opened.
        copied: What the last restore has copied into `root`.
        copier: Copies the parts of new steps.
    """

    def __init__(
        self,
        root: Path,
        directory: Path,
        index: run_index.RunIndex,
        step_format: _steps.names.StepFormat,
        events: run_events.Stream,
        options: PeerOptions,
        mode: int | None,
    ) -> None:
        self._root = root
        self._directory = directory
        self._index = index
        self._format = step_format
        self._options = options
        path = options.certificate
        self._certificate = None if path is None else str(path)
        describe = _distributed.peer_files.describe_certificate
        self._described = describe(self._certificate)
        self._mode = mode
        self._server: FileServer | None = None
        self._own = 0
        self._peers: Sequence[Peer] = ()
        self._meeting: str | None = None
        self._domains: Sequence[str] = ()
        self._keepers: Sequence[Sequence[int]] = ()
        self._sources: dict[Path, Sources] = {}
        self._next_sources: dict[Path, list[Sources]] = {}
        self._times: dict[int, int] = {}
        self.whole: set[int] = set()
        self.lost: set[int] = set()
        self.has_agreed = False
        self.copied = Copied()
        self.copier = Copier(events, mode)
        self._fetched: set[str] = set()

    def close(self) -> None:
        """Ends the server of this process, and names steps without their copies."""
        if waiting := self.copier.unfinished():
            _log.warning(
                "steps %s of %s have no copies at other processes yet",
                errors.first_few([str(step) for step in waiting]),
                self._root,
            )
        if self._server is not None:
            self._server.close()
            self._server = None
            self._meeting = None

    # ---- the processes ------------------------------------------------------------

    def meet(self, operation: Operation) -> None:
        """Learns of the servers of all processes, unless all did in one operation.

        After a failure, some may have learnt of them, and others not.

        Raises:
            OptionError: Processes have the same directory, or other numbers of copies
                or certificates, or one has no failure domain.
        """
        row = [socket.gethostname(), self._meeting, self._options.copies]
        rows = operation.exchange("host", [*row, self._described])
        hosts, meetings, copies, certificates = zip(*rows, strict=True)
        _check_equal("staging_copies", copies)
        _check_equal("peer_certificate", certificates)
        if self._meeting and {*meetings} == {self._meeting}:
            return
        self._own = operation.index
        if self._server is None:
            self._server = _distributed.peer_files.FileServer(
                self._root, self._address(hosts), self._certificate
            )
        with self._present() as token:
            mine = [self._server.peer[:3], self._find_domain(), token]
            rows = operation.exchange("met", mine)
            seen = [
                process
                for process, (_, _, name) in enumerate(rows)
                if (self._root / name).exists()
            ]
            for shared in operation.exchange("seen", seen):
                if len(shared) > 1:
                    raise errors.OptionError(
                        f"{parts.names_of(shared)} have the same staging directory,"
                        f" such as {self._root}: each process needs its own, such as"
                        " staging='/local/run-{process}'"
                    )
        self._domains = domains = [name for _, name, _ in rows]
        self._keepers = parts.choose_copies(domains, self._options.copies)
        if self.copies < self._options.copies:
            _log.warning(
                "staging_copies=%d, but a part gets %d: a copy is in another failure"
                " domain than its part, and the processes are in %s. Pass"
                " failure_domain=, a function of the process index that returns a name",
                self._options.copies,
                self.copies,
                errors.first_few(sorted(map(repr, {*domains}))),
            )
        certificate = self._certificate
        self._peers = [
            _distributed.peer_files.Peer(host, port, token, certificate)
            for (host, port, token), _, _ in rows
        ]
        self._meeting = rows[0][2]

    def _find_domain(self) -> str:
        """Returns the failure domain of this process, or raises OptionError."""
        find = self._options.failure_domain or (lambda index: socket.gethostname())
        name, cause = None, None
        try:
            name = find(self._own)
        except Exception as error:
            cause = error
        if name is None:
            kind, why = type(cause).__name__, errors.one_line(cause)
            what = "returned None" if cause is None else f"raised {kind}: {why}"
            raise errors.OptionError(
                f"failure_domain has {what} for process {self._own}: return a name,"
                " such as that of its machine"
            ) from cause
        return str(name)

    def _address(self, hosts: Collection[str]) -> str:
        """Returns the address for the server, or raises OptionError without any."""
        network = self._options.network
        if network is None and len({*hosts}) == 1:
            return "127.0.0.1"
        try:
            return _util.processes.own_address(network)
        except OSError as error:
            if network is None:
                raise
            raise errors.OptionError(
                f"peer_network={network!r}: {error}; pass the network that all"
                " processes of the job share"
            ) from None

    @contextlib.contextmanager
    def _present(self) -> Iterator[str]:
        """Yields the name of a file in the directory of this process only."""
        # Named like a temporary file, which `tidy` removes after a crash.
        token = self._root / f"{_steps.names.STAGING_OWNER}.{secrets.token_hex(8)}.tmp"
        try:
            token.touch()
            yield token.name
        except OSError as error:
            raise errors.CheckpointError(
                f"{self._root} cannot be written: {error}; check this disk of process"
                f" {self._own}, then try again"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                token.unlink()

    # ---- choosing ---------------------------------------------------------------

    def has_parts(self) -> bool:
        """Returns True if this process has a step of which it may lack parts."""
        return any(
            (path / _steps.markers.PARTS).exists()
            for path in self._index.paths().values()
        )

    def agree(
        self,
        operation: Operation | None,
        list_far: Callable[[], Mapping[int, Path]],
        step: int | None,
    ) -> tuple[list[tuple[int, Path]], list[Lost]]:
        """Returns the steps that can be restored, best first, and those that cannot.

        Args:
            operation: The operation of all processes; None for a single process.
            list_far: Lists the run directory; called in process 0.
            step: A step to include although it is marked as damaged.
        """
        paths = self._index.paths()
        marked = self._index.damaged_paths() if step is not None else {}
        paths |= {number: marked[number] for number in marked.keys() & {step}}
        if operation is not None:
            self.meet(operation)
        held = self._look_until_settled(operation, _find_held(paths))
        behind = parts.find_behind(held)
        if any(behind):
            mended = self._mend(held[self._own], behind[self._own])
            held = _exchange_held(operation, "mended", held[self._own] | mended)
        faults = _find_faults(held)
        self._times.clear()
        for number, here in (each for steps in held for each in steps.items()):
            self._times[number] = max(here.created, self._times.get(number, 0))
        mine = held[self._own]
        unknown = {n for steps in held for n, here in steps.items() if not here.total}
        held = [{n: here for n, here in steps.items() if here.total} for steps in held]
        near = {step for steps in held for step in steps}

        def look() -> list[tuple[int, str, str | None]]:
            return [
                (step, path.name, parts.identify(path) if step in near else None)
                for step, path in list_far().items()
            ]

        listed = _distributed.agreement.broadcast(operation, "far", look)
        names = {step: name for step, name, _ in listed}
        found, lost = parts.choose(held, {step: save for step, _, save in listed})
        self.whole = {whole.step for whole in found}
        known = self.whole | {each.step for each in lost}
        lost += [Lost(number, ()) for number in sorted(unknown - known)]
        lost = [each._replace(faults=tuple(faults.get(each.step, ()))) for each in lost]
        self.lost = {each.step for each in lost}
        self.has_agreed = True
        self._sources, self._next_sources = {}, {}
        candidates = []
        for step, save, holders, is_far in found:
            far = self._directory / names[step] if is_far else None
            if save is None:
                assert far is not None
                candidates.append((step, far))
                continue
            path = self._root / self._format.name(step)
            # Nothing is read from here on: a process that failed now would fail alone.
            earlier = _others(paths, path)
            sources = Sources(
                path,
                step,
                save,
                self._own,
                self._peers,
                holders,
                far,
                earlier,
                {each.save for each in found if each.step == step}
                | {mine[step].save if step in mine else None},
            )
            self._next_sources.setdefault(path, []).append(sources)
            candidates.append((step, path))
        for path, (best, *_) in self._next_sources.items():
            self._sources[path] = best
        return candidates, lost

    def _mend(
        self, held: Mapping[int, Held], behind: Mapping[int, Sequence[int]]
    ) -> dict[int, Held]:
        """Copies what others know of steps here; returns what is here of these then.

        Args:
            held: Step -> what is here of it.
            behind: Step -> the processes that know more of it: also its parts, if their
                lists are damaged here, or later changes, or that these are uploaded.
        """
        mended = {}
        for step, others in behind.items():
            path, save = self._root / self._format.name(step), held[step].save
            sources = Sources(path, step, save, self._own, self._peers, {0: others})
            try:
                if not held[step].total:
                    part_copies.copy_metadata(sources, self._mode)
                else:
                    part_copies.copy_changes(sources)
            except (errors.CheckpointError, OSError) as error:
                _log.warning("step %d is not the same everywhere: %s", step, error)
                continue
            here = parts.find_held(path)
            if here is not None and here.save == save:  # else, it was just replaced
                mended[step] = here
        return mended

    def _look_until_settled(
        self, operation: Operation | None, mine: Mapping[int, Held]
    ) -> list[dict[int, Held]]:
        """Returns what each process has; raises CheckpointError if a save goes on."""
        # Another job, thought dead, may be committing a step. Two looks that found the
        # same, and no save under way, show what there was between them.
        held = _exchange_held(operation, "held", mine)
        for look in range(_LOOKS):
            if not (doubtful := parts.find_doubtful(held)):
                return held
            mine, before = self._examine(held, doubtful), held
            held = _exchange_held(operation, f"examined {look}", mine)
            if _changing(held):
                time.sleep(_LOOK_SECS)
            elif _identities(held) == _identities(before):
                return held
        step = max({*_changing(held), *doubtful})
        raise errors.CheckpointError(
            f"step {step} is being saved into the directories of these processes, such"
            f" as {self._root}: end the other job that saves there, or wait for it,"
            " then restore again"
        )

    def _examine(
        self, held: Sequence[Mapping[int, Held]], doubtful: Collection[int]
    ) -> dict[int, Held]:
        """Returns what is here of all steps, after another look at doubtful ones."""
        mine = dict(held[self._own])
        for step in doubtful:
            rest = (steps.get(step) for n, steps in enumerate(held) if n != self._own)
            others = {other.save for other in rest if other is not None}
            path = self._root / self._format.name(step)
            is_changing = False
            with contextlib.suppress(OSError):  # first: a save that ends now is found
                is_changing = _storage.temporary.is_being_written(path)
            here = parts.find_held(path)
            is_left_out = step not in mine and _steps.markers.is_damaged(path)
            if here is None or is_left_out:
                mine.pop(step, None)
                here = Held("", 0, ())
            else:
                with contextlib.suppress(OSError):  # a full disk mends no marker
                    here = parts.examine(path, here, others)
                mine[step] = here
            if is_changing:
                mine[step] = here._replace(is_changing=True)
        return mine

    def adopt_steps(self) -> None:
        """Copies, to process 0, the metadata of steps that the others have whole."""
        # It uploads them, and decides which of them stay.
        for sources in self._sources.values():
            if all(sources.holders.values()) and not sources.path.exists():
                try:
                    part_copies.copy_metadata(sources, self._mode)
                except (errors.CheckpointError, OSError) as error:
                    _log.warning("step %d is not kept here: %s", sources.step, error)

    def has_sources(self, path: Path) -> bool:
        """Returns True for a step of which other places may have files."""
        return path in self._sources

    def earliest_time(self, step: int, path: Path | None) -> float:
        """Returns a time after the saves of a step at any process, and at `path`."""
        known = 0 if path is None else parts.find_time(path)
        return max(known, self._times.get(step, 0)) / 1e9 + 1e-3

    def missing_parts(self, path: Path) -> list[int]:
        """Returns the parts of a step that only the run directory has."""
        sources = self._sources.get(path)
        holders = {} if sources is None else sources.holders
        return [part for part, having in holders.items() if not having]

    def forget(self, step: int) -> None:
        self.whole.discard(step)
        self.lost.discard(step)

    # ---- saving -------------------------------------------------------------------

    def is_whole(self, path: Path, operation: Operation, stage: str) -> bool:
        """Returns True if the processes together have all parts of a step."""
        here = None if _steps.markers.is_damaged(path) else parts.read_held(path)
        rows = operation.exchange(stage, here)
        held = [Held(*row) for row in rows if row is not None]
        return bool(parts.choose([{0: each} for each in held if each.total], {})[0])

    def make_room(self, path: Path, operation: Operation) -> None:
        """Removes leftovers of a step; raises CheckpointExistsError if it is whole.

        Raises SaveFailedError for what another job, thought dead, has put there since.
        """
        save = parts.read_identity(path)
        if self.is_whole(path, operation, "durable"):
            raise exists_error(path)
        if path.exists():
            _checkpoint.overwrite.check_replaceable(path)
            check = functools.partial(parts.check_save, saves={save})
            _storage.transaction.delete(path, check)

    # ---- restoring --------------------------------------------------------------

    def prepare(self, path: Path) -> None:
        """Copies the metadata of a step; DamagedCheckpointError if no process has it.

        Several saves of a step are at one path: each call takes the next, best first.
        """
        self.copied = Copied()
        self._fetched = set()
        if saves := self._next_sources.get(path):
            self._sources[path] = saves.pop(0)
        if (sources := self._sources.get(path)) is not None:
            part_copies.copy_metadata(sources, self._mode)

    def fetch(self, path: Path, wanted: Collection[Path], *, is_again: bool) -> bool:
        """Copies the files that a restore of `path` reads and this process lacks.

        Args:
            path: The step.
            wanted: The files that it reads.
            is_again: True to verify the files that are here, and to replace them.

        Returns:
            True if files were copied.

        Raises:
            DamagedCheckpointError: A file is at none of its places.
        """
        if (sources := self._sources.get(path)) is None:
            return False
        names = {str(file.relative_to(path)) for file in wanted}
        here = [n for n in sorted(names) if (path / n).exists()] if is_again else []
        faults = _checkpoint.verify.find_faults(path, here) if here else {}
        for name, why in faults.items():
            _log.warning("%s is damaged, and copied again: %s", path / name, why)
        copied = part_copies.copy_parts(sources, names, self._mode, damaged=faults)
        self.copied += copied
        self._fetched |= names
        return copied != Copied()

    # ---- copies -----------------------------------------------------------------

    def copy(self, step: int, path: Path, processes: Processes) -> None:
        """Begins to copy the parts of a new step between all processes."""
        if self.copies:
            holders = {process: [process] for process in range(len(self._keepers))}
            self._begin_copy(step, path, processes, holders, self._keepers)

    def keep_restored(self, step: int, path: Path, processes: Processes) -> None:
        """Begins to keep what a restore has copied, and to make lost copies again."""
        if self.copied != Copied():
            sync = functools.partial(self._sync, path, self._fetched)
            with contextlib.suppress(RuntimeError):  # no more threads
                _util.threads.background(sync, "flaxckpt copies").start()
        if not self.copies or (sources := self._sources.get(path)) is None:
            return
        holders = sources.holders
        keepers = parts.choose_copies(self._domains, self.copies, holders)
        if any(keepers):  # the same in all processes
            with contextlib.suppress(OSError):
                _steps.markers.mark_copied(path, 0)
            self._begin_copy(step, path, processes, holders, keepers)

    def _sync(self, path: Path, names: Collection[str]) -> None:
        try:
            part_copies.sync(path, names)
        except OSError as error:  # deleted, or the disk fails
            _log.info("%s may not outlast a power cut here: %s", path, error)

    def _begin_copy(
        self,
        step: int,
        path: Path,
        processes: Processes,
        holders: Mapping[int, Sequence[int]],
        keepers: Sequence[Sequence[int]],
    ) -> None:
        mine = [part for part, some in enumerate(keepers) if self._own in some]
        # A process that fails before begins none: the number of the step keeps the
        # operations of the others apart.
        operation = processes.begin(f"copies.{step}", f"the copies of step {step}")
        assert operation is not None, path
        find = functools.partial(self._find_sources, step, path, holders)
        self.copier.begin(CopyTask(step, path, find, mine, self.copies, operation))

    def _find_sources(
        self, step: int, path: Path, holders: Mapping[int, Sequence[int]]
    ) -> Sources:
        """Returns where the parts of a step are, of which this process has one."""
        if (save := parts.identify(path)) is None:
            raise FileNotFoundError(f"{path} was deleted")
        earlier = _others(self._index.paths(), path)
        return Sources(path, step, save, self._own, self._peers, holders, None, earlier)

    @property
    def copies(self) -> int:
        """Number of copies that each part gets at other processes."""
        return min(map(len, self._keepers), default=0)


def exists_error(path: Path) -> errors.CheckpointExistsError:
    return errors.CheckpointExistsError(
        f"{path} exists, in parts at the processes of this job: choose another step, or"
        " pass on_exists='overwrite', or 'skip' to keep the step"
    )


def _check_equal(option: str, values: Sequence[object]) -> None:
    """Raises OptionError if processes have different values of an option."""
    if len({*values}) > 1:
        raise errors.OptionError(
            f"all processes must have the same {option}, but they have\n"
            + errors.rows(f"process {n}: {each}" for n, each in enumerate(values))
        )


def _others(paths: Mapping[int, Path], path: Path) -> list[Path]:
    return [paths[n] for n in sorted(paths, reverse=True) if paths[n] != path]


def _changing(held: Sequence[Mapping[int, Held]]) -> set[int]:
    """Returns the steps of which a save is under way at a process."""
    return {step for steps in held for step in steps if steps[step].is_changing}


def _identities(held: Sequence[Mapping[int, Held]]) -> list[dict[int, object]]:
    """Returns what tells two looks apart: which saves, and which parts of them."""
    return [{n: here[:3] for n, here in steps.items()} for steps in held]


def _find_held(paths: Mapping[int, Path]) -> dict[int, Held]:
    found = {step: parts.find_held(path) for step, path in paths.items()}
    return {step: here for step, here in found.items() if here is not None}


def _find_faults(held: Sequence[Mapping[int, Held]]) -> dict[int, list[str]]:
    """Returns step -> what is damaged at which process, after warnings of it."""
    faults: dict[int, list[str]] = {}
    for process, steps in enumerate(held):
        for step, here in steps.items():
            if here.fault:
                why = f"process {process}: {here.fault}"
                _log.warning("step %d: %s", step, why)
                faults.setdefault(step, []).append(why)
    return faults


def _exchange_held(
    operation: Operation | None, stage: str, mine: Mapping[int, Held]
) -> list[dict[int, Held]]:
    if operation is None:
        return [dict(mine)]
    return [
        {int(step): Held(*row) for step, row in rows.items()}
        for rows in operation.exchange(
            stage, {str(step): here for step, here in mine.items()}
        )
    ]
