"""Writers of a conversion: the files of a checkpoint in each format."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flaxckpt import _arrays, _checkpoint, _formats, _state, _storage
from flaxckpt._arrays.blockwise import Piece
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._formats import file_layout, msgpack, safetensors
from flaxckpt._formats.items import Items
from flaxckpt._formats.reader import CheckpointMetadata
from flaxckpt._state.leaf import LeafInfo, LeafTable
from flaxckpt._types import JSON, LeafPath
from flaxckpt._zarr.array_layout import ArrayLayout
from flaxckpt._zarr.metadata import Array

_SYNCING_THREADS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The new checkpoint in any format: leaves, metadata, and limits.

    Attributes:
        table: The leaves, with the chunks to write.
        metadata: Metadata of the source, with the transforms of the conversion.
        dataset: File name -> content, of a dataset iterator's state.
        max_shard_bytes: Upper bound on the arrays in one file of several.
        batch_bytes: Upper bound on pieces.
        files: File name -> content, of further files in the directory.
        arrays_name: The beginning of the names of a model's files of arrays.
    """

    table: LeafTable
    structure: _state.tree.Node | LeafPath
    strings: Mapping[LeafPath, str]
    metadata: CheckpointMetadata
    step: int | None
    dataset: Mapping[str, bytes]
    json: Mapping[str, JSON]
    items: Items
    layout: ArrayLayout
    max_shard_bytes: int
    batch_bytes: int
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    arrays_name: str = "model"

    @property
    def infos(self) -> tuple[LeafInfo, ...]:
        return tuple([leaf.info for leaf in self.table.values()])

    def pieces(self, *, by_chunk: bool) -> list[Piece]:
        return [
            piece
            for leaf in self.table.values()
            if leaf.info.dtype is not None
            for piece in _arrays.blockwise.cut(
                leaf,
                chunk_shape=leaf.info.chunk_shape if by_chunk else None,
                max_bytes=self.batch_bytes,
            )
        ]


class Target(Protocol):
    """A new checkpoint in an output directory.

    Attributes:
        files: Distinguishes the checkpoint from others with the same leaves.
        result: Path of the checkpoint in the output directory; empty for all of it.
        batch_bytes: Upper bound on the pieces written together.
    """

    pieces: list[Piece]
    files: list[str]
    result: str
    batch_bytes: int

    def begin(self, output: Path, done: Collection[str]) -> Collection[str]:
        """Prepares the output, and returns the pieces of `done` still on disk."""
        ...

    def write(self, ready: Sequence[tuple[Piece, Array]]) -> None: ...

    def finish(self, output: Path) -> None:
        """Writes all other files, after all pieces."""
        ...


# ---- files of bytes ---------------------------------------------------------------


class _FlatTarget:
    def __init__(
        self, state: State, layouts: Sequence[file_layout.FileLayout], result: str
    ) -> None:
        self._layouts = layouts
        self._output = Path()
        self.pieces = state.pieces(by_chunk=False)
        self.files = [
            f"{layout.name} {layout.size} {_literals_digest(layout)}"
            for layout in layouts
        ]
        self.result = result
        self.batch_bytes = state.batch_bytes

    def begin(self, output: Path, done: Collection[str]) -> Collection[str]:
        self._output = output
        if not all((output / layout.name).is_file() for layout in self._layouts):
            done = ()
        for layout in self._layouts:
            with _file_descriptor(output / layout.name, os.O_CREAT) as descriptor:
                os.ftruncate(descriptor, layout.size)
                os.fsync(descriptor)
        _storage.of(output).sync_directory(output)
        return done

    def write(self, ready: Sequence[tuple[Piece, Array]]) -> None:
        for layout in self._layouts:
            inside = [item for item in ready if item[0].path in layout.runs]
            if not inside:
                continue
            with _file_descriptor(self._output / layout.name) as descriptor:
                for piece, array in inside:
                    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    runs = layout.runs[piece.path]
                    file_layout.write_values(
                        descriptor, runs, piece.start, content.data
                    )
                os.fsync(descriptor)

    def finish(self, output: Path) -> None:
        for layout in self._layouts:
            with _file_descriptor(output / layout.name) as descriptor:
                file_layout.write_literals(descriptor, layout)


def _literals_digest(layout: file_layout.FileLayout) -> str:
    return _storage.files.digest(
        b"".join(b"%d %b" % (at, content) for at, content in layout.literals)
    )


