"""Reader of GGUF files, with quantized values as float32 if they are Q8_0."""

from __future__ import annotations

import functools
import logging
import os
import shlex
from pathlib import Path

from flaxckpt import _state, _storage, errors
from flaxckpt._arrays.read_plan import Span
from flaxckpt._formats import array_names, file_leaves, plain
from flaxckpt._formats.gguf import header as gguf_header
from flaxckpt._formats.gguf import quantization
from flaxckpt._formats.gguf.header import GgufHeader, GgufTensor
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable, StoredLeaf, Unsupported

_log = logging.getLogger(__name__)

_SPLIT_COUNT = "split.count"


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    """Reads the key-values, and the names, shapes and types of all tensors."""
    stamp = _storage.stamp(path)
    header = _read_header(path)
    count = header.values.get(_SPLIT_COUNT)
    if isinstance(count, int) and count > 1:
        _log.warning("%s is one of %d files; the others are not read", path, count)
    return plain.make_stored(
        path,
        _leaf_table(path, header, stamp),
        format_name="gguf",
        step=step,
        stamp=stamp,
        custom=header.values,
    )


def _read_header(path: Path) -> GgufHeader:
    try:
        with _storage.of(path).open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            return gguf_header.parse(file, file_size=size)
    except gguf_header.UnsupportedVersionError as error:
        raise errors.CheckpointFormatError(f"{path} is {error}") from None
    except ValueError as error:
        raise errors.DamagedCheckpointError(
            f"{path} is not an intact GGUF file: {errors.one_line(error)}; get another"
            " copy"
        ) from None


def _leaf_table(path: Path, header: GgufHeader, stamp: _storage.Stamp) -> LeafTable:
    keys = array_names.split(header.tensors, ".", path)
    table: LeafTable = {}
    for name, tensor in header.tensors.items():
        info = _leaf_info(keys[name], tensor)
        table[info.path] = Leaf(info, (_stored_leaf(path, info, tensor, stamp),))
    return table


def _leaf_info(keys: tuple[_state.tree.Key, ...], tensor: GgufTensor) -> LeafInfo:
    dtype, shape = tensor.type.dtype, tensor.shape
    block = tensor.type.block
    return LeafInfo(
        _state.tree.join(keys),
        keys,
        "array",
        _state.dtypes.array_type(dtype),
        shape,
        dtype,
        chunk_shape=(*[1] * (len(shape) - 1), block) if shape else (),
    )


def _stored_leaf(
    path: Path, info: LeafInfo, tensor: GgufTensor, stamp: _storage.Stamp
) -> StoredLeaf:
    if not tensor.is_read:
        return StoredLeaf(path, info, unsupported=_unsupported(path, tensor))
    element = tensor.type
    if element.block == 1:
        span = Span(
            stamp.path,
            tensor.offset,
            tensor.shape,
            element.dtype,
            identity=stamp.identity,
        )
        return file_leaves.stored_leaf(path, info, span)
    *outer, last = tensor.shape
    blocks = Span(
        stamp.path,
        tensor.offset,
        (*outer, last // element.block, element.block_bytes),
        "uint8",
        identity=stamp.identity,
    )
    return StoredLeaf(path, info, functools.partial(quantization.open_q8_0, blocks))


def _unsupported(path: Path, tensor: GgufTensor) -> Unsupported:
    element = tensor.type
    if not element.block_bytes:
        return Unsupported(
            f"of the unknown element {element.name}",
            "Use a newer flaxckpt, or convert the model again to F16 or Q8_0.",
        )
    return Unsupported(
        f"quantized as {element.name}",
        "Convert the model again to F16 or Q8_0, or the file with llama.cpp:"
        f" llama-quantize --allow-requantize {shlex.quote(path.name)} new.gguf Q8_0.",
    )
