"""Writes the golden checkpoints of older formats: T5X, streams, msgpack, old Orbax.

Run from the root of the repository, once for every new version of a format:

    python -m tests.golden.make_legacy

What is in the repository was written with

    flax 0.12.8    tensorstore 0.1.86    msgpack 1.2.4    orbax-checkpoint 0.12.8

in the layouts of T5X (version 3), EasyLM and fjformer, `flax.training.checkpoints`,
and of Orbax before it had `_METADATA`. Each folder has an `expected.npz`: its keys are
`<checkpoint>|<leaf path>|<type>`, its values those of the leaf, floats as float32 (the
numbers are exact in bfloat16). A folder is never written again.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import serialization

from tests import GOLDEN

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
FLOAT32: Final = np.dtype("float32")

# How many devices each axis of a parameter was split over when T5X wrote it.
SPLIT: Final = {"decoder/logits/kernel": (1, 2), "token_embedder/embedding": (2, 1)}

Tree = dict[str, Any]
Expected = dict[str, np.ndarray[Any, Any]]


def main() -> None:
    for name, make in (
        ("t5x-3", make_t5x),
        ("streaming", make_streaming),
        ("flax-msgpack", make_flax),
        ("legacy-orbax", make_orbax),
    ):
        folder = GOLDEN / name
        if folder.exists():
            print(f"{folder} is there already")  # noqa: T201
            continue
        folder.mkdir()
        expected: Expected = {}
        make(folder, expected)
        np.savez(folder / "expected.npz", **expected)


def parameters(seed: int) -> Tree:
    """Eighths, whose squares are exact in bfloat16, too."""
    random = np.random.default_rng(seed)

    def array(*shape: int) -> np.ndarray[Any, Any]:
        return random.integers(1, 16, shape).astype(np.float32) / 8

    return {
        "decoder": {"logits": {"kernel": array(8, 16)}, "norm": {"scale": array(8)}},
        "token_embedder": {"embedding": array(16, 8)},
    }


def leaves(tree: Tree, prefix: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    found = []
    for key, value in sorted(tree.items()):
        if isinstance(value, dict):
            found += leaves(value, (*prefix, key))
        else:
            found.append(("/".join((*prefix, key)), value))
    return found


def put(tree: Tree, path: str, value: Any) -> None:
    *outer, last = path.split("/")
    for key in outer:
        tree = tree.setdefault(key, {})
    tree[last] = value


def expect(expected: Expected, name: str, path: str, value: Any, kind: str) -> None:
    """Notes a leaf; `kind` is the name of its dtype, `int32 scalar` or `python int`."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuc":
        array = array.astype(np.float32)
    expected[f"{name}|{path}|{kind}"] = array


# ---- T5X --------------------------------------------------------------------------


def make_t5x(folder: Path, expected: Expected) -> None:
    for step, dtype in ((7, FLOAT32), (9, BFLOAT16)):
        write_t5x(folder, step, dtype, expected)
    tree = {"state": {"step": np.int32(3)}, "target": parameters(5)}
    content = serialization.msgpack_serialize({"version": 3, "optimizer": tree})
    (folder / "single_3").write_bytes(content)
    expect(expected, "single_3", "state/step", 3, "int32 scalar")
    for path, value in leaves(parameters(5)):
        expect(expected, "single_3", f"target/{path}", value, "float32")


def write_t5x(
    folder: Path, step: int, dtype: np.dtype[Any], expected: Expected
) -> None:
    """A step with Adafactor's state, of which only `v` is in use and an array."""
    name = f"checkpoint_{step}"
    root = folder / name
    root.mkdir()

    def array(path: str, value: Any, dtype: np.dtype[Any] = FLOAT32) -> Any:
        expect(expected, name, path, value, dtype.name)
        parameter = path.removeprefix("target/").removeprefix("state/param_states/")
        split = SPLIT.get(parameter.removesuffix("/v"), (1,) * value.ndim)
        return write_zarr(root, path, value.astype(dtype), split)

    mean = np.arange(4, dtype=np.float32)
    mutables = {"stats": {"mean": array("flax_mutables/stats/mean", mean)}}
    target: Tree = {}
    states: Tree = {}
    for path, value in leaves(parameters(step)):
        put(target, path, array(f"target/{path}", value, dtype))
        below = f"state/param_states/{path}"
        slots = None  # not trained
        if not path.startswith("token_embedder"):
            slots = {
                key: np.zeros((1,), np.float32) for key in ("m", "v", "v_col", "v_row")
            }
            for key in ("m", "v_col", "v_row"):
                expect(expected, name, f"{below}/{key}", slots[key], "float32")
            slots["v"] = array(f"{below}/v", value * value)
        put(states, path, slots)
    expect(expected, name, "state/step", step, "int32 scalar")
    optimizer = {
        "flax_mutables": mutables,
        "state": {"param_states": states, "step": np.int32(step)},
        "target": target,
    }
    # In place, as else the lists in specifications would become maps.
    content = serialization.msgpack_serialize(
        {"version": 3, "optimizer": optimizer}, in_place=True
    )
    (root / "checkpoint").write_bytes(content)


