"""Requests that the driver sends to workers, and the results that they return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freezer.artifact import UNMEASURED, Measured, PreviousRecord, Tradeoff
from freezer.codec import OMIT_DEFAULT, decode
from freezer.spec import Clock, SamplingPolicy
from pipeline.catalog import Entry
from pipeline.records import SKIPPED, CandidateReport, Failure, nested_json


@dataclass(
    frozen=True,
    kw_only=True,
    slots=True,
)
class BuildRequest:
    """Builds of one model and class, which share its captures.

    Attributes:
        builds: keys of the candidates, by recipe, in order. That of `portable` is for that class.
        source: key of the source, under which its weights are shared.
    """

    entry: Entry
    builds: Mapping[str, str]
    device_class: str
    num_threads: int
    store: str
    source: str = ""


@dataclass(
    frozen=True,
    kw_only=True,
    slots=True,
)
class BuildResult:
    """Result of a build; `failure` is None if the store contains its candidate.

    Attributes:
        wall_s: duration in seconds; that of the first build in a child contains the start and
            loading the model.
        peak_bytes: of the child and its compilers.
        architecture: as in FinishedBuild.
    """

    key: str
    recipe: str
    failure: Failure | None = None
    wall_s: float = 0.0
    peak_bytes: int = 0
    architecture: str = ""

    @property
    def is_skipped(self) -> bool:
        """Whether it was not built on purpose; the message of `failure` is the reason."""
        return self.failure is not None and self.failure.kind == SKIPPED

    @property
    def problem(self) -> str:
        """Message of the failure; empty without one."""
        return self.failure.message if self.failure else ""

    @classmethod
    def skipped(
        cls,
        key: str,
        recipe: str,
        reason: str,
    ) -> BuildResult:
        """Return the result of a build that is not run on purpose."""
        failure = Failure(kind=SKIPPED, message=f"{SKIPPED}: {reason}")
        return cls(
            key=key,
            recipe=recipe,
            failure=failure,
        )


@dataclass(
    frozen=True,
    kw_only=True,
    slots=True,
)
class JudgeRequest:
    """One judge.

    Attributes:
        builds: keys of the candidates, by recipe.
        failures: for every other recipe, why it has no candidate.
        inherits: whether the winner inherits the speed of the artifact that serves now.
        drift_max: error ratio above which it does not.
        confirms: whether a short timing confirms the inherited speed, as nothing waits for the
            machine.
        previous: digest of the image of the artifact that serves now; the worker sets it.
        further: whether to add the payloads that follow the verdict; the worker sets it.
        beside: the judge of `portable` for the same model, which shares its reference.
        source: key of the source, under which its weights are shared.
    """

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
    inherits: bool = False
    drift_max: float = math.inf
    confirms: bool = False
    previous: str | None = None
    further: bool = True
    beside: JudgeRequest | None = None
    source: str = ""


@dataclass(
    frozen=True,
    kw_only=True,
    slots=True,
)
class JudgeResult:
    """Result of a judge.

    Attributes:
        verdict, reason: of the judgement; `failed` if there is none.
        contest: why the winner cannot inherit a speed; empty if it does, or need not.
        has_artifact: whether the store contains an artifact folder to publish.
        recipe, failure, figures, clock, task_metric, previous, deciles_ms: as in Outcome.
        candidates: one for each that was judged.
        left_out: why the others were not, by recipe: each ended a child that had it in hand.
        pareto: as in Outcome.
        judge_s: duration of the child, in seconds.
        peak_bytes: of the child.
    """

    verdict: str
    reason: str
    contest: str = field(default="", metadata=OMIT_DEFAULT)
    has_artifact: bool = False
    recipe: str | None = None
    failure: Failure | None = None
    figures: Measured = UNMEASURED
    clock: Clock = field(default="wall", metadata=OMIT_DEFAULT)
    task_metric: Mapping[str, float] | None = None
    candidates: tuple[CandidateReport, ...] = ()
    left_out: Mapping[str, Failure] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    pareto: tuple[Tradeoff, ...] = ()
    host: Mapping[str, Any] | None = None
    judge_s: float = 0.0
    peak_bytes: int = 0
    previous: PreviousRecord | None = field(default=None, metadata=OMIT_DEFAULT)
    deciles_ms: Mapping[str, tuple[float, ...]] = field(
        default_factory=dict,
        metadata=OMIT_DEFAULT,
    )

    @classmethod
    def of_failure(cls, failure: Failure) -> JudgeResult:
        """Return the result of a judge that failed."""
        return cls(
            verdict="failed",
            reason=failure.message,
            failure=failure,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JudgeResult:
        """Return the result that `flat_json` wrote, also after a pass through JSON text."""
        return decode(cls, nested_json(data), origin="judge result")
