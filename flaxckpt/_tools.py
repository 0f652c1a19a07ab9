"""What is done with checkpoints outside of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from flaxckpt import _conversion, _convert, _locate, _storage, _verify, errors
from flaxckpt._findings import VerifyReport
from flaxckpt._info import ArrayLayout, SaveResult
from flaxckpt._types import PathLike
from flaxckpt.transforms import Transform


def verify(path: PathLike, *, step: int | None = None) -> VerifyReport:
    """Reads all of a checkpoint, in any format, and compares it with its checksums.

    What flaxckpt wrote is compared byte by byte: arrays with the CRC-32C of their
    chunks, all other files with the digests in the manifest. Of other formats,
    everything is read and decoded, and `unchecked` names the leaves that have no
    checksums. Little memory is taken, however large the checkpoint is.

    ```python
    report = verify("run", step=1000)
    print(report)
    assert report.ok
    ```

    Args:
        path: A checkpoint, or a run directory of steps.
        step: Which step of a run directory; by default the newest.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        CheckpointFormatError: What is there is no checkpoint.
    """
    root = _storage.resolve(path)
    try:
        found, number = _locate.locate(root, step)
    except errors.DamagedCheckpointError as error:
        return _verify.lost(root, step, error)
    return _verify.verify(found, number)


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
    max_concurrent_bytes: int = _conversion.DEFAULT_CONCURRENT_BYTES,
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
    final = _storage.resolve(dst)
    options = _conversion.Options(
        _conversion.format_of(final, format),
        transforms,
        ArrayLayout() if layout is None else layout,
        overwrite,
        max_shard_bytes,
        max_concurrent_bytes,
        progress,
    )
    return _convert.run(_storage.resolve(src), step, final, options)
