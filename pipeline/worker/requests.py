"""Requests that the driver sends to workers, and the results that come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freezer.limits import SamplingPolicy
from pipeline.catalog.entry import Entry
from pipeline.records.outcome import CandidateReport, pair


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """One build."""

    key: str
    entry: Entry
    recipe: str
    device_class: str
    num_threads: int
    store: str
    further_threads: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildResult:
    """What became of a build; `failure` is None when there is a candidate in the store.

    Attributes:
        cached: it was there already.
        failure, code, message, log_tail: of a build that failed; see isolate.End.
        wall_s: of this task's child.
        peak_bytes: of the child and its compilers.
        tried_bytes: of a failure of memory, as much as was not enough.
    """

    key: str
    recipe: str
    cached: bool = False
    failure: str | None = None
    code: str | None = None
    message: str = ""
    log_tail: str = ""
    wall_s: float = 0.0
    peak_bytes: int = 0
    tried_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRequest:
    """One judge: of the candidates that `builds` names by recipe; `failures` says of the other recipes why there is none."""

    key: str
    entry: Entry
    builds: Mapping[str, str]
    device_class: str
    num_threads: int
    policy: SamplingPolicy
    campaign: str
    store: str
    failures: Mapping[str, str] = field(default_factory=dict)
    further_threads: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeResult:
    """What a judge found.

    Attributes:
        verdict, reason: of the judgement; `failed` when there is none.
        has_artifact: whether an artifact folder lies in the store, to be published.
        recipe, speedup, speedup_ci, drift, latency_ms, task_metric: as in Outcome.
        candidates: one for each that was judged.
        peak_bytes: of the judge's child.
        tried_bytes: of a failure of memory, as much as was not enough.
    """

    key: str
    verdict: str
    reason: str
    has_artifact: bool = False
    recipe: str | None = None
    failure: str | None = None
    code: str | None = None
    log_tail: str = ""
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    drift: Mapping[str, float | None] | None = None
    latency_ms: Mapping[str, float | None] | None = None
    task_metric: Mapping[str, float] | None = None
    candidates: tuple[CandidateReport, ...] = ()
    host: Mapping[str, Any] | None = None
    judge_s: float = 0.0
    peak_bytes: int = 0
    tried_bytes: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JudgeResult:
        """The result that `asdict` took apart, also after a pass through JSON text."""
        candidates = tuple(CandidateReport.from_json(item) for item in data["candidates"])
        return cls(**{**data, "speedup_ci": pair(data["speedup_ci"]), "candidates": candidates})
