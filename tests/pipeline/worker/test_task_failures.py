"""Results of builds and judges whose model fails, and what they leave in the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from freezer.freezing.models.sources import parse_source
from freezer.limits import Limits
from freezer.store.store import WORK
from pipeline.catalog.entry import Entry
from pipeline.worker.requests import BuildRequest, JudgeRequest
from pipeline.worker.tasks import build, judge
from pipeline.workspace.layout import candidate_folder, judged_folder
from tests.pipeline.worker.test_tasks import MODELS, entry
from tests.steps import HERE, QUICK


def test_judge_that_hangs_or_uses_too_much_memory(tmp_path: Path) -> None:
    flag, store = tmp_path / "flag", str(tmp_path / "store")
    source = parse_source("python:campaign_models:good_until", folder=MODELS, search_path=(str(MODELS),), args={"flag": str(flag)})
    common: dict[str, Any] = {"device_class": HERE, "num_threads": 2, "store": store}

    def limited(limits: Limits) -> Entry:
        return replace(entry(), source=source, limits=limits)

    built = build(BuildRequest(key="b", recipe="torchscript-frozen", entry=limited(Limits()), **common))
    assert built.failure is None, built.failure
    assert built.peak_bytes > 0
    judges = {"key": "j", "builds": {"torchscript-frozen": "b"}, "policy": QUICK, "campaign": "c", **common}
    flag.write_text("spin")
    hung = judge(JudgeRequest(entry=limited(Limits(timeout_s=3)), **judges))
    assert hung.failure is not None
    assert (hung.verdict, hung.failure.kind, hung.failure.code) == ("failed", "timeout", "CP-TIMEOUT")
    assert "in good_until" in hung.failure.log_tail, "where it was"
    flag.write_text("eat")
    ate = judge(JudgeRequest(entry=limited(Limits(memory_gb=1.2)), **judges))
    assert ate.failure is not None
    assert (ate.failure.kind, ate.failure.code, ate.failure.tried_bytes) == ("memory", "CP-MEMORY", 1.2e9)
    assert candidate_folder(store, "b").is_dir(), "what was built stays"
    assert not judged_folder(store, "j", "good").exists()
    assert list((tmp_path / "store" / WORK / "staging").iterdir()) == []


def test_damaged_model_file_is_a_source_failure(tmp_path: Path) -> None:
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04" + bytes(1000))
    source = parse_source("torchscript:damaged.pt", folder=tmp_path)
    request = BuildRequest(
        key="b",
        entry=replace(entry(), source=source),
        recipe="torchscript-frozen",
        device_class=HERE,
        num_threads=2,
        store=str(tmp_path / "store"),
    )
    result = build(request)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.code) == ("source", "CP-SOURCE"), result.failure
    assert list((tmp_path / "store" / WORK / "staging").iterdir()) == []
