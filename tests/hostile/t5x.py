"""Checkpoints of T5X made to break a reader, or to make it read what it must not.

Each case writes one under a directory and returns the path to load.
"""

import bz2
import gzip
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgpack

from tests.hostile import later
from tests.hostile.msgpack import GOOD, deep
from tests.hostile.orbax import VALUES, ZARRAY, write_array


def spec(
    path: Any = "target.w/", /, kvstore: Any = None, **more: Any
) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": kvstore or {"driver": "file", "path": path},
        "metadata": {"shape": [8]},
        **more,
    }


def write(
    root: Path,
    *,
    spec: Any = spec(),  # noqa: B008
    zarray: Any = ZARRAY,
    chunks: Any = None,
    directory: str = "target.w",
    version: Any = 3,
    **more: Any,
) -> Path:
    """A checkpoint of one array, sound but for what is given."""
    step = root / "checkpoint_1"
    step.mkdir()
    tree = {"version": version, "optimizer": {"target": {"w": spec}}, **more}
    (step / "checkpoint").write_bytes(msgpack.packb(tree))
    write_array(step / directory, zarray, chunks)
    return step


case = later(write)


def zarray(chunks: Any = None, /, **changes: Any) -> Callable[[Path], Path]:
    return case(zarray=ZARRAY | changes, chunks=chunks)


def encoded(codec: Any, *contents: bytes) -> Callable[[Path], Path]:
    chunks = {str(i): content for i, content in enumerate(contents)}
    compressor = codec and {"id": codec}
    return case(zarray=ZARRAY | {"compressor": compressor}, chunks=chunks)


def whole(shape: Any, chunks: Any, contents: Any) -> Callable[[Path], Path]:
    """The file and `.zarray` agree, and both lie."""
    return case(
        spec=spec(metadata={"shape": shape}),
        zarray=ZARRAY | {"shape": shape, "chunks": chunks},
        chunks=contents,
    )


@later
def elsewhere(root: Path, path: Callable[[Path], str]) -> Path:
    """The specification leads to a good array in another directory."""
    write_array(root / "secret")
    return write(root, spec=spec(path(root)))


@later
def linked(root: Path, make: Callable[[Path], None]) -> Path:
    """A sound checkpoint and a good array outside it, before `make` links them."""
    write_array(root / "secret")
    step = write(root)
    make(root)
    return step


def link_array(root: Path) -> None:
    (root / "checkpoint_1/target.w").rename(root / "away")
    (root / "checkpoint_1/target.w").symlink_to(root / "secret")


def link_metadata(root: Path) -> None:
    (root / "checkpoint_1/target.w/.zarray").unlink()
    (root / "checkpoint_1/target.w/.zarray").symlink_to(root / "secret/.zarray")


def link_chunk(root: Path) -> None:
    (root / "checkpoint_1/target.w/1").unlink()
    (root / "checkpoint_1/target.w/1").symlink_to("../../secret/1")


def link_file(root: Path) -> None:
    (root / "checkpoint_1/checkpoint").rename(root / "file")
    (root / "checkpoint_1/checkpoint").symlink_to(root / "file")


def pipe_for_chunk(root: Path) -> None:
    (root / "checkpoint_1/target.w/1").unlink()
    os.mkfifo(root / "checkpoint_1/target.w/1")


def directory_for_chunk(root: Path) -> None:
    (root / "checkpoint_1/target.w/1").unlink()
    (root / "checkpoint_1/target.w/1").mkdir()


def shared(root: Path) -> Path:
    step = write(root)
    tree = {"version": 3, "optimizer": {"target": {"w": spec(), "v": spec()}}}
    (step / "checkpoint").write_bytes(msgpack.packb(tree))
    return step


@later
def content(root: Path, data: bytes, name: str = "checkpoint") -> Path:
    (root / name).write_bytes(data)
    return root


def tensorflow(root: Path) -> Path:
    for name in ("model.ckpt-1.index", "model.ckpt-1.data-00000-of-00001"):
        (root / name).write_bytes(b"\0" * 20)
    return root / "model.ckpt-1.index"


