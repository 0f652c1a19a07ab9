"""Supported checkpoint formats; `detect` returns the format of a path."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple, NoReturn

from flaxckpt import _steps, _storage, errors
from flaxckpt._types import PathLike
from flaxckpt.formats import _signatures, _t5x
from flaxckpt.formats._msgpack import reader as msgpack_reader
from flaxckpt.formats._msgpack import stream
from flaxckpt.formats._native import checkpoint, items
from flaxckpt.formats._npz import reader as npz_reader
from flaxckpt.formats._reader import Reader
from flaxckpt.formats._safetensors import reader as safetensors_reader

__all__ = ["Detected", "detect", "recognises"]

READERS: dict[str, Reader] = {
    # Old Orbax checkpoints have a file with the same name as T5X's, but other keys.
    "t5x": _t5x,
    "orbax": checkpoint,
    "safetensors": safetensors_reader,
    "npz": npz_reader,
    "streaming": stream,
    # After T5X, whose single files are msgpack maps, too.
    "msgpack": msgpack_reader,
}
"""Format name -> reader, in the order in which `identify` tries them."""

_READ_HERE = (
    "flaxckpt or Orbax (a directory with a _METADATA file in it or in its state/),"
    " T5X (a directory with a file 'checkpoint'), safetensors (a file, or a directory"
    " with an index), an .npz of numpy (a file), Flax's old msgpack (a file), or a"
    " stream of EasyLM or fjformer (a file)"
)


def _readers(path: Path) -> dict[str, Reader]:
    """Returns the readers for the storage of `path`.

    On an object store only Orbax: the other readers map files, or follow links.
    """
    return READERS if _storage.of(path).can_map else {"orbax": checkpoint}


class Detected(NamedTuple):
    """A recognised checkpoint format.

    Attributes:
        format: Name of the format, such as `orbax`.
        why: The evidence, such as a file name.
        reader: The reader of the format.
    """

    format: str
    why: str
    reader: Reader

    def __str__(self) -> str:
        return f"{self.format}: {self.why}"


def identify(path: Path) -> Detected | None:
    """Returns the format of the checkpoint `path`; None if not recognised."""
    with _storage.permissions.reading(path), _storage.paths.listing_cache(path):
        for name, reader in _readers(path).items():
            if why := reader.recognises(path):
                return Detected(name, why, reader)
    return None


def recognises(path: Path) -> bool:
    """Returns True if `path` is a checkpoint in a supported format."""
    return identify(path) is not None


def detect(path: PathLike) -> Detected:
    """Returns the format of the checkpoint `path`, and the evidence for it.

    Args:
        path: A checkpoint, as a directory or a file.

    Raises:
        CheckpointNotFoundError: The path does not exist, or is not committed yet.
        CheckpointFormatError: The path is not a checkpoint in a supported format.
        DamagedCheckpointError: The checkpoint is incomplete, or may not be read.
    """
    path = _storage.paths.resolve(path)
    with _storage.permissions.reading(path), _storage.paths.listing_cache(path):
        return _detect(path)


def _detect(path: Path) -> Detected:
    if not path.exists():
        raise errors.CheckpointNotFoundError(
            f"there is no checkpoint at {path}: "
            + (
                "a save to it is under way, or was cut off, and is not committed"
                if path.parent.is_dir() and is_being_written(path)
                else "the path does not exist"
            )
        )
    return identify(path) or _explain_unrecognised(path)


def _explain_unrecognised(path: Path) -> NoReturn:
    """Raises the error for an existing path without a recognised checkpoint."""
    if path.is_dir() and (steps := _steps.index.StepIndex(path, identify).steps):
        raise errors.CheckpointFormatError(
            f"{path} is no checkpoint but a directory of {len(steps)} steps: pass one"
            f" of them, as {steps[max(steps)]}"
        )
    if is_being_written(path):
        raise errors.CheckpointNotFoundError(
            f"there is no checkpoint at {path} yet: a save to it is under way, or was"
            " cut off, and is not committed"
        )
    if path.is_dir() and (advice := advice_on_saves(path)):
        raise errors.CheckpointNotFoundError(
            f"{path} has no committed step yet: {advice}"
        )
    if path.is_dir() and _storage.of(path).names(path) == [_steps.journal.NAME]:
        raise errors.CheckpointNotFoundError(
            f"{path} has no committed step yet: a run has only begun there"
        )
    if path.is_dir() and items.is_json_item(path):
        raise errors.CheckpointFormatError(
            f"{path} is an item of JSON, which Orbax's JsonSave wrote, and no tree of"
            f" arrays: {items.json_advice(path)}"
        )
    mark = _steps.index.sign(path) if path.is_dir() else None
    if mark and not _storage.of(path).is_committed(path):
        raise errors.DamagedCheckpointError(
            f"{path} has {mark}, but no {_storage.commit_marker.MARKER}, without which"
            " nothing in a"
            " store counts: it was not finished, or not copied whole; restore another"
            " step"
        )
    if mark:
        raise errors.DamagedCheckpointError(
            f"{path} has the file {mark}, so it was a checkpoint, but neither"
            f" state/_METADATA nor another description of its leaves is there; found"
            f" {_content(path)}; restore another step"
        )
    if _readers(path) is not READERS:
        raise errors.CheckpointFormatError(
            f"{path} is no checkpoint that is read from a store: wanted one of flaxckpt"
            f" or Orbax, with {_storage.commit_marker.MARKER} in it; found"
            f" {_content(path)}. Copy"
            " those of other formats to a disk first"
        )
    if refused := _refused(path):
        raise errors.CheckpointFormatError(f"{path} is {refused}")
    raise errors.CheckpointFormatError(
        f"{path} is no checkpoint that is read here: wanted one of {_READ_HERE}; found"
        f" {_content(path)}"
    )


def _refused(path: Path) -> str | None:
    """Describes content in a known but unsupported form, with advice; else None."""
    if path.is_dir():
        if flax := _of_clu(path):
            return flax
        if _signatures.first_bytes(path / "checkpoint").startswith(_TENSORFLOW) or any(
            path.glob("*.ckpt*.index")
        ):
            return _OF_TENSORFLOW
        return safetensors_reader.refusal(path) or _with_points(path) or _above(path)
    first = _signatures.first_bytes(path)
    if first.startswith(_TENSORFLOW) or path.with_name(path.name + ".index").is_file():
        return _OF_TENSORFLOW
    if path.suffix == ".index" or ".data-" in path.suffix:
        return _OF_TENSORFLOW
    if first.startswith(_signatures.LFS):
        return _signatures.OF_LFS
    if first[:1] == b"\x80" and b"\x02" <= first[1:2] <= b"\x05":
        return f"a pickle. {_OF_PICKLES}"
    if first.startswith(_signatures.ARCHIVE):
        return (
            "a zip archive that does not begin with an array of numpy, and may hold"
            f" pickles, as torch's do. {_OF_PICKLES}"
        )
    if first.startswith(_signatures.ARRAY):
        return (
            "a single numpy array, without a name: wanted an .npz, which has names."
            " Read it with numpy.load(path, allow_pickle=False), and save it with"
            " numpy.savez(new_path, name=array)"
        )
    if _signatures.begins_with_array(path):
        return (
            "a single array in msgpack, without a name: wanted a map of names and"
            " values. Read it with flax.serialization.msgpack_restore, and save it in"
            " one"
        )
    return None


def _of_clu(directory: Path) -> str | None:
    """Describes a directory written by `clu.checkpoint`."""
    found = {path.name: path for path in directory.glob("*-*.flax")}
    numbers = {name[:-5].rpartition("-")[2]: name for name in found}
    if plain := [number for number in numbers if number.isdecimal()]:
        newest = found[numbers[max(plain, key=int)]]
        return (
            "a directory of clu.checkpoint, which has each state in a file: pass the"
            f" path of one, such as {newest}"
        )
    return None


def _with_points(directory: Path) -> str | None:
    """Describes a directory of steps with a decimal point in their numbers."""
    found = sorted(p for p in directory.glob("*[0-9].[0-9]*") if p.name[-1].isdigit())
    if step := next(filter(recognises, found[-_MAX_TRIED:]), None):
        return (
            "a directory of steps whose numbers have a point, which no step= can mean:"
            f" pass the path of one, such as {step}"
        )
    return None


def _above(directory: Path) -> str | None:
    """Describes a directory of checkpoints without step names, or of runs."""
    if (found := _below(directory)) is None:
        return _of_runs(directory)
    return (
        "a directory with checkpoints in it that are not called like steps: pass"
        f" the path of one, such as {found}{advice_on_names(directory)}"
    )


def _of_runs(directory: Path) -> str | None:
    """Describes a directory of run directories; None if no run is found."""
    children = sorted(child for child in directory.iterdir() if child.is_dir())
    for child in children[:_MAX_TRIED]:
        with contextlib.suppress(errors.CheckpointError, OSError):
            if _steps.index.StepIndex(child, identify).steps:
                return f"a directory of runs: pass the path of one, such as {child}"
    return None


def advice_on_names(directory: Path) -> str:
    """Returns advice for a directory of steps with unusual names.

    Empty if no checkpoint in the directory may be a step.
    """
    found = _steps.index.checkpoints_by_number(directory, identify)
    names = [path.name for paths in found.values() for path in paths]
    if not names:
        return ""
    name = errors.printable(min(names))
    prefix = name.rstrip("0123456789")
    digits = name.removeprefix(prefix)
    field = f"{{step:0{len(digits)}d}}" if digits[:-1].startswith("0") else "{step}"
    return (
        f". If {name} is a step of a run, say how its steps are called:"
        f" Checkpointer(…, step_format='{prefix}{field}'), or --step-format of the"
        " command"
    )


def is_being_written(path: Path) -> bool:
    """Returns True if `path` has an unfinished save and no committed checkpoint."""
    if _storage.of(path).is_committed(path):
        return False
    return path.name in _storage.temporary.unfinished_names(path.parent)


def advice_on_saves(directory: Path) -> str:
    """Describes the unfinished saves under a directory; empty without any."""
    names = _storage.temporary.unfinished_names(directory)
    if not names:
        return ""
    return (
        f"a save of {errors.first_few(names)} is under way, or was cut off; wait until"
        " it is committed"
    )


def _below(directory: Path) -> Path | None:
    """Returns a checkpoint among the first entries of a directory, or None."""
    children = sorted(
        (c for c in directory.iterdir() if _storage.temporary.TEMPORARY not in c.name),
        key=lambda path: (not path.is_dir(), path.name),
    )
    for child in children[:_MAX_TRIED]:
        with contextlib.suppress(errors.CheckpointFormatError):
            if recognises(child):
                return child
    return None


_MAX_TRIED = 20
_OF_PICKLES = (
    "Pickles run code when they are opened, so none ever is here; save the arrays in"
    " another format, such as numpy.savez or safetensors, with the program that wrote"
    " it"
)
_TENSORFLOW = b"model_checkpoint_path"
_OF_TENSORFLOW = (
    "a TensorFlow checkpoint, which is not read here: load it with tf.train or with"
    " T5X's importer, and save the arrays from there"
)


def _content(path: Path) -> str:
    if path.is_file():
        first = _signatures.first_bytes(path)
        if first and not any(first):
            return "a file that begins with zeros, as if never written to the disk"
        return f"a file that begins with {first[:8]!r}" if first else "an empty file"
    if not path.is_dir():
        return "no plain file"
    names = sorted(child.name for child in path.iterdir())
    return (
        f"a directory with {errors.first_few(names)}" if names else "an empty directory"
    )
