"""Checkpoints of our own format made to break a reader, or to make it read elsewhere.

Each case writes one under a directory and returns the path to load. Whoever changes one
can change its digests, too: they are for accidents, and all of these have none.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import flaxckpt
from flaxckpt import ArrayLayout
from tests.helpers import old_stores
from tests.hostile import SPECIAL, later

LAYOUTS: Final = {
    "raw": ArrayLayout(),
    "zstd": ArrayLayout(codec="zstd"),
    "zarr 2": ArrayLayout(zarr_version=2),
    "database": ArrayLayout(),
    "zstd database": ArrayLayout(codec="zstd"),
    "zarr 2 database": ArrayLayout(zarr_version=2),
}
"""Databases, and directories of chunk files as old releases wrote."""


VALUES: Final = np.arange(4096, dtype=np.float32)


def write(root: Path, layout: str = "raw", name: str = "step") -> Path:
    """A sound checkpoint with an array and a string, less its digests."""
    step = root / name
    if LAYOUTS[layout].zarr_version == 2:
        flaxckpt.save(root / "source", {"w": VALUES, "text": "x"})
        flaxckpt.convert(root / "source", step, layout=LAYOUTS[layout])
    else:
        flaxckpt.save(step, {"w": VALUES, "text": "x"}, layout=LAYOUTS[layout])
    if not layout.endswith("database"):
        old_stores.make_directories(step)
    change(step, lambda manifest: manifest.update(digests={}))
    return step


def change(step: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edits the manifest."""
    manifest = json.loads((step / "flaxckpt.json").read_text())
    edit(manifest)
    (step / "flaxckpt.json").write_text(json.dumps(manifest))
    (step / "commit_success.txt").unlink(missing_ok=True)


@later
def manifest(root: Path, layout: str = "raw", **changes: Any) -> Path:
    step = write(root, layout)
    change(step, lambda data: data.update(changes))
    return step


@later
def leaf(root: Path, layout: str = "raw", **changes: Any) -> Path:
    """The row of the array `w` says something else."""

    def edit(data: dict[str, Any]) -> None:
        for row in data["leaves"]:
            if row["path"] == "w":
                row.update(changes)

    step = write(root, layout)
    change(step, edit)
    return step


@later
def text(root: Path, content: bytes) -> Path:
    step = write(root)
    (step / "flaxckpt.json").write_bytes(content)
    (step / "commit_success.txt").unlink(missing_ok=True)
    return step


@later
def linked(root: Path, layout: str, edit: Callable[[Path, Path], None]) -> Path:
    """A sound checkpoint and another one, of which something is linked."""
    (root / "away").mkdir()
    secret = write(root / "away", layout)
    step = write(root, layout)
    edit(step / "state", secret / "state")
    return step


def link(*names: str) -> Callable[[Path, Path], None]:
    """Puts a link in the place of something, if it is there."""

    def edit(item: Path, secret: Path) -> None:
        paths = [path for name in names for path in sorted(secret.glob(name))]
        assert paths, names
        for path in paths:
            mine = item / path.relative_to(secret)
            if path.parent.name == "d":  # other names in each database
                mine = sorted(mine.parent.iterdir())[0]
            if mine.is_dir():
                shutil.rmtree(mine)
            else:
                mine.unlink()
            mine.symlink_to(path)

    return edit


def link_item(root: Path) -> Path:
    step = write(root)
    (step / "state").rename(root / "away")
    (step / "state").symlink_to(root / "away", target_is_directory=True)
    return step


@later
def array_metadata(root: Path, layout: str, content: Any) -> Path:
    """The metadata of the array `w` is something else."""
    step = write(root, layout)
    [file] = [*step.glob("state/w/zarr.json"), *step.glob("state/w/.zarray")]
    if not isinstance(content, bytes):
        file.write_text(json.dumps(json.loads(file.read_text()) | content))
    else:
        file.write_bytes(content)
    return step


