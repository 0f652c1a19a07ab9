"""What holds for every format that is read, of whole checkpoints and of others.

A format joins by a folder `golden/<format>` with an `expected.npz` (see
`golden/make_legacy.py`) and by a module `hostile/<format>.py` with its `CASES`.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import crc32c
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax import serialization
from flax.training import train_state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors, formats, transforms
from tests import GOLDEN, ROOT
from tests.helpers import old_stores, programs, seams, slow
from tests.helpers.golden_cases import CASES, Case, assert_same, find, nested
from tests.hostile import safetensors as hostile_safetensors

HOSTILE = sorted(file.stem for file in (ROOT / "tests/hostile").glob("[!_]*.py"))

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


# ---- whole checkpoints ------------------------------------------------------------


def test_golden_checkpoints_cover_every_format():
    assert {"t5x", "streaming", "msgpack", "orbax", "safetensors", "npz", "gguf"} <= {
        case.format for case in CASES
    }


@every_case
def test_metadata_reports_shapes_and_types_without_reading_arrays(case, monkeypatch):
    seams.replace(monkeypatch, "arrays.read", None)
    seams.replace(monkeypatch, "arrays.open_one", None)
    found = flaxckpt.metadata(case.path)
    detected = formats.detect(case.path)
    assert detected.format == found.format
    assert detected.why
    for path, value in case.arrays.items():
        assert found.leaves[path].shape == value.shape
        assert found.leaves[path].dtype == value.dtype.name
    assert found.total_bytes >= sum(value.nbytes for value in case.arrays.values())


@every_case
def test_loads_all_values_with_their_types(case):
    tree = flaxckpt.load(case.path)
    for path, value in case.leaves.items():
        found = find(tree, path)
        if isinstance(found, jax.Array):  # Orbax tells those from numpy's
            found = np.asarray(found)
        assert_same(found, value)


@every_case
def test_opens_each_array_alone(case):
    for path, value in case.arrays.items():
        store = flaxckpt.open_leaf(case.path, path)
        found = store.read().result()
        assert found.shape == value.shape
        assert found.astype(value.dtype).tobytes() == value.tobytes()
        if value.ndim == 2 and value.size:
            part = np.s_[value.shape[0] // 2 :, : value.shape[1] // 2]
            np.testing.assert_array_equal(store[part].read().result(), value[part])


@every_case
def test_loads_subset_by_leaf_paths(case):
    path = sorted(case.arrays)[-1]
    wanted = nested({path: case.arrays[path]})
    found = flaxckpt.load(case.path, wanted, optimizer="exact", unused="ignore")
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert_same(find(found, path), case.arrays[path])


@pytest.mark.sampled(3)
@every_case
def test_loads_floats_as_any_float_type(case):
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        floats = {
            path: value.astype(dtype)
            for path, value in case.arrays.items()
            if jnp.issubdtype(value.dtype, jnp.floating)
        }
        abstract = {p: jax.ShapeDtypeStruct(v.shape, dtype) for p, v in floats.items()}
        found = flaxckpt.load(
            case.path, nested(abstract), optimizer="exact", unused="ignore"
        )
        for path, value in floats.items():
            assert find(found, path).dtype == dtype
            np.testing.assert_array_equal(find(found, path), value)


@pytest.mark.sampled(5)
@every_case
@pytest.mark.parametrize("spec", [("x",), (None, "x"), ("x", "y"), ()])
def test_loads_arrays_sharded(case, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    matrices = {
        path: value
        for path, value in case.arrays.items()
        if value.ndim == 2 and value.shape[0] % 8 == value.shape[1] % 8 == 0
        if value.dtype in (jnp.float32, jnp.bfloat16) and value.size
    }
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    abstract = {
        path: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        for path, value in matrices.items()
    }
    found = flaxckpt.load(
        case.path, nested(abstract), optimizer="exact", unused="ignore"
    )
    for path, value in matrices.items():
        array = find(found, path)
        assert array.sharding == sharding
        np.testing.assert_array_equal(array, value)


@every_case
def test_error_names_all_leaves_of_wrong_shape(case):
    wrong = {
        path: np.zeros((*value.shape, 2), value.dtype)
        for path, value in case.arrays.items()
    }
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(case.path, nested(wrong), optimizer="exact", unused="ignore")
    assert {m.leaf for m in caught.value.mismatches} == set(wrong)
    assert len(str(caught.value).splitlines()) < 15


# ---- damaged checkpoints ----------------------------------------------------------


def files(case: Case) -> list[Path]:
    """All files of a checkpoint, relative to its folder."""
    if case.path.is_file():
        return [Path(case.path.name)]
    return sorted(
        file.relative_to(case.path.parent)
        for file in case.path.rglob("*")
        # The databases of single processes hold what is in the common one, too.
        if file.is_file() and "ocdbt." not in str(file)
    )


def copied(case: Case, folder: Path) -> Path:
    if case.path.is_dir():
        shutil.copytree(case.path, folder / case.path.name)
    else:
        shutil.copyfile(case.path, folder / case.path.name)
    return folder / case.path.name


def assert_exact_or_refused(case: Case, path: Path) -> bool:
    """Whether a damaged copy of `case` was refused; it must be, or be whole."""
    try:
        tree = flaxckpt.load(path)
    except errors.CheckpointError as error:
        assert len(str(error).splitlines()) < 15  # noqa: PT017
        return True
    for name, value in case.leaves.items():
        found = find(tree, name)
        assert_same(np.asarray(found) if isinstance(found, jax.Array) else found, value)
    return False


def is_needed(file: Path) -> bool:
    """Whether a checkpoint without the file is not whole.

    `_METADATA` is not, beside a tree in msgpack, and the other way round.
    """
    return file.name not in ("_METADATA", "checkpoint") or "both" not in file.parts


@every_case
def test_missing_file_raises_error(case, tmp_path):
    for file in files(case):
        (tmp_path / "copy").mkdir()
        path = copied(case, tmp_path / "copy")
        (tmp_path / "copy" / file).unlink()
        if is_needed(file):
            assert assert_exact_or_refused(case, path), file
        shutil.rmtree(tmp_path / "copy")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.slow] * (case.format in ("t5x", "big_vision")),
        )
        for case in CASES
    ],
)
def test_truncated_file_raises_error(case, tmp_path):
    path = copied(case, tmp_path)
    for file in files(case):
        whole = (tmp_path / file).read_bytes()
        cuts = {*range(1, 9), *range(9, len(whole), max(len(whole) // 12, 1))}
        for less in sorted(cuts):
            if less > len(whole):
                break
            if file.suffix == ".json" and whole[-less:].isspace():
                continue
            (tmp_path / file).write_bytes(whole[:-less])
            refused = assert_exact_or_refused_or_shorter(case, path)
            assert refused, f"{file} less {less} bytes"
        (tmp_path / file).write_bytes(whole)
    assert not assert_exact_or_refused(case, path)


def assert_exact_or_refused_or_shorter(case: Case, path: Path) -> bool:
    """The same, but a stream may have been cut between two records."""
    if "streaming" not in case.name:
        return assert_exact_or_refused(case, path)
    try:
        leaves = flaxckpt.metadata(path).leaves
    except errors.CheckpointError:
        return True
    rest = {name: value for name, value in case.leaves.items() if name in leaves}
    assert len(rest) < len(case.leaves)
    for name, value in rest.items():
        assert flaxckpt.open_leaf(path, name).read().result().tobytes() == (
            np.asarray(value).tobytes()
        )
    return True


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.path.is_file()], ids=lambda case: case.name
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_in_file_are_detected_or_harmless(case, tmp_path, data):
    """Anywhere: they may change names, types and values, but nothing else is read."""
    content = bytearray(case.path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(
            st.integers(0, 255)
        )
    (tmp_path / "flipped").write_bytes(content)
    try:
        found = flaxckpt.metadata(tmp_path / "flipped")
        jax.tree.leaves(flaxckpt.load(tmp_path / "flipped"))
    except errors.CheckpointError as error:
        assert len(str(error).splitlines()) < 15  # noqa: PT017
    else:
        assert found.total_bytes <= len(content) + 64 * len(found.leaves)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_in_t5x_checkpoint_are_detected_or_harmless(tmp_path, data):
    case = next(case for case in CASES if case.name == "t5x-3-checkpoint_7")
    path = tmp_path / case.path.name
    if not path.exists():
        copied(case, tmp_path)
    file = tmp_path / data.draw(st.sampled_from(files(case)))
    whole = file.read_bytes()
    content = bytearray(whole)
    content[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        flaxckpt.load(path)
    except errors.CheckpointError as error:
        assert len(str(error).splitlines()) < 15  # noqa: PT017
    finally:
        file.write_bytes(whole)


# ---- hostile checkpoints ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("format_name", slow.all_but(HOSTILE, ["orbax", "msgpack"]))
def test_rejects_hostile_checkpoints(format_name, tmp_path):
    """All in one process, which is started again behind a case that has ended it."""
    names: list[str] = []
    outcomes: dict[str, Any] = {}
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        words = ("-m", "tests.helpers.run_hostile", format_name, folder, *names)
        process = programs.run(*words, code=None, timeout=None, XLA_FLAGS="")
        known = told(process.stdout, outcomes)
        if process.returncode == 0:
            break
        assert known, process.stderr[-2000:]
        last = list(outcomes)[-1]
        outcomes[last] = {"error": f"exit code {process.returncode}", "grown": 0}
        outcomes[last]["text"] = process.stderr[-500:]
        names = [name for name in hostile_names(format_name) if name not in outcomes]
        if not names:
            break
    faults = {
        name: outcome
        for name, outcome in outcomes.items()
        if not is_ours(outcome.get("error", "nothing told"))
        or outcome["grown"] > 2**30
        or len(outcome["text"].splitlines()) > 14
    }
    assert not faults
    assert set(outcomes) == set(hostile_names(format_name))


def told(output: str, outcomes: dict[str, Any]) -> bool:
    """Enters what a process has said, and says whether it has begun with a case."""
    begun = False
    for line in output.splitlines():
        row = json.loads(line)
        outcomes[row["case"]] = row
        begun = True
    return begun


def hostile_names(format_name: str) -> list[str]:
    module = __import__(f"tests.hostile.{format_name}", fromlist=["CASES"])
    return list(module.CASES)


def is_ours(error: str) -> bool:
    return issubclass(getattr(errors, error, Exception), errors.CheckpointError)


@pytest.mark.parametrize("target", ["chunk", "array"])
@pytest.mark.parametrize("layout", ["raw", "zstd", "zarr 2"])
def test_follows_links_within_checkpoint(tmp_path, layout, target):
    from tests.hostile import flaxckpt as ours

    step = ours.write(tmp_path, layout)
    array = step / "state/w"
    path = array if target == "array" else next(p for p in array.glob("*0"))
    path.rename(step / "state/moved")
    path.symlink_to(step / "state/moved", target_is_directory=target == "array")
    np.testing.assert_array_equal(flaxckpt.load(step)["w"], ours.VALUES)
    (tmp_path / "link").symlink_to(step, target_is_directory=True)
    np.testing.assert_array_equal(flaxckpt.load(tmp_path / "link")["w"], ours.VALUES)


def bools(root: Path, name: str) -> Path:
    """A checkpoint of four bools, one of which is the byte 2, in some format."""
    from tests.hostile import orbax, t5x

    values = np.array([0, 1, 2, 1], np.uint8)
    content = values.tobytes()
    if name in ("msgpack", "streaming"):
        text = serialization.to_bytes({"w": values.view(np.bool_)})
        if name == "streaming":
            leaf = serialization.to_bytes(values.view(np.bool_))
            text = msgpack.packb((("w",), leaf))
        (root / "file").write_bytes(text)
        return root / "file"
    if name == "safetensors":
        return hostile_safetensors.file(
            root / "m.safetensors",
            {"w": {"dtype": "BOOL", "shape": [4], "data_offsets": [0, 4]}},
            content,
        )
    changes = {"shape": [4], "chunks": [4], "dtype": "|b1"}
    if name.startswith("t5x"):
        codec = {"id": "zstd", "level": 1} if name == "t5x zstd" else None
        encoded = b"\x28\xb5\x2f\xfd\x20\x04\x21\x00\x00" + content
        return t5x.write(
            root,
            spec={**t5x.spec(metadata={"shape": [4]}), "dtype": "bool"},
            zarray=t5x.ZARRAY | changes | {"compressor": codec},
            chunks={"0": encoded if codec else content},
        )
    if name == "orbax":
        metadata = orbax.ZARRAY | changes | {"compressor": None}
        return orbax.write(root, metadata, {"0": content})
    flaxckpt.save(root / "c", {"w": np.array([False, True, True, True])})
    chunk = root / "c/state/d/0.small.0"
    if name == "flaxckpt directories":
        old_stores.make_directories(root / "c")
        chunk = root / "c/state/w/c.0"
    checksum = crc32c.crc32c(content).to_bytes(4, "little")
    assert chunk.stat().st_size == len(content + checksum)
    chunk.write_bytes(content + checksum)
    manifest = json.loads((root / "c/flaxckpt.json").read_text())
    manifest["checksums"]["w"] = base64.b64encode(checksum).decode()
    old_stores.rewrite_manifest(root / "c", manifest)
    return root / "c"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        *("msgpack", "streaming", "safetensors", "t5x", "t5x zstd", "orbax"),
        *("flaxckpt", "flaxckpt directories"),
    ],
)
def test_rejects_invalid_bools(tmp_path, name):
    path = bools(tmp_path, name)
    [leaf] = flaxckpt.metadata(path).leaves
    for abstract_state in (None, nested({leaf: jnp.zeros(4, bool)})):
        with pytest.raises(errors.DamagedCheckpointError, match="bool"):
            flaxckpt.load(path, abstract_state)
    with pytest.raises(ValueError, match="bool"):
        flaxckpt.open_leaf(path, leaf).read().result()


@pytest.mark.parametrize("zarr_version", [2, 3])
def test_reads_unstored_arrays_as_zeros(tmp_path, zarr_version):
    from tests.hostile import orbax

    size = 300 * 2**20  # bytes; nothing of them is there
    if zarr_version == 2:
        metadata = orbax.ZARRAY | {"shape": [size // 4], "chunks": [2**20]}
    else:
        metadata = orbax.ZARR | {"shape": [size // 4], "chunk_grid": orbax.grid(2**20)}
    step = orbax.write(tmp_path, metadata, {}, use_zarr3=zarr_version == 3)
    found = flaxckpt.load(step)["w"]
    assert found.nbytes == size
    assert not found.any()


def test_describes_but_does_not_open_huge_array(tmp_path):
    from tests.hostile import orbax

    step = orbax.CASES["huge, nothing stored"](tmp_path)
    assert flaxckpt.metadata(step).leaves["w"].shape == (orbax.HUGE,)
    with pytest.raises(errors.DamagedCheckpointError, match="only"):
        flaxckpt.open_leaf(step, "w")


# ---- what is particular to a format -----------------------------------------------


def test_finds_flax_and_t5x_steps_in_directory(tmp_path):
    (tmp_path / "flax").mkdir()
    for step in (0, 3, 10):
        content = serialization.to_bytes({"step": step})
        (tmp_path / f"flax/checkpoint_{step}").write_bytes(content)
    (tmp_path / "flax/checkpoint_99.5").write_bytes(content)
    (tmp_path / "flax/checkpoint_tmp").write_bytes(content)
    assert flaxckpt.load(tmp_path / "flax") == {"step": 10}
    assert flaxckpt.load(tmp_path / "flax", step=0) == {"step": 0}
    assert flaxckpt.metadata(tmp_path / "flax").step == 10
    with pytest.raises(errors.CheckpointNotFoundError, match="0, 3, 10"):
        flaxckpt.load(tmp_path / "flax", step=99)

    shutil.copytree(GOLDEN / "t5x-3/checkpoint_7", tmp_path / "t5x/checkpoint_7")
    shutil.copytree(GOLDEN / "t5x-3/checkpoint_9", tmp_path / "t5x/checkpoint_11.tmp-0")
    assert flaxckpt.load(tmp_path / "t5x")["state"]["step"] == 7
    ckpt = flaxckpt.Checkpointer(
        tmp_path / "t5x", step_format="checkpoint_{step}", read_only=True
    )
    assert ckpt.steps() == [7]


def test_restores_train_state_from_flax_msgpack(tmp_path):
    import optax

    params = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
    state = train_state.TrainState.create(
        apply_fn=None, params=params, tx=optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    )
    state = state.apply_gradients(grads=params)
    (tmp_path / "checkpoint_1").write_bytes(serialization.to_bytes(state))
    again = flaxckpt.load(tmp_path, jax.eval_shape(lambda: state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    plain = flaxckpt.load(tmp_path)
    assert list(plain["opt_state"][1][0]) == ["count", "mu", "nu"]
    assert plain["opt_state"][0] == {}


def test_lists_longer_than_ten_keep_order(tmp_path):
    state = {"layers": [{"w": np.full(2, i)} for i in range(12)]}
    tree = jax.tree.map(lambda x: x, serialization.to_state_dict(state))  # sorts keys
    (tmp_path / "file").write_bytes(serialization.msgpack_serialize(tree))
    found = flaxckpt.load(tmp_path / "file")
    assert [int(layer["w"][0]) for layer in found["layers"]] == list(range(12))


@pytest.mark.parametrize("where", ["kvstore", "spec"])
@pytest.mark.parametrize("driver", ["file", "gfile", "gcs"])
def test_reads_t5x_specs_of_other_releases(tmp_path, driver, where):
    from tests.hostile import t5x

    kvstore = {"driver": driver} | ({"bucket": "b"} if driver == "gcs" else {})
    more: dict[str, Any] = {"kvstore": {**kvstore, "path": "target.w"}}
    if where == "spec":
        more = {"kvstore": kvstore, "path": "target.w/"}
    spec = t5x.spec(**more) | {
        "transform": {"input_inclusive_min": [0], "input_exclusive_max": [[8]]},
        "metadata": {"shape": [8], "chunks": [4], "dtype": "<f4"},
    }
    path = t5x.write(tmp_path, spec=spec)
    np.testing.assert_array_equal(flaxckpt.load(path)["target"]["w"], t5x.VALUES)


@pytest.mark.parametrize("compressor", [None, "zlib", "gzip", "bz2", "zstd", "blosc"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", ">i2", "uint8"])
def test_reads_zarr_2_arrays_like_tensorstore(tmp_path, compressor, dtype):
    import tensorstore as ts

    from tests.hostile import t5x

    order = "F" if dtype == "float32" else "C"
    stored = {"bool": "|b1", "uint8": "|u1", "float32": "<f4"}.get(dtype, dtype)
    metadata = {"shape": [5, 6], "chunks": [2, 4], "dtype": stored}
    native = np.dtype(dtype).newbyteorder("=").name
    path = t5x.write(tmp_path, spec=t5x.spec(metadata=metadata, dtype=native))
    shutil.rmtree(path / "target.w", ignore_errors=True)
    store = ts.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{path}/target.w/"},
            "metadata": {
                **metadata,
                "order": order,
                "compressor": compressor and {"id": compressor},
            },
        },
        create=True,
    ).result()
    values = np.arange(30).reshape(5, 6).astype(store.dtype.numpy_dtype)
    store.write(values).result()
    found = flaxckpt.open_leaf(path, "target/w")
    assert found.shape == (5, 6)
    for region in (np.s_[:, :], np.s_[1:4, 3:5], np.s_[4:, 5:], np.s_[2:2, :]):
        np.testing.assert_array_equal(found[region].read().result(), values[region])


@pytest.mark.parametrize("step", [np.int32(3), np.asarray(3, np.int32), 3])
def test_reads_single_file_t5x_with_any_step_type_and_order(tmp_path, step):
    optimizer = {"target": {"w": np.ones(2)}, "state": {"step": step}}
    for tree in (
        {"version": 3, "optimizer": optimizer},
        {"optimizer": optimizer, "version": 3},
    ):
        content = serialization.msgpack_serialize(tree)
        (tmp_path / "checkpoint_0").write_bytes(content)
        assert flaxckpt.metadata(tmp_path).format == "t5x"
        found = flaxckpt.load(tmp_path, step=0)
        assert found["state"]["step"] == 3
        assert type(found["state"]["step"]) is type(step)
        np.testing.assert_array_equal(found["target"]["w"], [1, 1])


def test_parameters_named_like_spec_stay_parameters(tmp_path):
    target = {"driver": np.ones(2), "kvstore": {"x": np.ones(1)}, "metadata": {}}
    content = {"version": 3, "optimizer": {"target": target}}
    (tmp_path / "file").write_bytes(serialization.msgpack_serialize(content))
    found = flaxckpt.load(tmp_path / "file")["target"]
    np.testing.assert_array_equal(found["driver"], [1, 1])


def test_msgpack_returns_large_integers_and_other_values(tmp_path):
    state = {
        "large": 2**64 - 1,
        "small": -(2**63),
        "nothing": None,
        "infinite": float("inf"),
        "empty": {},
        "text": "ä" * 300,
        "list": [1, [2.5]],
    }
    (tmp_path / "file").write_bytes(serialization.msgpack_serialize(state))
    assert flaxckpt.load(tmp_path / "file") == state


def test_reads_t5x_version_2_except_old_bfloat16(tmp_path):
    from tests.hostile import t5x

    path = t5x.write(tmp_path, version=2)
    np.testing.assert_array_equal(flaxckpt.load(path)["target"]["w"], t5x.VALUES)
    shutil.rmtree(path)
    bits = np.arange(4, dtype="<u2")
    path = t5x.write(
        tmp_path,
        version=2,
        spec={**t5x.spec(metadata={"shape": [4]}), "dtype": "uint16"},
        zarray=t5x.ZARRAY
        | {"shape": [4], "chunks": [4], "dtype": "<u2", "compressor": None},
        chunks={"0": bits.tobytes()},
    )
    with pytest.raises(errors.DamagedCheckpointError, match="stand for bfloat16"):
        flaxckpt.load(path)


@pytest.mark.parametrize("step_name", ["checkpoint_4", "step_00000004", "0004"])
def test_finds_old_orbax_steps_under_any_name(tmp_path, step_name):
    shutil.copytree(GOLDEN / "legacy-orbax/files", tmp_path / step_name)
    assert flaxckpt.metadata(tmp_path).step == 4
    shutil.copytree(GOLDEN / "legacy-orbax/files", tmp_path / "items/5/default")
    assert flaxckpt.load(tmp_path / "items", step=5)["step"] == 3


def test_error_lists_readable_formats_and_explains_pickles(tmp_path):
    from tests.hostile import msgpack

    (tmp_path / "notes").write_text("")
    with pytest.raises(errors.CheckpointFormatError, match=r"Orbax.*T5X.*EasyLM"):
        formats.detect(tmp_path)
    for name, says in (
        ("a pickle", "Pickles run code"),
        ("an archive with a pickle", "Pickles run code"),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(errors.CheckpointFormatError, match=says):
            flaxckpt.load(msgpack.CASES[name](tmp_path / name))


def npys(*arrays):
    """Returns the bytes of arrays in one file, as `np.save` appends them."""
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    return file.getvalue()


def archive(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        for name in names:
            members.writestr(name, b"x")
    return file.getvalue()


HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(40)
KNOWN = {
    "model.eqx": (npys(np.ones(3)), "tree_deserialise_leaves"),
    "two_leaves": (npys(np.ones(3), np.ones(2)), "tree_deserialise_leaves"),
    "with_json.eqx": (b'{"width": 3}\n' + npys(np.ones(3)), "tree_deserialise_leaves"),
    "one.npy": (npys(np.ones(3)), r"numpy\.load"),
    "model.keras": (archive("metadata.json", "model.weights.h5"), "load_model"),
    "unnamed": (archive("metadata.json", "config.json"), "load_model"),
    "model.weights.h5": (HDF5, r"weights of Keras.*load_weights"),
    "data.h5": (HDF5, r"h5py\.File"),
    "data.hdf5": (HDF5, r"h5py\.File"),
    "run.zip": (archive("run/1/_METADATA"), "unpack it"),
    "model.pt": (archive("model/data.pkl"), r"torch\.load.*weights_only"),
    "model.pth": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9", r"torch\.load.*weights_only"),
    "model.ckpt": (archive("epoch=1/data.pkl"), r"torch\.load.*weights_only"),
    "state.pkl": (b"\x80\x04\x95\x05", "Pickles run code"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_error_names_foreign_format_and_alternative(tmp_path, name):
    content, says = KNOWN[name]
    (tmp_path / name).write_bytes(content)
    for call in (flaxckpt.load, flaxckpt.metadata):
        with pytest.raises(errors.CheckpointFormatError, match=says) as caught:
            call(tmp_path / name)
        assert ("numpy.load" in str(caught.value)) == (name == "one.npy")


def test_haiku_names_become_keys_with_slashes(tmp_path):
    state = {"mlp/~/linear_0": {"w": np.ones(3, np.float32)}, "100%": 1}
    (tmp_path / "flax").write_bytes(serialization.to_bytes(state))
    with (tmp_path / "stream").open("wb") as file:
        for keys, value in ((("mlp/~/linear_0", "w"), np.ones(3)), (("100%",), 1)):
            file.write(msgpack.packb((keys, serialization.to_bytes(value))))
    for name in ("flax", "stream"):
        found = flaxckpt.load(tmp_path / name)
        np.testing.assert_array_equal(found["mlp/~/linear_0"]["w"], [1, 1, 1])
        assert found["100%"] == 1
        paths = ["mlp%2F~%2Flinear_0/w", "100%25"]
        assert list(flaxckpt.metadata(tmp_path / name).leaves) == paths
    again = flaxckpt.load(tmp_path / "flax", state)
    assert list(again) == list(state)


def test_bad_keys_and_bare_arrays_raise_clear_errors(tmp_path):
    file = tmp_path / "file"
    for key, says in (("", "an empty key"), ("a\0", "contains a NUL")):
        file.write_bytes(msgpack.packb({key: 1}))
        with pytest.raises(errors.DamagedCheckpointError, match=says):
            flaxckpt.load(file)
        file.write_bytes(msgpack.packb(((key,), b"\x01")))
        with pytest.raises(errors.DamagedCheckpointError, match=says):
            flaxckpt.load(file)
    file.write_bytes(serialization.to_bytes({}))
    assert flaxckpt.load(file) == {}
    file.write_bytes(serialization.to_bytes(np.ones(3)))
    with pytest.raises(errors.CheckpointFormatError, match="a single array in msgpack"):
        flaxckpt.load(file)


def test_loads_fractional_step_by_path(tmp_path):
    path = tmp_path / "checkpoint_1.5"
    path.write_bytes(serialization.to_bytes({"step": 3}))
    with pytest.raises(errors.CheckpointFormatError, match=r"such as .*nt_1\.5$"):
        flaxckpt.load(tmp_path)
    assert flaxckpt.load(path) == {"step": 3}


def test_old_orbax_items_become_branches_of_one_tree(tmp_path, caplog):
    step = tmp_path / "3"
    for name in ("state", "ema"):
        shutil.copytree(GOLDEN / "legacy-orbax/files", step / name)
    (step / "dataset").mkdir()
    (step / "notes").mkdir()
    (step / "notes" / "notes.txt").touch()
    assert flaxckpt.load(step / "ema").keys() == flaxckpt.load(step)["ema"].keys()
    [record] = caplog.records
    assert "notes has no files of a tree of arrays" in record.message
    assert list(flaxckpt.load(step)) == ["ema", "state"]


@pytest.mark.parametrize("name", ["streaming_params", "streaming_train_state"])
def test_loads_streamed_parameters_like_easylm(name):
    """Kinds `params` and `trainstate_params`."""
    change = [transforms.rename("(.*)", r"params/\1")]
    if name == "streaming_train_state":
        change = [
            transforms.keep("params/params/.*"),
            transforms.rename("params/params/(.*)", r"params/\1"),
        ]
    found = flaxckpt.load(GOLDEN / "streaming" / name, transforms=change)
    [case] = [case for case in CASES if case.name == "streaming-streaming_params"]
    assert list(found) == ["params"]
    for path, value in case.leaves.items():
        assert_same(find(found["params"], path), value)
