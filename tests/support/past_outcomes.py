"""Outcomes of past campaigns, with every field that reports show."""

from __future__ import annotations

from dataclasses import replace

from freezer.artifact import FreezingReport, Measured, MeasuredDrift, MeasuredLatency
from freezer.codec import encode
from pipeline.records import CandidateReport, Event, Failure, Outcome
from pipeline.reporting import ItemWork

DOWN = "http://127.0.0.1:9"


BAD = Outcome(
    model="bad",
    device_class="auto",
    verdict="failed",
    failure=Failure(kind="source"),
    reason="field 'source': no such module",
    num_threads=0,
    source="",
    source_key="",
    judge_key="",
)


PUBLISHED = Outcome(
    model="resnet50",
    device_class="cpu-x86-64-v4",
    verdict="published",
    reason="inductor-frozen is 1.84 times as fast as eager",
    num_threads=2,
    source="python:m:f",
    source_key="s",
    judge_key="j",
    recipe="inductor-frozen",
    figures=Measured(
        speedup=1.84,
        speedup_ci=(1.79, 1.9),
        drift=MeasuredDrift(error_ratio=1.25, max_abs_err=1e-6, sqnr_db=None, margin=None),
        latency_ms=MeasuredLatency(eager_p50=20.0, p50=10.9, p90=11.0, p99=None),
    ),
    artifact="sha256:1",
    version=3,
    candidates=(
        CandidateReport(
            recipe="inductor-frozen",
            build_key="b",
            figures=Measured(speedup_ci=(1.0, 2.0)),
            warnings=("w",),
            lowering="inductor",
            tried=(
                {
                    "payload": "all",
                    "capture": "export",
                    "lowering": "inductor",
                    "outcome": "captured and lowered",
                },
            ),
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


WORK = [
    ItemWork(what="m cpu-x86-64-v4", recipes=RECIPES),
    ItemWork(what="m portable", recipes=("portable",)),
]


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
