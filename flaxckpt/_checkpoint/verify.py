"""Verification of every byte of a checkpoint, in small parts, several at a time."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from flaxckpt import (
    _arrays,
    _doors,
    _formats,
    _state,
    _steps,
    _storage,
    _util,
    _zarr,
    errors,
)
from flaxckpt._checkpoint import inventory, verify_arrays, verify_report
from flaxckpt._checkpoint.inventory import StoredFile
from flaxckpt._checkpoint.verify_report import Check
from flaxckpt._formats import locate
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import LeafPath, PathLike
from flaxckpt._util.pace import Pace

_LARGE = 2**62
"""Size limit that admits any file."""

_READERS = (
    "flaxckpt._arrays.blockwise",
    "flaxckpt._arrays.read",
    "flaxckpt._formats.native_contents",
)
"""Modules that read arrays, which other packages import only when they need them."""

_THREADS = 4
"""Files received or read at a time by `find_faults`."""

_DECODED_AT_ONCE = 128 * 2**20
_PIECE_BYTES = 64 * 2**20
"""At least a chunk of our format: smaller pieces would read chunks repeatedly."""


@_util.guessed_names.explain
def verify(path: PathLike, *, step: int | None = None) -> verify_report.VerifyReport:
    """Reads a whole checkpoint in any format, and compares the data with checksums.

    Every byte of a flaxckpt checkpoint is compared: arrays with the CRC-32C of their
    chunks, all other files with the digests in the manifest. In other formats, all
    leaves are read and decoded, and `unchecked` names the leaves without checksums.
    The memory use is small and independent of the size of the checkpoint.

    ```python
    report = verify("run", step=1000)
    print(report)
    assert report.ok
    ```

    Args:
        path: A checkpoint, or a run directory.
        step: Step of a run directory; by default the newest.

    Raises:
        CheckpointNotFoundError: `path` does not exist.
        CheckpointFormatError: `path` is not a checkpoint.
    """
    root = _storage.paths.resolve(path)
    try:
        located = locate.locate(root, step)
    except errors.DamagedCheckpointError as error:
        return report_lost(locate.find_doubtful(root, step), step, error)
    return _verify(located.path, located.step, located.open_as_saved)


def verify_checkpoint(
    path: Path,
    step: int | None,
    *,
    thorough: bool = True,
    counter: _util.progress.Counter | None = None,
) -> verify_report.VerifyReport:
    """Verifies a checkpoint, up to the first problem unless `thorough`.

    An error of `counter.add`, called with the bytes read, ends the verification.
    """
    read = functools.partial(locate.read_stored, path, step)
    return _verify(path, step, read, thorough=thorough, counter=counter)


def _verify(
    path: Path,
    step: int | None,
    read: Callable[[], Stored],
    *,
    thorough: bool = True,
    counter: _util.progress.Counter | None = None,
) -> verify_report.VerifyReport:
    counter = counter or _util.progress.Counter(f"verifying {path.name}")
    findings = verify_report.Findings(counter, thorough=thorough)
    with _util.progress.bar(counter), _storage.paths.listing_cache(path):
        stored = _read_description(path, read, findings)
        # The first description in a process imports jax, and the first array
        # TensorStore, which may take longer than reading the whole checkpoint.
        for name in _READERS:
            _doors.import_module(name)
        start = time.monotonic()
        format_name = "unknown" if stored is None else stored.metadata.format
        extra: list[str] = []
        try:
            if stored is not None and format_name == "flaxckpt":
                with _storage.paths.read_ahead(_read_often(path, stored)):
                    extra = _verify_own(path, stored, findings)
            elif stored is not None:
                extra = _verify_foreign(path, stored, findings)
            if stored is not None:
                check = functools.partial(locate.check_step, path, step, stored)
                findings.attempt(verify_report.HERE, check)
        except OSError as error:
            _record_failure(path, error, findings)
    secs = time.monotonic() - start
    leaves, unreadable, places = None, {}, {}
    if stored is not None:
        leaves = sum(leaf.info.kind != "empty" for leaf in stored.table.values())
        unreadable = _unreadable(stored, findings)
        places = _describe_places(stored, findings)
    return findings.report(
        path,
        format_name,
        step,
        extra,
        secs,
        leaves=leaves,
        unreadable=unreadable,
        places=places,
    )


def check(path: Path, step: int | None) -> None:
    """Raises an error unless a checkpoint can be read; its metrics may be damaged."""
    report = verify_checkpoint(path, step)
    for name, why in {**report.problems, **report.unread}.items():
        if not name.startswith(f"{_formats.items.METRICS}/"):
            where = path if name == verify_report.HERE else name
            raise errors.DamagedCheckpointError(f"{where}: {why}")


def report_lost(
    path: Path, step: int | None, error: Exception
) -> verify_report.VerifyReport:
    """Returns the report on a path no longer recognised as a checkpoint."""
    findings = verify_report.Findings(_util.progress.Counter(""), thorough=True)
    is_unread = _storage.read_errors.is_unread(error)
    findings.add(
        findings.unread if is_unread else findings.problems,
        verify_report.HERE,
        str(error),
    )
    return findings.report(path, "unknown", step, (), 0.0)


def find_faults(
    path: Path,
    names: Collection[str],
    stream: Callable[[str], Iterable[memoryview]] | None = None,
    pace: Pace | None = None,
) -> dict[str, str]:
    """Returns the faults of files of arrays: name -> the fault.

    `stream` yields the content of a file from elsewhere; an error is its fault. Raises
    DamagedCheckpointError if the metadata is damaged.
    """
    stored = locate.read_without_classes(path)
    assert stored.manifest is not None, path
    listed = inventory.make(stored.manifest, stored.metadata.deleted_items)
    counter = _util.progress.Counter("")
    findings = verify_report.Findings(counter, thorough=False)
    checks = verify_arrays.find_checks(path, stored, listed, findings).files
    for name, why in findings.problems.items():
        raise errors.DamagedCheckpointError(f"{path / name}: {why}")
    found: dict[str, str] = {}

    def check(name: str) -> None:
        unknown = verify_arrays.FileCheck(name, (), has_checksum=False, size=None)
        file = checks.get(name, unknown)
        mine = verify_report.Findings(counter, thorough=False)
        if stream is None:
            mine.attempt(name, lambda: file.run(path, mine))
        else:
            mine.attempt(name, lambda: file.take(stream(name), mine))
        for why in (*mine.unread.values(), *mine.problems.values()):
            found[name] = why

    _util.threads.each(check, names, threads=_THREADS, pace=pace)
    return found


def find_damage(path: Path, step: int | None) -> str | None:
    """Returns a short text on proved damage, or None, also if it cannot be read now."""
    try:
        report = verify_checkpoint(path, step, thorough=False)
    except (errors.CheckpointError, OSError) as error:
        if _storage.read_errors.is_unread(error):
            return None
        # The path was a checkpoint before the damage.
        if _steps.index.may_be_step(path) and _find_unreadable(path) is None:
            return str(error).splitlines()[0]
        return None
    for name, why in report.problems.items():
        return why if name == verify_report.HERE else f"{name}: {why}"
    return None


def _read_description(
    path: Path, read: Callable[[], Stored], findings: verify_report.Findings
) -> Stored | None:
    """Reads the metadata of a checkpoint; on failure, records it and returns None."""
    try:
        return read()
    except errors.CheckpointNotFoundError:
        raise
    except OSError as error:
        _record_failure(path, error, findings)
        return None


def _record_failure(
    path: Path, error: OSError, findings: verify_report.Findings
) -> None:
    """Records an error that ended reading: a problem only if all files can be read."""
    if _storage.read_errors.is_unread(error):
        findings.add(findings.unread, verify_report.HERE, str(error))
    elif (why := _find_unreadable(path)) is not None:
        findings.add(findings.unread, verify_report.HERE, why)
    else:
        findings.add(findings.problems, verify_report.HERE, str(error))


def _unreadable(
    stored: Stored, findings: verify_report.Findings
) -> dict[LeafPath, str]:
    """Returns leaf path -> the reason why a restore cannot read the leaf."""
    unreadable = {
        path: leaf.unsupported.form
        for path, leaf in stored.table.items()
        if leaf.unsupported is not None
    }
    for faults, default in (
        (findings.problems, "damaged"),
        (findings.unread, "not readable"),
    ):
        for name, why in faults.items():
            if name in stored.table:
                unreadable.setdefault(name, why)
            state = "missing" if name in findings.missing else default
            for leaf_path in findings.leaves.get(name, ()):
                unreadable.setdefault(leaf_path, f"{name} is {state}")
    return unreadable


def _describe_places(
    stored: Stored, findings: verify_report.Findings
) -> dict[str, str]:
    """Returns name of a fault -> the file, and the values in it."""
    described = {}
    for name in (*findings.problems, *findings.unread):
        leaves: Sequence[LeafPath] = [name]
        place = findings.places.get(name, verify_report.NOWHERE)
        if name not in stored.table:
            leaves = findings.leaves.get(name, ())
            place = verify_report.StoredPlace(name)
        text = errors.first_few(leaves, 3)
        if len(leaves) == 1:
            text += _describe_values(stored, stored.table[leaves[0]].info, place)
        else:
            text = f"{len(leaves):,} leaves: {text}"
        if leaves:
            described[name] = " -> ".join(filter(None, (place.file, text)))
    return described


def _describe_values(
    stored: Stored, info: LeafInfo, place: verify_report.StoredPlace
) -> str:
    """Returns `, rows 0-127 of 512` for a part of a leaf; empty for the whole leaf."""
    shape, region = info.stored_shape, place.region
    if region is None and place.file and info.chunk_shape is not None:
        directory = _formats.items.prefix(stored.items.array_directory(info))
        key = place.file.rpartition(directory)[2]
        region = _zarr.metadata.region_of_key(key, shape, info.chunk_shape)
    if region is None:
        return ""
    cut = [n for n, size in enumerate(shape) if region[n] != (0, size)]
    if cut == [0]:
        (start, stop), noun = region[0], "rows" if shape[1:] else "elements"
        return f", {noun} {start}-{stop - 1} of {shape[0]}"
    ranges = ", ".join(f"{start}:{stop}" for start, stop in region)
    return f", [{ranges}] of {[*shape]}" if cut else ""


# ---- our own format ---------------------------------------------------------------


def _read_often(path: Path, stored: Stored) -> list[Path]:
    """Returns the files that several checks read."""
    names = {
        _formats.orbax_json.MANIFEST,
        _formats.items.CHECKPOINT,
        _formats.native_contents.seal_name(stored.digests),
        *_index_files(stored),
    }
    return [path / name for name in sorted(names)]


def _index_files(stored: Stored) -> set[str]:
    """Returns the files of databases that have the places of the values."""
    names = _zarr.metadata.INDEX_FILES
    roots = map(_formats.items.prefix, stored.items.trees)
    return {f"{root}{name}" for root in roots for name in names}


def _verify_own(
    path: Path, stored: Stored, findings: verify_report.Findings
) -> list[str]:
    """Compares every file with a checksum; returns files not in the checkpoint."""
    text = _formats.items.read_file(path / _formats.orbax_json.MANIFEST, path)
    seal = _formats.native_contents.commit_marker(text)
    assert stored.manifest is not None, path
    listed = inventory.make(stored.manifest, stored.metadata.deleted_items)
    absent: set[str] = set()
    if (parts := _steps.markers.read_parts(path)) is not None:
        needed = parts.select(listed.files)
        absent = {
            n for n in listed.files if n not in needed and not (path / n).exists()
        }
        files = {n: file for n, file in listed.files.items() if n not in absent}
        listed = listed._replace(files=files)
    index = _index_files(stored)
    checks = []
    for name, file in listed.files.items():
        is_large = bool(file.leaves) and name not in index
        check = functools.partial(
            _check_digest, path, file, findings.counter.add, is_large=is_large
        )
        checks += [Check(name, check)] if name in stored.digests else []
    is_digested = stored.manifest.has_metrics or _steps.markers.is_measured(path)
    checks += _metrics_checks(
        path, findings, stored.recorded_step, is_digested=is_digested
    )
    seal_name = _formats.native_contents.seal_name(stored.digests)
    check_seal = functools.partial(_check_seal, path, seal_name, seal)
    checks.append(Check(seal_name, check_seal))
    findings.counter.total = _storage.listing.known_size_below(path)
    findings.run(checks)
    arrays = verify_arrays.find_checks(path, stored, listed, findings)
    findings.run([check for check in arrays.checks if check.name not in absent])
    for name in {*findings.problems, *findings.unread} - stored.table.keys():
        findings.leaves[name] = verify_arrays.leaves_in(name, path, stored, listed)
    lost = _unreadable(stored, findings)  # the fault of their file is known
    undigested = {p: leaf for p, leaf in arrays.undigested.items() if p not in lost}
    for leaf_path in undigested:
        findings.unchecked[leaf_path] = (
            "it was saved without checksums; its files exist"
        )
    _decode(path, undigested, findings)
    unlisted = tuple(
        _formats.items.prefix(item)
        for item in listed.unlisted
        if _formats.items.database(item) not in stored.digests
    )
    expected = {*listed.files, *_formats.items.UNDIGESTED}
    return sorted(
        name
        for name in {*_storage.listing.files_below(path)} - expected
        if not name.startswith(unlisted)
        and ("/" in name or not _steps.markers.is_marker(name))
    )


def _check_digest(
    path: Path, file: StoredFile, count: Callable[[int], object], *, is_large: bool
) -> None:
    """Raises ValueError if a file of the checkpoint `path` has another digest."""
    digest, whole = hashlib.sha256(), path / file.name
    for part in _storage.of(path).stream(whole, path, _LARGE if is_large else 0):
        digest.update(part)
        count(len(part))
    found = f"sha256:{digest.hexdigest()}"
    _storage.files.check_digest("it", found, file.digest)


def _check_seal(path: Path, seal_name: str, wanted: bytes) -> None:
    """Raises ValueError unless the file with the digest of the manifest is `wanted`."""
    if _formats.items.read_file(path / seal_name, path) != wanted:
        raise ValueError("its content has changed since it was written")


def _metrics_checks(
    path: Path, findings: verify_report.Findings, step: int | None, *, is_digested: bool
) -> list[Check]:
    """Returns the checks of the metrics of `step`; `is_digested`: need digests."""
    name = f"{_formats.items.METRICS}/{_formats.items.METRICS}"
    digests = _formats.items.METRICS_DIGESTS

    def check() -> None:
        if (path / _formats.items.METRICS).exists():
            (path / name).stat()  # raises if the directory has no metrics file
        _formats.native_metadata.load_metrics(path, step)

    checks = [Check(name, check)]
    if is_digested or (path / digests).exists():
        check_digests = functools.partial(
            _formats.native_metadata.check_metrics_digests, path
        )
        checks.append(Check(digests, check_digests))
    elif (path / name).exists():
        findings.unchecked[name] = "the metrics were saved without a digest"
    return checks


# ---- other formats ----------------------------------------------------------------


def _verify_foreign(
    path: Path, stored: Stored, findings: verify_report.Findings
) -> list[str]:
    """Decodes every array of another format; compares checksums of items in our own.

    Returns the files in items of our own that are not part of them.
    """
    leaves = {
        p: leaf for p, leaf in stored.table.items() if verify_arrays.is_array(leaf)
    }
    extra: list[str] = []
    if damaged := stored.metadata.damaged_items:
        proved = _find_unreadable(path) is None
        for item, why in damaged.items():
            findings.add(findings.problems if proved else findings.unread, item, why)
    for item, part in stored.own_items.items():
        names = {
            leaf_path: _path_in(stored, item, leaf.info)
            for leaf_path, leaf in part.table.items()
        }
        found = verify_report.Findings(findings.counter, thorough=findings.thorough)
        extra += [f"{item}/{name}" for name in _verify_own(path / item, part, found)]
        findings.take(found, item, {**names, verify_report.HERE: item})
        for name in names.values():
            leaves.pop(name, None)
    findings.counter.total = findings.counter.done + sum(
        i.info.stored_bytes for i in leaves.values()
    )
    for leaf_path, leaf in leaves.items():
        if not _has_checksums(leaf):
            findings.unchecked[leaf_path] = (
                "its format has no checksums; it was decoded"
            )
    _decode(path, leaves, findings)
    return extra


def _path_in(stored: Stored, item: str, info: LeafInfo) -> LeafPath:
    if isinstance(stored.items.state, str):
        return info.path
    return _state.tree.join((_state.tree.Key(item, "key"), *info.keys))


def _has_checksums(leaf: Leaf) -> bool:
    """Returns True if reading an array compares the data with checksums."""
    source = leaf.source
    assert isinstance(source, StoredLeaf), leaf.info.path
    if source.check is not None:
        return True
    try:
        codec = _arrays.read.open_one(source).codec
    except errors.CheckpointError:
        return False
    return codec is not None and "crc32c" in str(codec.to_json())


def _decode(
    path: Path, leaves: Mapping[LeafPath, Leaf], findings: verify_report.Findings
) -> None:
    """Reads and decodes arrays in pieces, and records errors."""
    pieces = [
        piece
        for leaf in leaves.values()
        for piece in _arrays.blockwise.cut(
            leaf, chunk_shape=None, max_bytes=_PIECE_BYTES
        )
    ]
    faults = verify_report.Findings(findings.counter, thorough=findings.thorough)
    for batch in _arrays.blockwise.batches(pieces, max_bytes=_DECODED_AT_ONCE):
        if findings.is_enough or faults.is_enough:
            break
        try:
            _arrays.blockwise.read(batch, max_bytes=_DECODED_AT_ONCE)
        except (OSError, ValueError, MemoryError):
            for piece in batch:  # find the damaged pieces
                read = functools.partial(
                    _arrays.blockwise.read, [piece], max_bytes=_DECODED_AT_ONCE
                )
                place = verify_report.StoredPlace("", piece.region)
                faults.attempt(piece.path, read, place)
        findings.counter.add(sum(piece.nbytes for piece in batch))
    # The error does not tell a failed read from a failed decoding.
    proved = not faults.problems or _find_unreadable(path) is None
    for name, why in faults.problems.items():
        to = findings.problems if proved else findings.unread
        findings.add(to, name, why, faults.places[name])
    for name, why in faults.unread.items():
        findings.add(findings.unread, name, why, faults.places[name])


# ---- files ------------------------------------------------------------------------


def _find_unreadable(path: Path) -> str | None:
    """Returns the reason why files of a checkpoint cannot be read, or None."""
    storage = _storage.of(path)
    try:
        for file in _storage.listing.all_files(path):
            with contextlib.suppress(FileNotFoundError, ValueError):
                for _ in storage.stream(file, path, _LARGE):
                    pass
    except OSError as error:
        return str(error)
    return None
