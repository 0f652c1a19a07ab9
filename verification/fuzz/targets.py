"""What is fuzzed: for each reader and each parser, a function of some bytes.

A target returns, or raises what it must not. It writes the bytes where a checkpoint has
them, in a directory in memory, beside other files that are sound.
"""

import atexit
import contextlib
import functools
import json
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import crc32c
import msgpack
import numpy as np

import flaxckpt
from flaxckpt import _formats, _storage, errors, formats
from flaxckpt._state import classes as state_classes
from flaxckpt._steps import index as steps_index
from flaxckpt._steps import journal as steps_journal
from flaxckpt._steps import names as steps_names
from flaxckpt.datasets import _files, _json_codec
from tests import GOLDEN

CORPUS: Final = Path(__file__).parent / "corpus"
VALUES: Final = np.arange(8, dtype="<f4")


class Target(NamedTuple):
    """A function to be fuzzed.

    Attributes:
        run: Takes the bytes.
        kind: What they are: `json`, `msgpack` or `bytes`.
        head: How many bytes at their beginning say what the others are for.
    """

    run: Callable[[bytes], None]
    kind: str = "bytes"
    head: int = 0

    def mutate(self, rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
        """Changes an input."""
        from verification.fuzz import mutate

        head = data[: self.head]
        if rng.random() < 0.02:
            head = rng.randbytes(len(head))
        rest = [other[self.head :] for other in others]
        return head + mutate.mutated(rng, data[self.head :], rest, self.kind)


TARGETS: Final[dict[str, Target]] = {}
outcome = ""
"""What the last input was told, if anything."""


def target(kind: str = "bytes", head: int = 0) -> Callable[[Any], Any]:
    def enter(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[run.__name__] = Target(run, kind, head)
        return run

    return enter


@functools.cache
def room() -> Path:
    """A directory of this process, in memory where there is such."""
    memory = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="fuzz", dir=memory if memory.is_dir() else None)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@contextlib.contextmanager
def only_ours() -> Iterator[None]:
    """Lets our errors pass, if they are as short as they should be."""
    try:
        yield
    except errors.CheckpointError as error:
        global outcome
        outcome = str(error)
        lines = outcome.splitlines()
        assert len(lines) < 15, lines[:20]
        assert len(outcome) < 20_000, outcome[:1000]


RESOLVE: Final = state_classes.resolver()
LARGE: Final = 2**24


def read(path: Path) -> None:
    """Reads a checkpoint as far as its damage allows, values included."""
    with only_ours():
        stored = formats.detect(path).reader.read(path, step=None, resolve=RESOLVE)
        if stored.metadata.total_bytes <= LARGE and len(stored.table) < 100:
            flaxckpt.load(path)
        else:
            str(stored.metadata)


# ---- whole files ------------------------------------------------------------------


def file_target(name: str, kind: str) -> None:
    def run(data: bytes) -> None:
        path = room() / name
        path.write_bytes(data)
        read(path)

    TARGETS[name] = Target(run, kind)


file_target("msgpack", "msgpack")
file_target("streaming", "msgpack")


file_target("npz", "bytes")


@target()
def gguf(data: bytes) -> None:
    """What follows the magic and the version."""
    path = room() / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + data)
    read(path)


@target()
def npy(data: bytes) -> None:
    """The text of an array's header, in an archive that is sound otherwise."""
    from tests.hostile import npz as cases

    path = room() / "header.npz"
    path.write_bytes(cases.one(cases.header(data, bytes(64))))
    read(path)


@target()
def safetensors(data: bytes) -> None:
    """A header, whose length is put before it and which 64 bytes follow."""
    path = room() / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))
    read(path)


TARGETS["safetensors"] = Target(safetensors, "json")


@target("json")
def safetensors_index(data: bytes) -> None:
    directory = room() / "sharded"
    if not directory.exists():
        from tests.hostile import safetensors as cases

        directory.mkdir()
        for n in (1, 2):
            cases.file(directory / f"model-{n}.safetensors", {f"t{n}": cases.ZEROS})
    path = directory / "model.safetensors.index.json"
    path.write_bytes(data)
    read(path)


