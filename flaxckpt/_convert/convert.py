"""Conversion: from a checkpoint of one format to one of another, piece by piece.

What is made lies beside its place until all of it is durable, with a journal of what is
done: the same conversion goes on where it was interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from flaxckpt import _arrays, _checkpoint, _steps, _storage, _util, errors
from flaxckpt._arrays.blockwise import Piece
from flaxckpt._arrays.zarr.array_layout import ArrayLayout
from flaxckpt._arrays.zarr.metadata import Array
from flaxckpt._checkpoint.result import SaveResult
from flaxckpt._convert import journal as convert_journal
from flaxckpt._convert import plan, source_files, writers
from flaxckpt._convert.plan import Options
from flaxckpt._types import PathLike
from flaxckpt.formats import _locate
from flaxckpt.formats._reader import Stored
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)

TEMPORARY = ".flaxckpt-convert-tmp"
"""In the name of a directory: an unfinished conversion, no checkpoint for anybody."""


def convert(
    src: PathLike,
    dst: PathLike,
    *,
    format: Literal["orbax", "safetensors", "msgpack"] | None = None,
    transforms: Sequence[Transform] = (),
    layout: ArrayLayout | None = None,
    step: int | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = 5 * 10**9,
    max_concurrent_bytes: int = plan.DEFAULT_CONCURRENT_BYTES,
    progress: Literal["auto"] | bool | Callable[[int, int], object] = "auto",
) -> SaveResult:
    """Makes a checkpoint in another format, or in another layout, of one that is read.

    Arrays pass through memory in pieces, so that they need not fit into it. What is
    read is verified, and `dst` is there only when it is whole and durable. A conversion
    that was interrupted leaves `<dst>.flaxckpt-convert-tmp`; the same conversion goes
    on there, and any other starts over.

    ```python
    convert("run", "model.safetensors")
    ```

    Args:
        src: A checkpoint in any format that is read, or a run directory of steps.
        dst: Where the new one shall be. `safetensors`: a path that ends in
            `.safetensors` is one file; any other is a directory, with an index if the
            arrays take several files. `msgpack`: a file. `orbax`: a directory.
        format: `orbax` is what `save` writes. `safetensors` takes what we know of the
            leaves along, in text that other readers ignore: it converts back to equal
            values and types. `msgpack` is what `flax.serialization.to_bytes` writes.
            By default what `dst` ends in, `.safetensors` or `.msgpack`, else `orbax`.
        transforms: What to change on the way, as `transforms.cast`.
        layout: How arrays are cut and encoded, for `orbax`.
        step: Which step of a run directory; by default the newest.
        overwrite: Whether to replace a checkpoint that is there. A directory with
            anything else in it is never replaced.
        max_shard_bytes: Upper bound on the arrays in one file of a directory of
            safetensors; a larger array has a file of its own.
        max_concurrent_bytes: Bytes of arrays in memory at one time. Arrays are cut
            into rows and parts of rows, but chunks that are written and what transforms
            compute are not cut.
        progress: Whether to show a bar: `auto` does so on a terminal, if it takes some
            seconds. Or a function that is called with the bytes that are done and those
            in all.

    Returns:
        Where it is, its size, and the time it took.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError, DamagedCheckpointError: As for
            `load`.
        DamagedCheckpointError: Files of `src` were changed meanwhile, too.
        OptionError: `dst` is a part of what is read, or ends as another format does.
        CheckpointExistsError: `dst` is taken, or another process works there.
        UnsupportedLeafError: The format lacks the types of some leaves, or would not
            give back some values; all are named.
        LeafNameError: Leaf names collide in it, or would not come back.
        SaveFailedError: The bytes could not be written.
    """
    final = _storage.local.resolve(dst)
    options = Options(
        plan.format_of(final, format),
        transforms,
        ArrayLayout() if layout is None else layout,
        overwrite,
        max_shard_bytes,
        max_concurrent_bytes,
        progress,
    )
    return _run(_storage.local.resolve(src), step, final, options)


def _run(source: Path, step: int | None, final: Path, options: Options) -> SaveResult:
    """Converts the checkpoint at `source` into one at `final`."""
    if final.suffix.lower() != f".{options.format}":
        _checkpoint.overwrite.check_name(final, "convert")
    if not _storage.of(final).can_rename:
        return _to_store(source, step, final, options)
    begun = time.monotonic()
    located = _locate.locate(source, step)
    found, number = located.path, located.step
    source_files.check_apart(final, [found], ())
    _checkpoint.overwrite.check_target_free(final, overwrite=options.overwrite)
    files = source_files.stamps(found)
    stored = located.open()
    # Under a number of its own, it is no step of the run that it comes from.
    is_other = _steps.names.number(final.name) not in (number, None)
    state = plan.state(stored, None if is_other else number, options)
    roots = plan.roots(state)
    files += tuple([f for r in roots if r != found for f in source_files.stamps(r)])
    source_files.check_apart(final, roots, files)
    temporary = final.with_name(final.name + TEMPORARY)
    plan.check_sources(state)
    plan.check_space(final, temporary, state, options)
    target = writers.MAKERS[options.format](state, final)
    work = plan.work(stored, state, target, options, files)
    progress = _Shown(options.progress, final.name)
    try:
        with convert_journal.Journal(temporary, work) as done, progress.begin() as show:
            kept = target.begin(done.output, done.done)
            _write(target, kept, done, show)
            target.finish(done.output)
            size = _storage.local.sync_tree(done.output)
            _check_current(stored, files)
            _check_readable(done, target, number)
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
    source: Path, step: int | None, final: Path, options: Options
) -> SaveResult:
    """The same on the local disk, and from there to the store."""
    if options.format != "orbax":
        raise errors.OptionError(
            f"{final}: in stores, wanted format='orbax', found {options.format!r}:"
            " convert to a local path, and copy that"
        )
    begun = time.monotonic()
    _checkpoint.overwrite.check_target_free(final, overwrite=options.overwrite)
    with tempfile.TemporaryDirectory(prefix="flaxckpt-convert-") as directory:
        made = Path(directory) / final.name
        _run(source, step, made, options)
        size = _storage.of(final).copy_checkpoint(
            made, final, overwrite=options.overwrite
        )
    secs = time.monotonic() - begun
    return SaveResult(None, str(final), size, secs, secs)


def _rest(temporary: Path) -> str:
    if not temporary.is_dir():
        return ""
    return (
        f"\nWhat is done of it is in {temporary}: the same conversion goes on there;"
        " else remove it."
    )


def _write(
    target: writers.Target,
    kept: Collection[str],
    journal: convert_journal.Journal,
    show: Callable[[int, int], object],
) -> None:
    missing = [piece for piece in target.pieces if piece.name not in kept]
    total = sum(piece.nbytes for piece in target.pieces)
    batches = _arrays.blockwise.batches(missing, target.batch_bytes)
    done = total - sum(piece.nbytes for piece in missing)
    show(done, total)
    # The next batch is read while one is written.
    waiting: list[tuple[Piece, Array]] = []
    for batch in batches:
        values: list[Array] = []
        with _util.threads.beside(functools.partial(_finish, target, journal, waiting)):
            values += _arrays.blockwise.read(batch, max_bytes=target.batch_bytes)
        done += sum(piece.nbytes for piece, _ in waiting)
        show(done, total)
        waiting = list(zip(batch, values, strict=True))
    _finish(target, journal, waiting)
    show(total, total)


def _finish(
    target: writers.Target,
    journal: convert_journal.Journal,
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

    def __init__(self, progress: plan.Progress, name: str) -> None:
        self._progress = progress
        self._counter = _util.progress.Counter(f"converting to {name}")
        self.raised: Exception | None = None

    @contextlib.contextmanager
    def begin(self) -> Iterator[Callable[[int, int], object]]:
        """While this lasts, what it gives is called with bytes done and in all."""
        if callable(self._progress):
            yield self._call
        elif self._progress == "auto":
            with _util.progress.shown(self._counter):
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


def _check_current(stored: Stored, files: Sequence[_storage.local.Stamp]) -> None:
    if stored.stamp is not None and not stored.stamp.is_current():
        raise errors.DamagedCheckpointError(
            f"{stored.metadata.path} was replaced or deleted while it was read;"
            " convert it again"
        )
    if names := source_files.changed(files):
        raise errors.DamagedCheckpointError(
            f"{len(names)} files were changed or deleted while they were read:\n"
            f"{errors.rows(names)}\nConvert {stored.metadata.path} again."
        )


def _check_readable(
    done: convert_journal.Journal, target: writers.Target, step: int | None
) -> None:
    """Reads a new checkpoint, except its arrays, as a load would.

    Raises:
        SaveFailedError: It cannot be read, and is removed.
    """
    try:
        _locate.read_stored(done.output / target.result, step)
    except (errors.DamagedCheckpointError, errors.CheckpointFormatError) as error:
        done.forget()
        done.remove()
        raise errors.SaveFailedError(
            f"what was made cannot be read, so it is not kept: {error}\n"
            "Leave leaves out by transforms, or convert to another format."
        ) from error


def _publish(made: Path, final: Path, *, overwrite: bool) -> None:
    """Moves what was made to its place, in one step."""
    _checkpoint.overwrite.check_target_free(final, overwrite=overwrite)
    if made.is_dir() and overwrite and final.is_dir():
        _storage.rename.exchange(made, final)
    elif made.is_dir() and not (overwrite and final.exists()):
        _storage.rename.publish(made, final)
    else:
        if made.is_dir() or final.is_dir():
            aside = made.with_name("replaced")
            final.rename(aside)
        made.rename(final)
        _storage.local.sync_directory(final.parent)
