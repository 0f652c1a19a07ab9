"""Checkpoints in Orbax's layout made to break a reader, or to make it read elsewhere.

Each case writes one under a directory and returns the path to load.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.hostile import SPECIAL, later

VALUES: Final = np.arange(8, dtype="<f4")
ZARRAY: Final = {
    "chunks": [4],
    "compressor": {"id": "gzip", "level": 1},
    "dimension_separator": ".",
    "dtype": "<f4",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [8],
    "zarr_format": 2,
}
ZARR: Final = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [8],
    "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    "fill_value": 0.0,
    "codecs": [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "gzip", "configuration": {"level": 1}},
    ],
}
TREE: Final = {"use_zarr3": False, "use_ocdbt": False}


def row(*names: str, value_type: str = "np.ndarray") -> dict[str, Any]:
    """A leaf in `_METADATA`."""
    keys = [{"key": name, "key_type": 2} for name in names]
    value = {"value_type": value_type, "skip_deserialize": False}
    return {str(names): {"key_metadata": keys, "value_metadata": value}}


def chunks(values: Any = VALUES, size: int = 4) -> dict[str, bytes]:
    """File name -> content, of an array of one axis."""
    return {
        str(i): gzip.compress(values[size * i :][:size].tobytes())
        for i in range(-(-len(values) // size))
    }


def write_array(directory: Path, metadata: Any = ZARRAY, contents: Any = None) -> None:
    """Writes an array; `metadata` is that of zarr 2 or 3, or text."""
    directory.mkdir(parents=True)
    text = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    is_new = b"node_type" in text or text.startswith(b'{"n')
    (directory / ("zarr.json" if is_new else ".zarray")).write_bytes(text)
    for name, content in (chunks() if contents is None else contents).items():
        (directory / (f"c.{name}" if is_new else name)).write_bytes(content)


def write(
    root: Path,
    metadata: Any = ZARRAY,
    contents: Any = None,
    *,
    tree: Any = None,
    text: bytes | None = None,
    **flags: Any,
) -> Path:
    """A checkpoint with the array `w`, sound but for what is given."""
    step = root / "step"
    write_array(step / "w", metadata, contents)
    data = TREE | {"tree_metadata": row("w") if tree is None else tree} | flags
    (step / "_METADATA").write_bytes(text or json.dumps(data).encode())
    return step


case = later(write)


def zarray(contents: Any = None, **changes: Any) -> Callable[[Path], Path]:
    return case(ZARRAY | changes, contents)


def zarr(contents: Any = None, **changes: Any) -> Callable[[Path], Path]:
    return case(ZARR | changes, contents, use_zarr3=True)


def grid(*sizes: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": sizes}}


@later
def linked(root: Path, change: Callable[[Path, Path], None], **options: Any) -> Path:
    """A sound checkpoint, and a good array outside it, that are then linked."""
    write_array(root / "secret", options.get("metadata", ZARRAY))
    step = write(root, **options)
    change(step, root / "secret")
    return step


def link_chunk(step: Path, secret: Path) -> None:
    name = "c.0" if (secret / "c.0").exists() else "0"
    (step / "w" / name).unlink()
    (step / "w" / name).symlink_to(secret / name)


def link_array(step: Path, secret: Path) -> None:
    (step / "w").rename(step.parent / "old")
    (step / "w").symlink_to(secret, target_is_directory=True)


def link_metadata(step: Path, secret: Path) -> None:
    (step / "w/.zarray").unlink()
    (step / "w/.zarray").symlink_to(secret / ".zarray")


def link_loop(step: Path, secret: Path) -> None:
    (step / "w/0").unlink()
    (step / "w/0").symlink_to(step / "w/0")


def link_through_a_link(step: Path, secret: Path) -> None:
    """The link stays within the checkpoint, the directory that it is for does not."""
    link_array(step, secret)
    (step / "v").symlink_to("w", target_is_directory=True)
    tree = TREE | {"tree_metadata": row("v")}
    (step / "_METADATA").write_text(json.dumps(tree))


def link_item(root: Path) -> Path:
    """The item of a checkpoint lies elsewhere."""
    step = write(root)
    (root / "checkpoint").mkdir()
    (root / "checkpoint/default").symlink_to(step, target_is_directory=True)
    (root / "checkpoint/_CHECKPOINT_METADATA").write_text("{}")
    return root / "checkpoint"


@later
def named(root: Path, *names: str) -> Path:
    """A leaf whose name leads to a good array."""
    write_array(root / "secret")
    texts = [name.replace("ROOT", str(root)) for name in names]
    return write(root, tree=row(*texts))


def key_row() -> dict[str, Any]:
    return row("w", value_type="jax.Array")


def nested(depth: int, before: bytes = b"") -> bytes:
    return before + b"[" * depth + b"]" * depth + (b"}" if before else b"")


HUGE: Final = 2**46


def zstd_bomb(size: int) -> bytes:
    """A frame of zeros, four bytes for every 128 KiB."""
    count = size // 2**17
    blocks = [
        ((i == count - 1) | 1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"\0"
        for i in range(count)
    ]
    return b"\x28\xb5\x2f\xfd\0\x38" + b"".join(blocks)


def gzip_bomb(size: int) -> bytes:
    part = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = part.compress(bytes(2**20)) + part.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + zeros * (size // 2**20) + b"\3\0"


def blosc_bomb() -> bytes:
    """A chunk of blosc that says it has 2 GiB, and has nothing."""
    sizes = struct.pack("<III", 2**31 - 17, 2**31 - 17, 16)
    return b"\x02\x01\x01\x04" + sizes


def compressed(*names: str) -> dict[str, Any]:
    codecs = [
        ZARR["codecs"][0],
        *({"name": name, **CONFIGURED[name]} for name in names),
    ]
    return {"codecs": codecs}


CONFIGURED: Final[dict[str, dict[str, Any]]] = {
    "zstd": {"configuration": {"level": 1}},
    "gzip": {"configuration": {"level": 1}},
    "blosc": {
        "configuration": {
            "cname": "lz4",
            "clevel": 1,
            "shuffle": "noshuffle",
            "typesize": 4,
            "blocksize": 0,
        }
    },
}


def cut_again(*parts: int, **changes: Any) -> dict[str, Any]:
    inner = {
        "chunk_shape": list(parts),
        "codecs": [ZARR["codecs"][0]],
        "index_codecs": [ZARR["codecs"][0], {"name": "crc32c"}],
    }
    return {"codecs": [{"name": "sharding_indexed", "configuration": inner | changes}]}


@later
def special(root: Path, kind: str, name: str, **options: Any) -> Path:
    """A file that is something else: it is neither waited for nor read without end."""
    step = write(root, **options)
    path = step / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "link":
        (root / "away").write_text("{}")
        path.symlink_to(root / "away")
    else:
        SPECIAL[kind](path)
    return step


@later
def metadatas(root: Path, content: Any) -> Path:
    """What is told of arrays beside them; the tree has PRNG keys."""
    step = write(root, ZARRAY | {"dtype": "<u4"}, tree=key_row())
    (step / "array_metadatas").mkdir()
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (step / "array_metadatas/process_0").write_bytes(text)
    return step


KEY: Final = {"param_name": "w", "ext_metadata": {"random_key_impl": "evil"}}


def tree_of(*rows: dict[str, Any]) -> Callable[[Path], Path]:
    return case(
        tree={str(i): value for i, row in enumerate(rows) for value in row.values()}
    )


def indexed(name: Any) -> dict[str, Any]:
    return {
        "a": {**row("w")[str(("w",))], "key_metadata": [{"key": name, "key_type": 1}]}
    }


SIX_GB: Final = 6 * 2**30
SHORT: Final = ZARRAY | {"chunks": [8]}
NESTED: Final = ZARR | {
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}
}


def link_directory(step: Path) -> Path:
    """Its chunks are where the link leads, and so is another link, which leads out."""
    (step.parent / "away").mkdir()
    (step / "other").mkdir()
    (step / "other/0").symlink_to(step.parent / "away", target_is_directory=True)
    (step / "w/c").symlink_to(step / "other", target_is_directory=True)
    return step


CASES: Final[dict[str, Callable[[Path], Path]]] = {
    "a chunk that is a link": linked(link_chunk),
    "a chunk of zarr 3 that is a link": linked(
        link_chunk, metadata=ZARR, use_zarr3=True
    ),
    "an array that is a link": linked(link_array),
    "metadata that is a link": linked(link_metadata),
    "a link to itself": linked(link_loop),
    "a link to a link": linked(link_through_a_link),
    "an item that is a link": link_item,
    "a path up": named("../secret"),
    "a path up, in two keys": named("", ".", "secret"),
    "a path up, within": named("w/../../secret"),
    "an absolute path": named("ROOT/secret"),
    "a key with NUL": named("w\0"),
    "two dots": named(".."),
    "huge, nothing stored": zarray({}, shape=[HUGE], chunks=[2**20]),
    "huge, nothing stored, zarr 3": zarr({}, shape=[HUGE], chunk_grid=grid(2**20)),
    "larger than the memory": zarray({}, shape=[2**37], chunks=[2**20]),
    "larger than the memory, zarr 3": zarr({}, shape=[2**37], chunk_grid=grid(2**20)),
    "34 GB, nothing stored": zarr({}, shape=[2**33], chunk_grid=grid(2**20)),
    "chunks of 2^40": zarray(chunks=[2**40]),
    "chunks of 2^40, zarr 3": zarr(chunk_grid=grid(2**40)),
    "chunks of 2^37 of as much": zarray(shape=[2**37], chunks=[2**37]),
    "chunks of 2^37 of as much, zarr 3": zarr(shape=[2**37], chunk_grid=grid(2**37)),
    "a shape of 2^60": zarray(shape=[2**30, 2**30], chunks=[2**10, 2**10]),
    "sizes that are too large": zarray(shape=[2**60]),
    "negative sizes": zarray(shape=[-1]),
    "chunks of no size": zarray(chunks=[0]),
    "another rank of chunks": zarray(chunks=[4, 4]),
    "rank 1000": zarray(shape=[1] * 1000, chunks=[1] * 1000),
    "type object": zarray(dtype="|O"),
    "type with fields": zarray(dtype=[["a", "<f4"]]),
    "zarray of 100k lists": case(nested(100_000, b'{"shape":')),
    "zarray of 200k lists": case(nested(200_000, b'{"shape":')),
    "zarr.json of 200k lists": case(nested(200_000, b'{"node_type":'), use_zarr3=True),
    "zarray that is a list of lists": case(nested(200_000)),
    "_METADATA of 200k lists": case(text=nested(200_000, b'{"tree_metadata":')),
    "_METADATA of 20 million lists": lambda root: case(
        text=b'{"tree_metadata":[' + b"[]," * (20 * 10**6) + b"[]]}"
    )(root),
    "_METADATA that is a list": case(text=b"[]"),
    "_METADATA that is no JSON": case(text=b"{"),
    "a tree that is a list": case(tree=[]),
    "keys nested 1000 deep": case(tree=row(*"a" * 1000)),
    "a value type of no such kind": case(tree=row("w", value_type="os.system")),
    "keys of no such kind": metadatas({"array_metadatas": [{"array_metadata": KEY}]}),
    "an array that is missing": case(tree=row("v")),
    "a chunk that is no gzip": zarray({"0": b"zip", "1": b"zip"}),
    "a chunk too long": zarray(chunks(np.zeros(2**20, "<f4"), 2**19)),
    # Bombs: chunks of a few bytes that expand to 6 GB.
    "a bomb of gzip": zarray({"0": gzip_bomb(SIX_GB), "1": gzip_bomb(SIX_GB)}),
    "a bomb of zlib": zarray(
        {"0": b"\x78\x9c" + gzip_bomb(SIX_GB)[10:]}, compressor={"id": "zlib"}
    ),
    "a bomb of zstd": zarray({"0": zstd_bomb(SIX_GB)}, compressor={"id": "zstd"}),
    "a bomb of blosc": zarray({"0": blosc_bomb()}, compressor={"id": "blosc"}),
    "a bomb of gzip, zarr 3": zarr({"0": gzip_bomb(SIX_GB)}),
    "a bomb of zstd, zarr 3": zarr({"0": zstd_bomb(SIX_GB)}, **compressed("zstd")),
    "a bomb of blosc, zarr 3": zarr({"0": blosc_bomb()}, **compressed("blosc")),
    "a bomb in a part of a chunk": zarr({"0": zstd_bomb(SIX_GB)}, **cut_again(2)),
    "a bomb in a bomb": zarr(**compressed("zstd", "zstd")),
    "a bomb of two kinds": zarr(**compressed("zstd", "gzip", "blosc")),
    # What metadata of arrays may not say.
    "codecs that are no list": zarr(codecs={"name": "bytes"}),
    "a thousand codecs": zarr(codecs=[{"name": "crc32c"}] * 1000),
    "a codec of another kind": zarr(codecs=[{"name": "numcodecs.pickle"}]),
    "a codec that is a number": zarr(codecs=[1]),
    "an array cut into 2^40 parts": zarr(
        shape=[2**40], chunk_grid=grid(2**40), **cut_again(1)
    ),
    "a chunk cut into 2^28 parts": zarr(
        shape=[2**28], chunk_grid=grid(2**28), **cut_again(1)
    ),
    "a chunk cut into nothing": zarr(**cut_again(0)),
    "a chunk cut twice": zarr(**cut_again(2, codecs=cut_again(1)["codecs"])),
    "a compressor of another kind": zarray(compressor={"id": "pickle"}),
    "a compressor that is a text": zarray(compressor="gzip"),
    "filters": zarray(filters=[{"id": "pickle"}]),
    "a chunk grid of another kind": zarr(
        chunk_grid={"name": "x", **grid(4)} | {"name": "x"}
    ),
    "a group": zarr(node_type="group"),
    "zarr true": zarray(zarr_format=True),
    "zarr 3 as if it were 2": case(ZARR, use_zarr3=False),
    "a shape of floats": zarray(shape=[8.0]),
    "a shape that is true": zarray(shape=[True]),
    "a shape that is infinite": zarray(shape=[float("inf")]),
    "a shape of NaN": zarr(shape=[float("nan")]),
    "a shape of 10^400": zarr(shape=[10**400]),
    "a million axes": case(json.dumps(ZARRAY | {"shape": [1] * 10**6}).encode()),
    "a key twice": case(
        json.dumps(ZARRAY).encode()[:-1] + b',"shape":[8],"chunks":[1099511627776]}'
    ),
    **{
        f"type {name[:20]}": zarray(dtype=name)
        for name in (
            "(1+,)f4",
            "f4,f4",
            "(1000000000,)f4",
            "(" * 10_000,
            "|V4",
            "<M8[s]",
        )
    },
    # What the tree may not say.
    "two leaves of one name": tree_of(row("w"), row("w")),
    "two leaves of one array": tree_of(row("a.b"), row("a", "b")),
    "two leaves of one path": tree_of(row("1"), indexed(1)),
    **{
        f"an index that is {title}": case(tree=indexed(value))
        for title, value in {
            "infinite": float("inf"),
            "a float": 1.5,
            "true": True,
            "null": None,
            "a list": [1],
            "text": "one",
        }.items()
    },
    "a name of 5000 bytes": case(tree=row("w" * 5000)),
    "names in many lines": case(tree=row("a\n" * 50)),
    "names of half characters": case(tree=row("\ud800")),
    "names of bells": case(tree=row("\a\x1b[2J\x9b")),
    "keys of arrays that are numbers": metadatas({"array_metadatas": [1]}),
    "keys of arrays that are a list": metadatas([]),
    "keys of arrays nested 200k": metadatas(nested(200_000, b'{"array_metadatas":')),
    # Files that are none.
    **{
        f"a {kind} for {name}": special(kind, name, **options)
        for kind in ("pipe", "device", "directory", "link", "long file")
        for name, options in {
            "w/0": {},
            "w/.zarray": {},
            "w/zarr.json": {"metadata": ZARR, "use_zarr3": True},
            "w/c.0": {"metadata": ZARR, "use_zarr3": True},
            "_METADATA": {},
            "_CHECKPOINT_METADATA": {},
            "array_metadatas/process_0": {},
            "_strings.json": {"tree": row("w", value_type="string")},
            "manifest.ocdbt": {"use_ocdbt": True},
        }.items()
    },
    "a directory for the only chunk": special("directory", "w/0", metadata=SHORT),
    "a directory for a chunk in directories": special(
        "directory", "w/c/0", metadata=NESTED, use_zarr3=True
    ),
    "a link for a directory of chunks": lambda root: link_directory(
        write(root, NESTED, {}, use_zarr3=True)
    ),
    # Little is stored, and much memory wanted for it.
    **{
        f"a chunk of 1 GiB of {codec}": zarray(
            {"0": bomb}, shape=[2**28], chunks=[2**28], compressor={"id": codec}
        )
        for codec, bomb in {
            "gzip": gzip_bomb(2**20),
            "zstd": zstd_bomb(2**20),
            "blosc": blosc_bomb(),
        }.items()
    },
    "a small array in a chunk of 1 GiB": zarray(
        {"0": zstd_bomb(2**30)}, chunks=[2**28]
    ),
    "a small array in a chunk of 1 GiB, zarr 3": zarr(
        {"0": zstd_bomb(2**30)}, chunk_grid=grid(2**28), **compressed("zstd")
    ),
    "parts of blosc": zarr(
        {"0": blosc_bomb()},
        **cut_again(2, codecs=[ZARR["codecs"][0], *compressed("blosc")["codecs"][1:]]),
    ),
}
