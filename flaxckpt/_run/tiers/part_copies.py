"""Copies the metadata and the parts of a step from other processes, verified."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from flaxckpt import _checkpoint, _distributed, _formats, _steps, _storage, errors
from flaxckpt._run import edit
from flaxckpt._run.tiers import parts
from flaxckpt._steps.markers import PARTS, StepParts
from flaxckpt._util.pace import Pace

if TYPE_CHECKING:
    from flaxckpt._distributed.peer_files import Peer

_log = logging.getLogger(__name__)

_commit_marker = _formats.native_contents.commit_marker

_THREADS = 4
"""Files synced at a time."""

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Errors of renames to a name that has something already."""

_MARKERS = (
    _steps.markers.PIN,
    _steps.markers.TEMPORARY,
    _steps.markers.MEASURED,
    *_steps.markers.OF_UPLOADS,
)
"""Markers that a process gets with the metadata."""

_CHANGED = (
    f"{_formats.items.METRICS}/{_formats.items.METRICS}",
    _formats.items.METRICS_DIGESTS,
    *_MARKERS,
)
"""Files that change in a committed step; that of what is uploaded comes last."""


class Sources(NamedTuple):
    """Where a process finds what it lacks of a step.

    Attributes:
        path: The step in the directory of this process.
        step: Its number.
        save: The identity of the save.
        own: This process.
        peers: The servers of all processes.
        holders: Part -> the processes that have it.
        far: The same step in the run directory; None without.
        earlier: Other steps in the directory of this process, newest first.
        replaceable: The saves of the step that may be here, and be replaced; None for
            no step.
    """

    path: Path
    step: int
    save: str
    own: int
    peers: Sequence[Peer]
    holders: Mapping[int, Sequence[int]]
    far: Path | None = None
    earlier: Sequence[Path] = ()
    replaceable: Collection[str | None] = (None,)

    def knows_parts(self) -> bool:
        """Returns True unless the step here has lost the list of its parts."""
        return len(parts.find_parts(self.path).files) == len(self.holders)

    def others(self, part: int | None = None) -> list[int]:
        """Returns the other processes with a part, or with any, in the order to ask."""
        some = self.holders.values() if part is None else [self.holders.get(part, ())]
        found = sorted({process for each in some for process in each} - {self.own})
        first = parts.first_source(self.own, part or 0, len(found))
        return found[first:] + found[:first]

    def far_files(self, name: str) -> list[Path]:
        """Returns the file in the run directory, if the step is there."""
        return [] if self.far is None else [self.far / name]


class Copied(NamedTuple):
    """Bytes of parts that the directory of this process has got.

    Attributes:
        from_peers: From other processes.
        from_directory: From the run directory.
        unchanged: By hard links to files of other steps here.
    """

    from_peers: int = 0
    from_directory: int = 0
    unchanged: int = 0

    def __add__(self, other: Copied) -> Copied:  # type: ignore[override]
        return Copied(*map(sum, zip(self, other, strict=True)))


# ---- metadata -----------------------------------------------------------------------


def copy_metadata(sources: Sources, mode: int | None) -> None:
    """Copies the metadata of a step, unless it is whole here.

    Raises DamagedCheckpointError if no other process has it; SaveFailedError if another
    job has saved the step since the processes said what they have.
    """
    path = sources.path  # a power cut may take it away again, but does not damage it
    is_same = parts.identify(path) == sources.save
    if is_same and has_metadata(path) and sources.knows_parts():
        return
    files = _read_any_metadata(sources)
    if is_same:
        _mend(path, files)
        return
    try:
        check = functools.partial(parts.check_save, saves=sources.replaceable)
        _write_metadata(path, files, mode, check)
    except OSError as error:
        _check_disk(error, path)
        raise


def copy_changes(sources: Sources) -> None:
    """Copies the metrics and markers of a step from a process that knows more of it.

    What is uploaded is recorded last: a crash before leaves the step as it was known.
    Raises DamagedCheckpointError if no process has them; SaveFailedError if an item
    that was deleted there is read here, or if another job has replaced the step.
    """
    path, files = sources.path, _read_any_metadata(sources)
    parts.check_save(path, {sources.save})
    deleted = _steps.markers.deleted_items(files)
    for item in deleted - _steps.markers.deleted_items(_storage.of(path).names(path)):
        edit.delete_item(path, item)
    for name in _CHANGED:
        if (content := files.get(name)) is None:
            (path / name).unlink(missing_ok=True)
            continue
        _storage.files.make_parents(path, name)
        _storage.of(path).replace(path / name, content)
    _storage.files.sync_directory(path)
    if parts.identify(path) != sources.save:  # replaced after the check
        _steps.markers.mark_for_upload(path)


