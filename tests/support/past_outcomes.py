"""Outcomes of past campaigns, with every field that reports show."""

from __future__ import annotations

from dataclasses import replace

from freezer.artifact import FreezingReport, Measured, MeasuredDrift
from freezer.codec import encode
from pipeline.records import Event, Failure
from tests.support.outcomes import candidate, failed, outcome

DOWN = "http://127.0.0.1:9"


BAD = failed(
    "bad", device_class="auto", reason="field 'source': no such module", judge_key="", source=""
)

PUBLISHED = outcome(
    "resnet50",
    device_class="cpu-x86-64-v4",
    reason="inductor-frozen is 1.84 times as fast as eager",
    judge_key="j",
    recipe="inductor-frozen",
    speedup=1.84,
    speedup_ci=(1.79, 1.9),
    drift=MeasuredDrift(error_ratio=1.25, max_abs_err=1e-6, sqnr_db=None, margin=None),
    candidates=(
        candidate(
            "inductor-frozen",
            warnings=("w",),
            lowering="inductor",
            tried=({"payload": "all", "capture": "export", "lowering": "inductor"},),
            strides_equal=True,
            reports={
                "payloads/all.pt2": encode(FreezingReport(ops_before={"aten.relu.default": 2}))
            },
        ),
    ),
)


CRASH = Failure(
    kind="crash",
    message="the process died of SIGSEGV without a result",
    log_tail="line one\nline two",
)


FAILED = replace(
    PUBLISHED,
    model="broken",
    verdict="failed",
    failure=CRASH,
    reason="the process died of SIGSEGV without a result",
    figures=Measured(),
    **dict.fromkeys(("recipe", "artifact", "version")),  # type: ignore[arg-type]
)


RECIPES = ("torchscript-frozen", "inductor-frozen")


WORK = {"m cpu-x86-64-v4": RECIPES, "m portable": ("portable",)}


EVENTS = [
    Event(kind="build", what="m cpu-x86-64-v4", recipes=RECIPES[:1]),
    Event(kind="build", what="m cpu-x86-64-v4", recipes=RECIPES[1:]),
    Event(kind="build", what="m portable", recipes=("portable",)),
    *(
        Event(kind="built", what="m cpu-x86-64-v4", recipes=(recipe,), text="in 4.0 s", seconds=4.0)
        for recipe in RECIPES
    ),
    Event(kind="judge", what="m cpu-x86-64-v4"),
    Event(kind="judged", what="m cpu-x86-64-v4", recipes=RECIPES, text="in 9.0 s", seconds=9.0),
    Event(kind="outcome", what="m cpu-x86-64-v4", outcome=FAILED),
]
