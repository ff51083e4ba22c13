"""The order in which a plan is executed, with tasks that end when they are waited for."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from freezer.errors import SourceError
from freezer.freezing.models import load_source
from freezer.freezing.sources import parse_source
from freezer.hardware import PORTABLE
from freezer.spec import Limits
from freezer.store import Store
from pipeline.cluster import Done, Handle, Node
from pipeline.ledger import Ledger
from pipeline.planning import Plan
from pipeline.scheduling import Executor
from pipeline.workspace import machine_time, workplace
from tests.support.campaigns import entry, plan_of
from tests.support.executions import (
    Fake,
    built,
    executed,
    failure_of,
    judged,
    materials_of,
)
from tests.support.one_node import NODE, OneNode
from tests.support.steps import HERE

HOME = Node(node_id="home", num_cpus=2, classes=(PORTABLE,))


def planned(store: Store, ledger: Ledger, names: str, in_store: str = "") -> Plan:
    """Of models for `portable`, of which some have their candidates in the store."""
    entries = [entry(name, store.root.parent, device_classes=(PORTABLE,)) for name in names]
    plan = plan_of(entries, store, ledger, classes=(PORTABLE,))
    for item in plan.items:
        if item.entry.name in in_store:
            key = item.builds[PORTABLE].digest
            workplace(store.uri).folder("candidates", key).mkdir(parents=True)
    return plan


class Ready(Fake):
    """Every task ends well."""

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        kind = self.started[handles[0] - 1].partition(" ")[0]
        self.ends.append(built(PORTABLE) if kind == "build" else judged("rejected"))
        return super().wait(handles, timeout_s)


def test_judges_start_before_builds(store: Store, ledger: Ledger) -> None:
    """No judge measures on this machine while an outcome is published."""
    plan = planned(store, ledger, "abcd", in_store="cd")
    cluster = Ready([])
    fleet = OneNode(cluster, store.root, HOME)
    for _ in Executor(plan, fleet, store, ledger, materials_of(store), lambda _: None).outcomes():
        with machine_time.lock_file("compute") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as a judge would
    started = cluster.started
    assert started[:2] == ["judge c portable", "build a portable portable"]
    assert started.index("judge d portable") < started.index("build b portable portable")
    assert len(started) == 6


def test_damaged_candidate_fails_until_the_next_start(store: Store, ledger: Ledger) -> None:
    damaged = judged("failed", failure=failure_of("disk", "CP-INTEGRITY"))
    for end, verdict in ((damaged, "failed"), (judged("rejected"), "rejected")):
        plan = planned(store, ledger, "a")
        [(_, outcome)], cluster, _ = executed(store, ledger, [built(PORTABLE), end], plan, HOME)
        assert outcome.verdict == verdict
        assert cluster.started == ["build a portable portable", "judge a portable"]


def test_disturbed_judge_is_repeated_after_the_others(store: Store, ledger: Ledger) -> None:
    plan = planned(store, ledger, "abc", in_store="abc")
    disturbed, quiet = judged("unstable"), judged("rejected")
    ends = [disturbed, quiet, quiet, disturbed, quiet]
    outcomes, cluster, _ = executed(store, ledger, ends, plan, HOME)
    assert cluster.started == [f"judge {name} portable" for name in "abcaa"]
    assert [item.entry.name for item, _ in outcomes] == ["b", "c", "a"]
    assert {outcome.verdict for _, outcome in outcomes} == {"rejected"}


def test_third_disturbed_judge_is_final(store: Store, ledger: Ledger) -> None:
    plan = planned(store, ledger, "a", in_store="a")
    [(_, outcome)], cluster, _ = executed(store, ledger, [judged("unstable")] * 3, plan, HOME)
    assert len(cluster.started) == 3
    assert (outcome.verdict, outcome.failure) == ("unstable", None)
    assert "--accept-noise" in str(outcome.reason)


def test_measured_memory_is_requested_later(store: Store, ledger: Ledger) -> None:
    roomy = replace(NODE, memory_bytes=64 * 10**9)
    ends = [built(PORTABLE, peak_bytes=20 * 10**9), judged()]
    for expected in ([10**9, 32 * 10**9], [32 * 10**9] * 2):
        _, cluster, _ = executed(store, ledger, ends, planned(store, ledger, "a"), roomy)
        assert cluster.reserved == expected


@pytest.mark.parametrize("last", [PORTABLE, HERE])
def test_each_class_has_its_own_limits(last: str, store: Store, ledger: Ledger) -> None:
    """Portable's are the defaults for speed; both share what is prepared for an entry."""
    own = entry("a", store.root.parent, limits=Limits(speedup_min=0.01))
    plan = plan_of([own], store, ledger)
    materials, limits = materials_of(store), {HERE: own.limits, PORTABLE: Limits()}
    for item in sorted(plan.items, key=lambda item: item.device_class == last):
        sent = materials.as_sent(materials.ready(item.entry))
        assert sent.limits == limits[item.device_class]


def test_file_changed_after_planning_is_rejected(
    store: Store, ledger: Ledger, tmp_path: Path
) -> None:
    model = tmp_path / "model.pt"
    model.write_bytes(b"as it was planned")
    source = parse_source(f"torchscript:{model}", folder=tmp_path)
    made = replace(entry("a", store.root.parent), source=source, device_classes=(PORTABLE,))
    plan = plan_of([made], store, ledger, classes=(PORTABLE,))
    model.write_bytes(b"as it is now")
    _, cluster, _ = executed(store, ledger, [built(PORTABLE), judged()], plan, HOME)
    assert len(cluster.requests) == 2
    for request in cluster.requests:
        with pytest.raises(SourceError) as caught:
            load_source(request.entry.source)
        assert caught.value.code == "CP-FETCH-DIGEST"
