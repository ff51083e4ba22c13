"""Campaigns whose builds and judges are done beforehand: all that comes after a judge is real, and
no Ray is started.

`python -m tests.support.campaigns STORE TRACKING_URI CAMPAIGN NUM HERE=FOLDER portable=FOLDER`
runs one with MODELS, and kills itself with SIGKILL when NUM outcomes were reached."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from freezer.artifact import Artifact, Measured, MeasuredDrift, MeasuredLatency, write_artifact
from freezer.freezing.sources import Source, parse_source
from freezer.spec import InputSpec, Limits, SamplingPolicy, TensorSpec
from freezer.store import Store
from pipeline.campaign import Campaign
from pipeline.catalog import Entry
from pipeline.config import Config
from pipeline.ledger import Continued, Ledger
from pipeline.planning import FileDigests, FinishedWork, Item, Plan, PlanRequest, make_plan
from pipeline.records import CandidateReport, ClassFacts, Failure, Outcome
from pipeline.reporting import CampaignReport, Display, LineDisplay
from pipeline.scheduling import Executor
from pipeline.tracking import Tracker, TrackerProcess
from pipeline.workspace import judged_name, workplace
from tests.support.raylets import ROOT
from tests.support.steps import HERE

DEFAULT_LIMITS = Limits()

FACTS = ClassFacts(num_threads=2, toolchain={"torch": "2.13.0"})

Models = Mapping[str, Mapping[str, str]]
"""For each model and device class, its verdict."""

MODELS: Models = {
    "first": {HERE: "published", "portable": "published"},
    "kept": {HERE: "kept-eager", "portable": "published"},
    "gone": {HERE: "failed", "portable": "failed"},
}


class Judged:
    """In place of an Executor: the outcomes are known."""

    begun: Mapping[str, Any] = {}

    def __init__(
        self, plan: Plan, made: Callable[[Item], Outcome], after: Callable[[int], None]
    ) -> None:
        self._items, self._made, self._after = (
            [item for item in plan.items if item.finished is None],
            made,
            after,
        )

    def outcomes(self) -> Iterator[tuple[Item, Outcome]]:
        """Yield the outcome of each item; `after` receives the number so far."""
        for index, item in enumerate(self._items):
            yield item, self._made(item)
            self._after(index + 1)


def entry(
    name: str,
    folder: Path,
    *,
    tags: Mapping[str, str] | None = None,
    registered_name: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    device_classes: tuple[str, ...] = (HERE,),
) -> Entry:
    """An entry with a source of its own."""
    (folder / "mod.py").write_text("def make(): ...\n")
    return Entry(
        name=name,
        source=parse_source(
            "python:mod:make", folder=folder, search_path=(str(folder),), args={"model": name}
        ),
        spec=InputSpec(inputs=(TensorSpec(name="x", dtype="float32", shape=(1, 4)),)),
        samples=None,
        task_metric=None,
        limits=limits,
        device_classes=device_classes,
        recipes=("torchscript-frozen",),
        files=(),
        search_path=(str(folder),),
        tags=tags or {},
        registered_name=registered_name,
    )


GOOD_FOLDER = ROOT / "tests" / "pipeline" / "models"


def good_source(function: str = "campaign_models:good", **args: object) -> Source:
    """A function of GOOD_FOLDER as the source of a model."""
    path = (str(GOOD_FOLDER),)
    return parse_source(f"python:{function}", folder=GOOD_FOLDER, search_path=path, args=args)


def good_entry() -> Entry:
    """The entry of a model that workers can load."""
    source = good_source()
    return Entry(
        name="good",
        source=source,
        spec=InputSpec(inputs=(TensorSpec(name="input", dtype="float32", shape=(2, 16)),)),
        samples=None,
        task_metric=None,
        limits=Limits(speedup_min=0.0, timeout_s=300),
        device_classes=(HERE,),
        recipes=("torchscript-frozen",),
        files=(),
        search_path=source.search_path,
    )


def plan_of(
    entries: Sequence[Entry],
    store: Store,
    ledger: Ledger,
    *,
    facts: ClassFacts = FACTS,
    digests: FileDigests | None = None,
    classes: Sequence[str] = (HERE, "portable"),
    lift_quarantine: bool = False,
    **options: Any,
) -> Plan:
    """A plan for workers of `classes`, which are alike, and which `auto` means; `options` are
    fields of PlanRequest.
    """
    request = PlanRequest(
        **{
            "entries": entries,
            "facts": dict.fromkeys(classes, facts),
            "nodes": [classes],
            "policy": SamplingPolicy(),
            **options,
        }
    )
    finished = FinishedWork(store, ledger, lifted=lift_quarantine)
    return make_plan(request, finished, digests or FileDigests(store.root / "digests.json"))


def judged_folder(store: Path, key: str, model: str, missing: Collection[str] = ()) -> Path:
    """The folder of a judge's result and artifact until they are published."""
    return workplace(str(store)).folder("judged", judged_name(key, model, missing))


