"""A build and a judge in their sandboxed children, without Ray, and what they write into
the store.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact import Artifact, FreezingReport
from freezer.codec import decode
from freezer.freezing.in_hand import FURTHER
from freezer.spec import InputSpec, Limits, TensorSpec
from pipeline import worker
from pipeline.catalog import Entry
from pipeline.records import BuildResult, Failure, flat_json
from pipeline.worker import (
    BuildRequest,
    JudgeRequest,
    JudgeResult,
    build,
)
from pipeline.worker.child import End
from pipeline.workspace import log_place, workplace
from tests.support.campaigns import good_entry as entry
from tests.support.campaigns import good_source, judged_folder
from tests.support.judges import judge
from tests.support.steps import HERE, QUICK, python


def broken() -> Entry:
    """An entry whose factory raises."""
    return replace(entry(), source=good_source("campaign_models:raises"))


def kind_of(result: BuildResult | JudgeResult) -> str | None:
    return result.failure.kind if result.failure else None


def of_a_broken_model(store: Path, builds: dict[str, str]) -> JudgeRequest:
    """A judge that always fails."""
    return JudgeRequest(
        key="j",
        entry=broken(),
        builds=builds,
        device_class=HERE,
        threads=(2,),
        policy=QUICK,
        campaign="c",
        store=str(store),
    )


def test_judge_reports_what_freezing_did(tmp_path: Path) -> None:
    common = {"entry": entry(), "device_class": HERE, "threads": (2,), "store": str(tmp_path)}
    (built,) = build(BuildRequest(builds={"torchscript-frozen": "b"}, **common))  # type: ignore[arg-type]
    assert built.failure is None, built.failure
    why = {"inductor-frozen": "inductor: no compiler"}
    request = JudgeRequest(
        key="j",
        builds={"torchscript-frozen": "b"},
        policy=QUICK,
        campaign="c",
        failures=why,
        **common,  # type: ignore[arg-type]
    )
    result = judge(request)
    assert result.verdict == "published", result.failure
    (candidate,) = result.candidates
    report = decode(FreezingReport, candidate.reports["payloads/all.pt"], origin="here")
    assert len(report.constants) == 10 < report.num_constants, "the ledger keeps short lists"
    folder = judged_folder(tmp_path, "j", "good", why)
    assert JudgeResult.from_json(json.loads((folder / "result.json").read_text())) == result
    freezing = Artifact.read(folder / "artifact").manifest.freezing
    assert freezing.failures == why
    assert len(freezing.reports["payloads/all.pt"].constants) == report.num_constants


def test_death_in_a_further_build_leaves_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child dies after the verdict: the model is judged again for the deciding thread count
    alone.
    """
    workplace(str(tmp_path)).folder("candidates", "b").mkdir(parents=True)
    asked: list[tuple[int, ...]] = []

    def isolated(child: Any, request: JudgeRequest, staging: Path, *args: Any) -> End:
        asked.append(request.threads)
        if not request.further:
            return End(parts=(JudgeResult(verdict="published", reason="it is fast"),))
        failure = Failure(kind="memory", code="CP-MEMORY", message="used more than 8.0 GB")
        return End(failure=failure, in_hand=f"{FURTHER}\nopening")

    monkeypatch.setattr("pipeline.worker.judge_task.in_child", isolated)
    result = judge(
        replace(of_a_broken_model(tmp_path, {"torchscript-frozen": "b"}), threads=(2, 2, 1))
    )
    assert asked == [(2, 2, 1), (2,)]
    assert (result.verdict, result.left_out) == ("published", {})
    assert "used more than 8.0 GB" in result.reason