# ---- one file of a checkpoint -----------------------------------------------------


@functools.cache
def sound(name: str) -> Path:
    """A sound checkpoint that is kept."""
    from tests.hostile import flaxckpt as ours
    from tests.hostile import orbax, t5x

    root = room() / name
    root.mkdir()
    match name:
        case "t5x":
            return t5x.write(root)
        case "orbax":
            return orbax.write(root)
        case "orbax zarr 3":
            return orbax.write(root, orbax.ZARR, use_zarr3=True)
        case "golden database":
            [golden] = GOLDEN.glob("flaxckpt-1/ocdbt/[0-9]*")
            step = shutil.copytree(golden, root / "step")
            ours.change(step, lambda manifest: manifest.update(digests={}))
            return step
    step = ours.write(root, name)
    _storage.of(step).write(step / "commit_success.txt", b"{}")
    return step


def part(path: Path, files: tuple[str, ...], data: bytes) -> None:
    """Reads a checkpoint of which one file, as the first byte says, is `data`."""
    if not data:
        return
    file = path / files[data[0] % len(files)]
    is_new = not file.parent.is_dir()
    file.parent.mkdir(exist_ok=True)
    before = file.read_bytes() if file.is_file() else None
    file.write_bytes(data[1:])
    try:
        read(path)
        if file.parts[-2] == "metadata":
            with only_ours():
                _formats.native_metadata.read_run_metadata(path)
    finally:
        if is_new:
            shutil.rmtree(file.parent)
        elif before is None:
            file.unlink()
        else:
            file.write_bytes(before)


@target("json", head=1)
def own(data: bytes) -> None:
    """The manifest, and what is beside it."""
    files = (
        *("flaxckpt.json", "flaxckpt.json", "flaxckpt.json", "_CHECKPOINT_METADATA"),
        *("metrics/metrics", "state/_strings.json", "metadata/_ROOT_METADATA"),
        *("state/w/zarr.json", "commit_success.txt"),
    )
    part(sound("zstd"), files, data)


@target("json", head=1)
def orbax(data: bytes) -> None:
    """Orbax's own files."""
    files = (
        *("_METADATA", "_METADATA", "array_metadatas/process_0", "metrics/metrics"),
        *("_CHECKPOINT_METADATA", "_strings.json", "_sharding", "w/.zarray"),
    )
    part(sound("orbax"), files, data)


@target("json", head=1)
def zarr(data: bytes) -> None:
    """Metadata of arrays, which TensorStore reads when it has been checked."""
    names = ("orbax zarr 3", "orbax", "zstd", "zarr 2", "t5x")
    name = names[data[0] % len(names)] if data else names[0]
    files = ("w/zarr.json", "w/.zarray", "state/w/zarr.json", "state/w/.zarray")
    file = dict(zip(names, (*files, "target.w/.zarray"), strict=True))[name]
    part(sound(name), (file,), data)


@target(head=1)
def chunks(data: bytes) -> None:
    """Chunks as they are compressed."""
    if not data:
        return
    name, file, codec = CHUNKS[data[0] % len(CHUNKS)]
    path = sound(name)
    if codec is not None:
        metadata = path / Path(file).parent / ".zarray"
        before = json.loads(metadata.read_text())
        if before["compressor"] != codec:
            metadata.write_text(json.dumps(before | {"compressor": codec or None}))
    part(path, (file,), data)


CHUNKS: Final[tuple[tuple[str, str, Any], ...]] = (
    *(
        ("t5x", "target.w/1", codec and {"id": codec})
        for codec in ("", "gzip", "zlib", "bz2", "zstd", "blosc")
    ),
    *(("orbax", "w/1", {"id": codec}) for codec in ("gzip", "zstd", "blosc")),
    ("orbax zarr 3", "w/c.1", None),
    ("zstd", "state/w/c.0", None),
    ("raw", "state/w/c.0", None),
)


