"""Old checkpoints of Orbax made to break a reader: the tree is in msgpack.

Each case writes one under a directory and returns the path to load.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgpack

from tests.hostile import later
from tests.hostile.msgpack import deep
from tests.hostile.t5x import ZARRAY, write_array


@later
def names(root: Path, name: Any, prefix: str = "PLACEHOLDER://") -> Path:
    """The tree names an array, and a good one is beside the checkpoint and in it."""
    text = name(root) if callable(name) else name
    write_array(root / "secret")
    (root / "item").mkdir()
    write_array(root / "item/w")
    content = msgpack.packb({"params": {"w": prefix + text}})
    (root / "item/checkpoint").write_bytes(content)
    return root / "item"


@later
def zarray(root: Path, contents: Any = None, **changes: Any) -> Path:
    write_array(root / "w", ZARRAY | changes, contents)
    (root / "checkpoint").write_bytes(msgpack.packb({"w": "PLACEHOLDER://w"}))
    return root


@later
def file(root: Path, content: bytes) -> Path:
    (root / "checkpoint").write_bytes(content)
    return root


def link(root: Path) -> Path:
    step = names("w")(root)
    (step / "w/0").unlink()
    (step / "w/0").symlink_to(root / "secret/0")
    return step


def linked_tree(root: Path) -> Path:
    step = names("w")(root)
    (step / "checkpoint").rename(root / "away")
    (step / "checkpoint").symlink_to(root / "away")
    return step


CASES: Final[dict[str, Callable[[Path], Path]]] = {
    "a path up": names("../secret"),
    "an absolute path": names(lambda root: str(root / "secret")),
    "a hidden path": names(".w"),
    "no name": names(""),
    "a NUL": names("w\0"),
    "an array that is missing": names("v"),
    "a path up, aggregated": names("../secret", "AGGREGATED://"),
    "a chunk is missing": zarray({}),
    "chunks of 2^31": zarray(chunks=[2**31]),
    "dtype object": zarray(dtype="|O"),
    "a link for a chunk": link,
    "a link for the tree": linked_tree,
    "depth 100k": file(deep(100_000)),
    "garbage behind": file(b"\x81\xa1a\x01\0"),
    "cut": file(b"\x82\xa1a\x01"),
}
