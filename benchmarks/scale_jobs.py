"""The jobs of benchmarks/scale.py: plan a catalog, drive a campaign, build without Ray."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freezer.artifact import MANIFEST, Artifact, Measured, MeasuredDrift, MeasuredLatency
from freezer.files import link_or_copy
from freezer.hardware import PORTABLE, best_level, detect
from freezer.spec import SamplingPolicy
from freezer.store import WORK, Store
from pipeline.campaign import Campaign
from pipeline.catalog import read_catalog
from pipeline.config import Config
from pipeline.ledger import Continued, Draft, Ledger
from pipeline.planning import FileDigests, FinishedWork, Item, Plan, PlanRequest, make_plan
from pipeline.publish import Publisher
from pipeline.records import BuildResult, ClassFacts, Event, Outcome, flat_json
from pipeline.reporting import Display
from pipeline.run import prepare, run
from pipeline.scheduling import Executor, executor, facts_here
from pipeline.scheduling.outcomes import outcome_of
from pipeline.sources import Materials
from pipeline.tracking import Tracker
from pipeline.worker import BuildRequest, JudgeRequest, JudgeResult, build
from pipeline.workspace import judged_name, workplace

CAMPAIGN = "scale"
CLASSES = 2
"""Device classes of each entry: the machine's level and portable."""

WARM = 10
"""First models, which are left out of the CPU time of MLflow."""

TEMPLATE = "template"
"""The folder in a store with the artifact that idle judges return."""

POLICY = SamplingPolicy(time_limit_s=2.0, warmup_s=0.2)
"""For the real judges: short, since their time is not measured."""


def model_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Save a small TorchScript model."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    ).eval()
    torch.jit.trace(model, torch.zeros(4, 32)).save(job["path"])
    return {}


def plan_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Plan a catalog as a campaign does, for one class and portable."""
    folder = Path(job["folder"])
    wall, cpu = time.perf_counter(), time.process_time()
    store = Store.open(str(folder / "store"), create=True)
    with Ledger(store, CAMPAIGN) as ledger:
        plan = planned(folder, store, ledger)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return {"items": len(plan.items), "wall_s": wall_s, "cpu_s": cpu_s, "peak_mb": peak_mb()}


def planned(folder: Path, store: Store, ledger: Ledger) -> Plan:
    """Plan a catalog as pipeline/run.py does, without probing nodes."""
    digests = FileDigests(store.root / WORK / "digests.json")
    entries, problems = Materials(store.root, "sqlite:///unused", digests).resolve(
        read_catalog(folder / "catalog.jsonl").entries
    )
    if problems:
        raise problems[0]
    level = str(best_level(detect().classes))
    facts = ClassFacts(num_threads=1, toolchain={"torch": "2.13.0"})
    request = PlanRequest(
        entries=entries,
        facts={level: facts, PORTABLE: facts},
        nodes=[[level, PORTABLE]],
        policy=SamplingPolicy(),
    )
    return make_plan(request, FinishedWork(store, ledger), digests)


class Meter(Display):
    """A display that counts tasks in flight and verdicts, and records when builds started and
    ended.
    """

    def __init__(self) -> None:
        self.in_flight = self.num_builds = self._now = 0
        self.verdicts: Counter[str] = Counter()
        self.first_build: float | None = None
        self.last_build = 0.0

    def show(self, event: Event) -> None:
        """Count an event."""
        self._now += {
            "build": len(event.recipes),
            "judge": 1,
            "built": -1,
            "judged": -1,
            "retried": -1,
        }.get(event.kind, 0)
        self.in_flight = max(self.in_flight, self._now)
        if event.kind == "build" and self.first_build is None:
            self.first_build = time.monotonic()
        if event.kind == "built":
            self.num_builds += 1
            self.last_build = time.monotonic()
        if event.outcome is not None:
            self.verdicts[
                f"unchanged {event.outcome.verdict}"
                if event.outcome.cached
                else event.outcome.verdict
            ] += 1


def config_of(folder: Path, address: str | None = None) -> Config:
    """The campaign over the catalog in a folder."""
    return Config(
        catalog=str(folder / "catalog.jsonl"),
        store=str(folder / "store"),
        tracking_uri=f"sqlite:///{folder}/mlflow.db",
        campaign=CAMPAIGN,
        address=address,
        policy=POLICY,
    )


def drive_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Drive a campaign to its end; without `do_build` or `do_judge`, these tasks are idle."""
    folder, meter = Path(job["folder"]), Meter()
    if job["do_build"] is False:
        executor.build = idle_build  # type: ignore[attr-defined]
    if job["do_judge"] is False:
        executor.judge = idle_judge  # type: ignore[attr-defined]
    wall, cpu = time.perf_counter(), time.process_time()
    report = run(config_of(folder, job["address"]), meter)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    failed = [outcome for outcome in report.outcomes if outcome.failed]
    if failed or report.infrastructure:
        raise RuntimeError(
            f"{len(failed)} outcomes failed, the first: {failed[:1]}; {report.infrastructure}"
        )
    tracker = resource.getrusage(resource.RUSAGE_CHILDREN)  # the ended child that wrote to MLflow
    return {
        "items": len(report.outcomes),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tracker_cpu_s": tracker.ru_utime + tracker.ru_stime,
        "peak_mb": peak_mb(),
        "in_flight": meter.in_flight,
        "verdicts": dict(sorted(meter.verdicts.items())),
        "builds": meter.num_builds,
        "build_phase_s": meter.last_build - (meter.first_build or 0.0),
    }


