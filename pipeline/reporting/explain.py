"""`--explain`: show what a campaign would do with each item, and why."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.planning import Item, Plan
from pipeline.records import SKIPPED, Event, Outcome
from pipeline.reporting.live.display import Display
from pipeline.scheduling import BuildRecords


def explain_plan(
    plan: Plan, skipped: Sequence[Outcome], records: BuildRecords, display: Display
) -> None:
    """Show a line for each item, and for each outcome that needs no work.

    Args:
        plan, skipped: of the campaign.
        records: builds that earlier campaigns finished.
        display: takes the lines.
    """
    lines = []
    for item in plan.items:
        why = "" if item.why == "unchanged" else f" ({item.why})"
        lines.append(f"{item.label()}: {_work_of(item, records)}{why}")
    for outcome in skipped:
        place = f"{outcome.model} {outcome.device_class}"
        lines.append(f"{place}: nothing ({outcome.coded_reason})")
    for line in lines:
        display.show(Event(kind="note", text=line))


def _work_of(item: Item, records: BuildRecords) -> str:
    """The work of an item in words: what the executor would start with."""
    if item.finished:
        return "unchanged"
    step = records.start(item)
    state = step.state
    outcome = state.outcome
    if outcome is not None:
        return f"nothing to build or judge; {outcome.verdict}: {outcome.coded_reason}"
    builds = [recipe for recipe in step.queue if recipe]
    words = []
    if builds:
        words.append(f"build {', '.join(builds)}")
    if state.waiting:
        words.append(
            f"then {', '.join(state.waiting)}, unless earlier judgements of the same architecture"
            " rule them out"
        )
    if state.built:
        words.append(f"keep {', '.join(state.built)}")
    for recipe, result in state.results.items():
        if result.is_skipped:
            problem = result.problem.removeprefix(f"{SKIPPED}: ")
            words.append(f"skip {recipe}: {problem}")
    words.append("judge if it is built" if item.missed and builds else "judge")
    return "; ".join(words)
