"""What people see of outcomes: typed rows, summaries of campaigns, events of a running one; and
facts about the workers of a class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, field, fields
from datetime import UTC, datetime
from typing import Literal

from freezer.artifact.description import with_accuracy
from freezer.codec import Json, JsonView, frozen
from freezer.hardware import PORTABLE, this_host
from freezer.spec import CLOCKS, MARKS
from pipeline.records.outcome import Outcome

Place = tuple[str, str]
"""A model and a device class."""

Outcomes = Sequence[Outcome]
"""In the order of the catalog."""

LABEL = "coldpress.dev/"
"""Prefix of the labels of a Ray node, followed by a device class that it serves; the value is
`true`.
"""

EMULATED = f"{LABEL}emulated"
"""Label of a node whose CPU is emulated: speeds are not measured there."""


def labels_of(classes: Collection[str]) -> dict[str, str]:
    """Return the labels of this machine as a Ray node that serves some classes."""
    labels = {f"{LABEL}{name}": "true" for name in classes}
    return labels | ({EMULATED: "true"} if this_host().emulated else {})


@frozen
class ClassFacts:
    """Toolchain and limits of the workers of a device class.

    Attributes:
        num_threads: CPUs of the smallest worker.
        toolchain: versions that are part of every build key.
        memory_bytes: memory for one item whose entry sets no limit; None if unknown.
        is_best: whether it is the best class of one of them. Earlier releases did not store it.
        emulated: whether the CPUs of all of them are emulated.
    """

    num_threads: int
    toolchain: JsonView
    memory_bytes: int | None = None
    is_best: bool = True
    emulated: bool = False


FleetFacts = Mapping[str, ClassFacts]
"""By device class."""


@frozen
class Row:
    """The figures of one outcome; None where nothing was measured.

    Attributes:
        mark: `~` before a speedup that was measured in disturbed rounds, whose interval is not
            a bound.
        clock: what measured the speedup.
        error_ratio, max_abs_err: as in `MeasuredDrift`.
        size_mb: size of the payloads of the recipe, in 1e6 bytes; None if it was not built.
        code: error code, or type of the failure.
        reason: one sentence for people, without its code.
        accuracy: precision of the recipe and what it costs; None for float32.
    """

    model: str
    device_class: str
    verdict: str
    cached: bool
    recipe: str | None
    mark: str
    clock: str
    speedup: float | None
    speedup_ci_low: float | None
    speedup_ci_high: float | None
    eager_p50_ms: float | None
    p50_ms: float | None
    error_ratio: float | None
    max_abs_err: float | None
    size_mb: float | None
    num_threads: int
    version: int | None
    artifact: str | None
    build_s: float
    judge_s: float
    code: str | None
    reason: str | None
    failed: bool
    accuracy: str | None

    @classmethod
    def of(cls, outcome: Outcome) -> Row:
        """Return the row of an outcome."""
        measured, report = outcome.figures, outcome.report
        low, high = measured.speedup_ci or (None, None)
        return cls(
            model=outcome.model,
            device_class=outcome.device_class,
            verdict=outcome.verdict,
            cached=outcome.cached,
            recipe=outcome.recipe,
            mark=MARKS[outcome.clock],
            clock=outcome.clock,
            speedup=measured.speedup,
            speedup_ci_low=low,
            speedup_ci_high=high,
            eager_p50_ms=measured.latency_ms.eager_p50,
            p50_ms=measured.latency_ms.p50,
            error_ratio=measured.drift.error_ratio,
            max_abs_err=measured.drift.max_abs_err,
            size_mb=report.size_bytes / 1e6 if report and report.size_bytes else None,
            num_threads=outcome.num_threads,
            version=outcome.version,
            artifact=outcome.artifact,
            build_s=outcome.build_s,
            judge_s=outcome.judge_s,
            code=outcome.code or outcome.failure_kind,
            reason=outcome.reason,
            failed=outcome.failed,
            accuracy=str(report.accuracy) if report and report.accuracy else None,
        )

    @property
    def speedup_text(self) -> str:
        """The speedup with its interval, like `1.84x (1.79-1.90)`; empty if it was not measured,
        or a note if that was because the CPU is emulated.
        """
        if self.clock == "none":
            return CLOCKS["none"]
        return speedup_text(self.speedup, self.speedup_ci_low, self.speedup_ci_high, self.mark)


def outcome_table(outcomes: Outcomes) -> Json:
    """Return the rows of outcomes as a JSON table."""
    columns = [column.name for column in fields(Row)]
    return {"columns": columns, "data": [astuple(Row.of(outcome)) for outcome in outcomes]}


def speedup_text(
    value: float | None,
    low: float | None,
    high: float | None,
    mark: str,
) -> str:
    """Return a speedup with its interval, like `1.84x (1.79-1.90)`, or with a mark, like `~1.84x`;
    empty if it was not measured.
    """
    if value is None:
        return ""
    interval = "" if mark or low is None or high is None else f" ({low:.2f}-{high:.2f})"
    return f"{mark}{value:.2f}x{interval}"


def counts_text(counts: Iterable[tuple[str, int]]) -> str:
    """Return names with their counts, like `3 published, 1 failed`; empty without any."""
    return ", ".join(f"{count} {name}" for name, count in counts)


def rounded(value: float | None) -> str:
    """Return a figure with three digits; empty if it was not measured."""
    return "" if value is None else f"{value:.3g}"


def shortened(value: float) -> float:
    """Return a figure with 5 digits: pages show all that it has. The ledger keeps them all."""
    return float(f"{value:.5g}")


def iso(seconds: float, *, timespec: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """Format seconds since the epoch as ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=timespec)


