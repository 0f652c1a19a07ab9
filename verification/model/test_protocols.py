"""No order of events breaks a protocol, and each of its rules is needed."""

import pytest

from tests import ROOT
from tests.helpers import slow
from verification.model import commit, uploads
from verification.model.cases import (
    PROTOCOLS,
    broken_without,
    cases,
    exhaust_all,
    only,
    rules,
)
from verification.model.engine import exhaust

LATE = "renew to report"
"""A rule that is needed only if the commit marker is late."""

EACH_RULE = [
    (name, rule)
    for name in PROTOCOLS
    for rule in rules(PROTOCOLS[name])
    if rule != LATE
]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_two_processes_violate_no_invariant(name):
    assert exhaust_all(name, 2).counterexample is None


@pytest.mark.parametrize("name", ["reading", "uploads"])
def test_three_processes_violate_no_invariant(name):
    assert exhaust_all(name, 3).counterexample is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["commit", "replace"])
def test_three_processes_violate_no_invariant_in_many_states(name):
    assert exhaust_all(name, 3).counterexample is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "rule"), EACH_RULE)
def test_removing_any_rule_violates_invariant(name, rule):
    found = None
    for processes in (2, 3):
        found = found or exhaust_all(name, processes, (rule,)).counterexample
    assert found is not None
    text = str(found)
    assert text.startswith(f"broken: {found.invariant}\n")
    assert text.count("\n") == len(found.history) + 1


@pytest.mark.parametrize("is_renewed", [True, False])
def test_only_renewed_locks_keep_reports_true_with_late_marker(is_renewed):
    without = ["prompt marker", *([] if is_renewed else [LATE])]
    broken = [
        exhaust(only(protocol, commit.REPORTED)).counterexample
        for protocol in cases("commit", 2, without)
    ]
    assert any(broken) != is_renewed


def test_finds_shortest_counterexample():
    protocol = uploads.protocol("changer", "uploader", without=["all changes"])
    found = exhaust(protocol).counterexample
    assert found is not None
    assert [str(event) for event in found.history] == [
        "uploader 2 locks the step",
        "uploader 2 reads the marker",
        "uploader 2 locks changes",
        "uploader 2 finds the same marker",
        "uploader 2 removes the marker",
    ]


@pytest.mark.parametrize("name", slow.all_but(PROTOCOLS, ["reading"]))
def test_page_names_broken_property_for_each_assumption(name):
    page = (ROOT / "docs/reliability/models.md").read_text(encoding="utf-8")
    for assumption, text in PROTOCOLS[name].ASSUMPTIONS.items():
        broken = "; ".join(broken_without(name, assumption))
        assert f"| *{assumption}*: {text} | {broken} |" in page
