"""Histories of the local tier keep their guarantees, and find planted faults."""

import functools
import json
import shutil

import pytest

from flaxckpt._distributed import messages, operation
from flaxckpt._run.tiers import part_copies, part_tier, parts, upload_copies, uploads
from verification.simulation import kernel, planted, runner, tier

MOST_HISTORIES = 600
"""The histories that find each planted fault: many times as many as find it on average,
as any change of flaxckpt's calls changes them all."""


def _run(seeds):
    assert not list(runner.find_violations(tier, seeds))


def test_sample_of_histories_is_sound():
    _run(range(6))


@pytest.mark.slow
def test_many_histories_are_sound():
    _run(range(200))


class _AllLost:
    """Random numbers of a power cut that takes away all that was not synced."""

    def choice(self, options):
        return options[0]

    def random(self):
        return 0.5


def _cut_power_of_copies(patches):
    with (
        runner.installed(tier, patches),
        tier.story(1, copies=1, domain_size=1, latest=0) as story,
    ):
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(3, ["restore", "save", "copies"], is_calm=True)
        for machine in ("m0", "m1", "m2"):
            story.files.cut_power(story.files.root / machine, _AllLost())
        story.lose("m1")
        story.files.failing.clear()
        story.end(3)


def test_copies_survive_power_cut():
    _cut_power_of_copies({})
    with pytest.raises(kernel.Violation):
        _cut_power_of_copies(planted.UNSYNCED_COPIES)


def _lose_a_failure_domain(patches):
    with (
        runner.installed(tier, patches),
        tier.story(1, copies=1, domain_size=2, latest=0) as story,
    ):
        # The run directory is out of reach, or the upload would save the step.
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(4, ["restore", "save", "copies"], is_calm=True)
        for machine in ("m0", "m1"):
            story.lose(machine)
        story.files.failing.clear()
        story.end(4)


def _copy_to_the_next(domains, count, holders=None):
    if holders is not None:
        return [[] for _ in holders]
    return [[(process + 1) % len(domains)] for process in range(len(domains))]


def test_a_step_survives_the_loss_of_a_failure_domain():
    _lose_a_failure_domain({})
    with pytest.raises(kernel.Violation):  # with a copy in the domain of its part
        _lose_a_failure_domain({(parts, "choose_copies"): _copy_to_the_next})


def _lose_a_machine_after_another(patches):
    with (
        runner.installed(tier, patches),
        tier.story(1, copies=1, domain_size=1, latest=0) as story,
    ):
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(3, ["restore", "save", "copies"], is_calm=True)
        for machine in ("m1", "m0"):
            story.lose(machine)
            story.run_job(3, ["restore", "copies"], is_calm=True)
            for other in ("m0", "m1", "m2"):
                story.files.cut_power(story.files.root / other, _AllLost())
        story.files.failing.clear()
        story.end(3)


def test_a_restore_makes_lost_copies_again():
    _lose_a_machine_after_another({})
    nothing = {(part_tier.PartTier, "keep_restored"): lambda *args: None}
    with pytest.raises(kernel.Violation):
        _lose_a_machine_after_another(nothing)


def _damage(story, machine, file):
    (story.files.root / machine / "local" / "1" / file).write_bytes(b"damaged")
    story.ledger.lose(machine)


@pytest.mark.parametrize("damaged", [(), ("m0", "m1")])
def test_restores_the_newest_of_two_saves_of_a_step(damaged):
    with runner.installed(tier), tier.story(1, copies=0, latest=0) as story:
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(2, ["save"], is_calm=True)
        for machines in (("m0", "m2"), ("m1", "m3")):
            story.swap(*machines)
        story.run_job(2, ["save"], is_calm=True)
        for machine in damaged:
            _damage(story, machine, "PARTS")
        story.run_job(4, ["restore"], is_calm=True)


