"""Outcomes: what became of one (model, device class) in a campaign. The ledger keeps them, MLflow and --json show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateReport:
    """What became of one recipe.

    Attributes:
        recipe, build_key: which build this is.
        problem: why it was not built or does not pass; None of a candidate that passes.
        failure: the type of a build that failed (`capture`, `build`, `timeout`, ...); None where a candidate was built.
        capture, lowering: how the graph was captured, and what turned it into payloads.
        tried: what was tried for each payload, in order: capture, lowering, and its outcome in a sentence.
        build_s: wall time of the build, in seconds.
        size_bytes: of all payloads.
        num_payloads: one for each shape and thread count.
        drift: error_ratio, max_abs_err, sqnr_db, margin; None where nothing was compared.
        latency_ms: p50, p90, p99; None where it was not timed.
        speedup, speedup_ci: over eager; None where it was not timed.
        task_metric: the entry's own measure; None where it has none.
        warnings: what the capture said.
        strides_equal: whether outputs had eager's strides; None where that was not compared.
        reports: by payload path, what freezing did; the JSON form of FreezingReport, with short lists.
        migration: of one that was converted from TorchScript, what that gained; the JSON form of Migration.
        points: figures of each payload wherever it was timed, the deciding place first; in the JSON form of
            freezer.freezing.validation.timed_cells.PointFigures.
    """

    recipe: str
    build_key: str
    problem: str | None = None
    failure: str | None = None
    capture: str | None = None
    build_s: float = 0.0
    size_bytes: int = 0
    num_payloads: int = 0
    drift: Mapping[str, float | None] | None = None
    latency_ms: Mapping[str, float | None] | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    task_metric: float | None = None
    warnings: tuple[str, ...] = ()
    lowering: str | None = None
    tried: tuple[Mapping[str, str], ...] = ()
    strides_equal: bool | None = None
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    migration: Mapping[str, Any] | None = None
    points: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CandidateReport:
        """The report that `asdict` took apart, also after a pass through JSON text; earlier releases had fewer fields."""
        lists = {name: tuple(data.get(name, ())) for name in ("warnings", "tried", "points")}
        return cls(**{**data, **lists, "speedup_ci": pair(data["speedup_ci"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one model for one device class.

    Attributes:
        verdict: published, kept-eager, rejected, failed, unstable.
        cached: taken from an earlier campaign; people are told "unchanged".
        recipe: of the published artifact, or of the candidate that came nearest.
        reason: one sentence for people.
        code: of a failed or rejected outcome, in docs/errors.md.
        failure: the type of a failed outcome: source, capture, build, judge, timeout, memory, crash.
        log_tail: of a failed outcome, the last lines of its log.
        tried_bytes: of a failure of memory, as much as was not enough.
        num_threads: the deciding thread count.
        drift, latency_ms, speedup, speedup_ci: of `recipe`, the latter at that count and the first point; latency_ms has eager_p50,
            p50, p90, p99.
        artifact: digest of the published image manifest.
        version: of the model, in which the artifact is published.
        task_metric: `eager` and the recipe's.
        candidates: one for each recipe.
        host: where it was judged; recorded, never part of a key.
        source_key, judge_key: see planning/keys.py.
        registered_name: the registered model of MLflow that its artifacts go to; None means `model`.
        tags: of the entry, free; shown in MLflow.
    """

    model: str
    device_class: str
    verdict: str
    reason: str | None
    num_threads: int
    source: str
    source_key: str
    judge_key: str
    cached: bool = False
    recipe: str | None = None
    failure: str | None = None
    code: str | None = None
    log_tail: str = ""
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    drift: Mapping[str, float | None] | None = None
    latency_ms: Mapping[str, float | None] | None = None
    artifact: str | None = None
    version: int | None = None
    build_s: float = 0.0
    judge_s: float = 0.0
    task_metric: Mapping[str, float] | None = None
    candidates: tuple[CandidateReport, ...] = ()
    host: Mapping[str, Any] = field(default_factory=dict)
    registered_name: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    tried_bytes: int | None = None

    @property
    def failed(self) -> bool:
        """Whether this outcome makes a campaign's exit code 1."""
        return self.verdict in ("failed", "rejected")

    def to_json(self) -> dict[str, Any]:
        """Every field; the ledger's form."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The outcome that `to_json` wrote, also after a pass through JSON text."""
        candidates = tuple(CandidateReport.from_json(item) for item in data["candidates"])
        return cls(**{**data, "speedup_ci": pair(data["speedup_ci"]), "candidates": candidates})

    @property
    def coded_reason(self) -> str | None:
        """The reason behind its code: how people and programs are shown it."""
        return f"{self.code}: {self.reason}" if self.code and self.reason else self.reason

    @property
    def registered_as(self) -> str:
        """The registered model of MLflow that its artifacts go to."""
        return self.registered_name or self.model

    def as_cached(self) -> Outcome:
        """The same outcome, taken over by a later campaign."""
        return replace(self, cached=True)

    def for_json_report(self) -> dict[str, Any]:
        """The record of docs/contract.md's `--json`."""
        latency = self.latency_ms
        return {
            "model": self.model,
            "device_class": self.device_class,
            "verdict": self.verdict,
            "cached": self.cached,
            "recipe": self.recipe,
            "reason": self.coded_reason,
            "num_threads": self.num_threads,
            "speedup": self.speedup,
            "speedup_ci": list(self.speedup_ci) if self.speedup_ci else None,
            "drift": {name: self.drift.get(name) for name in ("error_ratio", "max_abs_err", "sqnr_db", "margin")}
            if self.drift
            else None,
            "latency_ms": {name: latency.get(name) for name in ("eager_p50", "p50", "p90", "p99")} if latency else None,
            "artifact": self.artifact,
            "version": self.version,
            "build_s": self.build_s,
            "judge_s": self.judge_s,
        }


def pair(value: Any) -> tuple[float, float] | None:
    """An interval as JSON gives it back."""
    return (value[0], value[1]) if value else None
