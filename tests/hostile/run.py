"""Directories of steps in which something is hostile: what is beside the arrays.

Each case writes one under a directory and returns its path. They are read by all that a
`Checkpointer` has; what may be lost without harm, such as metrics, is none here.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import flaxckpt
from tests.hostile import SPECIAL, later

NESTED: Final = b"[" * 200_000 + b"]" * 200_000


class AnyIterator:
    """One that takes any state."""

    def __iter__(self) -> "AnyIterator":
        return self

    def __next__(self) -> int:
        return 0

    def get_state(self) -> dict[str, Any]:
        return {"a": 1}

    def set_state(self, state: Any) -> None:
        assert isinstance(state, dict), state


def write(root: Path) -> Path:
    """A sound run of two steps with all that steps can have."""
    with flaxckpt.Checkpointer(root / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": 1.0}, metrics={"loss": 1.0}, dataset=AnyIterator())
    manifest = root / "run/2/flaxckpt.json"
    content = json.loads(manifest.read_text()) | {"digests": {}}
    manifest.write_text(json.dumps(content))
    (root / "run/2/commit_success.txt").unlink()
    return root / "run"


def read(path: Path) -> None:
    """All that is not about arrays; then the dataset, and the metadata of the run."""
    with flaxckpt.Checkpointer(path, read_only=True) as ckpt:
        assert ckpt.steps()
        ckpt.explain()
        for step in ckpt.steps():
            ckpt.metrics(step)
            ckpt.best_step("loss", "min")
        ckpt.restore()
        ckpt.restore_dataset(AnyIterator(), step=2)
        ckpt.run_metadata()
        ckpt.metadata(2)


@later
def replaced(root: Path, name: str, change: Callable[[Path], object]) -> Path:
    run = write(root)
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    change(path)
    return run


def text(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def many(before: bytes, each: bytes, count: int) -> Callable[[Path], object]:
    """A long text, which is made only when it is written."""
    return lambda path: path.write_bytes(before + each * count + b"1]}")


def link(path: Path) -> None:
    """To a good file of that name, elsewhere."""
    away = path.parents[3] / "away" / path.name
    away.parent.mkdir(exist_ok=True)
    away.write_text('{"a":1}')
    path.symlink_to(away)


DATASET: Final = "2/dataset/process_0-of-1.json"
TAGS: Final[dict[str, Any]] = {
    "bytes that are none": {"__bytes__": "a"},
    "an array of objects": {
        "__ndarray__": {"dtype": "object", "shape": [], "data": ""}
    },
    "an array of 2^60": {
        "__ndarray__": {"dtype": "int8", "shape": [2**60], "data": ""}
    },
    "an array of -1": {"__ndarray__": {"dtype": "int8", "shape": [-5], "data": ""}},
    "a list for a state": {"__tuple__": []},
    "keys that are dicts": {"__dict__": [[{}, 1]]},
    "a tensor": {"__tensor__": {"dtype": "os", "shape": [], "data": ""}},
}

CASES: Final[dict[str, Callable[[Path], Path]]] = {
    **{
        f"{name} of 200k lists": replaced(name, text(b'{"a":' + NESTED + b"}"))
        for name in (DATASET, "metadata/_ROOT_METADATA")
    },
    **{
        f"{name} of ten million strings": replaced(
            name, many(b'{"a":[', b'"ab",', 10**7)
        )
        for name in (DATASET, "metadata/_ROOT_METADATA")
    },
    "a state of 60 million numbers": replaced(
        DATASET, many(b'{"a":[', b"257,", 6 * 10**7)
    ),
    "a state that is a link": replaced(DATASET, link),
    "a state that is no JSON": replaced(DATASET, text(b"\x80\x04K\x01.")),
    "metadata of the run that is a link": replaced(
        "metadata/_ROOT_METADATA",
        lambda path: (
            path.symlink_to(path.parents[1] / "1/metrics/metrics")
            if (path.parents[2] / "away").mkdir()
            else (path.parents[2] / "away/x").write_text("{}")
            and path.symlink_to(path.parents[2] / "away/x")
        ),
    ),
    **{
        f"a state with {title}": replaced(DATASET, text(json.dumps(tag).encode()))
        for title, tag in TAGS.items()
    },
}


@later
def harmless(root: Path, name: str, change: Callable[[Path], object]) -> Path:
    """What a state does not depend on may be anything; then the step is hostile."""
    run = replaced(name, change)(root)
    os.truncate(run / DATASET, 3)
    return run


CASES.update(
    {
        **{
            f"metrics that are {title}": harmless("2/metrics/metrics", change)
            for title, change in {
                "200k lists": text(b'{"a":' + NESTED + b"}"),
                "a number of 400 digits": text(b'{"loss":1' + b"0" * 400 + b"}"),
                "infinite": text(b'{"loss":1e999}'),
                "a pipe": SPECIAL["pipe"],
                "a directory": SPECIAL["directory"],
                "a link": link,
                "a device": SPECIAL["device"],
                "2^36 bytes": SPECIAL["long file"],
            }.items()
        },
        "a journal of 200k lists": harmless("events.jsonl", text(NESTED * 20)),
        "a step that is a link": harmless(
            "9", lambda path: path.symlink_to(path.parent / "1")
        ),
        "a step that is a pipe": harmless("10", os.mkfifo),
        "a step with a name of 5000 digits": harmless("9" * 200, Path.mkdir),
    }
)
