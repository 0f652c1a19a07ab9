"""Writes the golden GGUF files, and what is in them.

Run from the root of the repository:

    python -m tests.golden.make_gguf

What is in the repository was written with

    gguf 0.19.0    numpy 2.4.6    ml_dtypes 0.6.0

A folder is never written again. `expected.npz` is as in `make_legacy.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

from tests.golden import make_legacy

ROOT: Final = Path(__file__).parent / "gguf"
TOKENS: Final = [f"token {i}" for i in range(100)]

DTYPES: Final = {
    Type.F32: "float32",
    Type.F16: "float16",
    Type.BF16: "bfloat16",
    Type.F64: "float64",
    Type.I8: "int8",
    Type.I16: "int16",
    Type.I32: "int32",
    Type.I64: "int64",
    Type.Q8_0: "float32",
}
"""Element type in ggml -> as numpy and ml_dtypes call the type of its values."""


def eighths(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    """Values that are exact in all floats, also if they are quantized."""
    values = np.random.default_rng(seed).integers(-16, 16, shape)
    values[..., ::32] = 127  # the largest of a block is its scale times 127
    return (values / 8).astype(np.float32)


def tensors() -> dict[str, tuple[np.ndarray[Any, Any], Type]]:
    """The names of the tensors -> their values and types, as a model has them."""
    return {
        "token_embd.weight": (eighths(0, 16, 32), Type.F16),
        "blk.0.attn_norm.weight": (eighths(1, 32), Type.F32),
        "blk.0.attn_q.weight": (eighths(2, 8, 64), Type.Q8_0),
        "blk.0.ffn_gate_exps.weight": (eighths(3, 2, 3, 32), Type.Q8_0),
        "blk.0.ffn_up.weight": (eighths(4, 8, 24), Type.BF16),
        "rope_freqs.weight": (eighths(5, 5), Type.F32),
        "scale": (np.array(0.5), Type.F64),
        "ids.i8": (np.arange(-3, 3), Type.I8),
        "ids.i16": (np.arange(6).reshape(2, 3) * 1000, Type.I16),
        "ids.i32": (np.arange(4) - 2**30, Type.I32),
        "ids.i64": (np.array([2**40, -(2**40)]), Type.I64),
        "empty": (np.zeros((0, 4)), Type.F32),
        "output.weight": (eighths(6, 8, 16), Type.F32),  # no padding follows
    }


def add(writer: Any, name: str, values: np.ndarray[Any, Any], kind: Type) -> None:
    """Adds a tensor to a file."""
    if kind == Type.BF16:
        plain = values.astype(ml_dtypes.bfloat16).view(np.int16)
        writer.add_tensor(name, plain, raw_dtype=kind)
    elif kind == Type.Q8_0:
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values.astype(DTYPES[kind]))


def write(path: Path, more: dict[str, tuple[np.ndarray[Any, Any], Type]]) -> None:
    """Writes a model, with more tensors of raw bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_add_bos_token(True)
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.5] * len(TOKENS))
    writer.add_array("general.tags", ["tiny", "test"])
    writer.add_array("llama.rope.dimension_sections", [1, 2, 3, 4])
    for name, (values, kind) in more.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    for name, (values, kind) in tensors().items():
        add(writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Writes what is not there yet."""
    if ROOT.exists():
        print(f"{ROOT} is there already")  # noqa: T201
        return
    ROOT.mkdir()
    write(ROOT / "model.gguf", {})
    blocks = np.arange(2 * 144, dtype=np.uint8).reshape(2, 144)
    halves = np.arange(3 * 18, dtype=np.uint8).reshape(3, 18)
    unread = {
        "blk.0.ffn_down.weight": (blocks, Type.Q4_K),
        "blk.0.attn_v.weight": (halves, Type.Q4_0),
    }
    write(ROOT / "quantized.gguf", unread)
    expected: make_legacy.Expected = {}
    for name, (values, kind) in tensors().items():
        path, dtype = name.replace(".", "/"), DTYPES[kind]
        array = values.astype(getattr(ml_dtypes, dtype, dtype))
        make_legacy.expect(expected, "model.gguf", path, array, dtype)
    np.savez(ROOT / "expected.npz", **expected)


if __name__ == "__main__":
    main()
