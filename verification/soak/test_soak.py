"""A short soak: nothing grows, and nothing is left."""

import os
import threading

import pytest

from verification.soak import samples, work


@pytest.mark.slow
def test_300_saves_leave_nothing_behind(tmp_path):
    result = work.soak(tmp_path, 300, 60, say=lambda line: None)
    # So few saves do not tell growth from what is loaded once.
    growing = [line for line in result["problems"] if "grows" in line]
    assert [line for line in result["problems"] if line not in growing] == []
    assert len(result["writer"]) == work.EPOCHS
    assert result["read"] > 0


def make_samples(**series):
    return [
        dict(zip(series, values, strict=True))
        for values in zip(*series.values(), strict=True)
    ]


def test_detects_growth():
    base = {"rss_mib": 300.0, "python_mib": 9.0, "live_arrays": 3, "objects": 1000}
    steady = {name: [value] * 20 for name, value in base.items()}
    assert samples.problems(make_samples(**steady, threads=[1, 2] * 10)) == []
    noisy = {**steady, "rss_mib": [300.0 + n % 5 for n in range(20)]}
    assert samples.problems(make_samples(**noisy)) == []
    leaking = {**steady, "rss_mib": [300.0 + 2 * n for n in range(20)]}
    [problem] = samples.problems(make_samples(**leaking))
    assert problem.startswith("rss_mib grows by 26")


def test_does_not_count_initial_memory_as_growth():
    rss = [100.0 * n for n in range(6)] + [600.0] * 14
    base = {"python_mib": [9.0] * 20, "live_arrays": [3] * 20, "objects": [0] * 20}
    assert samples.problems(make_samples(rss_mib=rss, **base)) == []


@pytest.mark.parametrize("name", samples.NO_MORE)
def test_detects_resources_that_are_not_released(name):
    base = {"rss_mib": 1.0, "python_mib": 9.0, "live_arrays": 3, "objects": 1000}
    steady = {key: [value] * 20 for key, value in base.items()}
    [problem] = samples.problems(make_samples(**steady, **{name: [5] * 13 + [6] * 7}))
    assert problem == f"{name}: 5 before the middle, 6 or more after it"


STEADY = {"rss_mib": 1.0, "python_mib": 9.0, "live_arrays": 3, "objects": 1000}
POOL = [9, 1, 5, 9, 2, 7, 1, 9, 3, 9]
"""The threads of a pool in the epochs: more while many are busy, fewer after a rest."""


@pytest.mark.parametrize("name", [*samples.NO_MORE, *samples.FILLS])
@pytest.mark.parametrize("each", [1, 10], ids=["in each epoch", "in each save"])
def test_detects_steady_loss_of_resources(name, each):
    count = work.EPOCHS
    steady = {key: [value] * count for key, value in STEADY.items()}
    pool = POOL * 3 if name in samples.FILLS else [0] * count
    leaking = [20 + held + number * each for number, held in enumerate(pool)]
    [problem] = samples.problems(make_samples(**steady, **{name: leaking}))
    assert problem.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "tasks",
    [
        [20, 26, 29, 33, 34, 34, 35, 35, 36, 36] + [36] * 5 + [37] * 5 + [38] * 10,
        [20] * 15 + [36] * 15,
        [20] * 12 + [25] * 6 + [30] * 12,
        [36] * 28 + [60] * 2,
        POOL * 3,
    ],
)
def test_does_not_count_filling_pool_as_leak(tasks):
    steady = {key: [value] * len(tasks) for key, value in STEADY.items()}
    assert samples.problems(make_samples(**steady, tasks=tasks)) == []


@pytest.mark.slow
def test_detects_lost_threads_and_descriptors_in_this_process():
    taken, threads, descriptors = [], [], []
    end = threading.Event()
    try:
        for _ in range(work.EPOCHS):
            for _ in range(8):  # more than what ends meanwhile of other tests
                threads.append(threading.Thread(target=end.wait))
                threads[-1].start()
                descriptors.append(os.open(os.devnull, os.O_RDONLY))
            taken.append(samples.take())
    finally:
        end.set()
        for thread, descriptor in zip(threads, descriptors, strict=True):
            thread.join()
            os.close(descriptor)
    found = {line.partition(":")[0] for line in samples.problems(taken)}
    assert found >= {"threads", "tasks", "descriptors"}