@later
def in_database(root: Path, layout: str, content: Any) -> Path:
    import tensorstore as ts

    step = write(root, layout)
    base = {"driver": "file", "path": f"{step}/state/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    key = "w/.zarray" if "2" in layout else "w/zarr.json"
    found = json.loads(store.read(key).result().value)
    is_text = isinstance(content, bytes)
    store.write(key, content if is_text else json.dumps(found | content)).result()
    return step


@later
def renamed(root: Path, name: str) -> Path:
    """The leaf `w` has another key, which leads to a good array."""
    write(root, name="secret")
    step = write(root)
    key = json.dumps(name.replace("ROOT", str(root)))
    content = (step / "flaxckpt.json").read_text()
    (step / "flaxckpt.json").write_text(content.replace('"w"', key))
    return step


def nested(depth: int, before: bytes) -> bytes:
    return before + b"[" * depth + b"]" * depth + b"}"


GRID: Final = {"chunk_grid": {"name": "regular"}}


def grid(*sizes: int) -> dict[str, Any]:
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": sizes}}}


@later
def replaced(root: Path, name: str, change: Callable[[Path, Path], None]) -> Path:
    """A file of a sound checkpoint, and another of that name, made into something."""
    (root / "away").mkdir()
    secret = rich(root / "away")
    step = rich(root)
    (step / name).unlink()
    change(step / name, secret / name)
    return step


def rich(root: Path) -> Path:
    """A sound checkpoint with all files that one can have."""
    step = root / "step"
    flaxckpt.save(step, {"w": VALUES, "text": "x"})
    change(step, lambda manifest: manifest.update(digests={}))
    return step


@later
def pipe(root: Path, layout: str, name: str, kind: str = "pipe") -> Path:
    """A pipe in the place of a file, or something else that must not be read."""
    step = write(root, layout)
    [path, *_] = sorted((step / "state").glob(name))
    path.unlink()
    SPECIAL[kind](path)
    return step


@later
def long_file(root: Path, name: str) -> Path:
    """A file that takes no space and is said to have many bytes."""
    step = rich(root)
    os.truncate(step / name, 2**36)
    return step


def structured(structure: Any, **more: Any) -> Callable[[Path], Path]:
    return manifest(structure=structure, **more)


@later
def cut_short(root: Path, name: str, keep: int) -> Path:
    step = write(root, "database")
    [path, *_] = sorted((step / "state").glob(name))
    os.truncate(path, keep)
    return step


def database_of_another(root: Path) -> Path:
    """The tree of a database, and the values of another one."""
    away = root / "x"
    flaxckpt.save(away, {"w": VALUES + 1, "text": "x"}, layout=LAYOUTS["database"])
    step = write(root, "database")
    shutil.copyfile(away / "state/d/0.small.0", step / "state/d/0.small.0")
    return step


def many_leaves(root: Path) -> Path:
    step = write(root)
    names = [str(i) for i in range(100_000)]
    rows = [{"path": name, "type": "None"} for name in names]
    children = [["None", [], []]] * len(names)
    structure = ["dict", names, children]
    change(step, lambda data: data.update(leaves=rows * 2, structure=structure))
    return step


def cut_again(*parts: int, **changes: Any) -> dict[str, Any]:
    bytes_codec = {"name": "bytes", "configuration": {"endian": "little"}}
    inner: dict[str, Any] = {
        "chunk_shape": list(parts),
        "codecs": [bytes_codec],
        "index_codecs": [bytes_codec, {"name": "crc32c"}],
    }
    codec = {"name": "sharding_indexed", "configuration": inner | changes}
    return {"codecs": [codec]}


ZSTD: Final = {"name": "zstd", "configuration": {"level": 1}}
BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}