def test_a_save_is_newer_than_the_one_that_it_replaces_although_clocks_are_apart():
    with runner.installed(tier), tier.story(1, copies=1, domain_size=1) as story:
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(2, ["save", "copies"], is_calm=True)
        story.swap("m1", "m3")
        story.files.failing[story.files.root / "run"] = 1.0
        turns = ["restore", "overwrite", "copies"]
        story.run_job(2, turns, is_calm=True, clock_secs=-9000.0)
        story.swap("m0", "m1")
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(2, ["restore"], is_calm=True)


def test_a_save_is_newer_than_the_one_that_it_replaces_in_the_run_directory():
    with runner.installed(tier), tier.story(1, copies=0, latest=0) as story:
        story.run_job(1, ["save", "uploads"], is_calm=True)
        story.swap("m0", "m1")
        turns = ["restore", "overwrite", "uploads"]
        story.run_job(1, turns, is_calm=True, clock_secs=-9000.0)
        shutil.rmtree(story.files.root / "run" / "1")
        story.ledger.far.clear()
        story.run_job(2, ["restore"], is_calm=True)


@pytest.mark.parametrize("file", ["PARTS", "DAMAGED"])
def test_processes_agree_that_nothing_is_whole(file):
    """With a step at one process only, whose files are gone or unknown."""
    with runner.installed(tier), tier.story(1, copies=0, latest=0) as story:
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(2, ["save"], is_calm=True)
        _damage(story, "m0", file)
        story.lose("m1")
        script = story.run_job(2, ["restore", "overwrite", "restore"], is_calm=True)
    errors = [[result.error for result in each.values()] for each in script.results]
    assert len({type(error) for error in errors[0]}) == 1
    assert errors[0][0] is not None


def test_uploads_no_step_without_all_parts():
    with runner.installed(tier), tier.story(1, copies=0, latest=0) as story:
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(2, ["save"], is_calm=True)
        script = story.run_job(1, ["uploads"], is_calm=True)
    ((result,),) = [each.values() for each in script.results]
    assert "process 1" in str(result.error)
    assert not story.ledger.far


def test_uploads_no_step_without_all_parts_from_a_disk_that_fails_at_times():
    for seed in range(60):
        with runner.installed(tier), tier.story(seed, copies=0, latest=0) as story:
            story.files.failing[story.files.root / "run"] = 1.0
            story.run_job(2, ["save"], is_calm=True)
            story.files.failing[story.files.root / "m0"] = 0.03
            story.run_job(1, ["uploads"] * 3, is_calm=True)  # checks what is there


def test_prune_keeps_the_newest_whole_step_beside_a_part_of_a_newer_one():
    with runner.installed(tier), tier.story(1, copies=1, latest=0, near=2) as story:
        story.run_job(2, ["save", "copies", "uploads"], is_calm=True)
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(2, ["restore", "save"], is_calm=True)
        story.ledger.delete(2)
        shutil.rmtree(story.files.root / "m1/local/2")
        shutil.rmtree(story.files.root / "m0/local/2/state/d/1.0", ignore_errors=True)
        story.keep_near(1)
        story.run_job(1, ["restore", "prune"], is_calm=True)
        assert (story.files.root / "m0/local/1").exists()


def test_an_older_whole_step_stays_after_process_0_has_lost_its_disk():
    with (
        runner.installed(tier),
        tier.story(1, copies=1, domain_size=1, latest=0, near=2) as story,
    ):
        story.run_job(3, ["save", "save", "copies", "uploads"], is_calm=True)
        story.lose("m0")
        story.run_job(3, ["restore", "overwrite", "copies"], is_calm=True)
        assert (story.files.root / "m1/local/1").exists()
        shutil.rmtree(story.files.root / "run")  # nothing is read from there
        (story.files.root / "run").mkdir()
        story.ledger.far.clear()
        story.lose("m2")
        story.run_job(3, ["restore"], is_calm=True)


def test_changes_on_a_disk_that_fails_at_times_raise_our_errors():
    for seed in range(20):
        with runner.installed(tier), tier.story(seed, copies=0, latest=0) as story:
            story.run_job(2, ["save", "uploads"], is_calm=True)
            story.files.failing[story.files.root / "m1"] = 0.1
            story.run_job(2, ["restore", *["pin", "unpin"] * 6], is_calm=False)


