"""A short soak: nothing grows, and nothing is left. `make soak` runs the long one."""

import pytest

from tests.soak import samples, work


@pytest.mark.slow
def test_300_saves_leave_nothing_behind(tmp_path):
    result = work.soak(tmp_path, 300, 60, say=lambda line: None)
    # So few saves do not tell growth from what is loaded once.
    growing = [line for line in result["problems"] if "grows" in line]
    assert [line for line in result["problems"] if line not in growing] == []
    assert result["read"] > 0


def make_samples(**series):
    return [
        dict(zip(series, values, strict=True))
        for values in zip(*series.values(), strict=True)
    ]


def test_growth_is_found():
    base = {"rss_mib": 300.0, "python_mib": 9.0, "live_arrays": 3, "objects": 1000}
    steady = {name: [value] * 20 for name, value in base.items()}
    assert samples.problems(make_samples(**steady, threads=[1, 2] * 10)) == []
    noisy = {**steady, "rss_mib": [300.0 + n % 5 for n in range(20)]}
    assert samples.problems(make_samples(**noisy)) == []
    leaking = {**steady, "rss_mib": [300.0 + 2 * n for n in range(20)]}
    [problem] = samples.problems(make_samples(**leaking))
    assert problem.startswith("rss_mib grows by 26")


def test_what_is_loaded_at_the_beginning_is_no_growth():
    rss = [100.0 * n for n in range(6)] + [600.0] * 14
    base = {"python_mib": [9.0] * 20, "live_arrays": [3] * 20, "objects": [0] * 20}
    assert samples.problems(make_samples(rss_mib=rss, **base)) == []


@pytest.mark.parametrize("name", samples.NO_MORE)
def test_what_is_not_given_back_is_found(name):
    base = {"rss_mib": 1.0, "python_mib": 9.0, "live_arrays": 3, "objects": 1000}
    steady = {key: [value] * 20 for key, value in base.items()}
    [problem] = samples.problems(make_samples(**steady, **{name: [5] * 13 + [6] * 7}))
    assert problem == f"{name}: 5 before the middle, 6 or more after it"
