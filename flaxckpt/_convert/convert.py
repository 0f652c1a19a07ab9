"""Conversion of a checkpoint to another format, piece by piece.

The new checkpoint is written to a temporary directory beside its target until all of it
is durable. A journal lists the durable pieces, so that the same conversion continues
after an interruption.
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
from flaxckpt._checkpoint.handle import SaveResult
from flaxckpt._convert import journal as convert_journal
from flaxckpt._convert import plan, source_files, writers
from flaxckpt._convert.plan import ConvertOptions
from flaxckpt._types import PathLike
from flaxckpt.formats import _locate
from flaxckpt.formats._reader import Stored
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)

TEMPORARY = ".flaxckpt-convert-tmp"
"""Suffix of the directory of an unfinished conversion. Readers ignore it."""


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
    """Converts a checkpoint to another format or array layout.

    Arrays pass through memory in pieces, so the checkpoint may be larger than the
    memory. The source is verified while it is read, and `dst` appears only when it is
    complete and durable. An interrupted conversion leaves
    `<dst>.flaxckpt-convert-tmp`; the same call continues there, and a different
    conversion starts over.

    ```python
    convert("run", "model.safetensors")
    ```

    Args:
        src: A checkpoint in any supported format, or a run directory.
        dst: Path of the new checkpoint. `safetensors`: a path that ends in
            `.safetensors` is one file; any other path is a directory, with an index if
            the arrays take several files. `msgpack`: a file. `orbax`: a directory.
        format: `orbax` is the format of `save`. `safetensors` includes the metadata of
            the leaves, in text that other readers ignore: it converts back to equal
            values and types. `msgpack` is the format of
            `flax.serialization.to_bytes`. By default from the suffix of `dst`,
            `.safetensors` or `.msgpack`, else `orbax`.
        transforms: Changes to apply, such as `transforms.cast`.
        layout: Chunks and encoding of arrays, for `orbax`.
        step: Step of a run directory; by default the newest.
        overwrite: Whether to replace an existing checkpoint. A directory with any
            other files is never replaced.
        max_shard_bytes: Upper bound on the arrays in one file of a directory of
            safetensors; a larger array has a file of its own.
        max_concurrent_bytes: Bytes of arrays in memory at one time. Arrays are split
            into rows and parts of rows, but written chunks and computed leaves are not
            split.
        progress: Whether to show a progress bar: `auto` shows it on a terminal after
            some seconds. Or a function called with the bytes done and the total bytes.

    Returns:
        The path of the new checkpoint, its size, and the duration.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError, DamagedCheckpointError: As for
            `load`.
        DamagedCheckpointError: Files of `src` changed during the conversion.
        OptionError: `dst` overlaps the source, or has the suffix of another format.
        CheckpointExistsError: `dst` exists, or another process writes to it.
        UnsupportedLeafError: The format cannot hold the types or values of some leaves;
            all are named.
        LeafNameError: Leaf names collide in the format, or cannot be restored.
        SaveFailedError: The bytes could not be written.
    """
    final = _storage.paths.resolve(dst)
    options = ConvertOptions(
        plan.format_of(final, format),
        transforms,
        ArrayLayout() if layout is None else layout,
        overwrite,
        max_shard_bytes,
        max_concurrent_bytes,
        progress,
    )
    return _run(_storage.paths.resolve(src), step, final, options)


def _run(
    source: Path, step: int | None, final: Path, options: ConvertOptions
) -> SaveResult:
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
            size = _storage.of(done.output).sync_tree(done.output)
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
            f"{found} could not be converted to {final}:"
            f" {' '.join(str(error).split())[:300]}{_rest(temporary)}"
        ) from error
    secs = time.monotonic() - begun
    _log.info("converted %s to %s: %d bytes in %.3f s", found, final, size, secs)
    return SaveResult(None, str(final), size, secs, secs)


def _to_store(
    source: Path, step: int | None, final: Path, options: ConvertOptions
) -> SaveResult:
    """Converts on the local disk, then uploads the result to an object store."""
    if options.format != "orbax":
        raise errors.OptionError(
            f"{final}: in stores, wanted format='orbax', found {options.format!r}:"
            " convert to a local path, and copy the result"
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
        f"\nThe finished part is in {temporary}: the same conversion continues there;"
        " otherwise remove it."
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
    # Reads the next batch while the previous batch is written.
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
        # A function may differ at the next call, so its results are not kept.
        journal.add(piece.name for piece, _ in ready if piece.leaf.fn is None)


class _Shown:
    """Progress of a conversion.

    Attributes:
        raised: The exception raised by the caller's progress function.
    """

    def __init__(self, progress: plan.Progress, name: str) -> None:
        self._progress = progress
        self._counter = _util.progress.Counter(f"converting to {name}")
        self.raised: Exception | None = None

    @contextlib.contextmanager
    def begin(self) -> Iterator[Callable[[int, int], object]]:
        """Yields a function to call with the bytes done and the total bytes."""
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


def _check_current(stored: Stored, files: Sequence[_storage.Stamp]) -> None:
    if stored.stamp is not None and not stored.stamp.is_current():
        raise errors.DamagedCheckpointError(
            f"{stored.metadata.path} was replaced or deleted during the conversion;"
            " convert it again"
        )
    if names := source_files.changed(files):
        raise errors.DamagedCheckpointError(
            f"{len(names)} files were changed or deleted during the conversion:\n"
            f"{errors.rows(names)}\nConvert {stored.metadata.path} again."
        )


def _check_readable(
    done: convert_journal.Journal, target: writers.Target, step: int | None
) -> None:
    """Reads the metadata of the new checkpoint, like a load.

    Raises:
        SaveFailedError: The new checkpoint is unreadable, and was removed.
    """
    try:
        _locate.read_stored(done.output / target.result, step)
    except (errors.DamagedCheckpointError, errors.CheckpointFormatError) as error:
        done.forget()
        done.remove()
        raise errors.SaveFailedError(
            f"the new checkpoint is unreadable, and was removed: {error}\n"
            "Drop leaves with transforms, or convert to another format."
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
        _storage.of(final.parent).sync_directory(final.parent)