def _read_any_metadata(sources: Sources) -> dict[str, bytes]:
    """Returns the metadata of a step at another process; an error if none has it."""
    faults = []
    for process in sources.others():
        try:
            files, marker = _read_metadata(sources, process)
        except (OSError, ValueError, errors.DamagedCheckpointError) as error:
            faults.append(f"process {process}: {errors.one_line(error)}")
            continue
        return {**files, parts.MARKER: marker}
    raise errors.DamagedCheckpointError(
        f"the metadata of step {sources.step} is at no process:\n"
        + errors.rows(faults or ["no other process has a part of it"])
        + "\nRestore another step."
    )


def _write_metadata(
    path: Path,
    files: Mapping[str, bytes],
    mode: int | None,
    check: Callable[[Path], object],
) -> None:
    """Writes the metadata of a step, in place of what `check` lets pass there."""
    with _storage.temporary.new_directory(path, mode) as aside:
        _storage.of(aside).write_files(aside, files)
        if mode is not None:
            _storage.modes.set_below(aside, mode)
        _storage.of(aside).sync_tree(aside)
        try:
            aside.rename(path)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            _checkpoint.overwrite.check_replaceable(path)
            keep = _steps.markers.PIN.__eq__
            _storage.transaction.replace(aside, path, keep, check)


def has_metadata(path: Path) -> bool:
    """Returns True if the metadata here is what the commit marker stands for."""
    try:
        known = parts.find_parts(path)
        manifest = (path / parts.MANIFEST).read_bytes()
        deleted = _steps.markers.deleted_items(_storage.of(path).names(path))
        listed = parts.parse_manifest(manifest).without(deleted)
        if (path / parts.MARKER).read_bytes() != _commit_marker(manifest):
            return False
        if listed.sizes != known.sizes:
            return False
        return all(
            _storage.files.digest((path / name).read_bytes()) == digest
            for name, digest in _digests(manifest, known, deleted).items()
        )
    except (OSError, ValueError, errors.DamagedCheckpointError):
        return False


def _digests(
    manifest: bytes, known: StepParts, deleted: Collection[str]
) -> dict[str, str]:
    """Returns the metadata files of the items that are left -> their digests."""
    digests = json.loads(manifest)["digests"]
    return {
        name: digests[name]
        for name in digests
        if name not in known.sizes and _steps.markers.top(name) not in deleted
    }


def _mend(path: Path, files: Mapping[str, bytes]) -> None:
    """Replaces metadata that differs from `files`, except files that may change."""
    for name, content in files.items():
        if name in _CHANGED:
            continue
        try:
            found: bytes | None = (path / name).read_bytes()
            if name == PARTS:
                known = _steps.markers.read_parts(path)
                same = _steps.markers.parse_parts(content)
                if known is not None and known.files == same.files:
                    continue  # which part was saved here is not in `content`
        except (OSError, errors.DamagedCheckpointError):
            found = None
        if found != content:
            _log.warning("%s is damaged, and copied again", path / name)
            _storage.files.make_parents(path, name)
            _storage.of(path).replace(path / name, content)


