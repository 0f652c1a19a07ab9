"""Archives of numpy (`.npz`) are read like every other format.

What holds for all formats is tested in test_readers.py.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors, formats, transforms
from flaxckpt.cli import app
from tests import GOLDEN
from tests.helpers import seams
from tests.hostile import npz as hostile

VALUES = np.arange(4 * 6, dtype=np.float32).reshape(4, 6)
SAVES = pytest.mark.parametrize("save", [np.savez, np.savez_compressed])


@SAVES
@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">c8", "<i8", ">u2", "|i1", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_reads_all_dtypes_orders_and_slices(tmp_path, save, dtype, order):
    wanted = np.array(np.arange(4 * 5 * 6).reshape(4, 5, 6), dtype, order=order)
    save(tmp_path / "a.npz", w=wanted)
    found = flaxckpt.load(tmp_path / "a.npz")["w"]
    assert found.dtype == wanted.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, wanted)
    store = flaxckpt.open_leaf(tmp_path / "a.npz", "w")
    for part in (np.s_[1:3], np.s_[:, 2:4, 1:5], np.s_[3, 1, 2:], np.s_[..., 4]):
        np.testing.assert_array_equal(store[part].read().result(), wanted[part])


@SAVES
def test_splits_names_into_keys_like_big_vision(tmp_path, save):
    save(
        tmp_path / "a.npz",
        **{"params/Dense_0/kernel": VALUES, "opt/0/mu": VALUES, "opt/1/mu": VALUES},
        step=np.int64(3),
    )
    found = flaxckpt.load(tmp_path / "a.npz")
    assert list(found) == ["params", "opt", "step"]
    assert isinstance(found["opt"], list)
    np.testing.assert_array_equal(found["params"]["Dense_0"]["kernel"], VALUES)
    assert flaxckpt.load(tmp_path / "a.npz", {"step": 0}, unused="ignore") == {
        "step": 3
    }


def test_names_without_slashes_are_leaves(tmp_path):
    np.savez(tmp_path / "a.npz", VALUES, VALUES + 1)
    found = flaxckpt.load(tmp_path / "a.npz")
    assert list(found) == ["arr_0", "arr_1"]
    np.testing.assert_array_equal(found["arr_1"], VALUES + 1)


def test_does_not_split_conflicting_names(tmp_path, caplog):
    np.savez(tmp_path / "a.npz", **{"a": VALUES, "a/b": VALUES})
    assert list(flaxckpt.load(tmp_path / "a.npz")) == ["a", "a/b"]
    assert "are not split" in caplog.text


@SAVES
def test_reads_bfloat16_but_rejects_other_unnamed_types(tmp_path, save):
    wanted = VALUES.astype(ml_dtypes.bfloat16)
    save(tmp_path / "a.npz", w=wanted)
    found = flaxckpt.load(tmp_path / "a.npz")["w"]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found, wanted)
    kinds = {"f8": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    save(
        tmp_path / "b.npz", w=wanted, **{k: VALUES.astype(t) for k, t in kinds.items()}
    )
    with pytest.raises(errors.CheckpointFormatError) as caught:
        flaxckpt.load(tmp_path / "b.npz")
    for name in kinds:
        assert f"  {name}: has" in str(caught.value)
    assert "  w:" not in str(caught.value)


def test_error_names_non_numeric_arrays_without_unpickling(tmp_path):
    structure = np.zeros(2, [("x", "<f4")])
    arrays = {"o": np.array([{}], object), "s": structure, "t": np.array("text")}
    np.savez(tmp_path / "a.npz", w=VALUES, **arrays)
    with pytest.raises(errors.CheckpointFormatError) as caught:
        flaxckpt.load(tmp_path / "a.npz")
    assert "o: holds Python objects, which are pickled" in str(caught.value)
    assert "s: has the element type [('x', '<f4')]" in str(caught.value)
    assert "t: is an array of" in str(caught.value)
    assert "numpy.savez" in str(caught.value)


def test_error_for_bare_array_explains_reading_and_saving(tmp_path):
    np.save(tmp_path / "a.npy", VALUES)
    with pytest.raises(errors.CheckpointFormatError) as caught:
        flaxckpt.load(tmp_path / "a.npy")
    for words in ("a single numpy array", "allow_pickle=False", "numpy.savez("):
        assert words in str(caught.value)


@SAVES
def test_loads_arrays_sharded_and_cast(tmp_path, save):
    wanted = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    save(tmp_path / "a.npz", c=wanted, f=np.asfortranarray(wanted))
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    for spec in (("x",), (None, "y"), ("x", "y"), ()):
        leaf = jax.ShapeDtypeStruct(
            (8, 16), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )
        found = flaxckpt.load(tmp_path / "a.npz", {"c": leaf, "f": leaf})
        for name in ("c", "f"):
            assert found[name].sharding == leaf.sharding
            np.testing.assert_array_equal(found[name], wanted)


def changed_in_row_0(path: Path) -> Path:
    """A copy of an archive in which a bit of the first row of an array has changed."""
    content = bytearray(path.read_bytes())
    content[content.index(VALUES[1].tobytes()) - VALUES[0].nbytes + 1] ^= 1
    changed = path.with_name("changed.npz")
    changed.write_bytes(content)
    return changed


def test_load_verify_and_convert_detect_changed_bit(tmp_path):
    np.savez(tmp_path / "a.npz", w=VALUES, v=VALUES + 100)
    path = changed_in_row_0(tmp_path / "a.npz")
    for abstract in (None, {"w": jnp.zeros((4, 6))}):
        with pytest.raises(errors.DamagedCheckpointError, match=r"w: .* the CRC-32"):
            flaxckpt.load(path, abstract, unused="ignore")
    with pytest.raises(errors.DamagedCheckpointError, match=r"w: .* the CRC-32"):
        flaxckpt.convert(path, tmp_path / "b")
    report = flaxckpt.verify(path)
    assert list(report.problems) == ["w"]
    assert not report.unchecked
    sound = flaxckpt.verify(tmp_path / "a.npz")
    assert sound.ok
    assert not sound.unchecked
    found = flaxckpt.load(path, {"v": jnp.zeros((4, 6))}, unused="ignore")
    np.testing.assert_array_equal(found["v"], VALUES + 100)


def test_open_leaf_rejects_damaged_array(tmp_path):
    np.savez(tmp_path / "a.npz", w=VALUES)
    np.testing.assert_array_equal(
        flaxckpt.open_leaf(tmp_path / "a.npz", "w")[2:].read().result(), VALUES[2:]
    )
    path = changed_in_row_0(tmp_path / "a.npz")
    with pytest.raises(errors.DamagedCheckpointError):
        flaxckpt.open_leaf(path, "w")


def test_reading_replaced_archive_raises_error(tmp_path):
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", w=VALUES)
        store = flaxckpt.open_leaf(tmp_path / "a.npz", "w")
        save(tmp_path / "b.npz", w=VALUES + 1)
        (tmp_path / "b.npz").replace(tmp_path / "a.npz")
        with pytest.raises((ValueError, OSError), match="was replaced or changed"):
            store.read().result()


@SAVES
def test_diff_finds_converted_archives_equal(tmp_path, save):
    save(tmp_path / "a.npz", **{"params/w": VALUES, "params/b": VALUES[0]})
    for name in ("dir", "b.safetensors", "b.msgpack"):
        flaxckpt.convert(tmp_path / "a.npz", tmp_path / name)
        assert flaxckpt.diff(tmp_path / "a.npz", tmp_path / name).is_empty
    plan = flaxckpt.plan(
        tmp_path / "a.npz",
        {"model": {"w": VALUES, "b": VALUES[0]}},
        transforms=[transforms.rename("params/(.*)", r"model/\1")],
    )
    assert not plan.problems


@SAVES
def test_reads_leaves_in_pieces(tmp_path, monkeypatch, save):
    wanted = np.arange(2**16, dtype=np.float32).reshape(2**10, 64)
    save(tmp_path / "a.npz", w=wanted, f=np.asfortranarray(wanted))
    read, real = [], seams.current("blockwise.read")

    def trace(pieces, **options):
        read.extend(piece.name for piece in pieces)
        return real(pieces, **options)

    seams.replace(monkeypatch, "blockwise.read", trace)
    target = tmp_path / "m.safetensors"
    flaxckpt.convert(tmp_path / "a.npz", target, max_concurrent_bytes=2**16)
    assert len(read) == len(set(read)) == 16
    for array in flaxckpt.load(target).values():
        np.testing.assert_array_equal(array, wanted)


def test_numbered_big_vision_copies_are_steps(tmp_path):
    for step in (1000, 2000):
        with (tmp_path / f"checkpoint.npz-{step:09d}").open("wb") as file:
            np.savez(file, **{"params/w": VALUES + step})
    found = flaxckpt.load(tmp_path)
    np.testing.assert_array_equal(found["params"]["w"], VALUES + 2000)
    assert flaxckpt.metadata(tmp_path, step=1000).step == 1000


def test_reads_archives_of_other_programs(tmp_path):
    """Entries of directories, sizes behind the data, a comment, headers of Python 2."""
    content = hostile.npy(VALUES)
    old = hostile.header(
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }", bytes(8), 1
    )

    class Unseekable(io.RawIOBase):
        def __init__(self) -> None:
            self.content = b""

        def writable(self) -> bool:
            return True

        def write(self, data) -> int:
            self.content += bytes(data)
            return len(data)

    stream = Unseekable()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("params/w.npy", content)
        archive.writestr("params/", b"")
        archive.writestr(zipfile.ZipInfo("é/old.npy"), old, zipfile.ZIP_DEFLATED)
        archive.comment = b"made elsewhere"
    (tmp_path / "a.npz").write_bytes(stream.content)
    found = flaxckpt.load(tmp_path / "a.npz")
    np.testing.assert_array_equal(found["params"]["w"], VALUES)
    np.testing.assert_array_equal(found["é"]["old"], [0, 0])


def test_every_command_accepts_archive(tmp_path):
    np.savez(tmp_path / "a.npz", **{"params/w": VALUES})
    path = str(tmp_path / "a.npz")
    for words in (["show", path], ["verify", path], ["diff", path, path]):
        assert CliRunner().invoke(app, words).exit_code == 0, words
    words = ["convert", path, str(tmp_path / "b")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert formats.detect(path).format == "npz"


def test_golden_archives_have_the_shapes_numpy_reads():
    for path in GOLDEN.glob("npz/checkpoint*"):
        infos = flaxckpt.metadata(path).leaves
        with np.load(path) as wanted:
            assert list(infos) == list(wanted)
            for name, info in infos.items():
                assert info.shape == wanted[name].shape


def test_error_for_directory_with_archive_suggests_path(tmp_path):
    np.savez(tmp_path / "weights.npz", w=VALUES)
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(errors.CheckpointFormatError, match=r"such as .*weights\.npz$"):
        flaxckpt.load(tmp_path)
