"""Comparison of two campaigns over the same models: faster, slower, drifted, newly failing, fixed;
and the history of a model, each outcome compared with the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from freezer.artifact import SpeedChange, regression_kind
from freezer.codec import frozen
from freezer.freezing.recipes import EAGER
from freezer.spec import FLOAT32, MARKS
from pipeline.ledger import Reached
from pipeline.records import Outcome, Outcomes, Row, speedup_text

ChangeKind = Literal[
    "newly failing", "slower", "drifted", "faster", "fixed", "new", "removed", "unchanged"
]

REGRESSIONS: tuple[ChangeKind, ...] = ("newly failing", "slower", "drifted")
"""Changes for which `coldpress compare` ends with exit code 1."""

NOISE = 0.05
"""Relative change of speed that two judgements of one artifact may show; larger ones count if their
intervals are disjoint too.
"""


@frozen
class ServedSpeed:
    """Speed of what serves after an outcome, as a multiple of eager's, with its 95% confidence
    interval; `mark` as in `Row`.
    """

    recipe: str
    value: float
    low: float
    high: float
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.recipe} {speedup_text(self.value, self.low, self.high, self.mark)}"


@frozen
class OutcomeChange:
    """What became of one model and device class.

    Attributes:
        why: one sentence for people; empty if it is unchanged.
    """

    kind: ChangeKind
    model: str
    device_class: str
    why: str

    @property
    def is_regression(self) -> bool:
        """Whether it is one of REGRESSIONS."""
        return self.kind in REGRESSIONS


def served_speed(outcome: Outcome) -> ServedSpeed | None:
    """Return the speed of what serves after an outcome; None if it was not timed.

    After `kept-eager` that is the captured model, about as fast as eager. After `kept-previous` it
    is the speedup of the best candidate divided by its speedup over the artifact that stays, both
    measured in the same rounds.
    """
    if outcome.verdict == "kept-eager":
        return ServedSpeed(
            recipe=EAGER,
            value=1.0,
            low=1.0,
            high=1.0,
        )
    figures, previous = outcome.figures, outcome.previous
    if figures.speedup is None or figures.speedup_ci is None:
        return None
    recipe, divisor = outcome.recipe or "", 1.0
    if outcome.verdict == "kept-previous" and previous is not None and previous.speedup:
        recipe, divisor = previous.recipe, previous.speedup
    elif outcome.verdict != "published":
        return None
    low, high = figures.speedup_ci
    return ServedSpeed(
        recipe=recipe,
        value=figures.speedup / divisor,
        low=low / divisor,
        high=high / divisor,
        mark=MARKS[outcome.clock],
    )


def compare(before: Outcomes, after: Outcomes) -> list[OutcomeChange]:
    """Return a change for each model and device class of either campaign, regressions first.

    Args:
        before: outcomes of the earlier campaign.
        after: outcomes of the later campaign.
    """
    earlier = {outcome.place: outcome for outcome in before}
    later = {outcome.place: outcome for outcome in after}
    changes = []
    for model, device_class in later | earlier:
        place = model, device_class
        kind, why = _kind(earlier.get(place), later.get(place))
        changes.append(OutcomeChange(kind=kind, model=model, device_class=device_class, why=why))
    order = get_args(ChangeKind)
    return sorted(changes, key=lambda change: order.index(change.kind))


def _kind(before: Outcome | None, after: Outcome | None) -> tuple[ChangeKind, str]:
    if before is None:
        return "new", ""
    if after is None:
        return "removed", ""
    if after.failed and not before.failed:
        return "newly failing", f"{after.verdict}: {after.coded_reason}"
    if before.failed and not after.failed:
        return "fixed", f"was {before.verdict}"
    same_artifact = after.artifact is not None and after.artifact == before.artifact
    if after.failed or same_artifact or after.judge_key == before.judge_key:
        return "unchanged", ""
    old, new = served_speed(before), served_speed(after)
    speed = _speed_change(old, new)
    old_ratio = before.figures.drift.error_ratio
    new_ratio = after.figures.drift.error_ratio
    was, now = (one.report and one.report.accuracy for one in (before, after))
    worse = regression_kind(speed, None if was else old_ratio, new_ratio)
    if worse == "drifted":
        if now:
            return worse, f"{now}, was {FLOAT32}"
        return worse, f"error ratio {new_ratio:.2f}, was {old_ratio:.2f}"
    if worse is None and not (speed and speed.faster):
        return "unchanged", ""
    return worse or "faster", f"{new}, was {old}"


def _speed_change(old: ServedSpeed | None, new: ServedSpeed | None) -> SpeedChange | None:
    """Change between speeds that two campaigns measured; None unless both are known, and neither
    was measured in disturbed rounds.
    """
    if old is None or new is None or not (old.value and old.low and old.high):
        return None
    if old.mark or new.mark:
        return None
    return SpeedChange(
        value=new.value / old.value,
        low=new.low / old.high,
        high=new.high / old.low,
        noise=NOISE,
    )


@frozen
class PastOutcome:
    """Figures of one outcome of a model and device class.

    Attributes:
        time: when it was reached, in seconds since the epoch.
        speed: of what served afterwards.
        error_ratio: of the outcome's recipe.
        size_mb: of the payloads of the outcome's recipe, in 1e6 bytes.
        torch, coldpress: versions on the judge's machine.
        change: since the outcome before; None for the first one.
    """

    time: float
    device_class: str
    verdict: str
    version: int | None
    recipe: str | None
    speed: ServedSpeed | None
    error_ratio: float | None
    size_mb: float | None
    build_s: float
    torch: str | None
    coldpress: str | None
    change: OutcomeChange | None


def past_outcomes(past: Sequence[Reached]) -> dict[str, list[PastOutcome]]:
    """Return the history of each device class.

    Args:
        past: outcomes of one model, the oldest first.
    """
    history: dict[str, list[PastOutcome]] = {}
    before: dict[str, Outcome] = {}
    for reached in past:
        outcome = reached.outcome
        name, row, speed = outcome.device_class, Row.of(outcome), served_speed(outcome)
        change = compare([before[name]], [outcome])[0] if name in before else None
        shown = PastOutcome(
            time=reached.time,
            device_class=name,
            verdict=row.verdict,
            version=row.version,
            recipe=speed.recipe if speed else row.recipe,
            speed=speed,
            error_ratio=row.error_ratio,
            size_mb=row.size_mb,
            build_s=row.build_s,
            torch=outcome.host.get("torch"),
            coldpress=outcome.host.get("coldpress"),
            change=change,
        )
        history.setdefault(name, []).append(shown)
        before[name] = outcome
    return history
