"""Safetensors checkpoints made to break a reader, or to make it read what it must not.

Each case writes one under a directory and returns the path to load.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.hostile import SPECIAL, later

ZEROS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file(path: Path, header: Any, data: bytes = b"\0" * 8, length: int = -1) -> Path:
    """Writes a file with this header, as an object or as text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length < 0 else length
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


@later
def one(root: Path, header: Any, data: bytes = b"\0" * 8, length: int = -1) -> Path:
    return file(root / "model.safetensors", header, data, length)


def tensor(**changes: Any):
    return one({"a": ZEROS | changes})


@later
def index(root: Path, weight_map: Any, **more: Any) -> Path:
    """A good file `model-1.safetensors` with `a` in it, and this index beside it."""
    file(root / "model-1.safetensors", {"a": ZEROS})
    data = {"weight_map": weight_map, **more}
    (root / "model.safetensors.index.json").write_text(json.dumps(data))
    return root


@later
def index_text(root: Path, text: bytes) -> Path:
    file(root / "model-1.safetensors", {"a": ZEROS})
    (root / "model.safetensors.index.json").write_bytes(text)
    return root / "model.safetensors.index.json"


def outside(root: Path) -> Path:
    """A shard that is a link to a file in another directory."""
    inside = root / "checkpoint"
    inside.mkdir()
    real = file(root / "secret.safetensors", {"a": ZEROS})
    (inside / "model-1.safetensors").symlink_to(real)
    data = {"weight_map": {"a": "model-1.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(data))
    return inside


def index_outside(root: Path) -> Path:
    inside = root / "checkpoint"
    index({"a": "model-1.safetensors"})(root)
    inside.mkdir()
    name = "model.safetensors.index.json"
    (inside / name).symlink_to(root / name)
    return inside


def endless_link(root: Path) -> Path:
    path = root / "model.safetensors"
    path.symlink_to(path)
    return root


@later
def cached(root: Path, target: str, main: str = "abc") -> Path:
    """A model in the cache of the Hub whose file is a link to `target`."""
    model = root / "models--org--name"
    for name in ("blobs", "snapshots/abc", "refs"):
        (model / name).mkdir(parents=True)
    (model / "refs" / "main").write_text(main)
    for path in (root / "secret", model / "refs" / "secret", model / "blobs" / "0"):
        file(path, {"a": ZEROS})
    (model / "blobs" / "link").symlink_to(root / "secret")
    (model / "snapshots" / "abc" / "model.safetensors").symlink_to(target)
    return model


@later
def truncated(root: Path, keep: Callable[[bytes], int]) -> Path:
    path = one({"a": ZEROS})(root)
    content = path.read_bytes()
    path.write_bytes(content[: keep(content)])
    return path


@later
def special(root: Path, name: str, kind: str) -> Path:
    """A directory with something that is called like a file, and is none."""
    SPECIAL[kind](root / name)
    return root


OURS = {
    "version": 1,
    "leaves": [
        {"path": "a", "type": "jax.Array", "dtype": "float32", "shape": [2]}
        | {"chunks": [2]}
    ],
    "structure": ["dict", ["a"], ["a"]],
    "strings": {},
    "metrics": {},
    "custom": {},
}
LEAF: dict[str, Any] = OURS["leaves"][0]  # type: ignore[index,assignment]


def lie(**changes: Any):
    """A good file whose metadata of ours says something else."""
    return one({"__metadata__": {"flaxckpt": json.dumps(OURS | changes)}, "a": ZEROS})


def leaf(**changes: Any):
    return lie(leaves=[LEAF | changes])


def nested(depth: int):
    """A good file but for the depth of its containers."""
    path = "/".join("a" * depth)
    structure = '["dict",["a"],[' * depth + f'"{path}"' + "]]" * depth
    whole = json.dumps(OURS | {"leaves": [LEAF | {"path": path}]}).replace(
        json.dumps(OURS["structure"]), structure
    )
    name = ".".join("a" * depth)
    return one({"__metadata__": {"flaxckpt": whole}, name: ZEROS})


CASES: Final[dict[str, Callable[[Path], Path]]] = {
    "empty file": lambda root: file(root / "m.safetensors", b"", b"", 0),
    "header of 2^60 bytes": one({"a": ZEROS}, length=2**60),
    "header of 2^64 - 1 bytes": one({"a": ZEROS}, length=2**64 - 1),
    "header longer than the file": one({"a": ZEROS}, length=10_000),
    "header over the limit": one(b'{"a":1}' + b" " * (100 * 10**6), b""),
    "header that ends early": one({"a": ZEROS}, length=20),
    "no JSON": one(b"{oops}"),
    "no object": one([1, 2]),
    "no UTF-8": one(b'{"\xff\xfe": 1}'),
    "byte order mark": one(b'\xef\xbb\xbf{"a": 1}'),
    "depth 100k": one(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "depth 900": one(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
    "ten million containers": one(b'{"a":[' + b"[]," * 10**7 + b"[]]}"),
    "number of 5000 digits": one(b'{"a":' + b"1" * 5000 + b"}"),
    "duplicate tensor": one(b'{"a":%b,"a":%b}' % ((json.dumps(ZEROS).encode(),) * 2)),
    "duplicate field": one(
        b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    ),
    "metadata that is no text": one({"__metadata__": {"a": 1}, "a": ZEROS}),
    "metadata that is no object": one({"__metadata__": [], "a": ZEROS}),
    "tensor that is a number": one({"a": 1}),
    "field too many": tensor(more=1),
    "field missing": one({"a": {"dtype": "F32", "shape": [2]}}),
    "unknown type": tensor(dtype="F31"),
    "type of half a byte": tensor(dtype="F4", shape=[16]),
    "type that is a list": tensor(dtype=["F32"]),
    "negative size": tensor(shape=[-2]),
    "huge size": tensor(shape=[2**60]),
    "sizes whose product wraps around": tensor(shape=[2**33, 2**33, 2]),
    "size that is no integer": tensor(shape=[2.0]),
    "size that is true": tensor(shape=[True, 2]),
    "rank 1000": tensor(shape=[1] * 999 + [2]),
    "shape and bytes disagree": tensor(shape=[3]),
    "negative offset": tensor(data_offsets=[-8, 0]),
    "offsets swapped": tensor(data_offsets=[8, 0]),
    "three offsets": tensor(data_offsets=[0, 8, 16]),
    "offsets beyond the file": tensor(shape=[2**40], data_offsets=[0, 2**42]),
    "hole before": one({"a": ZEROS | {"data_offsets": [8, 16]}}, b"\0" * 16),
    "hole between": one(
        {"a": ZEROS, "b": ZEROS | {"data_offsets": [12, 20]}}, b"\0" * 20
    ),
    "hole behind": one({"a": ZEROS}, b"\0" * 9),
    "overlap": one({"a": ZEROS, "b": ZEROS | {"data_offsets": [4, 12]}}, b"\0" * 12),
    "the same bytes twice": one({"a": ZEROS, "b": ZEROS}),
    "cut off in the length": truncated(lambda content: 5),
    "cut off in the header": truncated(lambda content: 20),
    "cut off before the data": truncated(lambda content: len(content) - 8),
    "cut off in the data": truncated(lambda content: len(content) - 1),
    "index names a parent": index({"a": "../model-1.safetensors"}),
    "index names an absolute path": index({"a": "/etc/model-1.safetensors"}),
    "index names a subdirectory": index({"a": "sub/model-1.safetensors"}),
    "index names a hidden file": index({"a": ".model-1.safetensors"}),
    "index names another kind of file": index({"a": "model-1.bin"}),
    "index names a NUL": index({"a": "model\0-1.safetensors"}),
    "index names a missing file": index({"a": "model-2.safetensors"}),
    "index names a number": index({"a": 1}),
    "index lies about a tensor": index({"b": "model-1.safetensors"}),
    "index without a map": index([]),
    "index with metadata that is a list": index({}, metadata=[]),
    "index that is no JSON": index_text(b"{"),
    "index over the limit": lambda root: index_text(
        b'{"weight_map":{}}' + b" " * (100 * 10**6)
    )(root),
    "index of depth 100k": index_text(b'{"a":' * 100_000),
    "index with a name twice": index_text(
        b'{"weight_map":{"a":"model-1.safetensors","a":"model-1.safetensors"}}'
    ),
    "shard that is a link elsewhere": outside,
    "index that is a link elsewhere": index_outside,
    "link to itself": endless_link,
    "cached: a link out of the cache": cached("../../../secret"),
    "cached: a link to the system": cached("/etc/passwd"),
    "cached: a link beside the blobs": cached("../../refs/secret"),
    "cached: a blob that is a link": cached("../../blobs/link"),
    "cached: a reference upwards": cached("../../blobs/0", "../../refs"),
    "cached: a reference to the root": cached("../../blobs/0", "/"),
    "cached: a reference of a megabyte": cached("../../blobs/0", "a" * 10**6),
    "name that is half a character": one(
        b'{"a\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    ),
    "index with a name that is half a character": index_text(
        b'{"weight_map": {"a\\udfff": "model-1.safetensors"}}'
    ),
    "shape of a million axes": tensor(shape=[1] * 10**6 + [2]),
    "600,000 tensors": lambda root: one(
        {
            str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
            for i in range(600_000)
        },
        b"",
    )(root),
    "600,000 tensors, escaped": lambda root: one(
        json.dumps({str(i): {"dtype": "U8", "data": [0, 0]} for i in range(600_000)})
        .replace("data", r"data\u005foffsets")
        .encode(),
        b"",
    )(root),
    "index of 600,000 tensors": lambda root: index(
        dict.fromkeys(map(str, range(600_000)), "model-1.safetensors")
    )(root),
    "shards without an index": lambda root: (
        one({"a": ZEROS})(root).rename(root / "model-00001-of-99999.safetensors").parent
    ),
    "a header of 18 million strings": lambda root: one(
        b'{"a":[' + b'"ab",' * (18 * 10**6) + b"1]}", b""
    )(root),
    "a header of 20 million numbers": lambda root: one(
        b'{"a":[' + b"257," * (20 * 10**6) + b"1]}"
    )(root),
    "an index of eight million keys": lambda root: index_text(
        b'{"weight_map":{' + b",".join(b'"%x":1' % i for i in range(8 * 10**6)) + b"}}"
    )(root),
    "a header in UTF-16": one('{"a":1}'.encode("utf-16-le")),
    "numbers that are none": tensor(shape=[float("nan")]),
    "a size that is infinite": tensor(shape=[float("inf")]),
    "an offset that is infinite": tensor(data_offsets=[0, float("inf")]),
    "index names a file in many lines": index({"a": "\n" * 50 + ".safetensors"}),
    "a name in many lines": index({"a\n" * 50: "model-1.safetensors"}),
    **{
        f"{name} that is a {kind}": special(name, kind)
        for name in ("model.safetensors", "model.safetensors.index.json")
        for kind in ("pipe", "device", "directory")
    },
    "ours: no JSON": one({"__metadata__": {"flaxckpt": "{"}, "a": ZEROS}),
    "ours: a list": one({"__metadata__": {"flaxckpt": "[]"}, "a": ZEROS}),
    "ours: depth 60k": one(
        {"__metadata__": {"flaxckpt": '{"leaves":' + "[" * 60_000}, "a": ZEROS}
    ),
    "ours: another version": lie(version=2),
    "ours: no leaves": lie(leaves=[]),
    "ours: no structure": lie(structure=None),
    "ours: a leaf twice": lie(leaves=[LEAF, LEAF]),
    "ours: a leaf too many": lie(
        leaves=[LEAF, LEAF | {"path": "b"}], structure=["dict", ["a", "b"], ["a", "b"]]
    ),
    "ours: another leaf": lie(
        leaves=[LEAF | {"path": "b"}], structure=["dict", ["b"], ["b"]]
    ),
    "ours: another shape": leaf(shape=[1, 2], chunks=[1, 2]),
    "ours: another type": leaf(dtype="int32"),
    "ours: an unknown type": leaf(dtype="object"),
    "ours: a type that is a list": leaf(dtype=["float32"]),
    "ours: a huge shape": leaf(shape=[2**40, 2**40], chunks=[1, 1]),
    "ours: a key of no such kind": leaf(dtype="uint32", shape=[], prng_impl="evil"),
    "ours: a class": leaf(type="os.system"),
    "ours: a string that is not there": leaf(type="str"),
    "ours: a string too many": lie(strings={"b": "text"}),
    "ours: strings that are a list": lie(strings=[]),
    "ours: a metric that is text": lie(metrics={"loss": "low"}),
    "ours: a metric of 4000 digits": lie(metrics={"loss": 10**4000}),
    "ours: metadata that is a list": lie(custom=[]),
    "ours: containers 100 deep": nested(100),
    "ours: containers 900 deep": nested(900),
    "ours: a container with keys for others": lie(
        structure=["dict", ["a", "b"], ["a"]]
    ),
    "ours: a path that is a list": leaf(path=["a"]),
}
