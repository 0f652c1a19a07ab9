"""Quantized weights multiplied by the scales beside them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.core import freeze

import flaxckpt
from flaxckpt import errors, transforms
from flaxckpt.transforms import dequantize, rename, transpose
from tests.transforms.states import transformed

E4M3 = ml_dtypes.float8_e4m3fn


def values(*shape, dtype=E4M3, seed=0):
    wide = np.random.default_rng(seed).normal(size=shape) * 8
    return wide.astype(dtype)


def scales(*shape, dtype="f4"):
    return np.random.default_rng(1).uniform(0.01, 1, size=shape).astype(dtype)


def product(weight, scale, blocks):
    """The weight by its scales, block by block, in numpy."""
    wide = np.asarray(weight, "f4").copy()
    for index in np.ndindex(*scale.shape):
        at = tuple(
            slice(i * b, (i + 1) * b) for i, b in zip(index, blocks, strict=True)
        )
        wide[at] *= np.float32(scale[index])
    return wide


CASES = {  # weight, scales, the size of blocks on each axis
    "deepseek": (values(300, 200), scales(3, 2), (128, 128)),
    "one block": (values(64, 100), scales(1, 1), (64, 100)),
    "experts": (values(2, 256, 130), scales(2, 2, 2), (1, 128, 128)),
    "rows": (values(6, 5), scales(6, 1), (1, 5)),
    "groups": (values(6, 64), scales(6, 2), (1, 32)),
    "int8 rows": (values(6, 5, dtype=np.int8), scales(6, 1), (1, 5)),
    "narrow scales": (values(6, 5), scales(6, 1, dtype=ml_dtypes.bfloat16), (1, 5)),
    "square blocks": (values(256, 100), scales(4, 2), (64, 64)),
    "square blocks of an even size": (values(192, 384), scales(2, 4), (96, 96)),
    "square blocks with two edges": (values(2, 250, 200), scales(2, 4, 4), (1, 64, 64)),
    "uneven blocks of an expert": (values(576, 256), scales(5, 2), (128, 128)),
    "powers of two": (
        values(256, 128),
        scales(2, 1, dtype=ml_dtypes.float8_e8m0fnu),
        (128, 128),
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("end", ["_scale", "_scale_inv"])
def test_multiplies_weights_by_block_scales(name, end, x64):
    weight, scale, blocks = CASES[name]
    state = freeze({"layer": {"weight": weight, f"weight{end}": scale}})
    with jax.enable_x64(x64):
        found = transformed([dequantize()], state)
    assert [*found] == ["layer/weight"]
    assert found["layer/weight"].dtype == np.float32
    np.testing.assert_array_equal(found["layer/weight"], product(weight, scale, blocks))


@pytest.mark.parametrize("scale", [np.float32(0.5), np.full(1, 0.5, "f4")])
def test_accepts_scalar_scale_and_row_of_scales(scale, tmp_path):
    rows = scales(6)
    state = {
        "whole": {"weight": values(6, 6), "weight_scale": jnp.asarray(scale)},
        "rows": {"weight": values(6, 6), "weight_scale": rows},
    }
    found = transformed([dequantize()], state)
    np.testing.assert_array_equal(found["whole/weight"], values(6, 6).astype("f4") / 2)
    np.testing.assert_array_equal(
        found["rows/weight"], product(values(6, 6), rows[:, None], (1, 6))
    )


def test_plans_and_rounds_result_once(tmp_path):
    weight, scale, blocks = CASES["deepseek"]
    flaxckpt.save(
        tmp_path / "c",
        {
            "up": {"weight": weight, "weight_scale_inv": scale},
            "norm": {"weight": np.ones(3, "f4")},
            "down": {
                "weight": weight,
                "weight_scale": scale,
                "input_scale": np.ones((), "f4"),
            },
        },
    )
    changes = [
        dequantize(),
        rename("(up|down)/weight", r"\1/kernel"),
        transpose(".*/kernel"),
    ]
    wanted = {
        "up": {"kernel": jax.ShapeDtypeStruct((200, 300), jnp.bfloat16)},
        "down": {"kernel": jax.ShapeDtypeStruct((200, 300), jnp.float32)},
        "norm": {"weight": jax.ShapeDtypeStruct((3,), jnp.float32)},
    }
    plan = flaxckpt.plan(tmp_path / "c", wanted, transforms=changes)
    assert not plan.problems
    assert plan.leaves["up/kernel"].sources == ("up/weight", "up/weight_scale_inv")
    found = flaxckpt.load(tmp_path / "c", wanted, transforms=changes)
    exact = product(weight, scale, blocks).T
    np.testing.assert_array_equal(found["down"]["kernel"], exact)
    np.testing.assert_array_equal(found["up"]["kernel"], exact.astype(jnp.bfloat16))


def test_convert_writes_weights_of_requested_dtype(tmp_path):
    weight, scale, blocks = CASES["experts"]
    flaxckpt.save(tmp_path / "c", {"w": {"weight": weight, "weight_scale": scale}})
    out = tmp_path / "out.safetensors"
    flaxckpt.convert(tmp_path / "c", out, transforms=[dequantize(dtype=jnp.bfloat16)])
    found = flaxckpt.load(out)["w"]
    assert [*found] == ["weight"]
    wanted = product(weight, scale, blocks).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["weight"], wanted)


def test_accepts_other_names_and_blocks():
    weight, scale = values(6, 8), scales(3, 2)
    state = {"a": {"w": weight, "factor": scale}, "b": {"w": np.ones(2, "f4")}}
    change = dequantize("(.*)/w", scale=r"\1/factor", block=4)
    with pytest.raises(errors.OptionError, match=r"a/factor .*does not fit"):
        transformed([change], state)
    for block in ((2, 4), [2, 4], (3, 2, 4)):
        change = dequantize("(.*)/w", scale=r"\1/factor", block=block)
        found = transformed([change], state)
        np.testing.assert_array_equal(found["a/w"], product(weight, scale, (2, 4)))


@pytest.mark.parametrize(
    ("shape", "counts", "says"),
    [
        ((6, 192), (6, 2), "96 or 128"),
        ((192, 192), (2, 2), "96 or 128"),
        ((100, 100), (2, 2), "50 or 64"),
        ((6, 100), (6, 3), "34 to 49"),
        ((6, 8), (3, 2), "such as 2 x 4, are not square"),
    ],
)
def test_asks_for_ambiguous_block_size(shape, counts, says):
    state = {"a": {"w": values(*shape), "w_scale": scales(*counts)}}
    with pytest.raises(errors.OptionError, match=rf"a/w: .*{says}.*: pass block="):
        transformed([dequantize()], state)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"weight": values(4, 4)}, "weight: no scale weight_scale_inv or weight_scale"),
        (
            {"weight": values(4, 4), "weight_scale": scales(3, 3)},
            "weight_scale is float32.3, 3., which does not fit",
        ),
        (
            {"weight": values(4, 4), "weight_scale": np.ones(4, np.int32)},
            "does not fit",
        ),
        (
            {
                "weight": values(4, 4, dtype=np.int8),
                "weight_scale": scales(4),
                "weight_zero_point": np.zeros(4, np.int8),
            },
            "of another scheme",
        ),
        (
            {"weight": values(8, 4), "weight_scale": scales(4)},
            "weight_scale is float32.4., which does not fit",
        ),
        (
            {"weight": np.ones(3, "f4")},
            r"found 0 weights with scales, and 1 other leaves, such as weight, float32",
        ),
    ],
)
def test_error_names_misfit_of_quantized_weights(state, says):
    with pytest.raises(errors.OptionError, match=says) as caught:
        transformed([dequantize()], state)
    assert str(caught.value).count("\n") < 15


NARROW, WIDE = np.zeros((4, 8), np.uint8), np.zeros((4, 8), np.int32)

OTHER_SCHEMES = {  # the leaves of a layer, and the leaf that is named
    "awq": ({"qweight": WIDE, "qzeros": WIDE, "scales": scales(4)}, "qweight"),
    "gptq": (
        {"qweight": WIDE, "qzeros": WIDE, "scales": scales(4), "g_idx": WIDE[0]},
        "qweight",
    ),
    "packed": (
        {"weight_packed": WIDE, "weight_scale": scales(4), "weight_shape": WIDE[0]},
        "weight_packed",
    ),
    "nvfp4": (
        {
            "weight": NARROW,
            "weight_scale": values(4, 1),
            "weight_scale_2": scales(),
            "input_scale": scales(),
        },
        "weight",
    ),
    "packed nvfp4": (
        {
            "weight_packed": NARROW,
            "weight_scale": values(4, 1),
            "weight_global_scale": scales(1),
        },
        "weight_packed",
    ),
    "mxfp4": ({"w_blocks": NARROW, "w_scales": NARROW[:, 0]}, "w_blocks"),
    "bitsandbytes int8": (
        {"weight": NARROW.astype(np.int8), "SCB": scales(4)},
        "weight",
    ),
    "bitsandbytes nf4": (
        {"weight": NARROW, "weight.absmax": scales(4), "weight.quant_map": scales(16)},
        "weight",
    ),
}


@pytest.mark.parametrize("name", OTHER_SCHEMES)
def test_error_lists_leaves_of_other_schemes(name):
    layer, path = OTHER_SCHEMES[name]
    with pytest.raises(errors.OptionError) as caught:
        transformed([dequantize()], {"l": layer, "norm": np.ones(3, "f4")})
    [_, row, _] = str(caught.value).split("\n")
    assert row.startswith(f"  l/{path}: ")
    assert row.endswith("beside it, of another scheme")


def test_error_explains_missing_inverse():
    with pytest.raises(errors.OptionError, match="the scales are gone"):
        transforms.inverse([dequantize()])


def test_rejects_invalid_options():
    for options in ({"dtype": "int8"}, {"block": 0}, {"block": (2, 0)}):
        with pytest.raises(errors.OptionError):
            dequantize(**options)
