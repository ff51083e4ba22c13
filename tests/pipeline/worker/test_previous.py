"""A judge gets the artifact that serves now from the store: real builds and judges in their
children, without Ray.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freezer.artifact import Artifact
from freezer.spec import InputSpec, TensorSpec
from freezer.store import Store
from pipeline.failures import CODES
from pipeline.records import Failure
from pipeline.worker import BuildRequest, JudgeRequest, JudgeResult, build
from pipeline.worker.child import End
from pipeline.workspace import workplace
from tests.support.campaigns import good_entry, good_source, judged_folder
from tests.support.judges import judge
from tests.support.steps import HERE, QUICK, blob_of, flip_a_byte

RECIPE = "torchscript-frozen"


def common(store: Path, *, work: int = 0) -> dict[str, Any]:
    source = good_source("campaign_models:busy", work=work)
    spec = InputSpec(inputs=(TensorSpec(name="x", dtype="float32", shape=(2, 16)),))
    entry = replace(good_entry(), name="busy", source=source, spec=spec)
    return {"entry": entry, "device_class": HERE, "threads": (1,), "store": str(store)}


def judged(store: Path, key: str, **options: Any) -> JudgeResult:
    """Build, unless that is done, and judge a model, with one key for both."""
    given = common(store, **options)
    (built,) = build(BuildRequest(builds={RECIPE: key}, **given))
    assert built.failure is None, built.failure
    return judge(JudgeRequest(key=key, builds={RECIPE: key}, policy=QUICK, campaign="c", **given))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that serves the model without extra work as version 1, and has a candidate
    with it.
    """
    store = tmp_path_factory.mktemp("store")
    result = judged(store, "fast")
    assert (result.verdict, result.previous) == ("published", None), result.reason
    artifact = Artifact.read(judged_folder(store, "fast", "busy") / "artifact")
    Store.open(str(store)).publish("busy", source_key="fast", artifacts=[artifact])
    return store


def test_damaged_artifact_is_replaced(store: Path, tmp_path: Path) -> None:
    artifact = Artifact.read(judged_folder(store, "fast", "busy") / "artifact")
    Store.open(str(tmp_path)).publish("busy", source_key="fast", artifacts=[artifact])
    (payload,) = artifact.manifest.payloads
    flip_a_byte(blob_of(tmp_path / "busy", payload.digest))
    replacing = judged(tmp_path, "slow", work=60)
    assert replacing.verdict == "published"
    assert "; not compared with version 1 (torchscript-frozen, torch " in replacing.reason
    assert "tampered" in replacing.reason


@pytest.mark.parametrize(
    ("in_hand", "kind", "verdict", "compared"),
    [
        ("previous\nopening", "crash", "published", [True, False]),
        ("previous\nvalidating", "timeout", "published", [True, False]),
        ("previous\ntiming", "disk", "failed", [True]),
        ("", "timeout", "failed", [True]),
    ],
)
def test_death_with_the_old_artifact(
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_hand: str,
    kind: str,
    verdict: str,
    compared: list[bool],
) -> None:
    """Code for an older torch may kill the process that opens it; a late judge leaves it."""
    workplace(str(store)).folder("candidates", "b").mkdir(parents=True, exist_ok=True)
    asked: list[bool] = []

    def in_child(child: Any, request: JudgeRequest, staging: Path, *args: Any) -> End:
        asked.append(request.previous is not None)
        if request.previous is None:
            return End(parts=(JudgeResult(verdict="published", reason="it is fast"),))
        failure = Failure(kind=kind, code=CODES[kind], message="the child ended")
        return End(failure=failure, in_hand=in_hand)

    monkeypatch.setattr("pipeline.worker.judge_task.in_child", in_child)
    request = JudgeRequest(
        key=f"{kind} {verdict}", builds={RECIPE: "b"}, policy=QUICK, campaign="c", **common(store)
    )
    result = judge(request)
    assert (result.verdict, asked, result.previous) == (verdict, compared, None)
    assert "the child ended" in result.reason
