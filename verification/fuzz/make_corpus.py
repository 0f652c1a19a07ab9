"""Writes the corpus anew, from the golden checkpoints and the hostile ones.

    python -m verification.fuzz.make_corpus

Inputs that fuzzing has found are called `found-…`, and stay.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests import GOLDEN
from verification.fuzz import targets

MAX_BYTES: Final = 8192


def main() -> None:
    for name in targets.TARGETS:
        directory = targets.CORPUS / name
        directory.mkdir(parents=True, exist_ok=True)
        for file in directory.glob("seed-*"):
            file.unlink()
        unique = dict.fromkeys(c for c in contents(name) if len(c) <= MAX_BYTES)
        for i, content in enumerate(unique):
            (directory / f"seed-{i:03d}").write_bytes(content)


def contents(name: str) -> Iterator[bytes]:
    match name:
        case "msgpack" | "streaming":
            from tests.hostile import msgpack, streaming

            yield from golden("flax-msgpack" if name == "msgpack" else name)
            files = (msgpack if name == "msgpack" else streaming).FILES
            yield from list(files.values())[::2]
        case "npz":
            from tests.hostile import npz

            yield from golden("npz/checkpoint*")
            yield from [make() for make in list(npz.FILES.values())[::4]]
        case "gguf":
            for content in golden("gguf/*.gguf"):
                yield content[8:]
            yield from made("gguf", "model.gguf", cut=8)
        case "npy":
            yield from headers()
        case "safetensors":
            for file in GOLDEN.glob("safetensors/*/*.safetensors"):
                content = file.read_bytes()
                yield content[8 : 8 + int.from_bytes(content[:8], "little")]
            yield from made("safetensors", "model.safetensors", cut=8)
        case "safetensors_index":
            shards = {"t1": "model-1.safetensors", "t2": "model-2.safetensors"}
            index = {"metadata": {"total_size": 16}, "weight_map": shards}
            yield json.dumps(index).encode()
            yield from made("safetensors", "model.safetensors.index.json")
        case "own":
            manifests = [*GOLDEN.glob("flaxckpt-1/files/*/flaxckpt.json")]
            for file in [*manifests, targets.sound("zstd") / "flaxckpt.json"]:
                manifest = json.loads(file.read_text()) | {"digests": {}}
                yield b"\0" + json.dumps(manifest).encode()
            yield from beside(
                targets.sound("zstd"), "", "_CHECKPOINT_METADATA", "metrics/metrics"
            )
            yield b"\4" + b'{"loss":0.5,"accuracy":1}'
            yield b"\5" + b'{"text":"x"}'
            yield b"\6" + b'{"internal_metadata":{},"custom_metadata":{"a":[1]}}'
            yield b"\7" + (targets.sound("zstd") / "state/w/zarr.json").read_bytes()
        case "orbax":
            for item in sorted(GOLDEN.glob("orbax-0.12.8/*/**/_METADATA")):
                yield b"\0" + item.read_bytes()
                for file in item.parent.glob("array_metadatas/process_0"):
                    yield b"\2" + file.read_bytes()
                for file in item.parent.glob("_strings.json"):
                    yield b"\5" + file.read_bytes()
            yield b"\0" + (targets.sound("orbax") / "_METADATA").read_bytes()
            yield b"\7" + (targets.sound("orbax") / "w/.zarray").read_bytes()
        case "zarr":
            yield from zarr()
        case "chunks":
            for i, (step, file, codec) in enumerate(targets.CHUNKS):
                content = (targets.sound(step) / file).read_bytes()
                yield bytes((i,)) + targets.encoded(content, codec)
        case "database":
            state = targets.sound("golden database") / "state"
            yield b"\0" + (state / "manifest.ocdbt").read_bytes()
            for i, file in enumerate(sorted((state / "d").iterdir())):
                yield bytes((2 * i + 1,)) + file.read_bytes()
        case "t5x":
            for file in GOLDEN.glob("t5x-3/**/checkpoint"):
                yield b"\0" + file.read_bytes()
            yield b"\0" + (targets.sound("t5x") / "checkpoint").read_bytes()
            yield b"\1" + (GOLDEN / "t5x-3/single_3").read_bytes()
        case "orbax_aggregate":
            yield targets.pack({"w": "PLACEHOLDER://w", "step": 3})
            yield from golden("legacy-orbax/*/**/checkpoint")
        case "dataset" | "codec":
            yield from states(2 if name == "codec" else 0)
        case "journal":
            yield journal()
        case "step_names":
            for text in ("3", "step_00000003", "ckpt-10", "1.5", "checkpoint_7.tmp-3"):
                yield text.encode()
            yield "٣".encode()
            yield b"5.orbax-checkpoint-tmp-1"


def golden(pattern: str) -> Iterator[bytes]:
    pattern = pattern if "/" in pattern else f"{pattern}/*"
    for file in sorted(GOLDEN.glob(pattern)):
        if file.is_file() and file.name != "expected.npz":
            yield file.read_bytes()


def headers() -> Iterator[bytes]:
    for descr in ("<f4", ">f8", "|b1", "<V2", "|O", "<M8[D]", [("x", "<f4")]):
        for shape in ((), (4,), (2, 8)):
            header = {"descr": descr, "fortran_order": True, "shape": shape}
            yield repr(header).encode()
    yield b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 8L), }  \n"


def made(module: str, name: str, *, cut: int = 0) -> Iterator[bytes]:
    """What the hostile cases have in a file of this name."""
    cases = __import__(f"tests.hostile.{module}", fromlist=["CASES"]).CASES
    for title, make in cases.items():
        if "million" in title or "000" in title or "limit" in title:
            continue
        with tempfile.TemporaryDirectory() as root:
            make(Path(root))
            for file in Path(root).glob(name):
                if file.is_file() and file.stat().st_size <= MAX_BYTES + cut:
                    yield file.read_bytes()[cut:]


def beside(step: Path, head: str, *names: str) -> Iterator[bytes]:
    for i, name in enumerate(names):
        if (step / name).is_file():
            yield bytes((3 + i,)) + (step / name).read_bytes()


def zarr() -> Iterator[bytes]:
    from tests.hostile import orbax

    for i, name in enumerate(("orbax zarr 3", "orbax", "zstd", "zarr 2", "t5x")):
        for file in sorted(targets.sound(name).rglob("*zarr*")):
            yield bytes((i,)) + file.read_bytes()
    for file in sorted(GOLDEN.glob("orbax-0.12.8/*/**/zarr.json"))[:8]:
        yield b"\0" + file.read_bytes()
    inner = {"chunk_shape": [2], "codecs": orbax.ZARR["codecs"]}
    inner["index_codecs"] = [orbax.ZARR["codecs"][0], {"name": "crc32c"}]
    sharded = {"name": "sharding_indexed", "configuration": inner}
    blosc = {"cname": "lz4", "clevel": 1, "shuffle": "shuffle", "typesize": 4}
    for codecs in (
        [sharded],
        [orbax.ZARR["codecs"][0], {"name": "zstd", "configuration": {"level": 1}}],
        [orbax.ZARR["codecs"][0], {"name": "blosc", "configuration": blosc}],
        [{"name": "transpose", "configuration": {"order": [0]}}, {"name": "bytes"}],
    ):
        yield b"\0" + json.dumps(orbax.ZARR | {"codecs": codecs}).encode()


def states(version: int) -> Iterator[bytes]:
    import numpy as np

    from flaxckpt import datasets

    class Iterator:
        def __init__(self, state: object) -> None:
            self.state = state

        def get_state(self) -> object:
            return self.state

        def set_state(self, state: object) -> None:
            self.state = state

    head = bytes((version,))
    for state in (
        {"a": 1, "b": [1.5, None, True, "x"]},
        {"bytes": b"ab", "tuple": (1, (2,)), 3: "int key", (1, 2): b""},
        {"array": np.arange(3), "bf": np.ones((2, 2), np.float16), "s": np.int64(3)},
        {"__tuple__": [1]},
    ):
        yield head + datasets.state_files(Iterator(state))["process_0-of-1.json"]
    if not version:
        for codec in (0, 1, 2):
            described = {"adapter": "state", "type": "x.Y", "is_bytes": False}
            yield b"\1" + json.dumps(described | {"codec": codec}).encode()


def journal() -> bytes:
    row = {"time": 1.5, "kind": "committed", "step": 3, "path": "/x", "details": {}}
    rows = [row, row | {"kind": "restored", "details": {"secs": 0.5}}, {"x": 1}]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


if __name__ == "__main__":
    main()