def test_save_replaces_a_damaged_step_that_process_0_lacks():
    with runner.installed(tier), tier.story(1, copies=0, latest=0, near=2) as story:
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(1, ["save", "save"], is_calm=True)
        (story.files.root / "m0/local/2/state/d/tree").unlink()
        story.ledger.delete(2)
        story.swap("m0", "m1")
        script = story.run_job(2, ["restore", "save"], is_calm=True)
    _, saved = script.results
    assert [result.error for result in saved.values()] == [None, None], saved


def _help_slowly(*args, help_copy=upload_copies.help_copy):
    result = help_copy(*args)
    kernel.current().sleep(30.0)
    return result


def test_step_replaced_during_upload_does_not_count_as_uploaded():
    patches = {(upload_copies, "help_copy"): _help_slowly}
    with runner.installed(tier, patches), tier.story(1, copies=0, latest=0) as story:
        acknowledge = story.ledger.acknowledge

        def see(save):
            if save.survives is None and save.token == 2:  # it is never uploaded
                story.files.failing[story.files.root / "run"] = 1.0
                for process in story.world.processes.values():
                    crash = functools.partial(story.world.crash, process)
                    story.world.at(60.0, crash)
            acknowledge(save)

        story.ledger.acknowledge = see
        turns = ["restore", "save", "overwrite", *["measure"] * 20]
        story.run_job(2, turns, is_calm=True)
        story.end(2)


def _begin_late(self, *args, upload=uploads.Uploads._upload, **options):
    if kernel.current().task.process.name == "b0":
        kernel.current().sleep(40.0)
    upload(self, *args, **options)


def _change_slowly(self, *args, change=uploads.Uploads._copy_changes):
    change(self, *args)
    kernel.current().sleep(15.0)


def test_step_replaced_while_its_changes_are_uploaded_stays_to_be_uploaded():
    patches = {
        (uploads.Uploads, "_upload"): _begin_late,
        (uploads.Uploads, "_copy_changes"): _change_slowly,
    }
    for seed in range(10):
        with (
            runner.installed(tier, patches),
            tier.story(seed, copies=0, latest=0, near=1) as story,
        ):
            story.run_job(2, ["save", "uploads"], is_calm=True)
            story.run_together(
                (2, ["restore", "overwrite"]), (2, ["restore", "measure"])
            )
            story.end(2)


def _upload_a_pin(story, count, *more):
    """Saves a step that all processes pin, and uploads the pin."""
    turns = ["save", "copies", "pin", "uploads", *more]
    story.run_job(count, turns, is_calm=True)
    pinned = story.files.root / "run/1/PINNED"
    assert pinned.exists()
    return pinned


def test_pin_removed_in_the_run_directory_does_not_return_with_a_lost_disk():
    with runner.installed(tier), tier.story(1, copies=1, latest=0) as story:
        pinned = _upload_a_pin(story, 3)
        pinned.unlink()
        story.lose("m0")
        story.run_job(3, ["restore", "uploads"], is_calm=True)
        assert not pinned.exists()


def _bring_back(story, machine, later):
    """Gives a machine its earlier disk back, and loses that of process 0."""
    for name in (machine, "m0"):
        story.lose(name)
    shutil.copytree(later, story.files.root / machine, dirs_exist_ok=True)


def test_marker_of_a_returning_machine_loses_against_an_uploaded_one(tmp_path):
    with runner.installed(tier), tier.story(1, copies=1, latest=0) as story:
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(3, ["save", "copies", "pin"], is_calm=True)
        shutil.copytree(story.files.root / "m2", tmp_path / "m2")
        pinned = _upload_again(story)
        pinned.unlink()
        _bring_back(story, "m2", tmp_path / "m2")
        story.run_job(3, ["restore", "uploads"], is_calm=True)
        assert not pinned.exists()
        _check_equal(story)


def _upload_again(story):
    story.run_job(3, ["restore", "uploads"], is_calm=True)
    pinned = story.files.root / "run/1/PINNED"
    assert pinned.exists()
    return pinned


