"""Thread counts and points of an entry, in keys and plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.errors import InfrastructureError
from freezer.freezing.recipes import RECIPES
from freezer.spec import Dim, InputSpec, SamplingPolicy, TensorSpec
from freezer.store import Store
from pipeline.catalog import Entry
from pipeline.ledger import Ledger
from pipeline.planning import FileDigests, Plan, source_key
from pipeline.planning.keys import BuildTarget, Key, build_key, judge_key, make_key
from tests.support.campaigns import good_entry, plan_of
from tests.support.steps import HERE

POINTS = ({"batch": 1}, {"batch": 3})
SPEC = InputSpec(
    inputs=(TensorSpec(name="input", dtype="float32", shape=("batch", 16)),),
    dims=(Dim(name="batch", min=1, max=4),),
)


def several(**changes: Any) -> Entry:
    """An entry for 2 threads and 1, batch 1 and 3."""
    return replace(good_entry(), **{"spec": SPEC, "threads": (2, 1), "points": POINTS, **changes})


def target(num_threads: int = 2, further_threads: tuple[int, ...] = ()) -> BuildTarget:
    return BuildTarget(
        device_class=HERE,
        num_threads=num_threads,
        further_threads=further_threads,
        toolchain={},
        samples=None,
    )


def build_of(one: Entry, folder: Path, recipe: str, further_threads: tuple[int, ...] = ()) -> Key:
    source = source_key(one, FileDigests(folder / "digests.json"))
    return build_key(one, source, RECIPES[recipe], target(further_threads=further_threads))


def judge_of(one: Entry, further_threads: tuple[int, ...] = ()) -> Key:
    return judge_key(
        one,
        make_key({}),
        [make_key({"of": "a build"})],
        target(further_threads=further_threads),
        SamplingPolicy(),
    )


# Keys


def test_default_threads_and_points_are_not_in_keys(tmp_path: Path) -> None:
    plain = several(threads=(), points=())
    named = several(points=({"batch": 1},))
    assert build_of(plain, tmp_path, "inductor-frozen") == build_of(
        named, tmp_path, "inductor-frozen"
    )
    assert judge_of(plain) == judge_of(named) == judge_of(several(points=({},)))
    parts = build_of(plain, tmp_path, "inductor-frozen").parts
    assert parts["num_threads"] == 2
    assert set(parts) == {
        "source",
        "inputs",
        "samples",
        "recipe",
        "device_class",
        "num_threads",
        "toolchain",
        "weights",
        "format_version",
    }
    assert set(judge_of(plain).parts) == {
        "builds",
        "limits",
        "policy",
        "num_threads",
        "inputs",
        "task_metric",
        "sizes",
    }
    assert judge_of(plain).parts["sizes"] == [
        {"batch": 2},
        {"batch": 4},
    ], "earlier releases timed only the least sizes"
    assert "sizes" not in judge_of(several(spec=SPEC.at({"batch": 1}), points=())).parts, (
        "nothing else to time"
    )


def test_threads_and_points_change_keys(tmp_path: Path) -> None:
    plain = several(threads=(), points=())
    both = several()
    assert build_of(both, tmp_path, "inductor-frozen").parts["points"] == list(POINTS)
    for recipe in ("inductor-frozen", "torchscript-frozen", "torchscript-optimized", "portable"):
        assert build_of(plain, tmp_path, recipe, further_threads=(1,)) == build_of(
            plain, tmp_path, recipe
        ), "the judge builds them"
    for recipe in ("torchscript-frozen", "torchscript-optimized", "portable"):
        assert build_of(both, tmp_path, recipe) == build_of(plain, tmp_path, recipe), (
            "it makes no copies"
        )
    judges = {
        judge_of(one, further_threads=counts).digest
        for one in (plain, both)
        for counts in ((), (1,))
    }
    assert len(judges) == 4
    assert judge_of(several(points=POINTS[::-1])) != judge_of(both), "the first decides"
    assert judge_of(several(spec=None)).parts["points"] == list(POINTS), (
        "its dims are known only when it is loaded"
    )


# Planning


def planned(one: Entry, folder: Path, *, keep_going: bool = False) -> Plan:
    store = Store.open(str(folder / "store"), create=True)
    with Ledger(store, "c") as ledger:
        return plan_of([one], store, ledger, keep_going=keep_going)


def test_portable_is_planned_for_one_count(tmp_path: Path) -> None:
    """By default the workers' two CPUs decide, and one follows."""
    for threads, expected in (((1, 2), (1, (2,))), ((), (2, (1,))), ((2,), (2, ()))):
        items = planned(several(threads=threads), tmp_path).items
        found = {item.device_class: (item.num_threads, item.further_threads) for item in items}
        assert found == {HERE: expected, "portable": (2, ())}


def test_too_many_threads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InfrastructureError,
        match=(
            rf"entry 'good': got threads 4, but the smallest node that serves {HERE} has 2 CPUs;"
            r" leave the count"
        ),
    ) as caught:
        planned(several(threads=(1, 4)), tmp_path)
    assert caught.value.code == "CP-NO-NODE"
    plan = planned(several(threads=(1, 4)), tmp_path, keep_going=True)
    assert [item.device_class for item in plan.items] == ["portable"]
    (unplaced,) = plan.unplaced
    assert (unplaced.model, unplaced.device_class, unplaced.problem.code) == (
        "good",
        HERE,
        "CP-NO-NODE",
    )
