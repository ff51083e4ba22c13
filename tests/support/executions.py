"""Plans executed without Ray, with builds and judges that end as a test says."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from freezer.artifact import Measured
from freezer.store import Store
from pipeline.cluster import Done, Handle, Node
from pipeline.failures import CODES
from pipeline.ledger import Ledger
from pipeline.planning import FileDigests, Item, Plan
from pipeline.records import CandidateReport, Event, Failure, Outcome
from pipeline.reporting import LineDisplay, explain_plan
from pipeline.scheduling import BuildRecords, Executor
from pipeline.sources import Materials
from pipeline.worker import BuildRequest, BuildResult, JudgeRequest, JudgeResult
from tests.support.one_node import NODE, NoRay, OneNode


def failure_of(kind: str, code: str | None = None, **tried: Any) -> Failure:
    return Failure(kind=kind, code=code or CODES.get(kind), message="so it was", **tried)


def built(recipe: str, failure: Failure | None = None, **fields: Any) -> Done:
    """The end of a build."""
    return Done(handle=0, value=BuildResult(key="", recipe=recipe, failure=failure, **fields))


def judged(verdict: str = "kept-eager", **fields: Any) -> Done:
    """The end of a judge."""
    return Done(handle=0, value=JudgeResult(verdict=verdict, reason="because", **fields))


def reports_of(speedups: Mapping[str, float]) -> tuple[CandidateReport, ...]:
    """Reports of candidates; intervals reach 2% beyond the speedups."""
    figures = {
        name: Measured(speedup=value, speedup_ci=(value * 0.98, value * 1.02))
        for name, value in speedups.items()
    }
    return tuple(
        CandidateReport(recipe=name, build_key="", figures=found) for name, found in figures.items()
    )


class Fake(NoRay):
    """A cluster whose builds and judges end as a test says, in order; builds of a group end one
    after the other.
    """

    def __init__(self, ends: Sequence[Done]) -> None:
        super().__init__()
        self.ends, self.started = list(ends), list[str]()
        self.requests: list[BuildRequest | JudgeRequest] = []
        self.reserved: list[int | None] = []

    def start(self, *args: Any, name: str, memory_bytes: int | None = None, **_: object) -> Handle:
        request: BuildRequest | JudgeRequest = args[1]
        self.started += [name] if isinstance(request, JudgeRequest) else _builds_of(request)
        self.requests.append(request)
        self.reserved.append(memory_bytes)
        return len(self.requests)

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        request, done = self.requests[handles[0] - 1], self.ends.pop(0)
        value = done.value
        if value and isinstance(request, BuildRequest):
            first, *others = request.builds.values()
            value = (
                replace(value, key=first),
                *(replace(self.ends.pop(0).value, key=key) for key in others),
            )
        if value and isinstance(request, JudgeRequest):
            value = (value, self.ends.pop(0).value) if request.beside else (value,)
        return [replace(done, handle=handles[0], value=value)]

    def cancel(self, handles: Sequence[Handle], *, grace_s: float = 5.0) -> None:
        assert not handles


def _builds_of(request: BuildRequest) -> list[str]:
    what = f"build {request.entry.name} {request.device_class}"
    return [f"{what} {recipe}" for recipe in request.builds]


def materials_of(store: Store) -> Materials:
    return Materials(store.root, "sqlite://", FileDigests(store.root / "digests.json"))


def executed(
    store: Store, ledger: Ledger, ends: Sequence[Done], plan: Plan, node: Node = NODE
) -> tuple[list[tuple[Item, Outcome]], Fake, list[str]]:
    """The outcomes of a plan, the cluster that ran it, and what was shown."""
    cluster, notes = Fake(ends), list[str]()

    def show(event: Event) -> None:
        if event.kind in ("note", "built"):
            notes.append(event.text)

    fleet = OneNode(cluster, store.root, node)
    executor = Executor(plan, fleet, store, ledger, materials_of(store), show)
    return list(executor.outcomes()), cluster, notes


def record(ledger: Ledger, item: Item, outcome: Outcome) -> None:
    """Keep an outcome in the ledger, as the publisher does."""
    ledger.append(
        "outcome",
        item.judge.digest,
        model=item.entry.name,
        device_class=item.device_class,
        data={"outcome": outcome.to_json(), "parts": item.parts},
    )


def explained(plan: Plan, store: Store, ledger: Ledger) -> str:
    """What `--explain` prints for a plan."""
    printed = io.StringIO()
    display = LineDisplay(Console(file=printed, width=300))
    explain_plan(plan, (), BuildRecords(store, ledger, lifted=plan.lift_quarantine), display)
    return printed.getvalue()
