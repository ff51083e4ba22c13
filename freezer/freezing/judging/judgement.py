"""Records of a judgement: trials of candidates, timed cells, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from freezer.artifact import (
    UNMEASURED,
    AccuracyRecord,
    ColdStart,
    Dropped,
    LatencyRecord,
    Manifest,
    Measured,
    MeasuredLatency,
    PointFigures,
    PreviousRecord,
    Tradeoff,
    place_text,
)
from freezer.artifact.explanation import Explanation
from freezer.codec import frozen
from freezer.freezing.candidates import Candidate
from freezer.freezing.drift import STRIDES, Call, DriftReport
from freezer.freezing.recipes import KEPT_EAGER
from freezer.spec import Point, SamplingPolicy, Timing
from freezer.timing import Sampling, Speedup, over_processes, speedup

Verdict = Literal["published", "kept-eager", "kept-previous", "rejected", "failed", "unstable"]

CAPTURED = KEPT_EAGER.name
"""Entrant name of the captured program (slow_sizes.py)."""


def general(recipe: str) -> str:
    """Entrant name of a recipe's payload for all sizes, where a payload for a single point serves
    under the recipe's name.
    """
    return f"{recipe}, all sizes"


def again(entrant: str) -> str:
    """Name of an entrant in the second process (finalists.py)."""
    return f"{entrant}, second process"


@frozen
class Trial:
    """Result of one candidate. Figures are None if they were not measured.

    Attributes:
        candidate: the candidate with its kept payloads.
        problem: why it failed the drift gate; None if it passed.
        drift: drift of every output in every call.
        accuracy: of a lower precision; None for float32.
        ties: if ties explain differences from eager, the calls of the deciding way with the
            candidate's answers there.
        latency_ms: percentiles in the deciding cell.
        speedup: speedup over eager in the deciding cell, of the objective's figure (`timing_of`).
        cold_start: measured of the winner, and of all if memory is limited.
        points: figures of every kept payload in every cell.
        dropped: payloads that were not kept.
        explanation: where the drift enters that fails the gate, or failed it before the candidate
            was repaired; None if it passes, or that is unknown.
    """

    candidate: Candidate
    problem: str | None = None
    drift: DriftReport = DriftReport()
    accuracy: AccuracyRecord | None = None
    ties: Sequence[Call] = ()
    latency_ms: MeasuredLatency = UNMEASURED.latency_ms
    speedup: Speedup | None = None
    cold_start: ColdStart | None = None
    task_metric: float | None = None
    points: tuple[PointFigures, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    explanation: Explanation | None = None

    @property
    def recipe(self) -> str:
        """Name of the candidate's recipe."""
        return self.candidate.recipe

    @property
    def measured(self) -> Measured:
        """Speed and drift, as records have them."""
        faster = self.speedup
        return Measured(
            speedup=faster.value if faster else None,
            speedup_ci=(faster.low, faster.high) if faster else None,
            drift=self.drift.measured,
            latency_ms=self.latency_ms,
        )

    @property
    def strides_equal(self) -> bool | None:
        """Whether every output had eager's strides in every call, in dims of more than one element;
        None if not compared.
        """
        rows = self.drift.rows
        return not any((row.problem or "").startswith(STRIDES) for row in rows) if rows else None

    def without_payloads(self, dropped: Sequence[Dropped]) -> Trial:
        """The trial with payloads recorded as dropped."""
        return replace(self, dropped=(*self.dropped, *dropped))


