"""Conversion: from a checkpoint of one format to one of another, piece by piece.

What is made lies beside its place until all of it is durable, with a journal of what is
done: the same conversion goes on where it was interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from flaxckpt import (
    _belongings,
    _containers,
    _journal,
    _layout,
    _locate,
    _pieces,
    _progress,
    _read,
    _remote,
    _renames,
    _staging,
    _steps,
    _storage,
    _structure,
    _targets,
    _threads,
    _tree,
    errors,
)
from flaxckpt._info import ArrayLayout, Leaf, SaveResult, Stored, StoredLeaf
from flaxckpt._pieces import Piece
from flaxckpt._types import JSON
from flaxckpt._zarr import Array
from flaxckpt.formats import (
    _manifest,
    _orbax,
    _orbax_json,
)
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _table as _transforms

_log = logging.getLogger(__name__)

TEMPORARY = ".flaxckpt-convert-tmp"
"""In the name of a directory: an unfinished conversion, no checkpoint for anybody."""

DEFAULT_CONCURRENT_BYTES = 2**30

_BATCH_BYTES = 256 * 2**20
"""What is read, and then written and made durable, together."""


Progress: TypeAlias = Literal["auto"] | bool | Callable[[int, int], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How to convert.

    Attributes:
        format: What to make.
        transforms: What to change on the way.
        layout: How arrays of an Orbax checkpoint are cut and encoded.
        overwrite: Whether to replace a checkpoint that is there.
        max_shard_bytes: Upper bound on the arrays in one file of safetensors.
        max_concurrent_bytes: Bytes of arrays in memory at one time.
        progress: Whether to show a bar, `auto` to who waits for long at a terminal; or
            what is called with bytes done and in all.
    """

    format: Literal["orbax", "safetensors", "msgpack"] = "orbax"
    transforms: Sequence[Transform] = ()
    layout: ArrayLayout = dataclasses.field(default_factory=ArrayLayout)
    overwrite: bool = False
    max_shard_bytes: int = 5 * 10**9
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES
    progress: Progress = "auto"

    def __post_init__(self) -> None:
        if self.format not in tuple(_targets.MAKERS):
            raise errors.OptionError(
                f"format must be one of {tuple(_targets.MAKERS)}, got {self.format!r}"
            )
        for name in ("max_shard_bytes", "max_concurrent_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise errors.OptionError(f"{name} must be an int, got {value!r}")
            if value <= 0:
                raise errors.OptionError(f"{name} must be positive, got {value}")
        if not isinstance(self.layout, ArrayLayout):
            raise errors.OptionError(
                f"layout must be a flaxckpt.ArrayLayout, got {self.layout!r}"
            )
        is_known = isinstance(self.progress, bool) or self.progress == "auto"
        if not is_known and not callable(self.progress):
            raise errors.OptionError(
                f"progress must be 'auto', a bool or a function, got {self.progress!r}"
            )


def format_of(final: Path, format: str | None) -> Any:
    """The format that is meant: what is passed, else what the path ends in.

    Raises:
        OptionError: The path ends as those of another format do.
    """
    suffix = _SUFFIXES.get(final.suffix)
    if format is None:
        return suffix or "orbax"
    if suffix is not None and format in tuple(_targets.MAKERS) and format != suffix:
        raise errors.OptionError(
            f"{final} ends in {final.suffix}, and format={format!r} makes none of that:"
            f" pass format={suffix!r}, or choose another path"
        )
    return format


_SUFFIXES = {".safetensors": "safetensors", ".msgpack": "msgpack"}
"""How paths end that are of one format only."""


def run(source: Path, step: int | None, final: Path, options: Options) -> SaveResult:
    """Converts the checkpoint at `source` into one at `final`."""
    if _remote.is_remote(final):
        return _to_store(source, step, final, options)
    begun = time.monotonic()
    found, number = _locate.locate(source, step)
    _belongings.check_apart(final, [found], ())
    _belongings.check_free(final, overwrite=options.overwrite)
    files = _belongings.stamps(found)
    stored = _locate.read_stored(found, number)
    # Under a number of its own, it is no step of the run that it comes from.
    is_other = _steps.number(final.name) not in (number, None)
    state = _state(stored, None if is_other else number, options)
    roots = _roots(state)
    files += tuple([f for r in roots if r != found for f in _belongings.stamps(r)])
    _belongings.check_apart(final, roots, files)
    temporary = final.with_name(final.name + TEMPORARY)
    _check_sources(state)
    _check_space(final, temporary, state, options)
    target = _targets.MAKERS[options.format](state, final)
    work = _work(stored, state, target, options, files)
    progress = _Shown(options.progress, final.name)
    try:
        with _journal.Journal(temporary, work) as done, progress.begin() as show:
            kept = target.begin(done.output, done.done)
            _write(target, kept, done, show)
            target.finish(done.output)
            size = _storage.sync_tree(done.output)
            _check_current(stored, files)
            done.forget()
            _publish(done.output / target.result, final, overwrite=options.overwrite)
            done.remove()
    except errors.CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        if error is progress.raised:
            raise
        raise errors.SaveFailedError(
            f"{final} could not be made of {found}:"
            f" {' '.join(str(error).split())[:300]}{_rest(temporary)}"
        ) from error
    secs = time.monotonic() - begun
    _log.info("converted %s to %s: %d bytes in %.3f s", found, final, size, secs)
    return SaveResult(None, str(final), size, secs, secs)


def _to_store(
    source: Path, step: int | None, final: _remote.RemotePath, options: Options
) -> SaveResult:
    """The same on the local disk, and from there to the store."""
    if options.format != "orbax":
        raise errors.OptionError(
            f"{final}: in stores, wanted format='orbax', found {options.format!r}:"
            " convert to a local path, and copy that"
        )
    begun = time.monotonic()
    _belongings.check_free(final, overwrite=options.overwrite)
    with tempfile.TemporaryDirectory(prefix="flaxckpt-convert-") as directory:
        made = Path(directory) / final.name
        run(source, step, made, options)
        size = _staging.upload(made, final, overwrite=options.overwrite)
    secs = time.monotonic() - begun
    return SaveResult(None, str(final), size, secs, secs)


def _rest(temporary: Path) -> str:
    if not temporary.is_dir():
        return ""
    return (
        f"\nWhat is done of it is in {temporary}: the same conversion goes on there;"
        " else remove it."
    )


# ---- what is read -----------------------------------------------------------------


_LARGE = 2**30
"""What has fewer bytes is planned, read and written soon enough."""


def _check_sources(state: _targets.State) -> None:
    """Asserts that large arrays may be what they are said to be, before all work.

    Raises:
        DamagedCheckpointError: One is not.
    """
    stored = {id(s): s for leaf in state.table.values() for s in _stored(leaf)}
    for source in stored.values():
        if _layout.stored_bytes(source.info) > _LARGE:
            _read.open_one(source)


def _check_space(
    final: Path, temporary: Path, state: _targets.State, options: Options
) -> None:
    """Refuses to begin what does not fit on the disk.

    Chunks that are compressed are left out: nobody knows what they will take.

    Raises:
        SaveFailedError: It does not.
    """
    if options.format == "orbax" and options.layout.codec != "none":
        return
    wanted = sum(_layout.stored_bytes(info) for info in state.infos)
    if wanted <= _LARGE:
        return
    directory = next(path for path in final.parents if path.is_dir())
    found = os.statvfs(directory)
    done = sum(p.lstat().st_blocks * 512 for p in temporary.rglob("*"))
    free = found.f_bavail * found.f_frsize + done
    if wanted > free:
        raise errors.SaveFailedError(
            f"{final} would have {wanted} bytes, and {free} are free in {directory}:"
            " free some, choose another place, or leave leaves out by transforms"
        )


# ---- what is made -----------------------------------------------------------------


def _state(stored: Stored, step: int | None, options: Options) -> _targets.State:
    table = _transforms.apply(options.transforms, stored.table)
    structure = _containers.of(stored.structure, stored.table, table)
    keys = dict(_tree.key_paths(structure))
    for path, leaf in table.items():
        info = dataclasses.replace(leaf.info, keys=keys[path])
        info = _layout.with_chunk_shape(info, options.layout)
        table[path] = Leaf(info, leaf.sources, leaf.fn)
    found = _remote.from_text(stored.metadata.path)
    has_dataset = stored.metadata.has_dataset and options.format == "orbax"
    return _targets.State(
        table,
        structure,
        {
            path: _text(leaf)
            for path, leaf in table.items()
            if leaf.info.kind == "string"
        },
        dataclasses.replace(
            stored.metadata,
            transforms=(
                *stored.metadata.transforms,
                *_transforms.describe(options.transforms),
            ),
        ),
        step,
        _orbax.read_dataset(found, stored.digests) if has_dataset else {},
        options.layout,
        options.max_shard_bytes,
        min(_BATCH_BYTES, max(1, options.max_concurrent_bytes // 2)),
    )


def _text(leaf: Leaf) -> str:
    source = leaf.source
    return str(source.value if isinstance(source, StoredLeaf) else source)


def _work(
    stored: Stored,
    state: _targets.State,
    target: _targets.Target,
    options: Options,
    files: Sequence[_storage.Stamp],
) -> dict[str, JSON]:
    """What is made of what: equal only if what is done already can be kept."""
    rows: list[JSON] = [
        [
            _manifest.leaf_row(leaf.info),
            [
                [str(source.root), source.info.path, str(source.info)]
                for source in _stored(leaf)
            ],
        ]
        for leaf in state.table.values()
    ]
    # Of other checkpoints nobody knows whether they are still the same.
    others = [str(root) for root in _roots(state) if str(root) != stored.metadata.path]
    identity = None if stored.stamp is None else stored.stamp.identity
    content = _orbax_json.dumps([rows, _structure.to_json(state.structure)])
    return {
        "version": 1,
        "source": stored.metadata.path,
        "stamp": list(identity or ()),
        "source files": _storage.digest(repr(files).encode(errors="surrogatepass")),
        "format": options.format,
        "files": list(target.files),
        "leaves": _storage.digest(content),
        "layout": dataclasses.asdict(options.layout),
        "others": [*others, os.urandom(16).hex()] if others else [],
        "bytes": [int(state.batch_bytes), int(options.max_shard_bytes)],
    }


def _roots(state: _targets.State) -> list[Path]:
    """The checkpoints that leaves come from."""
    stored = [source for leaf in state.table.values() for source in _stored(leaf)]
    return list(dict.fromkeys(source.root for source in stored))


def _stored(leaf: Leaf) -> list[StoredLeaf]:
    return [source for source in leaf.sources if isinstance(source, StoredLeaf)]


# ---- making it --------------------------------------------------------------------


def _write(
    target: _targets.Target,
    kept: Collection[str],
    journal: _journal.Journal,
    show: Callable[[int, int], object],
) -> None:
    missing = [piece for piece in target.pieces if piece.name not in kept]
    total = sum(piece.nbytes for piece in target.pieces)
    batches = _pieces.batches(missing, target.batch_bytes)
    done = total - sum(piece.nbytes for piece in missing)
    show(done, total)
    # The next batch is read while one is written.
    waiting: list[tuple[Piece, Array]] = []
    for batch in batches:
        values: list[Array] = []
        with _threads.beside(functools.partial(_finish, target, journal, waiting)):
            values += _pieces.read(batch, max_bytes=target.batch_bytes)
        done += sum(piece.nbytes for piece, _ in waiting)
        show(done, total)
        waiting = list(zip(batch, values, strict=True))
    _finish(target, journal, waiting)
    show(total, total)


def _finish(
    target: _targets.Target,
    journal: _journal.Journal,
    ready: Sequence[tuple[Piece, Array]],
) -> None:
    if ready:
        target.write(ready)
        # Nobody can tell whether a function will be the same the next time.
        journal.add(piece.name for piece, _ in ready if piece.leaf.fn is None)


class _Shown:
    """Shows how far it is.

    Attributes:
        raised: What the caller's own function raised.
    """

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._counter = _progress.Counter(f"converting to {name}")
        self.raised: Exception | None = None

    @contextlib.contextmanager
    def begin(self) -> Iterator[Callable[[int, int], object]]:
        """While this lasts, what it gives is called with bytes done and in all."""
        if callable(self._progress):
            yield self._call
        elif self._progress == "auto":
            with _progress.shown(self._counter):
                yield self._counter.set
        elif not self._progress:
            yield lambda done, total: None
        else:
            import rich.progress

            with rich.progress.Progress(
                *rich.progress.Progress.get_default_columns(),
                rich.progress.DownloadColumn(binary_units=True),
            ) as bar:
                task = bar.add_task("converting", total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total)

    def _call(self, done: int, total: int) -> None:
        assert callable(self._progress), self._progress
        try:
            self._progress(done, total)
        except Exception as error:
            self.raised = error
            raise


def _check_current(stored: Stored, files: Sequence[_storage.Stamp]) -> None:
    if stored.stamp is not None and not stored.stamp.is_current():
        raise errors.DamagedCheckpointError(
            f"{stored.metadata.path} was replaced or deleted while it was read;"
            " convert it again"
        )
    if names := _belongings.changed(files):
        raise errors.DamagedCheckpointError(
            f"{len(names)} files were changed or deleted while they were read:\n"
            f"{errors.rows(names)}\nConvert {stored.metadata.path} again."
        )


def _publish(made: Path, final: Path, *, overwrite: bool) -> None:
    """Moves what was made to its place, in one step."""
    _belongings.check_free(final, overwrite=overwrite)
    if made.is_dir() and overwrite and final.is_dir():
        _renames.exchange(made, final)
    elif made.is_dir() and not (overwrite and final.exists()):
        _renames.publish(made, final)
    else:
        if made.is_dir() or final.is_dir():
            aside = made.with_name("replaced")
            final.rename(aside)
        made.rename(final)
        _storage.sync_directory(final.parent)