@target(head=1)
def database(data: bytes) -> None:
    """The manifest of a database, or its tree; checksums are put right."""
    if not data:
        return
    path = sound("golden database")
    files = sorted((path / "state/d").iterdir())
    file = files[data[0] // 2 % len(files)]
    name = ("manifest.ocdbt", f"d/{file.name}")[data[0] % 2]
    content = data[1:]
    if name == "manifest.ocdbt" and len(content) > 16:
        length = struct.pack("<Q", len(content))
        content = content[:4] + length + content[12:-4]
        content += struct.pack("<I", crc32c.crc32c(content))
    part(path, (f"state/{name}",), b"\0" + content)


def encoded(content: bytes, codec: Any) -> bytes:
    """A chunk of a sound checkpoint, compressed otherwise."""
    import gzip

    import tensorstore as ts

    if not codec and codec is not None:
        return gzip.decompress(content)
    if codec is None or codec["id"] == "gzip":
        return content
    metadata = {"shape": [4], "chunks": [4], "dtype": "<f4", "compressor": codec}
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
    store = ts.open(spec, create=True).result()
    store.write(np.frombuffer(gzip.decompress(content), "<f4")).result()
    return bytes(store.kvstore.read("0").result().value)


@target("msgpack", head=1)
def t5x(data: bytes) -> None:
    """The file of a checkpoint, and the aggregate file of old ones of Orbax."""
    if data and data[0] % 2:
        file = room() / "single"
        file.write_bytes(data[1:])
        read(file)
    else:
        part(sound("t5x"), ("checkpoint",), data)


@target("msgpack")
def orbax_aggregate(data: bytes) -> None:
    directory = room() / "aggregate"
    if not directory.exists():
        from tests.hostile import t5x as cases

        directory.mkdir()
        cases.write_array(directory / "w")
    (directory / "checkpoint").write_bytes(data)
    read(directory)


# ---- what is beside checkpoints ---------------------------------------------------


class AnyState:
    """An iterator that takes any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __iter__(self) -> "AnyState":
        return self

    def __next__(self) -> int:
        return 0

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


@target("json", head=1)
def dataset(data: bytes) -> None:
    """The state of an iterator, or the description of it."""
    if not data:
        return
    names = ("process_0-of-1.json", "metadata")
    files = {names[data[0] % 2]: data[1:]}
    iterator = AnyState(b"" if data[0] & 2 else {})
    with only_ours():
        _files.set_state(iterator, {names[0]: b"{}", **files}, path=Path("step"))


@target("json", head=1)
def codec(data: bytes) -> None:
    """The JSON of states: what is read can be written and read again."""
    try:
        state = _json_codec.loads(data[1:], version=data[0] % 3 if data else 0)
        written = _json_codec.dumps(state)
    except Exception:
        return  # `datasets` says which file it was
    assert _json_codec.dumps(_json_codec.loads(written)) == written


@target("json")
def journal(data: bytes) -> None:
    path = room() / "events.jsonl"
    path.write_bytes(data)
    for event in steps_journal.read(path):
        steps_journal._line(event)


@target()
def step_names(data: bytes) -> None:
    name = os.fsdecode(data.replace(b"/", b"").replace(b"\0", b""))
    for template in ("{step}", "step_{step:08d}", "ckpt-{step}"):
        step_format = steps_names.StepFormat(template)
        step = step_format.step(name)
        assert step is None or step_format.name(step) == name
    if name in ("", ".", "..") or len(data) > 200:
        return
    steps_names.is_usual(name)
    path = room() / "steps"
    path.mkdir(exist_ok=True)
    (path / name).mkdir()
    try:
        with only_ours():
            found = steps_index.StepIndex(path, lambda _: True).steps
            assert all(0 <= step < 10**18 for step in found)
    finally:
        (path / name).rmdir()


def seeds(name: str) -> list[bytes]:
    """The inputs that a target starts from."""
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


def pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value))
