"""Conversion of a checkpoint to another format, piece by piece.

A journal lists the durable pieces in a temporary directory beside the target, so that
the same conversion continues after an interruption.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, Unpack

from flaxckpt import _arrays, _checkpoint, _steps, _storage, _util, errors
from flaxckpt._arrays.blockwise import Piece
from flaxckpt._checkpoint.save_handle import SaveResult
from flaxckpt._convert import plan, source_files, writers
from flaxckpt._convert.journal import Journal
from flaxckpt._convert.plan import ConvertOptions, SharedOptions
from flaxckpt._formats import locate, reader
from flaxckpt._formats.reader import Stored
from flaxckpt._types import PathLike
from flaxckpt._zarr.array_layout import ArrayLayout, check_layout
from flaxckpt._zarr.metadata import Array
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)

TEMPORARY = ".flaxckpt-convert-tmp"
"""Suffix of the directory of an unfinished conversion. Readers ignore it."""


@_util.guessed_names.explain
@plan.takes_options
def convert(
    src: PathLike,
    dst: PathLike,
    *,
    format: Literal["orbax", "safetensors", "msgpack"] | None = None,
    transforms: Sequence[Transform] = (),
    layout: ArrayLayout | None = None,
    items: str | Sequence[str] | None = None,
    max_shard_bytes: int = plan.MAX_SHARD_BYTES,
    **options: Unpack[SharedOptions],
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
        items: As in `save`, for `orbax`: the name of the item with the state, or the
            top-level branches that are items of their own. By default the items of
            `src`, or a single item `state` if `src` has no items, or if the leaves are
            no longer in their branches after `transforms`.
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
        permissions: Mode of all directories that are made; see `save`.

    Returns:
        The path of the new checkpoint, its size, and the duration.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError, DamagedCheckpointError: As for
            `load`.
        DamagedCheckpointError: Files of `src` changed during the conversion.
        OptionError: `permissions` is no mode, or `dst` is in an object store.
        OptionError: `dst` overlaps the source, or has the suffix of another format.
        CheckpointExistsError: `dst` exists, or another process writes to it.
        UnsupportedLeafError: The format cannot hold the types or values of some leaves;
            all are named.
        LeafNameError: Leaf names collide in the format, cannot be restored, or are in
            none of `items`.
        SaveFailedError: The bytes could not be written.
    """
    final = _storage.paths.resolve(dst)
    return convert_to(
        src,
        final,
        ConvertOptions(
            **options,
            format=plan.choose_format(final, format),
            transforms=transforms,
            layout=check_layout(layout),
            items=items,
            max_shard_bytes=max_shard_bytes,
        ),
    )


def convert_to(src: PathLike, final: Path, options: ConvertOptions) -> SaveResult:
    start = time.monotonic()
    _storage.modes.check(options.permissions, final)
    source = _storage.paths.resolve(src)
    if final.suffix.lower() != f".{options.format}":
        _checkpoint.overwrite.check_name(final, "convert")
    can_rename = _storage.of(final).can_rename
    write = _convert_to_disk if can_rename else _convert_to_store
    size = write(source, final, options)
    secs = time.monotonic() - start
    _log.info("converted %s to %s: %d bytes in %.3f s", source, final, size, secs)
    return SaveResult(
        step=None,
        path=str(final),
        bytes_written=size,
        blocked_secs=secs,
        total_secs=secs,
    )


def _convert_to_disk(source: Path, final: Path, options: ConvertOptions) -> int:
    """Converts the checkpoint at `source` to `final`; returns the written bytes."""
    located = locate.locate(source, options.step)
    source, number = located.path, located.step
    source_files.check_apart(final, [source], ())
    _check_target_free(final, options)
    files = source_files.stamps(source)
    stored = located.open()
    stored.check_items(stored.metadata.damaged_items.keys() - stored.left_out)
    saved_as = stored.recorded_step if number is None else number
    # With another step number, the new checkpoint is not a step of the source's run.
    is_other = _steps.names.number(final.name) not in (saved_as, None)
    state = plan.make_state(stored, None if is_other else saved_as, options)
    roots = plan.source_roots(state)
    files += tuple([f for r in roots if r != source for f in source_files.stamps(r)])
    source_files.check_apart(final, roots, files)
    temporary = final.with_name(final.name + TEMPORARY)
    plan.check_sources(state)
    plan.check_space(final, temporary, state, options)
    target = writers.WRITERS[options.format](state, final)
    work = plan.describe_work(stored, state, target, options, files)
    progress = _Progress(options.progress, final.name)
    try:
        with (
            Journal(temporary, work, mode=options.permissions) as journal,
            progress.display() as show,
        ):
            output = journal.output
            kept = target.begin(output, journal.done)
            with _checkpoint.completeness.explain_parts(source):
                _write_pieces(target, kept, journal, show)
            target.finish(output)
            if options.permissions is not None:
                _storage.modes.set_below(output, options.permissions)
            size = _storage.of(output).sync_tree(output)
            _check_current(stored, files)
            _check_readable(journal, target, number)
            journal.forget()
            _check_target_free(final, options)
            _publish(output / target.result, final, overwrite=options.overwrite)
            journal.remove()
    except errors.CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        if error is progress.raised:
            raise
        hint = ""
        if temporary.is_dir():
            hint = (
                f"\nThe finished part is in {temporary}: the same conversion continues"
                " there; otherwise remove it."
            )
        raise errors.SaveFailedError(
            f"{source} could not be converted to {final}: {errors.one_line(error)}"
            f"{hint}"
        ) from error
    return size