def test_later_change_wins_over_the_state_of_a_returning_machine(tmp_path):
    with runner.installed(tier), tier.story(1, copies=1, latest=0) as story:
        story.run_job(3, ["save", "copies", "uploads"], is_calm=True)
        shutil.copytree(story.files.root / "m2", tmp_path / "m2")
        story.files.failing[story.files.root / "run"] = 1.0
        story.run_job(3, ["restore", "measure", "pin"], is_calm=True)
        _bring_back(story, "m2", tmp_path / "m2")
        story.swap("m0", "m2")  # the new process 0 knows of no change
        story.run_job(3, ["restore", "uploads"], is_calm=True)
        assert (story.files.root / "run/1/PINNED").exists()
        metrics = story.files.root / "run/1/metrics/metrics"
        assert b"accuracy" in metrics.read_bytes()
        _check_equal(story)


def _check_equal(story):
    """All processes have the same markers of the step."""
    found = {
        frozenset(
            (path.name, path.read_bytes())
            for name in ("CHANGES", "NOT_UPLOADED")
            for path in (story.files.root / machine).glob(f"local/1/{name}")
        )
        for machine in ("m0", "m1", "m2")
    }
    assert len(found) == 1


def _fail_to_copy(*args, **options):
    raise OSError("the peers are gone")


def test_failed_copies_have_an_event():
    patches = {(part_copies, "copy_parts"): _fail_to_copy}
    with runner.installed(tier, patches), tier.story(1, copies=1) as story:
        story.run_job(2, ["save", "copies"], is_calm=True)
        journal = (story.files.root / "m0/local/events.jsonl").read_text()
        rows = [json.loads(row) for row in journal.splitlines()]
        (failed,) = [row for row in rows if row["kind"] == "failed"]
        details = failed["details"]
        assert (failed["step"], details["what"]) == (1, "copies")
        assert "process 1: the peers are gone" in details["error"]


def _restore_beside_a_save(patches):
    """A job restores, while another one that it takes for dead overwrites the step."""
    for seed in range(100):
        with (
            runner.installed(tier, patches),
            tier.story(seed, copies=0, latest=0, near=1) as story,
        ):
            story.run_job(3, ["save", "uploads"], is_calm=True)
            story.run_together(
                (3, ["restore", *["overwrite"] * 3]), (5, ["restore"] * 3)
            )
            story.end(3)


@pytest.mark.slow
def test_a_restore_replaces_no_save_that_another_job_has_committed_meanwhile():
    _restore_beside_a_save({})
    look_once = {
        (part_tier.PartTier, "_look_until_settled"): lambda self, operation, mine: (
            part_tier._exchange_held(operation, "held", mine)
        ),
        (parts, "check_save"): lambda *args: None,
    }
    with pytest.raises(kernel.Violation):
        _restore_beside_a_save(look_once)


def _miss_the_end_of_the_meeting(missed, first=operation.Operation.first):
    def wait(self, stage, mine, **options):
        if stage == "seen" and self.index == 1 and not missed:
            missed.append(stage)
            raise messages.ApartError([messages.Failure(0, messages.LATE, "missed")])
        return first(self, stage, mine, **options)

    return wait


def test_processes_that_disagree_whether_they_have_met_meet_again():
    missed = []
    patches = {(operation.Operation, "first"): _miss_the_end_of_the_meeting(missed)}
    with runner.installed(tier, patches), tier.story(1, copies=1) as story:
        script = story.run_job(3, ["save", "save", "copies"], is_calm=True)
    assert missed
    first, *rest = [
        [result.error for result in each.values()] for each in script.results
    ]
    assert all(first)
    assert rest == [[None] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", planted.FAULTS_OF_TIER)
def test_detects_planted_fault(fault):
    histories, patches = planted.FAULTS_OF_TIER[fault]
    seeds = range(MOST_HISTORIES)
    _, found = next(runner.find_violations(histories, seeds, patches))
    for error in ("TypeError", "KeyError"):
        assert f"raised {error}" not in str(found), "it does not fit the code"
