"""Directories of big_vision made to break a reader, or to mislead it.

Each case writes one under a directory and returns the path to load.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.hostile import later
from tests.hostile.t5x import GZIP, ZARRAY, write_array

NAME = "checkpoint.bv-000000001"


def write(root: Path, *names: str, zarray: Any = ZARRAY, chunks: Any = None) -> Path:
    """A checkpoint of arrays with these names, sound but for what is given."""
    step = root / NAME
    step.mkdir()
    write_array(step / "params~sound")
    for name in names:
        write_array(step / name, zarray, chunks)
    return step


case = later(write)


def link_array(root: Path) -> Path:
    step = write(root)
    write_array(root / "outside")
    (step / "params~w").symlink_to(root / "outside")
    return step


def file_beside(root: Path) -> Path:
    step = write(root)
    (step / "notes.txt").write_text("x")
    return step


@later
def pointer(root: Path, content: bytes) -> Path:
    write(root)
    path = root / "checkpoint.bv-LAST"
    path.write_bytes(content)
    return path


CASES: Final[dict[str, Callable[[Path], Path]]] = {
    "a leaf below another": case("params", "params~w"),
    "a leaf above another": case("params~sound~w"),
    "an empty part": case("params~~w"),
    "an empty end": case("params~w~"),
    "deep": case("~".join("a" * 100)),
    "zarr that is no JSON": case("w", zarray=b"{"),
    "zarr of another format": case("w", zarray=ZARRAY | {"zarr_format": 3}),
    "a huge shape": case("w", zarray=ZARRAY | {"shape": [2**60]}),
    "a missing chunk": case("w", chunks={"0": GZIP[0]}),
    "a link for an array": link_array,
    "a file beside": file_beside,
    "an array without zarr": lambda root: (
        ((step := write(root)) / "params~w").mkdir() or step
    ),
    "a pointer to nothing": pointer(b"000000002"),
    "a pointer out of the directory": pointer(b"../../etc"),
    "an empty pointer": pointer(b""),
    "a pointer with a NUL": pointer(b"000000001\0"),
}