def _check_disk(error: BaseException, path: Path) -> None:
    """Raises CheckpointError, which is no damage, if the disk here is full."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        raise errors.CheckpointError(
            f"files of {path} cannot be copied, as the disk of this process is full:"
            f" {error}\nFree space there, then try again."
        ) from error


def _read_metadata(sources: Sources, process: int) -> tuple[dict[str, bytes], bytes]:
    """Returns the metadata of a step at another process, and its commit marker.

    Raises:
        ValueError: It is damaged there, or of another save.
        OSError: The process is gone, or lacks it.
    """
    path = sources.path
    with _distributed.peer_files.PeerConnection(sources.peers[process]) as peer:

        def read(names: Iterable[str]) -> dict[str, bytes]:
            there = {f"{path.name}/{_check_name(name)}": name for name in names}
            found = peer.read(there, _formats.orbax_json.MAX_BYTES)
            return {there[name]: content for name, content in found.items()}

        files = read((parts.MARKER, parts.MANIFEST, PARTS))
        if not {parts.MARKER, parts.MANIFEST} <= files.keys():
            raise FileNotFoundError(f"{path.name} is not there")
        marker, manifest = files.pop(parts.MARKER), files[parts.MANIFEST]
        if marker != _commit_marker(manifest):
            raise ValueError(
                f"{parts.MARKER} or {parts.MANIFEST} of {path.name} is damaged there"
            )
        if _storage.files.digest(marker) != sources.save:
            raise ValueError(f"{path.name} is another save there")
        known = listed = parts.parse_manifest(manifest)
        if PARTS in files:
            known = _steps.markers.parse_parts(files[PARTS])
        if known.sizes != listed.sizes:
            raise ValueError(f"the parts of {path.name} are not those of its manifest")
        files[PARTS] = known._replace(own=None).content()
        names = {*_digests(manifest, known, ()), *_formats.items.UNDIGESTED, *_MARKERS}
        items = {_steps.markers.top(name) for name in {*listed.sizes, *names}}
        marks = {_steps.markers.deletion_marker(item): item for item in items}
        files |= read(sorted({*names, *marks} - {parts.MARKER, *files}))
    deleted = {marks[name] for name in marks.keys() & files.keys()}
    for name, digest in _digests(manifest, known, deleted).items():
        if name not in files:
            raise FileNotFoundError(f"{path.name}/{name} is not there")
        found = _storage.files.digest(files[name])
        _storage.files.check_digest(name, found, digest)
    left = {n: files[n] for n in files if _steps.markers.top(n) not in deleted}
    return left, marker


def _check_name(name: str) -> str:
    """Returns the name of a file; raises ValueError if it leads out of the step."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
        raise ValueError(f"{name[:80]!r} is no name of a file in a step")
    return name


# ---- parts --------------------------------------------------------------------------


class _Request(NamedTuple):
    """A file to copy.

    Attributes:
        name: Its path in the step.
        size: Bytes.
        places: The processes that have it, and other files with its content.
        faults: Why the places before gave no whole file.
    """

    name: str
    size: int
    places: list[int | Path]
    faults: list[str]


def copy_parts(
    sources: Sources,
    wanted: Collection[str],
    mode: int | None,
    *,
    damaged: Collection[str] = (),
    pace: Pace | None = None,
) -> Copied:
    """Copies files of arrays that this process lacks, and keeps them.

    Until `sync`, a power cut may damage them; then they are copied again.

    Args:
        sources: Where they are.
        wanted: The files, by their paths in the step.
        mode: Mode of new directories; None for the umask's.
        damaged: The files to replace.
        pace: The pace of the threads; None for full speed.

    Raises:
        DamagedCheckpointError: A file is whole at no process, and not in the run
            directory.
        OSError: The disk of this process fails, or is full.
    """
    path, requests = sources.path, []
    known = parts.find_parts(path)
    for part, files in enumerate(known.files):
        others = sources.others(part)
        requests += [
            _Request(_check_name(name), size, [*others, *sources.far_files(name)], [])
            for name, size in files.items()
            if name in wanted
            and (name in damaged or parts.file_size(path / name) != size)
        ]
    _find_unchanged(sources, requests)
    return _copy_all(sources, requests, mode, pace) if requests else Copied()


def sync(path: Path, names: Collection[str]) -> None:
    """Makes files of the step `path` durable.

    Raises:
        OSError: A file is gone, or the disk fails.
    """
    _storage.of(path).sync_files([path / name for name in sorted(names)], _THREADS)
    # With their parents: those of files of large arrays are new, too.
    parents = {above for name in names for above in PurePosixPath(name).parents}
    for above in sorted(parents):
        _storage.files.sync_directory(path / above)
    _storage.files.sync_directory(path.parent)


