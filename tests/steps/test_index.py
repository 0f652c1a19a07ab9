"""Which entries of a directory are steps, and which may be damaged ones."""

import json

import pytest

from flaxckpt import errors
from flaxckpt._steps import index, names
from tests.helpers import faulty_store as faulty

PLAIN = names.StepFormat()


def make(root, *steps, content="ok"):
    for name in steps:
        (root / name).mkdir(parents=True)
        (root / name / "content").write_text(content)


def recognise(path):
    """A checkpoint whose content says what it is."""
    content = (path / "content").read_text() if (path / "content").exists() else None
    if content == "damaged":
        raise errors.DamagedCheckpointError(f"{path} is damaged")
    if content == "unclear":
        raise errors.CheckpointFormatError(f"{path} has several items")
    return content


def index_of(root, **options):
    return index.StepIndex(root, recognise, **options)


# ---- entries ----------------------------------------------------------------------


def test_entry_distinguishes_steps_damage_and_other_directories(tmp_path):
    make(tmp_path, "1")
    make(tmp_path, "2", content="damaged")
    make(tmp_path, "3", content="unclear")
    (tmp_path / "4").mkdir()
    ok, damaged, unclear, none = (
        index.Entry(step, tmp_path / str(step), recognise) for step in (1, 2, 3, 4)
    )
    assert (ok.checkpoint, ok.error, ok.why) == ("ok", None, "")
    assert damaged.checkpoint is None
    assert damaged.why == f"{tmp_path / '2'} is damaged"
    assert [e.is_step for e in (ok, damaged, unclear, none)] == [
        True,
        False,
        True,
        False,
    ]
    assert [e.was_step for e in (ok, damaged, unclear, none)] == [True] * 3 + [False]
    (tmp_path / "4" / "commit_success.txt").touch()
    assert none.was_step
    assert not none.is_damaged
    assert index.Entry(4, tmp_path / "4", recognise, ["x", "DAMAGED"]).is_damaged


def test_entry_recognises_checkpoint_only_once(tmp_path):
    make(tmp_path, "1")
    calls = []
    entry = index.Entry(1, tmp_path / "1", lambda path: calls.append(path) or "ok")
    assert entry.checkpoint == entry.checkpoint == "ok"
    assert entry.is_step
    assert len(calls) == 1


@pytest.mark.parametrize("error", [errors.CheckpointError("?"), OSError("on fire")])
def test_unreadable_entry_counts_as_former_step(tmp_path, error):
    def fail(path):
        raise error

    assert index.Entry(1, tmp_path / "1", fail).was_step


# ---- the index --------------------------------------------------------------------


def test_finds_steps_by_number(tmp_path):
    make(tmp_path, "10", "9", "2.orbax-checkpoint-tmp-3", "4.tmp-5", "notes")
    (tmp_path / "8").symlink_to(tmp_path / "9")
    (tmp_path / "7").mkdir()
    found = index_of(tmp_path)
    assert found.numbers == [7, 9, 10]
    assert found.steps == {9: tmp_path / "9", 10: tmp_path / "10"}
    assert list(found.steps) == [9, 10]
    assert found.find(9).checkpoint == "ok"
    assert found.find(7) is None
    assert found.find(8) is None


def test_duplicate_step_number_raises_error(tmp_path):
    make(tmp_path, "3", "step_3")
    message = "contains step 3 twice, as 3 and step_3: pass the path of one"
    with pytest.raises(errors.CheckpointFormatError, match=message):
        index_of(tmp_path)
    (tmp_path / "3/content").write_text("damaged")
    assert index_of(tmp_path).steps == {3: tmp_path / "step_3"}
    (tmp_path / "step_3/content").unlink()
    assert index_of(tmp_path).steps == {}


def test_index_recognises_entries_only_on_demand(tmp_path):
    make(tmp_path, "3", "4")
    looked_at = []
    found = index.StepIndex(tmp_path, looked_at.append)
    assert found.numbers == [3, 4]
    assert looked_at == []
    found.find(4)
    assert looked_at == [tmp_path / "4"]


def test_index_uses_given_number_function(tmp_path):
    make(tmp_path, "model1", "3")
    assert index_of(tmp_path, number=lambda name: 5 if name == "3" else None).steps == {
        5: tmp_path / "3"
    }
    make(tmp_path, "2.orbax-checkpoint-tmp-5", "checkpoint_5.tmp-6")
    assert index_of(tmp_path, number=names.number).numbers == [1, 3]


def commit(root, step, path):
    row = {"kind": "committed", "step": step, "path": path, "time": 1.0, "details": {}}
    with (root / "events.jsonl").open("a") as journal:
        journal.write(json.dumps(row) + "\n")


def test_journal_decides_between_different_name_formats(tmp_path):
    make(tmp_path, "model1", "plots_3")
    assert index_of(tmp_path).numbers == []
    commit(tmp_path, 1, f"{tmp_path}/model1/")
    assert index_of(tmp_path).numbers == [1]
    make(tmp_path, "5")
    assert index_of(tmp_path).numbers == [1]
    commit(tmp_path, 4, f"{tmp_path}/5")  # another number: not this name's
    assert index_of(tmp_path).numbers == [1]
    commit(tmp_path, 5, f"{tmp_path}/5")
    assert index_of(tmp_path).numbers == [1, 5]


