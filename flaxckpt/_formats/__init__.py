"""Supported checkpoint formats; `detect` returns the format of a path."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

from flaxckpt import _doors, _steps, _storage, _util, errors
from flaxckpt._formats import hub_cache, items, recognise, shards
from flaxckpt._formats import signatures as _signatures
from flaxckpt._formats.safetensors import files as safetensors_files
from flaxckpt._types import PathLike

if TYPE_CHECKING:
    from flaxckpt._formats import (
        file_layout,
        locate,
        msgpack,
        native,
        native_contents,
        native_manifest,
        native_metadata,
        native_names,
        orbax_aggregate,
        orbax_json,
        reader,
        safetensors,
    )
    from flaxckpt._formats.reader import Reader


class _Format(NamedTuple):
    """A format that can be read; the module of its reader is imported on first use.

    Attributes:
        recognise: Returns the evidence for a checkpoint at a path; None without any.
        looks: What its checkpoints look like, for messages.
        is_in_stores: Whether it can be read in object stores. The other readers map
            files, or follow links.
        is_in_shards: Whether its files may be shards, and in the cache of a hub.
    """

    recognise: Callable[[Path], str | None]
    reader: str
    looks: str
    is_in_stores: bool = False
    is_in_shards: bool = False


# In the order in which `identify` tries them.
_FORMATS = {
    # Old Orbax checkpoints have a file with the same name as T5X's, but other keys.
    "t5x": _Format(recognise.t5x, "t5x", "T5X (a directory with a file 'checkpoint')"),
    "orbax": _Format(
        items.recognises,
        "native",
        "flaxckpt or Orbax (a directory with a _METADATA file in it or in its state/)",
        is_in_stores=True,
    ),
    # Before safetensors, which also goes by the suffix.
    "gguf": _Format(recognise.gguf, "gguf.reader", "GGUF (a file)"),
    "safetensors": _Format(
        safetensors_files.recognises,
        "safetensors.reader",
        "safetensors (a file, or a directory with an index)",
        is_in_shards=True,
    ),
    "npz": _Format(recognise.npz, "npz.reader", "an .npz of numpy (a file)"),
    "streaming": _Format(
        recognise.streaming, "msgpack.stream", "a stream of EasyLM or fjformer (a file)"
    ),
    # After T5X, whose single files are msgpack maps, too.
    "msgpack": _Format(
        recognise.msgpack,
        "msgpack.reader",
        "Flax's old msgpack (a file)",
        is_in_shards=True,
    ),
    # After T5X and Orbax, whose steps have arrays of zarr 2 beside other files.
    "big_vision": _Format(
        recognise.big_vision, "big_vision", "big_vision (a directory of zarr arrays)"
    ),
}

IN_SHARDS = tuple(name for name, each in _FORMATS.items() if each.is_in_shards)
"""Formats whose files may be shards with an index."""

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)

_MAX_TRIED = 20
"""The most entries of a directory to try for an error message."""


class DetectedFormat(NamedTuple):
    """A recognised checkpoint format.

    Attributes:
        format: Name of the format, such as `orbax`.
        why: The evidence, such as a file name.
    """

    format: str
    why: str

    @property
    def reader(self) -> Reader:
        """The reader of the format."""
        return _import_reader(self.format)

    def __str__(self) -> str:
        return f"{self.format}: {self.why}"


@functools.cache
def _import_reader(format_name: str) -> Reader:
    module = _doors.import_module(f"{__name__}.{_FORMATS[format_name].reader}")
    return cast("Reader", module)


def identify(path: Path) -> DetectedFormat | None:
    with _storage.read_errors.reading(path), _storage.paths.listing_cache(path):
        return find_format(path)


def find_format(path: Path) -> DetectedFormat | None:
    """Returns the result of `identify`, while the caller reads `path`."""
    is_in_store = not _storage.of(path).can_map
    for name, each in _FORMATS.items():
        if is_in_store and not each.is_in_stores:
            continue
        if why := each.recognise(path):
            return DetectedFormat(name, why)
    return None


def exists(path: Path) -> bool:
    """Returns True if `path` exists, or a pointer that stands for it."""
    return path.exists() or is_pointer(path)


def is_pointer(path: Path) -> bool:
    """Returns True if `path` is no checkpoint itself, but stands for another."""
    return _storage.of(path).can_map and recognise.follow(path) != path


def follow(path: Path) -> Path:
    """Returns the checkpoint that a pointer stands for; other paths as they are."""
    if not is_pointer(path):
        return path
    checkpoint = recognise.follow(path)
    if not checkpoint.is_dir():
        raise errors.DamagedCheckpointError(
            f"{recognise.find_pointer(path)} names the checkpoint {checkpoint}, which"
            " is missing: pass the path of another"
        )
    return checkpoint


def recognises(path: Path) -> bool:
    """Returns True if `path` is a checkpoint in a supported format."""
    return identify(path) is not None


def detect(path: PathLike) -> DetectedFormat:
    """Returns the format of the checkpoint `path`, and the evidence for it.

    Raises:
        CheckpointNotFoundError: The path does not exist, or is not committed yet.
        CheckpointFormatError: The path is not a checkpoint in a supported format.
        DamagedCheckpointError: The checkpoint is incomplete, or may not be read.
    """
    path = _storage.paths.resolve(path)
    with _storage.read_errors.reading(path), _storage.paths.listing_cache(path):
        detected = find_format(path) if exists(path) else None
        return detected or _explain_unrecognised(path)


def _explain_unrecognised(path: Path) -> NoReturn:
    """Raises the error for a path without a recognised checkpoint."""
    is_dir = path.is_dir()
    if is_dir and (steps := _steps.index.StepIndex(path, identify).steps):
        raise errors.CheckpointFormatError(
            f"{path} is a directory of {_util.humanize.count(len(steps), 'step')}, not"
            f" a checkpoint: pass one of them, such as {steps[max(steps)]}"
        )
    if path.parent.is_dir() and is_being_written(path):
        raise errors.CheckpointNotFoundError(
            f"there is no checkpoint at {path} yet: a save to it is under way, or was"
            " interrupted, and is not committed"
        )
    if not path.exists():
        raise errors.CheckpointNotFoundError(
            f"there is no checkpoint at {path}: the path does not exist"
            f"{_suggest_near(path)}"
        )
    if is_dir and (advice := advice_on_saves(path)):
        raise errors.CheckpointNotFoundError(
            f"{path} has no committed step yet: {advice}"
        )
    if is_dir and has_only_begun(path):
        kind = "an empty directory, which has no steps yet"
        if any(path.iterdir()):
            kind = "the directory of a run that has no steps yet"
        raise errors.CheckpointNotFoundError(
            f"{path} is {kind}: save one first, or check the path"
        )
    if is_dir and (file := items.find_json(path)):
        raise errors.CheckpointFormatError(
            f"{path} is a JSON item of Orbax, not a tree of arrays:"
            f" {items.json_advice(file)}"
        )
    marker = _storage.transaction.MARKER
    sign = _steps.index.sign(path) if is_dir else None
    if sign and not _storage.transaction.is_committed(path):
        raise errors.DamagedCheckpointError(
            f"{path} has {sign}, but not {marker}, which completes a checkpoint in a"
            " store: it was not finished, or not copied as a whole; restore another"
            " step"
        )
    if sign:
        raise errors.DamagedCheckpointError(
            f"{path} was a checkpoint, as it has the file {sign}, but the description"
            f" of its leaves is missing: wanted state/_METADATA, found"
            f" {_describe_content(path)}; restore another step"
        )
    if not _storage.of(path).can_map:
        raise errors.CheckpointFormatError(
            f"{path} is not a checkpoint that can be read from a store: wanted flaxckpt"
            f" or Orbax, with the file {marker}; found {_describe_content(path)}. Copy"
            " checkpoints of other formats to a disk first"
        )
    if is_dir:
        for name in IN_SHARDS:
            shards.check_index(path, f".{name}")
    if description := _describe_unsupported(path):
        raise errors.CheckpointFormatError(f"{path} is {description}")
    ours_first = sorted(_FORMATS.values(), key=lambda each: not each.is_in_stores)
    *supported, last = (each.looks for each in ours_first)
    raise errors.CheckpointFormatError(
        f"{path} is not a checkpoint of a supported format: wanted"
        f" {', '.join(supported)}, or {last}; found"
        f" {_describe_content(path)}"
    )


def _suggest_near(path: Path) -> str:
    """Returns a question about an existing path whose names, not numbers, differ."""
    storage = _storage.of(path)
    if storage.costs_requests:
        return ""
    above = next(parent for parent in path.parents if parent.is_dir())
    wanted = path.relative_to(above).parts
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = storage.names(above)
    numbers = _NUMBERS.findall(wanted[0])
    alike = [name for name in names if _NUMBERS.findall(name) == numbers]
    for name in difflib.get_close_matches(wanted[0], alike[:_NEAREST_AMONG], n=1):
        near = above.joinpath(name, *wanted[1:])
        if near.exists():
            return f"; did you mean {near}?"
    return ""


_NUMBERS = re.compile("[0-9]+")
_NEAREST_AMONG = 5_000


def _describe_content(path: Path) -> str:
    if path.is_file():
        start = _signatures.read_start(path)
        if start and not any(start):
            return "a file that begins with zeros, as if never written to the disk"
        return f"a file that begins with {start[:8]!r}" if start else "an empty file"
    if not path.is_dir():
        return "neither a file nor a directory"
    names = sorted(child.name for child in path.iterdir())
    return (
        f"a directory with {errors.first_few(names)}" if names else "an empty directory"
    )


_BEFORE_STEPS = (
    _steps.journal.NAME,
    _steps.journal.STATISTICS,
    "metadata",
    "params_only",
)


def has_only_begun(root: Path) -> bool:
    """Returns True for a directory with only the files of a run before any step."""
    return all(
        child.name in _BEFORE_STEPS
        or _storage.temporary.TEMPORARY in child.name
        or _is_empty(child)
        for child in root.iterdir()
    )


def _is_empty(path: Path) -> bool:
    """Returns True for an empty directory; committed steps are never empty."""
    return path.is_dir() and not any(path.iterdir())


# ---- known but unsupported ----------------------------------------------------------


_ABOUT_PICKLES = (
    "Pickles run code when they are opened, so flaxckpt never opens one; save the"
    " arrays in another format, such as numpy.savez or safetensors, with the program"
    " that wrote it"
)
_ABOUT_TORCH = (
    f"{_ABOUT_PICKLES}: safetensors.torch.save_file(torch.load(path,"
    " weights_only=True), new_path) for a state_dict"
)
_OF_TORCH = (".pt", ".pth", ".ckpt", ".bin")
_ABOUT_KERAS = (
    "Of a model of Keras, load it with keras.saving.load_model(path), or its weights"
    " with model.load_weights(path), and save it here with"
    " flaxckpt.integrations.keras"
)
_HDF5 = b"\x89HDF\r\n\x1a\n"
_TENSORFLOW = b"model_checkpoint_path"
_TENSORFLOW_CHECKPOINT = (
    "a TensorFlow checkpoint, which flaxckpt does not read: load it with tf.train or"
    " with T5X's importer, and save the arrays from there"
)


def _describe_unsupported(path: Path) -> str | None:
    """Describes content in a known but unsupported form, with advice; else None."""
    if path.is_dir():
        if description := _describe_clu(path):
            return description
        if _signatures.read_start(path / "checkpoint").startswith(_TENSORFLOW) or any(
            path.glob("*.ckpt*.index")
        ):
            return _TENSORFLOW_CHECKPOINT
        return (
            hub_cache.describe_model(path)
            or _describe_torch_model(path)
            or safetensors_files.describe_ambiguity(path)
            or shards.describe_indices(path, ".msgpack")
            or _describe_decimal_steps(path)
            or _describe_parent(path)
            or _describe_runs(path)
        )
    start = _signatures.read_start(path)
    if (
        start.startswith(_TENSORFLOW)
        or path.with_name(path.name + ".index").is_file()
        or path.suffix == ".index"
        or ".data-" in path.suffix
    ):
        return _TENSORFLOW_CHECKPOINT
    if stand_in := _signatures.describe_stand_in(start):
        return stand_in
    if start[:1] == b"\x80" and b"\x02" <= start[1:2] <= b"\x05":
        if path.suffix in _OF_TORCH:
            return f"a file of torch, a pickle. {_ABOUT_TORCH}"
        return f"a pickle. {_ABOUT_PICKLES}"
    if start.startswith(_signatures.ARCHIVE):
        return _describe_archive(path)
    if start.startswith(_HDF5):
        return _describe_hdf5(path)
    if path.suffix == ".eqx" or _signatures.holds_arrays(path):
        return (
            "a file of Equinox, the leaves of a model without names. Load it with"
            " equinox.tree_deserialise_leaves(path, model) into a model of its class,"
            " and save that here: flaxckpt.save(new_path, equinox.filter(model,"
            " equinox.is_array))"
        )
    if start.startswith(_signatures.ARRAY):
        return (
            "a single numpy array, without a name: wanted an .npz, which has names."
            " Read it with numpy.load(path, allow_pickle=False), and save it with"
            " numpy.savez(new_path, name=array)"
        )
    if _signatures.begins_with_array(path):
        return (
            "a single array in msgpack, without a name: wanted a map of names and"
            " values. Read it with flax.serialization.msgpack_restore, and save it in"
            " a dict"
        )
    return None


def _describe_archive(path: Path) -> str:
    """Describes a zip archive that is not one of numpy."""
    first = _signatures.first_member(path)
    if path.suffix == ".keras" or first in ("metadata.json", "config.json"):
        return f"a model of Keras in a zip archive. {_ABOUT_KERAS}"
    if first.endswith("data.pkl") or path.suffix in _OF_TORCH:
        return f"a file of torch, a zip archive with pickles. {_ABOUT_TORCH}"
    return (
        f"a zip archive whose first member is {errors.printable(first)!r:.80}, not a"
        " numpy array: if a checkpoint is in it, unpack it, and pass its path. An .npz"
        " is read as it is; of torch's archives, which hold pickles, save the arrays in"
        " another format with torch"
    )


def _describe_hdf5(path: Path) -> str:
    if path.name.endswith((".weights.h5", ".keras")):
        return f"a file of weights of Keras, in HDF5. {_ABOUT_KERAS}"
    return (
        "an HDF5 file, as Keras, h5py and other programs write it, which flaxckpt does"
        " not read. Open it with the program that wrote it, or its arrays with"
        " h5py.File(path), and save them here: flaxckpt.save(new_path, arrays). "
        + _ABOUT_KERAS
    )


def _describe_torch_model(directory: Path) -> str | None:
    """Describes a published model whose arrays are only in pickles."""
    names = _storage.of(directory).names(directory)
    found = sorted(
        name
        for name in names
        if name.startswith(("pytorch_model", "consolidated"))
        and name.endswith((".bin", ".pth"))
    )
    if not found or any(name.endswith(".safetensors") for name in names):
        return None
    return (
        f"a model of torch in pickles ({errors.first_few(found)}). {_ABOUT_PICKLES}:"
        " transformers' from_pretrained, then save_pretrained, writes model.safetensors"
    )


def _describe_clu(directory: Path) -> str | None:
    """Describes a directory written by `clu.checkpoint`."""
    names = (path.name for path in directory.glob("*-*.flax"))
    numbers = {name: name[:-5].rpartition("-")[2] for name in names}
    steps = {int(n): name for name, n in numbers.items() if n.isdecimal()}
    if not steps:
        return None
    return (
        "a directory of clu.checkpoint, with a file for each state: pass the path of"
        f" one, such as {directory / steps[max(steps)]}"
    )


def _describe_decimal_steps(directory: Path) -> str | None:
    """Describes a directory of steps with a decimal point in their numbers."""
    names = directory.glob("*[0-9].[0-9]*")
    paths = sorted(path for path in names if path.name[-1].isdigit())
    if step := next(filter(recognises, paths[-_MAX_TRIED:]), None):
        return (
            "a directory of steps with decimal points in their numbers, which step="
            f" cannot name: pass the path of one, such as {step}"
        )
    return None


def _describe_parent(directory: Path) -> str | None:
    """Describes a directory of checkpoints without step names."""
    children = sorted(
        (c for c in directory.iterdir() if _storage.temporary.TEMPORARY not in c.name),
        key=lambda path: (not path.is_dir(), path.name),
    )
    pointers = filter(is_pointer, children)
    newest = next((f"{recognise.stem(each)}, the newest" for each in pointers), None)
    for child in children[:_MAX_TRIED]:
        with contextlib.suppress(errors.CheckpointFormatError):
            if recognises(child) and not is_pointer(child):
                return (
                    "a directory of checkpoints whose names are not names of steps:"
                    f" pass the path of one, such as {newest or child}"
                    f"{advice_on_names(directory)}"
                )
    return None


def _describe_runs(directory: Path) -> str | None:
    """Describes a directory of run directories; None if no run is found."""
    children = sorted(child for child in directory.iterdir() if child.is_dir())
    for child in children[:_MAX_TRIED]:
        with contextlib.suppress(errors.CheckpointError, OSError):
            if _steps.index.StepIndex(child, identify).steps:
                return f"a directory of runs: pass the path of one, such as {child}"
    return None


# ---- advice -------------------------------------------------------------------------


def advice_on_names(directory: Path) -> str:
    """Returns advice for a directory of steps with unusual names; empty without any."""
    steps = _steps.index.checkpoints_by_number(directory, identify)
    names = [path.name for paths in steps.values() for path in paths]
    formats = _steps.names.list_formats(min(names)) if names else []
    if not formats:
        return ""
    name, template = map(errors.printable, (min(names), formats[0].template))
    return (
        f". If {name} is a step of a run, pass the format of its step names:"
        f" Checkpointer(…, step_format='{template}'), or --step-format on the command"
        " line"
    )


def is_being_written(path: Path) -> bool:
    """Returns True if `path` has an unfinished save and no committed checkpoint."""
    if _storage.transaction.is_committed(path):
        return False
    return path.name in _storage.temporary.unfinished_names(path.parent)


def advice_on_saves(directory: Path) -> str:
    """Describes the unfinished saves under a directory; empty if none is known."""
    try:
        names = _storage.temporary.unfinished_names(directory)
    except OSError:
        return ""
    if not names:
        return ""
    return (
        f"a save of {errors.first_few(names)} is under way, or was interrupted: wait"
        " until it is committed, or save again if its program has ended"
    )