def _find_unchanged(sources: Sources, requests: Sequence[_Request]) -> None:
    """Adds files of other steps here that are the file at its first process, too.

    There, both steps then have hard links to one file.
    """
    found: dict[int, list[tuple[_Request, Path]]] = {}
    for request in requests:
        if request.places and isinstance(process := request.places[0], int):
            found.setdefault(process, []).extend(
                (request, step)
                for step in sources.earlier
                if parts.file_size(step / request.name) == request.size
            )
    for process, pairs in found.items():
        try:
            with _distributed.peer_files.PeerConnection(sources.peers[process]) as peer:
                known = peer.identify(
                    f"{path.name}/{request.name}"
                    for request, step in pairs
                    for path in (sources.path, step)
                )
        except OSError as error:  # it is asked for the files next
            _log.info("process %d: %s", process, error)
            continue
        for request, step in pairs:
            new = known.get(f"{sources.path.name}/{request.name}")
            if new is not None and new == known.get(f"{step.name}/{request.name}"):
                request.places.insert(0, step / request.name)


def _copy_all(
    sources: Sources, requests: Sequence[_Request], mode: int | None, pace: Pace | None
) -> Copied:
    """Copies files from their places, and gives them their names."""
    path, copied = sources.path, Copied()
    if others := [each.name for each in requests if (path / each.name).is_dir()]:
        raise errors.CheckpointError(
            f"directories in {path} are where files of arrays belong:\n"
            + errors.rows(others)
            + "\nMove them elsewhere, then try again."
        )
    with _storage.temporary.new_directory(path, mode) as aside:
        left: Sequence[_Request] = requests
        while left:
            done, left = _copy_round(sources, aside, left, pace)
            copied += done
        if parts.identify(path) != sources.save:
            raise FileNotFoundError(f"{path} was replaced meanwhile")
        for request in requests:
            _storage.files.make_parents(path, request.name)
            (aside / request.name).replace(path / request.name)
        if parts.identify(path) != sources.save:  # replaced between the two
            for request in requests:
                (path / request.name).unlink(missing_ok=True)
            raise FileNotFoundError(f"{path} was replaced meanwhile")
    return copied


def _copy_round(
    sources: Sources, aside: Path, left: Sequence[_Request], pace: Pace | None
) -> tuple[Copied, list[_Request]]:
    """Copies each file from its next place; returns the files that were not whole."""
    if gone := [request for request in left if not request.places]:
        rows = [
            f"{name}: {'; '.join(faults) or 'no other place has it'}"
            for name, _, _, faults in gone
        ]
        raise errors.DamagedCheckpointError(
            f"files of step {sources.step} cannot be copied from any other place:\n"
            f"{errors.rows(rows)}\nMend one of these places, or restore another step."
        )
    tried = {each.name: (each.places.pop(0), each.size) for each in left}
    begun = {name for name in tried if (aside / name).exists()}

    def copy(name: str) -> Iterator[memoryview]:
        _storage.files.make_parents(aside, name)
        try:
            yield from _copy(sources, name, aside / name, *tried[name])
        except OSError as error:
            _check_disk(error, sources.path)
            raise OSError(errors.one_line(error)) from error

    # Verified as they arrive: a second read would take as long as the first.
    faults = _checkpoint.verify.find_faults(sources.path, tried, copy, pace)
    copied = Copied()
    for name, size, places, why in left:
        place, _ = tried[name]
        if name not in faults:
            copied += (
                Copied(from_peers=size)
                if isinstance(place, int)
                else Copied(from_directory=size)
                if place in sources.far_files(name)
                else Copied(unchanged=size)
            )
            continue
        if parts.file_size(aside / name) == size:  # damaged: the next begins again
            (aside / name).unlink()
            if name in begun:  # perhaps in what came from another place
                places.insert(0, place)
        where = f"process {place}" if isinstance(place, int) else place
        why.append(f"{where}: {faults[name]}")
        _log.warning("step %d: %s from %s: %s", sources.step, name, where, faults[name])
    return copied, [request for request in left if request.name in faults]


def _copy(
    sources: Sources, name: str, target: Path, place: int | Path, size: int
) -> Iterator[memoryview]:
    """Copies a file from one of its places, and yields its content."""
    if isinstance(place, int):
        with _distributed.peer_files.PeerConnection(sources.peers[place]) as peer:
            yield from peer.copy(f"{sources.path.name}/{name}", target, size)
        return
    if sources.far is None or place not in sources.far_files(name):
        os.link(place, target, follow_symlinks=False)
        yield from _storage.of(target).stream(target, target.parent, size)
        return
    with target.open("wb") as file:
        for part in _storage.of(place).stream(place, sources.far, size):
            file.write(part)
            yield part