@contextlib.contextmanager
def _file_descriptor(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _safetensors_target(state: State, final: Path) -> Target:
    is_file = final.suffix == safetensors.header.SUFFIX
    layouts = safetensors.writer.make_layouts(
        state.infos,
        state.structure,
        state.strings,
        state.metadata,
        max_shard_bytes=None if is_file else state.max_shard_bytes,
    )
    return _FlatTarget(state, layouts, layouts[0].name if is_file else "")


def _huggingface_target(state: State, final: Path) -> Target:
    layouts = safetensors.writer.make_layouts(
        state.infos,
        state.structure,
        state.strings,
        None,
        max_shard_bytes=state.max_shard_bytes,
        name=state.arrays_name,
    )
    for name, content in state.files.items():
        layout = file_layout.FileLayout(name)
        layout.add(content)
        layouts.append(layout)
    return _FlatTarget(state, layouts, "")


def _msgpack_target(state: State, final: Path) -> Target:
    infos = {info.path: info for info in state.infos}
    numbers = [
        _arrays.blockwise.cut(leaf, chunk_shape=None, max_bytes=state.batch_bytes)[0]
        for leaf in state.table.values()
        if leaf.info.python_type in ("int", "float", "bool", "complex")
    ]
    values = _arrays.blockwise.read(numbers, max_bytes=state.batch_bytes)
    contents = msgpack.writer.Contents(
        state.structure,
        infos,
        {p.path: v.item() for p, v in zip(numbers, values, strict=True)},
        state.strings,
    )
    layout = msgpack.writer.make_layout("state.msgpack", contents)
    target = _FlatTarget(state, [layout], layout.name)
    target.pieces = [piece for piece in target.pieces if piece.path in layout.runs]
    return target


# ---- Orbax ------------------------------------------------------------------------


class _OrbaxTarget:
    def __init__(self, state: State, final: Path) -> None:
        self._state = state
        self._output = Path()
        infos, items = state.infos, state.items
        self._names = _checkpoint.save.check_names(infos, items)
        _formats.native_manifest.check_arrays(infos)
        self.pieces = state.pieces(by_chunk=True)
        self._total_bytes = sum(piece.nbytes for piece in self.pieces)
        self._manifest = _formats.native_manifest.Manifest(
            infos,
            state.structure,
            state.layout.encoding,
            items,
            state.step,
            state.metadata.lineage,
            state.metadata.transforms,
        )
        self._segment_bytes = self._manifest.segment_bytes()
        self.files = [repr(items)]
        self.result = ""
        self.batch_bytes = state.batch_bytes
        self._batches: dict[str, _Batches] = {}

    def begin(self, output: Path, done: Collection[str]) -> Collection[str]:
        self._output = output
        kept: set[str] = set()
        for item in self._state.items.split(self._state.infos):
            (output / item).mkdir(exist_ok=True)
            self._batches[item] = batches = _Batches(output / item)
            kept |= batches.keep(done)
        return {p.name for p in self.pieces if p.name in done and p.name in kept}

    def write(self, ready: Sequence[tuple[Piece, Array]]) -> None:
        parts: dict[str, list[tuple[Piece, Array]]] = {}
        for piece, array in ready:
            item = self._state.items.item_of(piece.leaf.info)
            parts.setdefault(item, []).append((piece, array))
        for item, part in parts.items():
            self._write_item(item, self._output / item, part)

    def _write_item(
        self, item: str, root: Path, ready: Sequence[tuple[Piece, Array]]
    ) -> None:
        batches = self._batches[item]
        written = _arrays.write.write(
            root,
            [self._host_array(piece, array) for piece, array in ready],
            _arrays.write.WriteOptions(
                encoding=self._state.layout.encoding,
                max_concurrent_bytes=self.batch_bytes,
                writer=batches.next_number,
                segment_bytes=self._segment_bytes,
                total_bytes=self._total_bytes,
            ),
        )
        batches.add(written, [piece.name for piece, _ in ready])

    def _host_array(self, piece: Piece, array: Array) -> HostArray:
        info = piece.leaf.info
        shards = (HostShard(piece.region, array),) if array.size else ()
        return HostArray(
            name=self._names[piece.path],
            shape=info.stored_shape,
            dtype=info.dtype or "",
            chunk_shape=info.chunk_shape or (),
            shards=shards,
        )

    def finish(self, output: Path) -> None:
        state, metadata = self._state, self._state.metadata
        contents = _formats.native_contents.Contents(
            manifest=self._manifest,
            names=self._names,
            segment_bytes=self._segment_bytes,
            strings=state.strings,
            metrics=metadata.metrics,
            custom=metadata.custom,
            dataset=state.dataset,
            json=state.json,
            created=metadata.created or time.time(),
        )
        files = _formats.native_contents.make_files(contents)
        _write_anew(output, files)
        written = {item: batches.written for item, batches in self._batches.items()}
        sealed = _formats.native_contents.seal(contents, files, output, written)
        _write_anew(output, sealed)
        for batches in self._batches.values():
            batches.forget()


class _Batches:
    """The batches of a database, each with a file of the places of its values."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.written = _arrays.written.Written({}, {})
        self.next_number = 0

    def keep(self, done: Collection[str]) -> set[str]:
        """Returns the pieces that are there; removes batches with other than `done`."""
        kept: set[str] = set()
        files: set[Path] = set()
        for file in self._root.glob("d/*.batch"):
            data = json.loads(file.read_bytes())
            if set(data["pieces"]) <= set(done):
                kept |= set(data["pieces"])
                files.add(file)
                self.written.add(_arrays.written.Written.from_json(data["written"]))
                self.next_number = max(self.next_number, int(file.stem) + 1)
        files |= {
            self._root / value.file
            for value in self.written.values.values()
            if not isinstance(value, bytes)
        }
        for file in [*_storage.listing.all_files(self._root)]:
            if file not in files:
                file.unlink()
        return kept

    def add(self, written: _arrays.written.Written, pieces: Sequence[str]) -> None:
        """Adds a batch, durably."""
        number, storage = self.next_number, _storage.of(self._root)
        content = {"pieces": list(pieces), "written": written.to_json()}
        storage.sync_tree(self._root)
        file = self._root / "d" / f"{number}.batch"
        file.parent.mkdir(exist_ok=True)
        storage.write(file, json.dumps(content).encode())
        storage.sync_directory(file.parent)
        self.written.add(written)
        self.next_number += 1

    def forget(self) -> None:
        """Removes the files that only an interruption needs."""
        for file in self._root.glob("d/*.batch"):
            file.unlink()


def _write_anew(root: Path, files: Mapping[str, bytes]) -> None:
    """Writes files, replacing files of an interrupted conversion."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        _storage.of(path).write(path, content)


WRITERS: dict[str, Callable[[State, Path], Any]] = {
    "orbax": _OrbaxTarget,
    "safetensors": _safetensors_target,
    "msgpack": _msgpack_target,
    "huggingface": _huggingface_target,
}
"""Format -> function from a state and a path to a writer."""