def _convert_to_store(source: Path, final: Path, options: ConvertOptions) -> int:
    """Converts to the local disk, and uploads the result; returns the written bytes."""
    if options.format != "orbax":
        raise errors.OptionError(
            f"{final}: wanted format='orbax' in a store, found {options.format!r}:"
            " convert to a local path, then copy the result"
        )
    _check_target_free(final, options)
    with tempfile.TemporaryDirectory(prefix="flaxckpt-convert-") as directory:
        local = Path(directory) / final.name
        _convert_to_disk(source, local, options)
        with _checkpoint.commit.replacing(
            final,
            overwrite=options.overwrite,
            check=lambda path: _check_target_free(path, options),
        ) as new:
            return new.commit(new.copy(local)).size


def _check_target_free(final: Path, options: ConvertOptions) -> None:
    _checkpoint.overwrite.check_target_free(
        final, overwrite=options.overwrite, replaced=options.files.names
    )


def _write_pieces(
    target: writers.Target,
    kept: Collection[str],
    journal: Journal,
    show: Callable[[int, int], object],
) -> None:
    missing = [piece for piece in target.pieces if piece.name not in kept]
    total = sum(piece.nbytes for piece in target.pieces)
    batches = _arrays.blockwise.batches(missing, target.batch_bytes)
    done = total - sum(piece.nbytes for piece in missing)
    show(done, total)
    # Reads the next batch while the previous batch is written.
    ready: list[tuple[Piece, Array]] = []

    def write() -> None:
        if ready:
            target.write(ready)
            journal.add(piece.name for piece, _ in ready)

    for batch in batches:
        values: list[Array] = []
        with _util.threads.beside(write):
            values += _arrays.blockwise.read(batch, max_bytes=target.batch_bytes)
        done += sum(piece.nbytes for piece, _ in ready)
        show(done, total)
        ready = list(zip(batch, values, strict=True))
    write()
    show(total, total)


class _Progress:
    """Progress of a conversion; `raised` is the error of the caller's function."""

    def __init__(self, progress: plan.Progress, name: str) -> None:
        self._progress = progress
        self._counter = _util.progress.Counter(f"converting to {name}")
        self.raised: Exception | None = None

    @contextlib.contextmanager
    def display(self) -> Iterator[Callable[[int, int], object]]:
        """Yields a function to call with the bytes done and the total bytes."""
        if callable(self._progress):
            yield self._call
        elif self._progress == "auto":
            with _util.progress.bar(self._counter):
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
    reader.check_current(stored.metadata.path, stored.stamp, "convert")
    if names := source_files.changed(files):
        raise errors.DamagedCheckpointError(
            f"{_util.humanize.count(len(names), 'file was', 'files were')} changed or"
            " deleted during the conversion:\n"
            f"{errors.rows(names)}\nConvert {stored.metadata.path} again."
        )


def _check_readable(journal: Journal, target: writers.Target, step: int | None) -> None:
    """Raises SaveFailedError for an unreadable new checkpoint, and removes it."""
    try:
        locate.read_stored(journal.output / target.result, step)
    except (errors.DamagedCheckpointError, errors.CheckpointFormatError) as error:
        journal.forget()
        journal.remove()
        raise errors.SaveFailedError(
            f"the new checkpoint is unreadable, and was removed: {error}\n"
            "Drop leaves with transforms, or convert to another format."
        ) from error


def _publish(output: Path, final: Path, *, overwrite: bool) -> None:
    if output.is_dir() and overwrite and final.is_dir():
        _storage.rename.exchange(output, final)
    elif output.is_dir() and not (overwrite and final.exists()):
        _storage.rename.publish(output, final)
    else:
        if output.is_dir() or final.is_dir():
            aside = output.with_name("replaced")
            final.rename(aside)
        output.rename(final)
        _storage.of(final.parent).sync_directory(final.parent)
