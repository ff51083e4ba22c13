"""`--explain`: show what a campaign would do with each item, and why."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.planning import Item, Plan
from pipeline.records import SKIPPED, Event, Outcome
from pipeline.reporting.live.display import Display
from pipeline.scheduling import BuildRecords, Decide, ItemState, QueueTask, advance


def explain_plan(
    plan: Plan, skipped: Sequence[Outcome], records: BuildRecords, display: Display
) -> None:
    """Show a line for each item, and for each outcome that needs no work.

    Args:
        plan, skipped: of the campaign.
        records: builds that earlier campaigns finished.
        display: takes the lines.
    """
    for item in plan.items:
        why = "" if item.why == "unchanged" else f" ({item.why})"
        display.show(Event(kind="note", text=f"{item.label()}: {_work_of(item, records)}{why}"))
    for outcome in skipped:
        display.show(
            Event(
                kind="note",
                text=f"{outcome.model} {outcome.device_class}: nothing ({outcome.coded_reason})",
            )
        )


def _work_of(item: Item, records: BuildRecords) -> str:
    """The work of an item in words: what the executor would start with."""
    if item.finished:
        return "unchanged"
    start = records.start_of(item)
    state, actions = advance(ItemState(item=item), start)
    for action in actions:
        if isinstance(action, Decide):
            return (
                f"nothing to build or judge; {action.outcome.verdict}:"
                f" {action.outcome.coded_reason}"
            )
    builds = [
        action.recipe for action in actions if isinstance(action, QueueTask) and action.recipe
    ]
    kept = [recipe for recipe, result in start.finished.items() if result.failure is None]
    words = [f"build {', '.join(builds)}"] if builds else []
    if state.waiting:
        words.append(
            f"then {', '.join(state.waiting)}, unless earlier judgements of the same architecture"
            " rule them out"
        )
    build_s = item.entry.limits.build_s
    if build_s is not None and len(builds) + len(state.waiting) > 1:
        words[-1] += f", until limits.build_s {build_s:g} s is used up"
    words += [f"keep {', '.join(kept)}"] if kept else []
    skipped = {
        name: found.failure.message
        for name, found in state.results.items()
        if found.failure and found.failure.kind == SKIPPED
    }
    words += [
        f"skip {recipe}: {why.removeprefix(f'{SKIPPED}: ')}" for recipe, why in skipped.items()
    ]
    return "; ".join([*words, "judge if it is built" if item.missed and builds else "judge"])