Note = Callable[[str], None]
"""Function that takes a line for the user."""

NUM_GAINS = 3
"""Gains that a summary lists."""


@frozen
class Summary:
    """Summary of a campaign.

    Attributes:
        counts: number of outcomes by verdict, the most frequent first.
        gains: the published outcomes with the largest speedups, one for each model, without
            `portable` and disturbed rounds.
        most_drifted: the published outcome in float32 with the largest error ratio, if one was
            measured.
        unpublished: groups as of `alike`, failed ones first.
    """

    counts: dict[str, int]
    gains: tuple[Outcome, ...]
    most_drifted: Outcome | None
    unpublished: list[list[Outcome]]


def summarize(outcomes: Outcomes) -> Summary:
    """Summarize outcomes, in the order of the catalog."""
    best: dict[str, Outcome] = {}
    published = [one for one in outcomes if one.verdict == "published"]
    timed = [one for one in published if one.device_class != PORTABLE and one.clock != "disturbed"]
    for one in sorted(timed, key=lambda one: one.figures.speedup or 0.0, reverse=True):
        if one.figures.speedup:
            best.setdefault(one.model, one)
    exact = [one for one in published if one.report is None or one.report.accuracy is None]
    return Summary(
        counts=dict(Counter(one.verdict for one in outcomes).most_common()),
        gains=tuple(best.values())[:NUM_GAINS],
        most_drifted=max(filter(_error_ratio, exact), key=_error_ratio, default=None),
        unpublished=sorted(
            alike(one for one in outcomes if one.verdict != "published"),
            key=lambda group: not group[0].failed,
        ),
    )


def _error_ratio(outcome: Outcome) -> float:
    return outcome.figures.drift.error_ratio or 0.0


def verdict_name(outcome: Outcome) -> str:
    """Return the verdict for people: what is published as portable is the fallback, and a lower
    precision says what it costs.
    """
    if outcome.verdict == "published" and outcome.device_class == PORTABLE:
        return "published (fallback)"
    return with_accuracy(outcome.verdict, outcome.report.accuracy if outcome.report else None)


def alike(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Group the outcomes of a model that have the same verdict and reason."""
    groups: dict[tuple[str, str, str | None], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.model, one.verdict, one.coded_reason), []).append(one)
    return list(groups.values())


STYLES = {
    "published": "green",
    "kept-eager": "cyan",
    "kept-previous": "blue",
    "rejected": "yellow",
    "failed": "red",
    "unstable": "magenta",
}


@frozen
class Event:
    """The start or end of a step.

    Attributes:
        kind: `note` is about the campaign; `build` and `judge` start, `built` and `judged` end,
            `retried` ends without a result; `outcome` is final: published and in the ledger.
        what: `model device_class`.
        recipes: of builds: those that start together, or the one that ended; of a judge that
            ended, those that it validated.
        text: details for people.
        seconds: duration of what ended.
        unstable: whether other processes disturbed the judge that ended.
    """

    kind: Literal["note", "build", "built", "judge", "judged", "retried", "outcome"]
    what: str = ""
    recipes: tuple[str, ...] = ()
    text: str = ""
    seconds: float = 0.0
    outcome: Outcome | None = None
    unstable: bool = False


@frozen
class LiveFigures:
    """Figures of a running campaign that no event carries.

    Attributes:
        nodes: number of nodes in use, by device class.
        num_logged, num_unlogged: final outcomes that MLflow shows, and those that it lacks.
    """

    nodes: Mapping[str, int] = field(default_factory=dict)
    num_logged: int = 0
    num_unlogged: int = 0


def verdict_text(outcome: Outcome) -> str:
    """Return a verdict in a few words: `published inductor-frozen 1.84x (1.79-1.90)`."""
    verdict = verdict_name(outcome)
    words = ["unchanged:", verdict] if outcome.cached else [verdict]
    if outcome.verdict == "failed":
        words.append(f"({outcome.failure_kind})")
    if outcome.recipe:
        words.append(outcome.recipe)
    if speedup := Row.of(outcome).speedup_text:
        words.append(speedup)
    if outcome.code is not None:  # the report has the reason
        words.append(outcome.code)
    return " ".join(words)