def write_zarr(root: Path, path: str, value: Any, split: tuple[int, ...]) -> Any:
    """Writes an array as T5X does; returns the specification that the file gets."""
    chunks = [size // n for size, n in zip(value.shape, split, strict=True)]
    spec = ts.Spec(
        {
            "driver": "zarr",
            "dtype": value.dtype.name,
            "kvstore": {"driver": "file", "path": path.replace("/", ".")},
            "metadata": {
                "compressor": {"id": "gzip"},
                "shape": value.shape,
                "chunks": chunks,
            },
        }
    ).to_json()
    where = {"driver": "file", "path": f"{root}/{spec['kvstore']['path']}"}
    store = ts.open({**spec, "kvstore": where}, create=True, open=True).result()
    store.write(value).result()
    return spec


# ---- EasyLM and fjformer ----------------------------------------------------------


def make_streaming(folder: Path, expected: Expected) -> None:
    params = leaves(parameters(1))
    count = np.asarray(5, np.int32)
    state = [("step", count)]
    state += [(f"params/params/{path}", value) for path, value in params]
    state += [("opt_state/0/count", count)]
    for moment in ("mu", "nu"):
        inside = f"opt_state/0/{moment}/params"
        state += [(f"{inside}/{path}", value * value) for path, value in params]
    write_stream(folder / "streaming_params", params, expected)
    write_stream(folder / "streaming_train_state", state, expected)


def write_stream(file: Path, values: list[tuple[str, Any]], expected: Expected) -> None:
    packer = msgpack.Packer()
    with file.open("wb") as stream:
        for path, value in values:
            cast = value.astype(BFLOAT16) if value.dtype == FLOAT32 else value
            record = (tuple(path.split("/")), serialization.to_bytes(cast))
            stream.write(packer.pack(record))
            expect(expected, file.name, path, cast, cast.dtype.name)


# ---- Flax -------------------------------------------------------------------------


def make_flax(folder: Path, expected: Expected) -> None:
    adam = {"count": np.asarray(3, np.int32), "mu": parameters(3), "nu": parameters(4)}
    state = {"step": 3, "params": parameters(2), "opt_state": {"0": adam, "1": {}}}
    (folder / "checkpoint_3").write_bytes(serialization.to_bytes(state))
    for path, value in leaves(state):
        kind = "python int" if path == "step" else value.dtype.name
        expect(expected, "checkpoint_3", path, value, kind)

    whole = parameters(2)["token_embedder"]["embedding"]
    flat = whole.reshape(-1)
    others = {
        "text": "a word",
        "half": 0.5,
        "true": True,
        "complex": 1.5 - 2j,
        "scalar": np.float64(0.25),
        "bfloat16": flat[:6].astype(BFLOAT16).reshape(2, 3),
        "float8": flat[:5].astype(ml_dtypes.float8_e4m3fn),
        "int4": np.arange(-4, 4).astype(ml_dtypes.int4),
        "mask": np.asarray([[True], [False]]),
        "nothing": np.zeros((0, 3), np.int64),
        # As Flax cuts arrays of more than 2**30 bytes.
        "w": {
            "__msgpack_chunked_array__": True,
            "shape": {"0": 16, "1": 8},
            "chunks": {"0": flat[:100], "1": flat[100:]},
        },
        # As Flax wrote named tuples before 0.3.
        "pair": {
            "name": "Pair",
            "fields": {"0": "left", "1": "right"},
            "values": {"0": flat[:2], "1": 7},
        },
    }
    content = serialization.msgpack_serialize(others, in_place=True)
    (folder / "checkpoint_4").write_bytes(content)
    kinds = {"half": "python float", "true": "python bool", "complex": "python complex"}
    for path, value in others.items():
        if path in kinds:
            expect(expected, "checkpoint_4", path, value, kinds[path])
        elif path == "scalar":
            expect(expected, "checkpoint_4", path, value, "float64 scalar")
        elif isinstance(value, np.ndarray):
            expect(expected, "checkpoint_4", path, value, value.dtype.name)
    expect(expected, "checkpoint_4", "w", whole, "float32")
    expect(expected, "checkpoint_4", "pair/left", flat[:2], "float32")
    expect(expected, "checkpoint_4", "pair/right", 7, "python int")


# ---- Orbax before `_METADATA` -----------------------------------------------------


def make_orbax(folder: Path, expected: Expected) -> None:
    state = {
        "params": parameters(6),
        "opt_state": {"0": {"count": np.asarray(3, np.int32)}, "1": {}},
        "step": 3,
    }
    for name, ocdbt, inline in (
        ("files", False, False),
        ("ocdbt", True, False),
        ("inline", False, True),
        ("both", False, False),
    ):
        root = folder / name
        ocp.PyTreeCheckpointer(use_ocdbt=ocdbt).save(root.resolve(), state)
        for extra in ("_sharding", "_CHECKPOINT_METADATA", "commit_success.txt"):
            (root / extra).unlink(missing_ok=True)
        shutil.rmtree(root / "array_metadatas", ignore_errors=True)
        tree: Tree = {"opt_state": {"1": {}}}
        for path, value in leaves(state):
            if path != "step" and not inline:
                value = f"PLACEHOLDER://{path.replace('/', '.')}"
            put(tree, path, value)
        (root / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
        if name != "both":
            (root / "_METADATA").unlink()
        if inline:
            for directory in root.iterdir():
                if directory.is_dir():
                    shutil.rmtree(directory)
        elif not ocdbt:
            shutil.rmtree(root / "step")
        check_orbax(root, state, ocdbt=ocdbt)
        for path, value in leaves(state):
            kind = "python int" if path == "step" else value.dtype.name
            expect(expected, name, path, value, kind)


def check_orbax(root: Path, state: Tree, *, ocdbt: bool) -> None:
    """Asserts that stock Orbax takes it for what it stands for."""
    found = ocp.PyTreeCheckpointer(use_ocdbt=ocdbt).restore(root.resolve())
    flat = dict(leaves({key: found[key] for key in ("params", "step")}))
    for path, value in leaves({key: state[key] for key in ("params", "step")}):
        np.testing.assert_array_equal(flat[path], value)


if __name__ == "__main__":
    main()
