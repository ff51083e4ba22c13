"""`--explain`: show what a campaign would do with each item, and why."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.planning.plan import Item, Plan
from pipeline.records.events import Event
from pipeline.records.outcome import Outcome
from pipeline.reporting.display import Display


def explain_plan(plan: Plan, skipped: Sequence[Outcome], display: Display) -> None:
    """Show a line for each item, and for each outcome that needs no work."""
    for item in plan.items:
        why = "" if item.why == "unchanged" else f" ({item.why})"
        display.show(Event(kind="note", text=f"{item.label()}: {_work_of(item)}{why}"))
    for outcome in skipped:
        display.show(Event(kind="note", text=f"{outcome.model} {outcome.device_class}: nothing ({outcome.coded_reason})"))


def _work_of(item: Item) -> str:
    if item.finished:
        return "unchanged"
    builds = ", ".join(item.missed or item.builds) or "nothing"
    return f"build {builds}; judge{' if it is built' if item.missed else ''}"
