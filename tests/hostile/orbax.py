"""Checkpoints in Orbax's layout made to break a reader, or to make it read elsewhere.

Each case writes one under a directory and returns the path to load.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

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


def array(directory: Path, metadata: Any, contents: Any = None) -> None:
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
    array(step / "w", metadata, contents)
    data = TREE | {"tree_metadata": row("w") if tree is None else tree} | flags
    (step / "_METADATA").write_bytes(text or json.dumps(data).encode())
    return step


def case(*args: Any, **options: Any) -> Callable[[Path], Path]:
    return lambda root: write(root, *args, **options)


def zarray(contents: Any = None, **changes: Any) -> Callable[[Path], Path]:
    return case(ZARRAY | changes, contents)


def zarr(contents: Any = None, **changes: Any) -> Callable[[Path], Path]:
    return case(ZARR | changes, contents, use_zarr3=True)


def grid(*sizes: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": sizes}}


def linked(
    change: Callable[[Path, Path], None], **options: Any
) -> Callable[[Path], Path]:
    """A sound checkpoint, and a good array outside it, that are then linked."""

    def make(root: Path) -> Path:
        array(root / "secret", options.get("metadata", ZARRAY))
        step = write(root, **options)
        change(step, root / "secret")
        return step

    return make


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


def named(*names: str) -> Callable[[Path], Path]:
    """A leaf whose name leads to a good array."""

    def make(root: Path) -> Path:
        array(root / "secret", ZARRAY)
        texts = [name.replace("ROOT", str(root)) for name in names]
        return write(root, tree=row(*texts))

    return make


def keys(**changes: Any) -> Callable[[Path], Path]:
    """PRNG keys that are none."""

    def make(root: Path) -> Path:
        step = write(root, ZARRAY | {"dtype": "<u4"} | changes, tree=key_row())
        metadata = {"param_name": "w", "ext_metadata": {"random_key_impl": "evil"}}
        (step / "array_metadatas").mkdir()
        data = {"array_metadatas": [{"array_metadata": metadata}]}
        (step / "array_metadatas/process_0").write_text(json.dumps(data))
        return step

    return make


def key_row() -> dict[str, Any]:
    return row("w", value_type="jax.Array")


def nested(depth: int, before: bytes = b"") -> bytes:
    return before + b"[" * depth + b"]" * depth + (b"}" if before else b"")


HUGE: Final = 2**46

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
    "_METADATA of 20 million lists": case(
        text=b'{"tree_metadata":[' + b"[]," * (20 * 10**6) + b"[]]}"
    ),
    "_METADATA that is a list": case(text=b"[]"),
    "_METADATA that is no JSON": case(text=b"{"),
    "a tree that is a list": case(tree=[]),
    "keys nested 1000 deep": case(tree=row(*"a" * 1000)),
    "a value type of no such kind": case(tree=row("w", value_type="os.system")),
    "keys of no such kind": keys(),
    "an array that is missing": case(tree=row("v")),
    "a chunk that is no gzip": zarray({"0": b"zip", "1": b"zip"}),
    "a chunk too long": zarray(chunks(np.zeros(2**20, "<f4"), 2**19)),
}