def judged(item: Item, verdict: str, store: Store, artifact: Artifact | None = None) -> Outcome:
    """An outcome as a judge returns it; its artifact is put where judges put theirs."""
    if artifact is not None:
        folder = judged_folder(store.root, item.judge.digest, item.entry.name)
        staging = folder.with_name("staging")
        shutil.copytree(artifact.folder, staging)
        folder.mkdir(parents=True)
        write_artifact(
            replace(artifact.manifest, model=item.entry.name), staging, folder / "artifact"
        )
    failed = verdict == "failed"
    recipe = next(iter(item.builds), "none")
    report = CandidateReport(
        recipe=recipe,
        build_key="b",
        figures=Measured(
            drift=MeasuredDrift(error_ratio=1.25),
            latency_ms=MeasuredLatency(p50=1.0),
            speedup=2.0,
            speedup_ci=(1.8, 2.2),
        ),
    )
    return Outcome(
        model=item.entry.name,
        device_class=item.device_class,
        verdict=verdict,
        reason="because",
        failure=Failure(kind="capture", message="because") if failed else None,
        num_threads=2,
        source=str(item.entry.source),
        source_key=item.source.digest,
        judge_key=item.judge.digest,
        recipe=None if failed else recipe,
        figures=Measured() if failed else Measured(speedup=2.0, speedup_ci=(1.8, 2.2)),
        candidates=() if failed else (report,),
        registered_name=item.entry.registered_name,
        tags=item.entry.tags,
    )


def run_judged(
    store: Store,
    uri: str,
    campaign: str,
    artifacts: Mapping[str, Artifact],
    *,
    models: Models = MODELS,
    after: Callable[[int], None] = lambda _: None,
    tags: Mapping[str, str] | None = None,
    registered_name: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **options: Any,
) -> CampaignReport:
    """Run a campaign to its end.

    Judges leave `artifacts`, by device class, and `after` is called with each outcome's count;
    `options` as for `run_with`."""
    entries = [
        entry(name, store.root.parent, tags=tags, registered_name=registered_name, limits=limits)
        for name in models
    ]

    def made_by_judge(item: Item) -> Outcome:
        verdict = models[item.entry.name][item.device_class]
        artifact = artifacts[item.device_class] if verdict == "published" else None
        return judged(item, verdict, store, artifact)

    def executor(plan: Plan, _: Ledger, __: FileDigests) -> Executor:
        return cast(Executor, Judged(plan, made_by_judge, after))

    return run_with(executor, store, uri, campaign, entries, **options)


def run_with(
    executor: Callable[[Plan, Ledger, FileDigests], Executor],
    store: Store,
    uri: str,
    campaign: str,
    entries: Sequence[Entry],
    *,
    problems: tuple[Outcome, ...] = (),
    apart: bool = False,
    display: Display | None = None,
) -> CampaignReport:
    """Run a campaign to its end with an executor of its plan.

    MLflow is written by this process, or with `apart`, as in any campaign, by another."""
    with Ledger(store, campaign) as ledger, ExitStack() as held:
        digests = FileDigests(store.root / "digests.json")
        started = 1_700_000_000.0
        continued = Continued(ledger, started)
        plan = plan_of(entries, store, ledger, digests=digests)
        tracker: Tracker | TrackerProcess
        if apart:
            tracker = held.enter_context(
                TrackerProcess(uri, campaign, str(store.root), mode="copy")
            )
        else:
            tracker = Tracker(uri, campaign, store, mode="copy")
        running = Campaign(
            config=Config(
                catalog="catalog.yaml", store=str(store.root), tracking_uri=uri, campaign=campaign
            ),
            plan=plan,
            executor=executor(plan, ledger, digests),
            store=store,
            ledger=ledger,
            tracker=tracker,
            display=display or LineDisplay(Console(file=io.StringIO())),
        )
        return running.run(problems, continued, started)


def main(store: str, uri: str, campaign: str, num: str, *folders: str) -> None:
    """Run MODELS, and die."""
    artifacts = {
        name: Artifact.read(Path(folder))
        for name, _, folder in (text.partition("=") for text in folders)
    }

    def die(count: int) -> None:
        if count == int(num):
            os.kill(os.getpid(), signal.SIGKILL)

    run_judged(Store.open(store, create=True), uri, campaign, artifacts, after=die)


if __name__ == "__main__":
    main(*sys.argv[1:])
