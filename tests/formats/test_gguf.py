"""GGUF files are read like every other format, but for quantizations that are not read.

What holds for all formats is tested in test_readers.py; test_gguf_package.py compares
with the gguf package.
"""

from __future__ import annotations

import json
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors, formats, transforms
from flaxckpt.cli import app
from tests import GOLDEN
from tests.hostile import gguf as cases

MODEL = GOLDEN / "gguf/model.gguf"
QUANTIZED = GOLDEN / "gguf/quantized.gguf"
UNREAD = {
    "blk/0/ffn_down/weight": "quantized as Q4_K",
    "blk/0/attn_v/weight": "quantized as Q4_0",
}


def write(tmp_path, *tensors, name="model.gguf", **options):
    path = tmp_path / name
    path.write_bytes(cases.content(*tensors, **options))
    return path


def blocks(count, seed=0):
    """Random blocks of Q8_0, with scales that are numbers."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (count, 34), np.uint8)
    data[:, :2] = rng.random(count).astype("<f2").view(np.uint8).reshape(count, 2)
    return data


# ---- key-values -------------------------------------------------------------------


def test_metadata_contains_key_values_and_describes_long_arrays():
    found = flaxckpt.metadata(MODEL)
    assert found.format == "gguf"
    assert found.custom == {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": "string[100]",
        "tokenizer.ggml.scores": "float32[100]",
        "general.tags": ["tiny", "test"],
        "llama.rope.dimension_sections": [1, 2, 3, 4],
    }
    assert not found.unsupported


@pytest.mark.parametrize(
    ("kind", "form", "number"),
    [
        *((0, "B", 255), (1, "b", -128), (2, "H", 65535), (3, "h", -(2**15))),
        *((4, "I", 2**32 - 1), (5, "i", -(2**31)), (6, "f", 0.25), (7, "B", True)),
        *((10, "Q", 2**64 - 1), (11, "q", -(2**63)), (12, "d", 0.1)),
    ],
)
def test_reads_values_of_all_types_and_their_arrays(tmp_path, kind, form, number):
    packed = struct.pack(f"<{form}", number)
    values = (
        cases.value(b"one", kind, packed),
        cases.value(b"three", cases.ARRAY, cases.array(kind, 3, packed * 3)),
        cases.value(b"many", cases.ARRAY, cases.array(kind, 65, packed * 65)),
        cases.value(b"none", cases.ARRAY, cases.array(kind, 0)),
        cases.number(b"last", cases.UINT32, 7),
    )
    found = flaxckpt.metadata(write(tmp_path, cases.tensor(), values=values)).custom
    assert found["one"] == number
    assert type(found["one"]) is type(number)
    assert found["three"] == [number] * 3
    assert found["many"].endswith("[65]")
    assert found["none"] == []
    assert found["last"] == 7


def test_reads_texts_and_nested_arrays(tmp_path):
    inner = cases.array(cases.STRING, 2, cases.text(b"a") + cases.text(b"\xff"))
    values = (
        cases.value(b"k", cases.ARRAY, cases.array(cases.ARRAY, 2, inner + inner)),
        cases.value(b"many", cases.ARRAY, cases.array(cases.ARRAY, 65, inner * 65)),
        cases.value(b"empty", cases.STRING, cases.text(b"")),
        cases.value(b"long", cases.STRING, cases.text(b"x" * 2**20)),
        cases.value(b"short", cases.STRING, cases.text("é".encode())),
    )
    found = flaxckpt.metadata(write(tmp_path, cases.tensor(), values=values)).custom
    assert found["k"] == [["a", "\ufffd"]] * 2
    assert found["many"] == "array[65]"
    assert found["empty"] == ""
    assert found["long"] == "text of 1048576 bytes"
    assert found["short"] == "é"


def test_vocabulary_without_tensors_is_empty_state(tmp_path):
    values = (cases.value(b"general.type", cases.STRING, cases.text(b"vocab")),)
    path = write(tmp_path, values=values, data=b"", alignment=1)  # without padding
    assert flaxckpt.load(path) == {}
    flaxckpt.convert(path, tmp_path / "converted")
    assert flaxckpt.load(tmp_path / "converted", {}) == {}
    assert flaxckpt.metadata(path).custom == {"general.type": "vocab"}
    assert flaxckpt.verify(path).ok
    with pytest.raises(errors.RestoreMismatchError, match="w: wanted"):
        flaxckpt.load(path, {"w": jnp.zeros(3)})


def test_warns_when_reading_one_of_several_files(tmp_path, caplog):
    values = (cases.value(b"split.count", 2, struct.pack("<H", 3)),)
    flaxckpt.load(write(tmp_path, cases.tensor(), values=values))
    assert "is one of 3 files; the others are not read" in caplog.text


# ---- places of tensors ------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_reads_all_versions_and_alignments(tmp_path, version, alignment):
    values = (cases.number(cases.ALIGNMENT, cases.UINT32, alignment),)
    data = np.arange(alignment + 4, dtype=np.float32)
    path = write(
        tmp_path,
        cases.tensor(b"b", (2, 2), offset=4 * alignment),
        cases.tensor(b"a", (alignment,)),
        values=values,
        data=data.tobytes() + b"more",
        version=version,
        alignment=alignment,
    )
    found = flaxckpt.load(path)
    assert list(found) == ["b", "a"]
    np.testing.assert_array_equal(found["a"], data[:-4])
    np.testing.assert_array_equal(found["b"], data[-4:].reshape(2, 2))


def test_reads_gaps_and_empty_tensors(tmp_path):
    data = np.arange(40, dtype=np.float32)
    path = write(
        tmp_path,
        cases.tensor(b"e", (0, 3), offset=64),
        cases.tensor(b"a", (), offset=64),
        cases.tensor(b"q", (2, 0), kind=cases.Q8_0, offset=64),
        cases.tensor(b"b", (2, 1, 4), offset=128),
        data=data.tobytes(),
    )
    found = flaxckpt.load(path)
    assert found["e"].shape == (0, 3)
    assert found["q"].shape == (2, 0)
    assert found["a"] == 16
    np.testing.assert_array_equal(found["b"].ravel(), data[32:])


def test_does_not_split_names_with_conflicting_prefixes(tmp_path, caplog):
    path = write(
        tmp_path, cases.tensor(b"a.b"), cases.tensor(b"a", offset=32), data=bytes(40)
    )
    assert list(flaxckpt.load(path)) == ["a.b", "a"]
    assert "are not split at" in caplog.text


@pytest.mark.parametrize("name", ["a.gguf", "a", "a.safetensors", "a.npz"])
def test_recognizes_files_by_content(tmp_path, name):
    path = write(tmp_path, cases.tensor(), name=name)
    found = formats.detect(path)
    assert (found.format, found.why) == ("gguf", "it begins with 'GGUF'")


def test_error_for_directory_suggests_one_file(tmp_path):
    for name in ("m-f16.gguf", "m-q8.gguf"):
        write(tmp_path, cases.tensor(), name=name)
    with pytest.raises(errors.CheckpointFormatError, match=r"such as .*m-f16\.gguf"):
        flaxckpt.load(tmp_path)


def test_replaced_file_raises_error(tmp_path):
    path = write(tmp_path, cases.tensor(shape=(32,), kind=cases.Q8_0))
    store = flaxckpt.open_leaf(path, "a")
    store.read().result()
    shutil.copyfile(path, tmp_path / "other")
    (tmp_path / "other").replace(path)
    with pytest.raises(OSError, match="was replaced or changed"):
        store.read().result()


# ---- Q8_0 -------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reads_any_part_of_quantized_array(tmp_path, data):
    outer = data.draw(st.lists(st.integers(1, 4), max_size=3))
    shape = (*outer, 32 * data.draw(st.integers(1, 4)))
    encoded = blocks(int(np.prod(shape)) // 32, seed=len(outer))
    path = write(
        tmp_path, cases.tensor(shape=shape, kind=cases.Q8_0), data=encoded.tobytes()
    )
    scales = encoded[:, :2].copy().view("<f2").astype(np.float32)
    wanted = (encoded[:, 2:].view(np.int8) * scales).reshape(shape)
    part = tuple(
        slice(*sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))))
        for size in shape
    )
    found = flaxckpt.open_leaf(path, "a")[part].read().result()
    assert found.dtype == np.float32
    assert found.tobytes() == wanted[part].tobytes()


def test_non_finite_scales_decode_like_float32(tmp_path):
    encoded = blocks(3)
    encoded[:, :2] = (
        np.array([np.inf, np.nan, -0.0], "<f2").view(np.uint8).reshape(3, 2)
    )
    encoded[:, 2:5] = [0, 1, 255]
    tensor = cases.tensor(shape=(1, 96), kind=cases.Q8_0)
    path = write(tmp_path, tensor, data=encoded.tobytes())
    found = flaxckpt.load(path)["a"]
    assert found.shape == (1, 96)
    np.testing.assert_array_equal(found[0, :3], [np.nan, np.inf, -np.inf])
    assert np.isnan(found[0, 32:64]).all()
    assert np.signbit(found[0, 64])


def test_reads_row_of_array_larger_than_memory(tmp_path):
    shape = (2**30, 32)
    path = write(tmp_path, cases.tensor(shape=shape, kind=cases.Q8_0))
    last = blocks(1)
    start = path.stat().st_size - 64
    with path.open("r+b") as file:
        file.seek(start + (2**30 - 1) * 34)
        file.write(last.tobytes())
    store = flaxckpt.open_leaf(path, "a")
    scale = last[:, :2].copy().view("<f2").astype(np.float32)
    wanted = last[:, 2:].view(np.int8) * scale
    np.testing.assert_array_equal(store[2**30 - 1 :].read().result(), wanted)
    assert not store[: 2**10].read().result().any()


@pytest.mark.parametrize("name", ["a.safetensors", "a.msgpack", "a"])
def test_conversions_keep_values_and_key_values(tmp_path, name):
    flaxckpt.convert(MODEL, tmp_path / name)
    assert flaxckpt.diff(MODEL, tmp_path / name).is_empty
    if name != "a.msgpack":
        found = flaxckpt.metadata(tmp_path / name).custom
        assert found == flaxckpt.metadata(MODEL).custom


def test_transforms_apply_to_quantized_arrays():
    changes = [
        transforms.keep("blk/0/attn_q/weight"),
        transforms.map_leaf(".*", lambda x: x.T.reshape(4, 16, 8)),
        transforms.rename("blk/0/attn_q/weight", "q/kernel"),
    ]
    wanted = {"q": {"kernel": jax.ShapeDtypeStruct((4, 16, 8), jnp.bfloat16)}}
    found = flaxckpt.load(MODEL, wanted, transforms=changes)["q"]["kernel"]
    plain = flaxckpt.load(MODEL)["blk"]["0"]["attn_q"]["weight"]
    np.testing.assert_array_equal(found, plain.T.reshape(4, 16, 8))


# ---- quantizations that are not read -----------------------------------------------


def test_lists_other_quantizations_with_shapes():
    found = flaxckpt.metadata(QUANTIZED)
    assert found.unsupported == UNREAD
    assert found.leaves["blk/0/ffn_down/weight"].shape == (2, 256)
    assert found.leaves.keys() - UNREAD.keys() == flaxckpt.metadata(MODEL).leaves.keys()


def named(caught):
    text = str(caught.value)
    assert len(text.splitlines()) < 15
    assert "llama-quantize --allow-requantize quantized.gguf new.gguf Q8_0" in text
    return {
        path
        for path, form in UNREAD.items()
        if any(path in line and form in line for line in text.splitlines())
    }


def refusals(tmp_path):
    both = {"blk": {"0": {"ffn_down": {"weight": jnp.zeros((2, 256))}}}}
    both["blk"]["0"]["attn_v"] = {"weight": jnp.zeros((3, 32))}
    added = transforms.map_leaf("blk/0/attn_v/weight", lambda x: x + 1)
    return {
        "load": lambda: flaxckpt.load(QUANTIZED),
        "load into a state": lambda: flaxckpt.load(QUANTIZED, both, unused="ignore"),
        "load with initial values": lambda: flaxckpt.load(
            QUANTIZED, both, unused="ignore", missing="init"
        ),
        "load of a computed leaf": lambda: flaxckpt.load(
            QUANTIZED, both, transforms=[added], unused="ignore"
        ),
        "load_async": lambda: flaxckpt.load_async(QUANTIZED),
        "convert": lambda: flaxckpt.convert(QUANTIZED, tmp_path / "a.safetensors"),
        "diff": lambda: flaxckpt.diff(QUANTIZED, QUANTIZED),
    }


@pytest.mark.parametrize("how", refusals(None))
def test_names_all_unsupported_leaves_before_reading(tmp_path, how):
    with pytest.raises(
        (errors.RestoreMismatchError, errors.CheckpointFormatError)
    ) as e:
        refusals(tmp_path)[how]()
    assert named(e) == UNREAD.keys()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", UNREAD)
def test_open_leaf_rejects_unsupported_leaf(path):
    with pytest.raises(errors.CheckpointFormatError) as caught:
        flaxckpt.open_leaf(QUANTIZED, path)
    assert named(caught) == {path}
    shown = CliRunner().invoke(app, ["show", str(QUANTIZED), path])
    assert shown.exit_code == 2
    assert UNREAD[path] in " ".join(shown.output.split())


def test_plan_shows_quantization_of_unsupported_leaf():
    state = {"blk": {"0": {"ffn_down": {"weight": jnp.zeros((2, 256))}}}}
    plan = flaxckpt.plan(QUANTIZED, state, unused="ignore")
    [problem] = plan.problems
    assert problem.kind == "unsupported"
    assert "quantized as Q4_K" in str(plan)
    assert plan.leaves[problem.leaf].actions == ("conflict",)


def test_other_problems_keep_their_advice():
    state = {"blk": {"0": {"ffn_down": {"weight": jnp.zeros((2, 256))}}}, "new": 1.0}
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(QUANTIZED, state, unused="ignore")
    assert "llama-quantize" in str(caught.value)
    assert 'missing="init"' in str(caught.value)


def test_loads_converts_and_compares_remaining_leaves(tmp_path):
    others = transforms.drop("blk/0/(ffn_down|attn_v)/weight")
    wanted = flaxckpt.load(MODEL)
    found = flaxckpt.load(QUANTIZED, wanted, unused="ignore")
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    flaxckpt.convert(QUANTIZED, tmp_path / "a", transforms=[others])
    assert flaxckpt.diff(MODEL, tmp_path / "a").is_empty
    assert flaxckpt.diff(QUANTIZED, QUANTIZED, values=False).is_empty
    report = flaxckpt.verify(QUANTIZED)
    assert report.ok
    assert report.unreadable == UNREAD
    assert report.unchecked.keys() == flaxckpt.metadata(MODEL).leaves.keys()


def test_error_fields_contain_leaves_omitted_from_message(tmp_path):
    tensors = [
        cases.tensor(b"blk.%d.w" % i, (256,), cases.Q4_K, offset=160 * i)
        for i in range(300)
    ]
    path = write(tmp_path, *tensors, data=bytes(160 * 300))
    with pytest.raises(errors.RestoreMismatchError, match="and 292 more") as caught:
        flaxckpt.load(path)
    assert len(caught.value.mismatches) == 300
    with pytest.raises(errors.CheckpointFormatError, match="300 leaves"):
        flaxckpt.convert(path, tmp_path / "a")


def test_command_line_shows_gguf_files_and_unsupported_leaves(tmp_path):
    def run(*args):
        return CliRunner().invoke(app, [str(arg) for arg in args])

    shown = run("show", QUANTIZED)
    assert shown.exit_code == 0
    assert "cannot be loaded: 1 leaf quantized as Q4_K" in shown.stdout
    assert "gguf" in run("ls", MODEL).stdout
    document = json.loads(run("show", QUANTIZED, "--json").stdout)
    assert document["unsupported"] == UNREAD
    assert document["custom"]["llama.block_count"] == 1
    assert run("show", MODEL, "blk/0/attn_q/weight").exit_code == 0
    assert run("verify", MODEL).exit_code == 0
    assert run("convert", MODEL, tmp_path / "a").exit_code == 0
    assert run("diff", MODEL, tmp_path / "a").exit_code == 0
    refused = run("convert", QUANTIZED, tmp_path / "b")
    assert refused.exit_code not in (0, 1)
    assert "llama-quantize" in refused.output + (refused.stderr or "")


@pytest.mark.parametrize("shape", [(2**30, 0), (0, 2**17, 2**17)])
def test_loads_empty_array_with_long_axes(tmp_path, shape):
    path = write(tmp_path, cases.tensor(shape=shape))
    assert flaxckpt.load(path)["a"].shape == shape


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 2**19), min_size=65, max_size=70), tail=st.binary()
)
def test_omits_long_arrays_of_texts(tmp_path, sizes, tail):
    texts = b"".join(cases.text(bytes(size)) for size in sizes)
    values = (
        cases.value(b"many", cases.ARRAY, cases.array(cases.STRING, len(sizes), texts)),
        cases.value(b"tail", cases.ARRAY, cases.array(cases.UINT8, len(tail), tail)),
        cases.number(b"last", cases.UINT32, 7),
    )
    found = flaxckpt.metadata(write(tmp_path, cases.tensor(), values=values)).custom
    assert found["many"] == f"string[{len(sizes)}]"
    assert found["last"] == 7