CASES: Final[dict[str, Callable[[Path], Path]]] = {
    "a chunk that is a link": linked("raw", link("w/c*")),
    "metadata that is a link": linked("raw", link("w/zarr.json")),
    "an array that is a link": linked("raw", link("w")),
    "a compressed chunk that is a link": linked("zstd", link("w/c*")),
    "a compressed array that is a link": linked("zstd", link("w")),
    "a chunk of zarr 2 that is a link": linked("zarr 2", link("w/0")),
    "a database that is a link": linked("database", link("manifest.ocdbt")),
    "a directory of a database that is a link": linked("database", link("d")),
    "a file of a database that is a link": linked("database", link("d/*")),
    "a directory of a compressed database that is a link": linked(
        "zstd database", link("d")
    ),
    "an item that is a link": link_item,
    "a path up": renamed("../secret/state/w"),
    "an absolute path": renamed("ROOT/secret/state/w"),
    "two dots": renamed(".."),
    "a key with NUL": renamed("w\0"),
    "an unknown codec": manifest(encoding={"codec": "pickle", "checksum": True}),
    "a codec that is a list": manifest(encoding={"codec": ["none"], "checksum": True}),
    "a checksum that is a text": manifest(encoding={"codec": "none", "checksum": "no"}),
    "zarr 9": manifest(encoding={"codec": "none", "checksum": True, "zarr_version": 9}),
    "an encoding that is a list": manifest(encoding=[]),
    "no leaves": manifest(leaves=[]),
    "a structure that is a number": manifest(structure=1),
    "digests that are a list": manifest(digests=[1]),
    "version 99": manifest(version=99),
    "keys of no such kind": leaf(
        type="jax.Array", dtype="uint32", shape=[2], chunks=[2, 2], prng_impl="evil"
    ),
    "keys of a kind that is a list": leaf(
        type="jax.Array", dtype="uint32", shape=[2], chunks=[2, 2], prng_impl=["rbg"]
    ),
    "keys of floats": leaf(
        type="jax.Array", shape=[2], chunks=[2, 2], prng_impl="threefry2x32"
    ),
    "an unknown type": leaf(type="os.system"),
    "an unknown element type": leaf(dtype="object"),
    "a shape of 2^60": leaf(shape=[2**60], chunks=[2**20]),
    "a huge shape": leaf(shape=[2**40], chunks=[2**40]),
    "a huge shape of as many chunks": leaf(shape=[2**40], chunks=[1]),
    "a huge shape, compressed": leaf("zstd", shape=[2**40], chunks=[2**40]),
    "a huge shape in a database": leaf("database", shape=[2**40], chunks=[2**40]),
    "chunks that are another rank": leaf(chunks=[2, 2]),
    "chunks of no size": leaf(chunks=[0]),
    "chunks beyond the array": leaf(chunks=[2**40]),
    "chunks beyond the array, in a database": leaf("database", chunks=[2**40]),
    "zarr.json says chunks of 2^40": array_metadata("zstd", grid(2**40)),
    "zarr.json says another shape": array_metadata("zstd", {"shape": [2**40]}),
    "zarr.json of 200k lists": array_metadata(
        "zstd", nested(200_000, b'{"zarr_format":3,"node_type":')
    ),
    "raw zarr.json of 200k lists": array_metadata("raw", nested(200_000, b'{"a":')),
    "zarray of 200k lists": array_metadata("zarr 2", nested(200_000, b'{"shape":')),
    "zarray says chunks of 2^40": array_metadata("zarr 2", {"chunks": [2**40]}),
    "zarray of 200k lists in a database": in_database(
        "zarr 2 database", nested(200_000, b'{"shape":')
    ),
    "zarray in a database says chunks of 2^40": in_database(
        "zarr 2 database", {"chunks": [2**40]}
    ),
    "zarr.json of 200k lists in a database": in_database(
        "zstd database", nested(200_000, b'{"zarr_format":3,"node_type":')
    ),
    "zarr.json in a database says chunks of 2^40": in_database(
        "zstd database", grid(2**40)
    ),
    "a manifest of 200k lists": text(nested(200_000, b'{"leaves":')),
    "a manifest of 20 million lists": lambda root: text(
        b'{"leaves":[' + b"[]," * (20 * 10**6) + b"[]]}"
    )(root),
    "a manifest that is a list": text(b"[]"),
    "a manifest of ten million strings": lambda root: text(
        b'{"leaves":[' + b'"ab",' * 10**7 + b"1]}"
    )(root),
    "a manifest of six million keys": lambda root: text(
        b'{"a":{' + b",".join(b'"%06x":1' % i for i in range(6 * 10**6)) + b"}}"
    )(root),
    "a manifest of 15 million numbers": lambda root: text(
        b'{"a":[' + b"257," * (15 * 10**6) + b"1]}"
    )(root),
    "a manifest in UTF-16": text('{"version":1}'.encode("utf-16")),
    "a manifest that is no UTF-8": text(b'{"version":"\xff"}'),
    "a manifest of 2^36 bytes": long_file("flaxckpt.json"),
    "strings of 2^36 bytes": long_file("state/_strings.json"),
    "a version of 4000 digits": manifest(version=10**4000),
    "a version in many lines": manifest(version="\n" * 100, versions={"a": "\n" * 100}),
    "100,000 leaves, each twice": many_leaves,
    **{
        f"{name} that is {title}": replaced(name, change)
        for name in ("flaxckpt.json", "state/_strings.json", "_CHECKPOINT_METADATA")
        for title, change in {
            "a link": lambda path, secret: path.symlink_to(secret),
            **{
                f"a {kind}": lambda path, secret, kind=kind: SPECIAL[kind](path)
                for kind in ("pipe", "device", "directory")
            },
        }.items()
    },
    "a pipe for a chunk": pipe("raw", "w/c*"),
    "a pipe for a compressed chunk": pipe("zstd", "w/c*"),
    "a pipe for metadata": pipe("zstd", "w/zarr.json"),
    "a pipe for a database": pipe("database", "manifest.ocdbt"),
    "a pipe for a value": pipe("database", "d/*"),
    "a value of 2^36 bytes": pipe("database", "d/*", "long file"),
    "a chunk of 2^36 bytes": pipe("zstd", "w/c*", "long file"),
    "a database that is cut short": cut_short("manifest.ocdbt", 20),
    "a database that is empty": cut_short("manifest.ocdbt", 0),
    "values that are cut short": cut_short("d/*", 100),
    "a database and the values of another": database_of_another,
    "digests that are elsewhere": manifest(
        "database", digests={"state/d/../../../../../../../etc/hostname": "sha256:0"}
    ),
    "digests of a dataset elsewhere": manifest(digests={"dataset/../../x": "sha256:0"}),
    "digests with NUL": manifest(digests={"dataset/a\0": "sha256:0"}),
    "a structure with a leaf that is not there": structured(
        ["dict", ["text", "w"], ["text", "v"]]
    ),
    "a structure with a leaf twice": structured(["dict", ["text", "w"], ["w", "w"]]),
    "a structure of 100 containers": structured(
        json.loads('["dict",["a"],[' * 100 + '"w"' + "]]" * 100)
    ),
    "a structure that is a text": structured("w"),
    "a structure with keys for others": structured(["dict", ["w"], ["text", "w"]]),
    "a structure with keys that are lists": structured(
        ["dict", [["w"], []], ["w", "text"]]
    ),
    "a structure with a key twice": structured(["dict", ["w", "w"], ["w", "text"]]),
    "a leaf for a container": structured(
        ["dict", ["text", "w"], ["text", ["dict", [], []]]]
    ),
    "a role that is a number": leaf(role=1),
    "a role of lists": leaf(role=[["a"], "b", "c", "d"]),
    "a spec that is a text": leaf(spec="x"),
    "a shape that is negative": leaf(shape=[-1]),
    "a shape that is a float": leaf(shape=[4096.0]),
    "a shape that is true": leaf(shape=[True]),
    "a shape that is infinite": leaf(shape=[float("inf")]),
    "a shape of a million axes": leaf(shape=[1] * 10**6, chunks=[1] * 10**6),
    "a path with many lines": renamed("a\n" * 50),
    "a very long name": renamed("x" * 5000),
    "zarr.json with a codec of another kind": array_metadata(
        "zstd", {"codecs": [BYTES, {"name": "numcodecs.pickle"}]}
    ),
    "zarr.json with codecs in each other": array_metadata(
        "zstd", {"codecs": [BYTES, ZSTD, ZSTD, ZSTD]}
    ),
    "zarr.json with chunks cut a thousand million times": array_metadata(
        "zstd", grid(4096) | cut_again(0)
    ),
    "zarr.json with chunks cut twice": array_metadata(
        "zstd", cut_again(64, codecs=cut_again(8)["codecs"])
    ),
    "zarr.json with an index that is compressed": array_metadata(
        "zstd", cut_again(64, index_codecs=[BYTES, ZSTD])
    ),
    "zarr.json with a transformer": array_metadata(
        "zstd", {"storage_transformers": [{"name": "x"}]}
    ),
    "zarr.json with a store elsewhere": array_metadata(
        "zstd", {"kvstore": "file:///etc/", "shape": [1]}
    ),
    "zarr.json that is a URL": array_metadata("zstd", b'"http://127.0.0.1:9/"'),
    "zarr.json with a key twice": array_metadata(
        "zstd", b'{"zarr_format":3,"shape":[4096],"shape":[4096],"node_type":"array"}'
    ),
    "zarr.json with chunks of no kind": array_metadata(
        "zstd", {"chunk_grid": {"name": "evil", "configuration": {"chunk_shape": [1]}}}
    ),
}
