"""The comparison of failures runs, and flaxckpt loses nothing."""

import json

import pytest

from benchmarks import reliability


@pytest.mark.slow
def test_rootless_reliability_cases_lose_nothing(tmp_path):
    path = tmp_path / "results.json"
    reliability.main(
        [
            *("--only", "flips", "newest damaged", "kills", "exits"),
            *("--contenders", "flaxckpt", "--rounds", "2"),
            *("--directory", str(tmp_path), "--json", str(path)),
        ]
    )
    data = json.loads(path.read_text())
    assert data["rounds"] == 2
    assert data["machine"]["versions"]["flaxckpt"]
    assert {row["case"]: row["outcomes"] for row in data["rows"]} == {
        "flips": {"an error": 2},
        "newest damaged": {"the step before, exactly": 2},
        "kills": {"all listed steps are exact": 2},
        "exits": {"exit code 0, the step is there": 2},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