def builds_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Build a share of a catalog sequentially, as a worker does, without Ray."""
    folder = Path(job["folder"])
    index, count = job["share"]
    store = Store.open(str(folder / "store"), create=True)
    with Ledger(store, f"{CAMPAIGN}-{index}") as ledger:
        items = planned(folder, store, ledger).items
    mine = items[index::count]
    started = time.monotonic()
    for item in mine:
        request = BuildRequest(
            entry=item.entry,
            builds={recipe: key.digest for recipe, key in item.builds.items()},
            device_class=item.device_class,
            threads=item.threads,
            store=str(store.root),
        )
        for done in build(request):
            if done.failure:
                raise RuntimeError(f"{item.entry.name}: {done.failure.message}")
    return {
        "started": started,
        "ended": time.monotonic(),
        "builds": sum(len(item.builds) for item in mine),
    }


def template_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Freeze one model, for idle judges to return."""
    import torch

    from freezer.freezing.freeze import FreezeOptions, freeze

    folder = Path(job["folder"])
    Store.open(str(folder / "store"), create=True)
    model, out = torch.jit.load(str(folder / "model.pt")), folder / "store" / WORK / TEMPLATE
    made = freeze(
        model,
        torch.zeros(4, 32),
        out=out,
        options=FreezeOptions(device_class=PORTABLE, num_threads=1, policy=POLICY),
    )
    if made.artifact is None:
        raise RuntimeError(made.reason)
    return {}


class Idle(Executor):
    """Hands out the template for each item, without Ray."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._items, self._store, self.begun = plan.items, store, {}

    def outcomes(self) -> Iterator[tuple[Item, Outcome]]:
        """Yield the outcome of each item."""
        for item in self._items:
            builds = {
                name: BuildResult(key=key.digest, recipe=name) for name, key in item.builds.items()
            }
            request = JudgeRequest(
                key=item.judge.digest,
                entry=item.entry,
                builds={name: key.digest for name, key in item.builds.items()},
                device_class=item.device_class,
                threads=item.threads,
                policy=item.policy,
                campaign=CAMPAIGN,
                store=str(self._store.root),
            )
            yield item, outcome_of(item, _idle_judge(request), builds)


def copy_first(plan: Plan, store: Store, ledger: Ledger) -> None:
    """Publish the first entry, and copy its files and outcomes to all others."""
    first = {item.device_class: item for item in plan.items[:CLASSES]}
    publisher = Publisher(plan, store, ledger)
    known: dict[str, Outcome] = {}
    for item, outcome in Idle(replace(plan, items=tuple(first.values())), store).outcomes():
        known |= {one.device_class: one for one in publisher.add(item, outcome)}
    drafts = []
    for item in plan.items[CLASSES:]:
        outcome = replace(
            known[item.device_class],
            model=item.entry.name,
            source=str(item.entry.source),
            source_key=item.source.digest,
            judge_key=item.judge.digest,
        )
        source = store.root / plan.items[0].entry.name
        if item.device_class == PORTABLE:
            shutil.copytree(source, store.root / outcome.model, copy_function=os.link)
        data = {"outcome": outcome.to_json(), "parts": item.parts}
        key, model = item.judge.digest, outcome.model
        drafts.append(
            Draft(kind="outcome", key=key, model=model, device_class=item.device_class, data=data)
        )
    ledger.append_all(drafts)


class Timed(Tracker):
    """A tracker that records the CPU time of each model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cpu_s: list[float] = []

    def log(self, outcomes: Sequence[Outcome], reached: float | None = None) -> None:
        """Log a model."""
        began = time.process_time()
        super().log(outcomes, reached)
        self.cpu_s.append((time.process_time() - began) / len(outcomes))