GZIP: Final = [gzip.compress(VALUES[4 * i :][:4].tobytes()) for i in (0, 1)]
ZLIB: Final = [zlib.compress(VALUES[4 * i :][:4].tobytes()) for i in (0, 1)]
BZ2: Final = [bz2.compress(VALUES[4 * i :][:4].tobytes()) for i in (0, 1)]
BOMB: Final = gzip.compress(bytes(2**28))
NESTED: Final = 200_000
START: Final = b"\x82\xa7version\x03\xa9optimizer"

CASES: Final[dict[str, Callable[[Path], Path]]] = {
    # What the specification may not say.
    "an absolute path": elsewhere(lambda root: f"{root}/secret/"),
    "a path that begins with a slash": elsewhere(lambda root: "/secret"),
    "a path up": elsewhere(lambda root: "../secret/"),
    "a path down and up": elsewhere(lambda root: "target.w/../../secret"),
    "a file URL": elsewhere(lambda root: f"file://{root}/secret/"),
    "a backslash": case(spec=spec("target.w\\x")),
    "a NUL": case(spec=spec("target.w\0")),
    "a hidden path": case(spec=spec(".target"), directory=".target"),
    "the directory itself": case(spec=spec(".")),
    "no name": case(spec=spec("")),
    "two slashes": case(spec=spec("target.w//")),
    "a path that is a number": case(spec=spec(kvstore={"driver": "file", "path": 1})),
    "a long path": case(spec=spec("x" * 5000)),
    "two paths": case(spec=spec(path="a", kvstore={"driver": "file", "path": "b"})),
    "no path": case(spec=spec(kvstore={"driver": "file"})),
    **{
        f"kvstore {driver}": case(spec=spec(kvstore={"driver": driver, "path": "a"}))
        for driver in ("http", "s3", "ocdbt", "zip", "memory", "kvstack", "tsgrpc")
    },
    "a kvstore that is a URL": case(spec={**spec(), "kvstore": "http://127.0.0.1:9/"}),
    "a base URL": case(
        spec=spec(kvstore={"driver": "file", "path": "a", "base_url": "http://x"})
    ),
    **{
        f"driver {driver}": case(spec={**spec(), "driver": driver})
        for driver in ("n5", "json", "auto", "zarr3", "cast", "stack", "downsample")
    },
    **{
        key: case(spec=spec(**{key: value}))
        for key, value in {
            "create": True,
            "delete_existing": True,
            "assume_metadata": True,
            "context": {"cache_pool": {"total_bytes_limit": 2**60}},
            "open": True,
            "recheck_cached_data": False,
        }.items()
    },
    "metadata of another driver": case(
        spec=spec(metadata={"shape": [8], "blockSize": [8]})
    ),
    "a huge transform": case(
        spec=spec(transform={"input_shape": [10**12], "output": [{}]})
    ),
    "a transform that crops": case(spec=spec(transform={"input_exclusive_max": [4]})),
    "a transform that shifts": case(spec=spec(transform={"input_inclusive_min": [1]})),
    "a transform that is text": case(spec=spec(transform="identity")),
    "another shape": case(spec=spec(metadata={"shape": [9]})),
    "no shape": case(spec=spec(metadata={})),
    "a negative shape": case(spec=spec(metadata={"shape": [-8]})),
    "a shape that is a map": case(spec=spec(metadata={"shape": {"0": 8}})),
    "another dtype": case(spec={**spec(), "dtype": "float64"}),
    "a dtype that is a list": case(spec={**spec(), "dtype": ["float32"]}),
    "two leaves of one directory": shared,
    # What `.zarray` may not say.
    "no zarray": case(spec=spec("elsewhere")),
    "zarray nested 200k": case(zarray=b"[" * NESTED + b"]" * NESTED),
    "zarray nested 20k": case(zarray=b"[" * 20_000 + b"]" * 20_000),
    "attributes nested 20k": case(
        zarray=json.dumps(ZARRAY)[:-1].encode()
        + b',"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    ),
    "zarray of 10 MB": case(zarray=json.dumps(ZARRAY).encode() + b" " * 10_000_000),
    "zarray that is no JSON": case(zarray=b"{"),
    "zarray that is a list": case(zarray=b"[]"),
    "zarray that is empty": case(zarray=b""),
    "zarr 3": zarray(zarr_format=3),
    "zarr true": zarray(zarr_format=True),
    "zarr a list": zarray(zarr_format=[2]),
    "chunks of 2^31": zarray(chunks=[2**31]),
    "chunks of 2^40": zarray(chunks=[2**40]),
    "chunks of 2^29": zarray(chunks=[2**29]),
    "chunks of 0": zarray(chunks=[0]),
    "chunks of -1": zarray(chunks=[-1]),
    "chunks of 1.5": zarray(chunks=[1.5]),
    "chunks of another rank": zarray(chunks=[4, 1]),
    "no chunks": case(zarray={k: v for k, v in ZARRAY.items() if k != "chunks"}),
    "shape of 2^47, chunks of 1": whole([2**47], [1], {}),
    "shape of 2^60": whole([2**60], [4], None),
    "shape of 34 GB, nothing stored": whole([2**33], [2**20], {}),
    "shape of 2 GB in one chunk": whole([2**29], [2**29], {"0": GZIP[0]}),
    "order A": zarray(order="A"),
    "order a list": zarray(order=["C"]),
    "filters": zarray(filters=[{"id": "delta", "dtype": "<f4"}]),
    "separator /": zarray(dimension_separator="/"),
    "dtype structured": zarray(dtype=[["a", "<f4"]]),
    **{
        f"dtype {name}": zarray(dtype=name)
        for name in ("|O", "|S4", "<U1", "|V4", "<M8[s]", "float32[4]", "<f16", "f4,f4")
    },
    "compressor lzma": zarray(compressor={"id": "lzma"}),
    "compressor without a name": zarray(compressor={}),
    "compressor a list": zarray(compressor=[["gzip"]]),
    # What chunks may not be.
    "a chunk is missing": case(chunks={"0": GZIP[0]}),
    "all chunks are missing": case(chunks={}),
    "another chunk is there": case(chunks={"0": GZIP[0], "2": GZIP[1]}),
    "an empty chunk": encoded("gzip", GZIP[0], b""),
    **{f"gzip less {n}": encoded("gzip", GZIP[0], GZIP[1][:-n]) for n in range(1, 13)},
    **{f"zlib less {n}": encoded("zlib", ZLIB[0], ZLIB[1][:-n]) for n in range(1, 9)},
    "bz2 less 1": encoded("bz2", BZ2[0], BZ2[1][:-1]),
    "gzip with a wrong checksum": encoded(
        "gzip", GZIP[0], GZIP[1][:-8] + bytes(4) + GZIP[1][-4:]
    ),
    "gzip and more": encoded("gzip", GZIP[0], GZIP[1] + b"\0"),
    "a bomb": encoded("gzip", GZIP[0], BOMB),
    "a small bomb": encoded("gzip", GZIP[0], gzip.compress(bytes(2**16))),
    "a short chunk": encoded("gzip", GZIP[0], gzip.compress(bytes(12))),
    "a short chunk, not compressed": encoded(None, bytes(16), bytes(15)),
    "a long chunk, not compressed": encoded(None, bytes(16), bytes(17)),
    "zstd of 2^60": encoded(
        "zstd", b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little") + bytes(8), b""
    ),
    "zstd that is rubbish": encoded("zstd", b"rubbish", b"rubbish"),
    "blosc of 2^31": encoded(
        "blosc", b"\x02\x01\x01\x04" + b"\xff\xff\xff\x7f" * 3 + bytes(8), b""
    ),
    "blosc that is rubbish": encoded("blosc", b"rubbish", b"rubbish"),
    # Links and other things that are no files.
    "a link for an array": linked(link_array),
    "a link for zarray": linked(link_metadata),
    "a link for a chunk": linked(link_chunk),
    "a link for the file": linked(link_file),
    "a pipe for a chunk": linked(pipe_for_chunk),
    "a directory for a chunk": linked(directory_for_chunk),
    # The file.
    "version 0": case(version=0),
    "version 1": case(version=1),
    "version 4": case(version=4),
    "version text": case(version="3"),
    "version true": case(version=True),
    "more than the state": case(more=1),
    "a state that is bytes": case(spec=b"ab"),
    "depth 100k": content(START + deep(100_000)),
    "a file that is cut": content(START + b"\x81\xa6tar"),
    "garbage behind": content(START + b"\x81\xa1a" + GOOD + b"\0"),
    "TensorFlow's file": content(b'model_checkpoint_path: "model.ckpt-1"\n'),
    "TensorFlow's checkpoint": tensorflow,
}  # fmt: skip