@frozen
class Cell:
    """Latency samples at one thread count and point.

    Attributes:
        point: sizes by dim name.
        sampling: samples of all entrants, interleaved.
        payloads: path of the payload that served each entrant; eager has none.
    """

    num_threads: int
    point: Point
    sampling: Sampling
    payloads: Mapping[str, str]

    def faster(
        self,
        name: str,
        over: str,
        num_candidates: int,
        policy: SamplingPolicy,
        timing: Timing = "p50",
    ) -> Speedup | None:
        """Speedup of one entrant over another, by medians by default, in both processes if both
        timed them; None if the machine was too disturbed.
        """
        if not self.sampling.stable:
            return None
        ratio = partial(
            speedup,
            self.sampling,
            num_candidates=num_candidates,
            policy=policy,
            timing=timing,
        )
        first = ratio(name, eager=over)
        if not {again(name), again(over)} <= self.sampling.samples_ms.keys():
            return first
        return over_processes(first, ratio(again(name), eager=again(over)))

    def __str__(self) -> str:
        return place_text(self.num_threads, self.point)


@frozen
class Incumbent:
    """The artifact that serves the device class now.

    Attributes:
        folder: folder of the artifact.
        manifest: manifest of the artifact.
        digest: digest of its image manifest in the store.
        problem: why it does not serve this process; None if it does.
    """

    folder: Path
    manifest: Manifest
    digest: str
    problem: str | None = None


@frozen
class Judgement:
    """The verdict of one model and device class, with its evidence. Each step adds its part.

    Attributes:
        reason: one sentence for people.
        trials: one for each candidate.
        winner: the trial to publish; None unless published, or unstable and something serves.
        best: the trial that came nearest; its figures are shown if nothing is published.
        cells: all timed cells, the deciding one first; none if no candidate passed the drift gate.
        eager_ms: percentiles of eager in the deciding cell; empty if nothing was timed.
        task_metric: quality of the eager model.
        pareto: the Pareto front of the trials that passed the drift gate and were timed.
        incumbent: the artifact that serves now; None without one.
        inherited: speed of an earlier version that counts for the winner (verdicts.py).
        old: trial of the incumbent with its payloads for the deciding thread count; None if it
            cannot be compared, and `previous.problem` says why.
        previous: the incumbent, compared with what would replace it; None without one.
        torch_only: if the winner needs an engine, the judgement whose winner is the best trial that
            needs torch alone (payload_sets).
    """

    trials: Sequence[Trial]
    verdict: Verdict = "failed"
    reason: str = ""
    winner: Trial | None = None
    best: Trial | None = None
    cells: Sequence[Cell] = ()
    eager_ms: Mapping[str, float | None] = field(default_factory=dict)
    task_metric: float | None = None
    pareto: tuple[Tradeoff, ...] = ()
    incumbent: Incumbent | None = None
    inherited: LatencyRecord | None = None
    old: Trial | None = None
    previous: PreviousRecord | None = None
    torch_only: Judgement | None = None

    @property
    def sampling(self) -> Sampling | None:
        """The samples of the deciding cell."""
        return self.cells[0].sampling if self.cells else None

    @property
    def passing(self) -> list[Trial]:
        """The trials that passed the drift gate."""
        return [trial for trial in self.trials if trial.problem is None]

    def with_passing(self, change: Callable[[Trial], Trial]) -> Judgement:
        """The judgement with the passing trials changed."""
        trials = [trial if trial.problem is not None else change(trial) for trial in self.trials]
        return replace(self, trials=trials)

    def with_winner(self, winner: Trial, *, text: str = "") -> Judgement:
        """The judgement with another trial of its winner, and more text in its reason."""
        trials = [winner if trial is self.winner else trial for trial in self.trials]
        reason = f"{self.reason}; {text}" if text else self.reason
        return replace(
            self,
            winner=winner,
            best=winner,
            trials=trials,
            reason=reason,
        )

    def with_cells(self, cells: Sequence[Cell]) -> Judgement:
        """The judgement with further cells."""
        return replace(self, cells=[*self.cells, *cells])


def recorded(percentiles: Mapping[str, float | None]) -> MeasuredLatency:
    """The percentiles that records have."""
    names = ("p50", "p90", "p95", "p99")
    return MeasuredLatency(**{name: percentiles.get(name) for name in names})