def test_journal_decides_between_two_usual_names(tmp_path):
    make(tmp_path, "3", "step_4")
    assert index_of(tmp_path).numbers == [3, 4]
    commit(tmp_path, 4, f"{tmp_path}/step_4")
    assert index_of(tmp_path).numbers == [4]


@pytest.mark.parametrize("kind", ["started", "restored"])
def test_ignores_journal_events_other_than_commits(tmp_path, kind):
    make(tmp_path, "model1", "3")
    commit(tmp_path, 1, "model1")
    journal = tmp_path / "events.jsonl"
    journal.write_text(journal.read_text().replace("committed", kind))
    assert index_of(tmp_path).numbers == [3]


def test_usual_names_count_without_journal(tmp_path):
    make(tmp_path, "step_3", "step_4")
    commit(tmp_path, 1, "model1")
    assert index_of(tmp_path).numbers == [3, 4]
    make(tmp_path, "plots_1")
    assert index_of(tmp_path).numbers == [3, 4]


# ---- doubt ------------------------------------------------------------------------


def test_find_doubtful_returns_damaged_steps(tmp_path):
    make(tmp_path, "1", "2")
    make(tmp_path, "3", content="damaged")
    (tmp_path / "4").mkdir()
    (tmp_path / "5").touch()
    found = index_of(tmp_path)
    assert found.find_doubtful(1) is None
    assert found.find_doubtful(9) is None
    assert found.find_doubtful(3).why.endswith("3 is damaged")
    assert found.find_doubtful(4).path == tmp_path / "4", "named like other steps"
    assert found.find_doubtful(5) is None, "a file, unlike other steps"
    assert [entry.step for entry in found.entries] == [1, 2, 3]


@pytest.mark.parametrize("sign", ["flaxckpt.json", "state/_sharding", "state/d"])
def test_recognises_former_step_by_its_files(tmp_path, sign):
    (tmp_path / "4" / "state" / "notes").mkdir(parents=True)
    make(tmp_path, "step_3")
    assert [entry.step for entry in index_of(tmp_path).entries] == [3]
    (tmp_path / "4" / sign).parent.mkdir(exist_ok=True)
    (tmp_path / "4" / sign).touch()
    assert [entry.step for entry in index_of(tmp_path).entries] == [3, 4]


# ---- lists ------------------------------------------------------------------------


def test_list_committed_returns_steps_in_order(tmp_path):
    make(tmp_path, "10", "9", "notes", "7.orbax-checkpoint-tmp-1")
    (tmp_path / "8").mkdir()
    (tmp_path / "9" / "DAMAGED").touch()
    entries = index.list_committed(tmp_path, PLAIN, recognise)
    assert [(e.step, e.path) for e in entries] == [
        (9, tmp_path / "9"),
        (10, tmp_path / "10"),
    ]
    assert sorted(entries[0].files) == ["DAMAGED", "content"]
    assert index.list_steps(tmp_path, PLAIN) == {10: tmp_path / "10"}
    assert index.list_committed(tmp_path / "missing", PLAIN, recognise) == []


def test_list_committed_raises_if_it_cannot_list(tmp_path):
    with pytest.raises(errors.DamagedCheckpointError):
        index.list_committed(tmp_path / ("x" * 300), PLAIN, recognise)


def test_steps_in_store_need_commit_marker():
    root = faulty.new_path("index")
    for name in ("1/state/w", "1/commit_success.txt", "2/state/w", "3/metrics/x"):
        (root / name).write_bytes(b"{}")
    assert index.list_steps(root, PLAIN).keys() == {1}


# ---- other looks ------------------------------------------------------------------


def test_sign_returns_file_unique_to_steps(tmp_path):
    assert index.sign(tmp_path) is None
    (tmp_path / "flaxckpt.json").mkdir()
    assert index.sign(tmp_path) is None
    (tmp_path / "commit_success.txt").touch()
    assert index.sign(tmp_path) == "commit_success.txt"


def test_finds_usual_name_of_step(tmp_path):
    make(tmp_path, "model3", "plots_4")
    assert index.find_usual_name(tmp_path, 3) is None
    make(tmp_path, "step_3", "5")
    assert index.find_usual_name(tmp_path, 3) == tmp_path / "step_3"
    assert index.find_usual_name(tmp_path, 4) is None


def test_groups_checkpoints_of_any_name_by_number(tmp_path):
    make(tmp_path, "model3", "step_3", "notes")
    make(tmp_path, "4", content="unclear")
    (tmp_path / "5").mkdir()
    found = index.checkpoints_by_number(tmp_path, recognise)
    assert found == {3: [tmp_path / "model3", tmp_path / "step_3"], 4: [tmp_path / "4"]}
