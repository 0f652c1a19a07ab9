"""The benchmarks run, describe the machine, and compare results with targets."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import memory, states, timing
from benchmarks.__main__ import main
from benchmarks.cases import CASES, buckets, gpu, processes
from benchmarks.contenders import CONTENDERS
from benchmarks.samples import Result, Sample, Series, Settings, collect
from benchmarks.targets import TARGETS, Target, judge

OURS = Series("train_state", "commit", "flaxckpt")
THEIRS = Series("train_state", "commit", "orbax")
RATIO = Target("commit, to orbax", OURS, 0.35, THEIRS)
SECONDS = Target("commit, seconds", OURS, 2.0)

RUN_CASES = (
    *("train_state", "tiny", "steps", "loop", "frozen", "flat_files", "planning"),
    "overlap",
    "gpu",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the results of a quick run of flaxckpt alone, and their directory."""
    directory = tmp_path_factory.mktemp("bench")
    path = directory / "results" / "run.json"
    main(
        [
            *("--quick", "--rounds", "2", "--only", *RUN_CASES),
            *("--contenders", "flaxckpt", "flaxckpt compact", "raw write"),
            *("--directory", str(directory / "disk"), "--json", str(path)),
        ]
    )
    return json.loads(path.read_text()), directory / "disk"


@pytest.mark.slow
def test_run_records_machine_software_and_date(run):
    data, _ = run
    machine = data["machine"]
    assert machine["cpu"]
    assert machine["filesystem"]
    assert machine["cores"] > 0
    assert machine["memory_bytes"] > 0
    assert machine["date"][:2] == "20"
    assert machine["versions"]["jax"] == jax.__version__
    assert data["quick"]
    assert data["rounds"] == 2


@pytest.mark.slow
def test_run_records_sample_per_round_and_median(run):
    data, _ = run
    rows = {
        (row["case"], row["figure"], row["contender"]): row for row in data["results"]
    }
    commit = rows[OURS]
    assert len(commit["values"]) == 2
    assert commit["minimum"] == min(commit["values"])
    assert commit["median"] == pytest.approx(sum(commit["values"]) / 2)
    assert commit["unit"] == "s"
    assert ("train_state", "commit", "raw write") in rows
    assert ("train_state", "restore", "raw write") not in rows


@pytest.mark.slow
def test_run_measures_all_targets_of_flaxckpt(run):
    data, _ = run
    found = {
        (row["case"], row["figure"])
        for row in data["results"]
        if row["contender"].startswith("flaxckpt")
    }
    # A tiny run has fewer leaves and steps, which are in the names of figures.
    wanted = {
        (target.measured.case, target.measured.figure)
        for target in TARGETS
        if target.measured.case in {"train_state", "loop", "frozen", "flat_files"}
    }
    assert wanted <= found
    assert {"20 leaves: commit", "200 leaves: restore and use"} <= {f for _, f in found}
    assert {"10 steps: open", "1,000 leaves"} <= {f for _, f in found}


@pytest.mark.slow
def test_run_records_skipped_cases_and_leaves_no_files(run):
    data, directory = run
    skipped = {row["case"]: row["reason"] for row in data["skipped"]}
    assert "GPU" in skipped["gpu"]
    assert list(directory.iterdir()) == []


@pytest.mark.slow
def test_memory_benchmark_measures_save_and_restore(tmp_path):
    if not memory.STATUS.exists():
        pytest.skip(f"needs {memory.STATUS}")
    path = tmp_path / "run.json"
    arguments = ["--quick", "--only", "memory", "--contenders", "flaxckpt"]
    main([*arguments, "--directory", str(tmp_path), "--json", str(path)])
    rows = json.loads(path.read_text())["results"]
    assert [row["figure"] for row in rows] == ["save", "restore"]
    assert all(row["median"] > 0 for row in rows)


