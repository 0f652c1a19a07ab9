"""Damage to the files of a step: exact values or an error, and an older step."""

import collections
import itertools
import logging
import random

import numpy as np
import pytest

import flaxckpt
from tests.helpers import chunks, old_stores, run_files

FLIPS, ZEROED, TRUNCATED, REMOVED = 128, 64, 38, 25
"""Of each case."""

CASES = [
    *itertools.product(("files", "ocdbt"), ("none", "compact"), ("small", "large")),
    ("files", "none", "items"),
    ("ocdbt", "none", "items"),
]

ITEMS = ("params", "numbers", "texts")

UNREAD = {"dataset/metadata"} | {
    f"{item}/{name}"
    for item in ("state", *ITEMS)
    for name in ("_METADATA", "_sharding", "array_metadatas/process_0")
}
"""Written for Orbax and grain only: what is in them changes nothing in a state."""

LOSSES = {"metrics/metrics", "metrics/digests"}
"""Metrics that are damaged are lost, with a warning, and the state is not."""

JSON_ITEM = "config/metadata"
"""A damaged JSON item is named by `damaged_items`, and the state is restored."""


class Iterator:
    def __init__(self, position=0):
        self.position = position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def state(size, step):
    """Values of which no two blocks are equal, and that differ in every step."""
    rng = np.random.default_rng(step)
    rows = 1500 if size == "large" else 40
    plain = {
        "params": {
            "kernel": rng.standard_normal((rows, 64), np.float32),
            "bias": rng.standard_normal(64, np.float32),
        },
        "count": rng.integers(0, 2**31, (3, 5), np.int32),
        "name": f"step {step}",
        "step": step,
    }
    if size != "items":
        return plain
    return {
        "params": plain["params"],
        "numbers": {"count": plain["count"], "step": plain["step"]},
        "texts": {"name": plain["name"]},
    }


def is_same(wanted, found):
    if isinstance(wanted, dict):
        return wanted.keys() == found.keys() and all(
            is_same(wanted[key], found[key]) for key in wanted
        )
    if isinstance(wanted, np.ndarray):
        return (wanted.dtype, wanted.shape, wanted.tobytes()) == (
            found.dtype,
            found.shape,
            found.tobytes(),
        )
    return type(wanted) is type(found) and wanted == found


def put(file, content):
    """Replaces a file: whoever has the old one mapped, keeps it."""
    made = file.with_name(file.name + ".made")
    made.write_bytes(content)
    made.replace(file)


def flipped(content, chance):
    at = chance.randrange(len(content))
    changed = bytearray(content)
    changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def zeroed(content, chance):
    at = chance.randrange(len(content)) // 512 * 512
    return content[:at] + bytes(len(content[at : at + 512])) + content[at + 512 :]


def truncated(content, chance):
    return content[: chance.randrange(len(content))]


def removed(content, chance):
    return None


class Run:
    """A run with a good step 1, and a step 2 that is damaged again and again."""

    def __init__(self, root, store, codec, size):
        layout = flaxckpt.ArrayLayout(codec=codec, chunk_bytes=2**17)
        items, json = ("state", {}) if size != "items" else (ITEMS, {"config": [1, 2]})
        self.ckpt = flaxckpt.Checkpointer(root, layout=layout, items=items)
        self.states = {step: state(size, step) for step in (1, 2)}
        for step in self.states:
            dataset = Iterator(10 * step)
            self.ckpt.save(
                step,
                self.states[step],
                metrics={"loss": 0.5},
                dataset=dataset,
                json=json,
            )
        self.ckpt.wait()
        for step in self.states if store == "files" else ():
            trees = ("state",) if size != "items" else ITEMS
            old_stores.make_directories(root / str(step), trees)
        self.path = root / "2"
        self.files = {
            str(file.relative_to(self.path)): file.read_bytes()
            for file in sorted(self.path.rglob("*"))
            if file.is_file()
        }

    def outcome(self, *, memory_map):
        """What a restore gives: a step, exactly; or `wrong`."""
        dataset = Iterator()
        found = self.ckpt.restore(dataset=dataset, memory_map=memory_map)
        step = self.ckpt.restored_step
        is_exact = is_same(self.states[step], found) and dataset.position == 10 * step
        return step if is_exact else "wrong"

    def heal(self, name):
        put(self.path / name, self.files[name])
        (self.path / run_files.DAMAGED).unlink(missing_ok=True)


def choose(files, chance, n):
    """A file: every other time by size, else any of them."""
    names = list(files)
    if n % 2:
        return names[n // 2 % len(names)]
    return chance.choices(names, [len(content) for content in files.values()])[0]


def is_between_chunks(step, name, old, new):
    """Whether only bytes have changed that no value needs; `verify` finds them."""
    item, _, file = name.partition("/")
    if not file.startswith("d/") or new is None or len(new) != len(old):
        return False
    values = chunks.read_tree(step / item).values()
    places = [value for value in values if not isinstance(value, bytes)]
    inside = [place for place in places if place.file == file]
    changed = [
        n for n, pair in enumerate(zip(old, new, strict=True)) if len({*pair}) > 1
    ]
    return not any(
        chunk.offset <= n < chunk.offset + chunk.size
        for chunk in inside
        for n in changed
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "codec", "size"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * ("large" in case or n % 4 == 2))
        for n, case in enumerate(CASES)
    ],
)
def test_damage_is_never_silent_and_restores_previous_step(
    tmp_path, caplog, store, codec, size
):
    caplog.set_level(logging.CRITICAL, logger="flaxckpt")
    chance = random.Random(f"damage {store} {codec} {size}")
    run = Run(tmp_path / "run", store, codec, size)
    assert run.outcome(memory_map=True) == 2
    outcomes = collections.Counter()
    for change, count in (
        (flipped, FLIPS),
        (zeroed, ZEROED),
        (truncated, TRUNCATED),
        (removed, REMOVED),
    ):
        done = 0
        for n in itertools.count():
            if done == count:
                break
            name = choose(run.files, chance, n)
            content = change(run.files[name], chance)
            if content == run.files[name]:
                continue  # that was zeros before
            done += 1
            if content is None:
                (run.path / name).unlink()
            else:
                put(run.path / name, content)
            found = run.outcome(memory_map=n % 4 < 2)
            is_marked = run.ckpt.damaged().keys() == {2}
            if name == JSON_ITEM:
                assert run.ckpt.metadata(2).damaged_items.keys() == {"config"}
            run.heal(name)
            outcomes[change.__name__, found] += 1
            assert found in (1, 2), f"{change.__name__} {name}: wrong values"
            assert is_marked == (found == 1), name
            if found == 2:
                assert (
                    name in {*UNREAD, *LOSSES, JSON_ITEM}
                    or (change is removed and name == "commit_success.txt")
                    or is_between_chunks(run.path, name, run.files[name], content)
                ), f"{change.__name__} {name}: not noticed"
    assert sum(outcomes.values()) == FLIPS + ZEROED + TRUNCATED + REMOVED
    assert run.outcome(memory_map=True) == 2, "all is healed"


def test_tries_enough_damage_cases():
    counts = [n * len(CASES) for n in (FLIPS, ZEROED, TRUNCATED, REMOVED)]
    assert all(
        n >= least for n, least in zip(counts, (1000, 500, 300, 200), strict=True)
    )