class Untracked(Timed):
    """A tracker that writes the campaign's own run, but none of candidates."""

    def log(self, outcomes: Sequence[Outcome], reached: float | None = None) -> None:
        """Log nothing."""


def idle_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Finish a catalog on this machine without Ray, with the template for each item.

    With `tracked`, this process writes to MLflow. Else MLflow gets only the campaign's own run, and
    all models are copies of the first, which is quicker.
    """
    folder, started = Path(job["folder"]), time.time()
    config = config_of(folder)
    work = prepare(config, print)
    tracker = (Timed if job["tracked"] else Untracked)(
        config.tracking_uri, config.campaign, work.store, mode=config.mlflow_artifacts
    )
    cpu = time.process_time()
    with Ledger(work.store, config.campaign) as ledger:
        request = PlanRequest(
            entries=work.entries,
            facts=facts_here(work.entries, work.classes, print),
            nodes=[detect().classes],
            policy=config.policy,
        )
        plan = make_plan(request, FinishedWork(work.store, ledger), work.digests)
        if not job["tracked"]:
            copy_first(plan, work.store, ledger)
            cpu = time.process_time()
            plan = make_plan(request, FinishedWork(work.store, ledger), work.digests)
        campaign = Campaign(
            config=config,
            plan=plan,
            executor=Idle(plan, work.store) if job["tracked"] else None,
            store=work.store,
            ledger=ledger,
            tracker=tracker,
            display=Meter(),
        )
        report = campaign.run((), Continued(ledger, started), started)
    if report.exit_code:
        raise RuntimeError(f"exit code {report.exit_code}: {report.infrastructure}")
    later = tracker.cpu_s[WARM:]
    return {
        "items": len(report.outcomes),
        "cpu_s": time.process_time() - cpu,
        "peak_mb": peak_mb(),
        "tracker_ms": 1e3 * sum(later) / (len(later) or 1),
    }


def idle_build(request: BuildRequest) -> tuple[BuildResult, ...]:
    """Builds that only create their folders."""
    for key in request.builds.values():
        workplace(request.store).folder("candidates", key).mkdir(parents=True, exist_ok=True)
    return tuple(BuildResult(key=key, recipe=recipe) for recipe, key in request.builds.items())


def idle_judge(request: JudgeRequest) -> tuple[JudgeResult, ...]:
    """Judges that return the template as the model's artifact."""
    requests = (request, request.beside) if request.beside else (request,)
    return tuple(map(_idle_judge, requests))


def _idle_judge(request: JudgeRequest) -> JudgeResult:
    template = Artifact.read(Path(request.store) / WORK / TEMPLATE)
    result = JudgeResult(
        verdict="published",
        reason="not judged",
        has_artifact=True,
        recipe=next(iter(request.builds)),
        figures=Measured(
            drift=MeasuredDrift(error_ratio=1.0, max_abs_err=1e-6, sqnr_db=120.0, margin=3.0),
            latency_ms=MeasuredLatency(eager_p50=1.0, p50=0.5, p90=None, p99=None),
            speedup=2.0,
            speedup_ci=(1.9, 2.1),
        ),
    )
    done = workplace(request.store).folder("judged", judged_name(request.key, request.entry.name))
    staging = done.with_name(f".{request.key}-{os.getpid()}")
    for item in template.manifest.contents:
        link_or_copy(template.folder / item.path, staging / "artifact" / item.path)
    manifest = replace(
        template.manifest, model=request.entry.name, device_class=request.device_class
    )
    (staging / "artifact" / MANIFEST).write_bytes(manifest.to_bytes())
    (staging / "result.json").write_text(json.dumps(flat_json(result)))
    staging.replace(done)
    return result


def peak_mb() -> float:
    """The peak resident memory of this process in 1e6 bytes; unlike getrusage's, without that of
    the process that forked it.
    """
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024 / 1e6


JOBS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "model": model_job,
    "template": template_job,
    "plan": plan_job,
    "drive": drive_job,
    "idle": idle_job,
    "builds": builds_job,
}