@pytest.mark.parametrize("ends", ["further", "missing"])
def test_portable_does_not_fail_the_class_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Its further payloads end the child, or its candidate is not there: it is judged alone."""
    for key in ("b", "p")[: 2 if ends == "further" else 1]:
        workplace(str(tmp_path)).folder("candidates", key).mkdir(parents=True)
    asked: list[tuple[str, bool, bool]] = []

    def isolated(child: Any, request: JudgeRequest, staging: Path, *args: Any) -> End:
        asked.append((request.device_class, request.further, request.beside is not None))
        if request.beside is not None:
            failure = Failure(kind="crash", code="CP-CRASH", message="it died")
            return End(failure=failure, in_hand=f"{FURTHER}\nopening")
        return End(parts=(JudgeResult(verdict="published", reason="it is fast"),))

    monkeypatch.setattr("pipeline.worker.judge_task.in_child", isolated)
    request = of_a_broken_model(tmp_path, {"torchscript-frozen": "b"})
    beside = replace(request, key="k", builds={"portable": "p"}, device_class="portable")
    of_class, of_portable = worker.judge(replace(request, beside=beside))
    assert (of_class.verdict, of_class.reason) == ("published", "it is fast")
    if ends == "further":
        assert asked == [(HERE, True, True), (HERE, True, False), ("portable", True, False)]
        assert of_portable.verdict == "published"
    else:
        assert asked == [(HERE, True, False)]
        assert kind_of(of_portable) == "disk"


def kept(store: Path, result: JudgeResult, *, missing: Sequence[str] = ()) -> None:
    """Write a result of the model `good`, as a judge does."""
    folder = judged_folder(store, "j", "good", missing)
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(flat_json(result)))


def test_missing_recipes_make_another_result(tmp_path: Path) -> None:
    both = of_a_broken_model(tmp_path, {"torchscript-frozen": "b", "inductor-frozen": "c"})
    for key in ("b", "c"):
        workplace(str(tmp_path)).folder("candidates", key).mkdir(parents=True)
    before = JudgeResult(verdict="kept-eager", reason="as it was")
    kept(tmp_path, before, missing=["inductor-frozen"])
    assert (
        judge(
            replace(
                both, builds={"torchscript-frozen": "b"}, failures={"inductor-frozen": "too late"}
            )
        )
        == before
    )
    again = judge(both)
    assert (again.verdict, kind_of(again), again.has_artifact) == ("failed", "source", False)
    assert again.judge_s > 0, "it was judged"
    assert judge(both) == again
    assert judged_folder(tmp_path, "j", "good", ["inductor-frozen"]).is_dir(), (
        "another campaign may need it"
    )


GROUP = {"torchscript-frozen": "a", "inductor-frozen": "b", "torchscript-exact": "c"}


def of_a_group(store: Path, end: str) -> tuple[list[str | None], int]:
    """Build a group whose second recipe ends as asked; return the kind of each failure, and how
    often the model was loaded.
    """
    loads = store / "loads"
    source = good_source("campaign_models:unexportable", end=end, loads=str(loads))
    limits = Limits(speedup_min=0.0)
    spec = InputSpec(inputs=(TensorSpec(name="x", dtype="float32", shape=(2, 16)),))
    made = replace(entry(), source=source, spec=spec, limits=limits)
    results = build(
        BuildRequest(entry=made, builds=GROUP, device_class=HERE, threads=(1,), store=str(store))
    )
    assert [result.key for result in results] == ["a", "b", "c"]
    for result in results:
        assert workplace(str(store)).folder("candidates", result.key).is_dir() == (
            result.failure is None
        )
    return [kind_of(result) for result in results], len(loads.read_text().splitlines())


def test_recipes_of_a_group_are_independent(tmp_path: Path) -> None:
    kinds, loads = of_a_group(tmp_path, "crash")
    assert kinds == [None, "crash", None]
    assert loads == 3, "after a crash, a recipe is built alone before it is blamed"
    assert "Segmentation fault" in Path(log_place(str(tmp_path), "b")).read_text()
    assert "Segmentation fault" not in Path(log_place(str(tmp_path), "c")).read_text()


def test_model_that_cannot_be_loaded_is_loaded_once(tmp_path: Path) -> None:
    results = build(
        BuildRequest(
            entry=broken(), builds=GROUP, device_class=HERE, threads=(1,), store=str(tmp_path)
        )
    )
    assert [kind_of(result) for result in results] == ["source"] * 3
    for result in results:
        assert "no weights at hand" in Path(log_place(str(tmp_path), result.key)).read_text()


def test_drivers_and_workers_import_no_torch() -> None:
    """It would cost each of them two seconds and 180 MB; children import it."""
    modules = ", ".join(f"pipeline.tracking.{name}" for name in ("process", "source_models"))
    code = f"import sys, pipeline.worker.judge_task, {modules}"
    left = python(f"{code}; print(sorted({{'torch', 'mlflow'}} & set(sys.modules)))")
    assert left.splitlines()[-1] == "[]"
