"""Files of the gguf package are read as the package reads them."""

from __future__ import annotations

import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors
from tests import GOLDEN

gguf = pytest.importorskip("gguf", reason="the gguf package is missing")
quants = pytest.importorskip("gguf.quants")
Type = gguf.GGMLQuantizationType

PLAIN = {
    Type.F32: "float32",
    Type.F16: "float16",
    Type.BF16: "bfloat16",
    Type.F64: "float64",
    Type.I8: "int8",
    Type.I16: "int16",
    Type.I32: "int32",
    Type.I64: "int64",
}


def write(path, tensors, *, alignment=32, fields=()):
    """Writes tensors of raw bytes: name -> shape in elements, type, bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for add, *args in fields:
        getattr(writer, add)(*args)
    for name, (shape, kind, data) in tensors.items():
        if kind in PLAIN and kind != Type.BF16:
            values = np.frombuffer(data, PLAIN[kind]).reshape(shape)
            writer.add_tensor(name, values)
        else:
            shape = gguf.quant_shape_to_byte_shape(shape, kind)
            values = np.frombuffer(data, np.uint8).reshape(shape)
            writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path):
    """Name -> values as the package reads them, also of quantized tensors."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(reversed(tensor.shape.tolist()))
        if tensor.tensor_type in PLAIN:
            dtype = PLAIN[tensor.tensor_type]
            dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
            values = np.frombuffer(tensor.data.tobytes(), dtype)
        else:
            with np.errstate(all="ignore"):
                values = quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = values.reshape(shape)
    return found


@st.composite
def tensors(draw, kinds=(*PLAIN, Type.Q8_0)):
    made = {}
    for i in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(kinds))
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        shape[-1] *= block
        count = int(np.prod(shape)) // block * size
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        made[f"blk.{i}.weight"] = shape, kind, rng.bytes(count)
    return made


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=tensors(), alignment=st.sampled_from([8, 32, 128]))
def test_reads_tensors_like_gguf_package(tmp_path, made, alignment):
    path = write(tmp_path / "a.gguf", made, alignment=alignment)
    for name, wanted in read(path).items():
        store = flaxckpt.open_leaf(path, name.replace(".", "/"))
        found = store.read().result()
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert found.tobytes() == wanted.tobytes()


def test_reads_golden_file_like_gguf_package():
    path = GOLDEN / "gguf/model.gguf"
    for name, wanted in read(path).items():
        found = flaxckpt.open_leaf(path, name.replace(".", "/")).read().result()
        assert found.shape == (() if name == "scale" else wanted.shape)
        assert found.tobytes() == wanted.tobytes()


KNOWN = [kind for kind in Type if kind.value <= 41]
"""All types but those of newer packages."""


@pytest.mark.parametrize("kind", KNOWN)
def test_block_sizes_match_gguf_package(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    path = write(tmp_path / "a.gguf", {"w": ([2, 2 * block], kind, bytes(4 * size))})
    content = path.read_bytes()
    end = len(content) - -(-4 * size // 32) * 32 + 4 * size  # without padding
    path.write_bytes(content[:end])
    metadata = flaxckpt.metadata(path)
    if kind in PLAIN or kind == Type.Q8_0:
        assert metadata.leaves["w"].dtype == PLAIN.get(kind, "float32")
        assert metadata.leaves["w"].shape == (2, 2 * block)
    else:
        assert metadata.unsupported == {"w": f"quantized as {kind.name}"}
    path.write_bytes(content[: end - 1])
    with pytest.raises(errors.DamagedCheckpointError):
        flaxckpt.metadata(path)


@pytest.mark.parametrize(
    "kind", [kind for kind in KNOWN if kind not in PLAIN and kind != Type.Q8_0]
)
def test_reports_each_unsupported_quantization(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    made = {
        "a.w": ([2, 2 * block], kind, bytes(4 * size)),
        "b.w": ([4], Type.F32, struct.pack("<4f", 1, 2, 3, 4)),
    }
    path = write(tmp_path / "a.gguf", made)
    assert flaxckpt.metadata(path).unsupported == {"a/w": f"quantized as {kind.name}"}
    assert flaxckpt.metadata(path).leaves["a/w"].shape == (2, 2 * block)
    found = flaxckpt.load(path, {"b": {"w": jnp.zeros(4)}}, unused="ignore")
    np.testing.assert_array_equal(found["b"]["w"], [1, 2, 3, 4])
    with pytest.raises(errors.RestoreMismatchError, match=f"quantized as {kind.name},"):
        flaxckpt.load(path)


def test_key_values_match_gguf_package(tmp_path):
    fields = [
        ("add_block_count", 3),
        ("add_layer_norm_rms_eps", 1e-6),
        ("add_name", "Tiny é"),
        ("add_add_bos_token", False),
        ("add_token_list", ["a", "b", "é"]),
        ("add_token_scores", [0.5, -1.0, 2.0]),
        ("add_token_types", [1, 2, 3]),
        ("add_array", "general.languages", ["en", "de"]),
        ("add_uint64", "test.u64", 2**63),
        ("add_int64", "test.i64", -(2**62)),
        ("add_float64", "test.f64", 0.1),
        ("add_array", "test.nested", [[1, 2], [3]]),
    ]
    path = write(tmp_path / "a.gguf", {}, fields=fields)
    wanted = {
        name: field.contents()
        for name, field in gguf.GGUFReader(path).fields.items()
        if not name.startswith("GGUF.") and name != "test.nested"
    }
    found = dict(flaxckpt.metadata(path).custom)
    assert found.pop("test.nested") == [[1, 2], [3]]
    assert found == wanted
    assert flaxckpt.load(path) == {}


def test_rejects_big_endian_file(tmp_path):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("a", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(errors.CheckpointFormatError, match="big-endian"):
        flaxckpt.load(path)


@pytest.mark.parametrize("spec", [("x",), (None, "x"), ("x", "y"), (None, ("x", "y"))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loads_quantized_values_sharded(tmp_path, spec, dtype):
    values = np.random.default_rng(0).standard_normal((16, 96)).astype(np.float32)
    encoded = quants.quantize(values, Type.Q8_0)
    made = {"a": (values.shape, Type.Q8_0, encoded.tobytes())}
    path = write(tmp_path / "a.gguf", made)
    mesh = jax.make_mesh((4, 2), ("x", "y"))  # parts of 24 and 12 columns
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    wanted = quants.dequantize(encoded, Type.Q8_0)
    np.testing.assert_allclose(wanted, values, atol=0.02)
    leaf = jax.ShapeDtypeStruct(values.shape, dtype, sharding=sharding)
    found = flaxckpt.load(path, {"a": leaf})["a"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, wanted.astype(dtype))