@pytest.mark.slow
def test_draws_picture_of_run(run, tmp_path):
    picture = pytest.importorskip("benchmarks.picture", exc_type=ImportError)
    data, _ = run
    picture.draw(data, tmp_path / "run.svg")
    assert "<svg" in (tmp_path / "run.svg").read_text()


@pytest.mark.slow
def test_measures_accelerator_and_copies_from_it(tmp_path):
    names = ("flaxckpt", "flaxckpt device", "flaxckpt device pageable")
    settings = Settings(tmp_path, rounds=1, quick=True, contenders=names)
    found = collect(gpu.measure(settings, jax.devices()[-1]))
    wanted = [target for target in TARGETS if target.measured.case == "gpu"]
    assert len(wanted) == 4
    for target in wanted:
        assert target.measured in found
        assert target.base is None or target.base in found
    for name in names:
        assert Series("gpu", "restore and use", name) in found
        assert Series("gpu", "host memory of 40 saves", name) in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "ours", "theirs", "value", "is_met"),
    [
        (RATIO, [1.0, 3.0, 100.0], [10.0], 0.3, True),
        (RATIO, [3.5], [10.0], 0.35, True),
        (RATIO, [4.0], [10.0, 10.0, 0.1], 0.4, False),
        (RATIO, [4.0], [], None, None),
        (RATIO, [], [4.0], None, None),
        (RATIO, [4.0], [0.0], None, None),
        (SECONDS, [1.0, 2.0, 9.0], [], 2.0, True),
        (SECONDS, [2.1], [], 2.1, False),
        (SECONDS, [], [], None, None),
    ],
)
def test_medians_decide_whether_target_is_met(target, ours, theirs, value, is_met):
    results = collect(
        [
            *(Sample(OURS, seconds) for seconds in ours),
            *(Sample(THEIRS, seconds) for seconds in theirs),
        ]
    )
    (verdict,) = judge(results, [target])
    assert verdict.value == (None if value is None else pytest.approx(value))
    assert verdict.is_met is is_met


def test_targets_name_existing_cases_and_contenders():
    others = {"its dependencies", "safetensors.flax", gpu.PINNED, gpu.NO_SAVES}
    others |= {"flaxckpt converted", "flaxckpt safetensors"}
    others |= {buckets.FLAXCKPT, buckets.BOTO3, buckets.SOCKETS, *processes.JOBS}
    for target in TARGETS:
        for series in filter(None, (target.measured, target.base)):
            assert series.case in CASES
            assert series.contender in {*CONTENDERS, *others}


def test_results_keep_sample_order():
    assert collect([Sample(OURS, 3.0), Sample(THEIRS, 1.0), Sample(OURS, 2.0)]) == {
        OURS: Result((3.0, 2.0), "s"),
        THEIRS: Result((1.0,), "s"),
    }


def test_contenders_take_turns_and_warm_up_is_not_timed():
    turns = list(timing.turns(["a", "b", "c"], 3))
    rounds = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(rounds) == 4
    assert all({turn.contender for turn in found} == {*"abc"} for found in rounds)
    assert [found[0].contender for found in rounds[1:]] == ["a", "b", "c"]
    assert [turn.is_timed for turn in turns] == [False] * 3 + [True] * 9
    assert [turn.is_first for turn in turns] == [True] * 3 + [False] * 9
    assert all(turn.is_timed for turn in timing.turns(["a"], 1, warm_up=False))


@pytest.mark.parametrize(
    "restored",
    [
        {"a": jnp.array([0.0, 1.0]), "b": jnp.array(2)},
        {"a": jnp.array([-0.0, 1.0], jnp.bfloat16), "b": jnp.array(2)},
        {"a": jnp.array([-0.0, 1.0])},
        {"a": [-0.0, 1.0], "b": jnp.array(2)},
    ],
)
def test_check_rejects_wrongly_restored_state(restored):
    saved = {"a": jnp.array([-0.0, 1.0]), "b": jnp.array(2)}
    states.check_equal(saved, saved)
    with pytest.raises(ValueError, match=r"differs|came back|restored"):
        states.check_equal(restored, saved)
