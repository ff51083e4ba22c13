"""The tasks that run on a worker. Each runs its heavy half in a child, and writes its result into the store.

    probe    which toolchain and limits the worker builds with
    build    one recipe, one model, one class      -> STORE/.coldpress/candidates/<build_key>/
    judge    all candidates of one model and class -> STORE/.coldpress/judged/<judge_key>-<model>/

A result is moved to its name atomically, so a repeated task finds it whole or not at all. Nothing here imports ray; only children
import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freezer.codec import encode
from freezer.errors import FreezeError, IntegrityError
from freezer.files.atomic import make_folder, write_whole
from freezer.hardware.cgroups import machine_bytes
from freezer.hardware.device_classes import device_class
from freezer.limits import Limits
from freezer.store.store import WORK
from pipeline.catalog.entry import Entry
from pipeline.failures.classify import classify
from pipeline.failures.policy import decide
from pipeline.records.class_facts import ClassFacts
from pipeline.records.outcome import SKIPPED, UNMEASURED, CandidateReport, Failure, Figures, flat_json
from pipeline.sources.transfer import arrived
from pipeline.worker.child import End
from pipeline.worker.previous import OPENED, bring_previous, open_previous
from pipeline.worker.requests import BuildRequest, BuildResult, JudgeRequest, JudgeResult
from pipeline.worker.sandbox import log_tail, run_isolated
from pipeline.worker.supervisor import Bounds
from pipeline.workspace.staging import remove_tree, staging_folder
from pipeline.workspace.workspace import (
    WALL_TIME,
    Workplace,
    damage_of,
    judged_name,
    log_path,
    note_digests,
    workplace,
)

if TYPE_CHECKING:
    from freezer.artifact.sections import Migration
    from freezer.freezing.models.subject import Subject
    from freezer.freezing.target.target import Target
    from freezer.freezing.validation.judge import Judgement
    from freezer.freezing.validation.trials import Trial

NICENESS = (-10, 0)
"""Nice values to try, in order: before all other processes if that is allowed, else no worse than they are."""

PROBE_TIMEOUT_S = 120.0

MEMORY_SHARE = 0.8
"""Share of the machine's memory that one item may use if its entry sets no limit."""

_PROBE = "import sys, json; from pipeline.worker.tasks import toolchain_of; print(json.dumps(toolchain_of(sys.argv[1])))"

FURTHER = "further"
"""Folder of a judge's staging with payloads for further thread counts, for slow sizes, and of the fallback. It exists once the
verdict is known; if the process dies from then on, the model is judged again without them."""

ARCHITECTURE = "architecture"
"""File of a build's staging with the digest of the model's architecture, which a failed build has too."""

LOG = "child.log"
"""File of a staging folder with the output of its child."""

MAX_LISTED_IN_LEDGER = 10
"""Length of each list of a report in the ledger; the manifest has longer ones."""


def probe(name: str, num_threads: int) -> ClassFacts:
    """Return what this worker builds with.

    Args:
        name: device class; a GPU class adds the names of the driver and the GPU.
        num_threads: number of threads that the worker gives to items.

    Raises:
        RuntimeError: torch cannot be imported there.
    """
    command = [sys.executable, "-c", _PROBE, name]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # Ray extends the path of its workers alone
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the worker cannot be probed (exit code {done.returncode})\n{done.stderr[-4000:]}")
    memory_bytes = _bounds(Limits(), name).memory_bytes
    return ClassFacts(num_threads=num_threads, toolchain=json.loads(done.stdout.splitlines()[-1]), memory_bytes=memory_bytes)


def toolchain_of(name: str) -> dict[str, Any]:
    """Return the toolchain of a device class on this machine. Imports torch."""
    from freezer.freezing.target.target import target_here, toolchain

    return toolchain(target_here(name, 1).device) if device_class(name).kind == "cuda" else toolchain()


def build(request: BuildRequest) -> tuple[BuildResult, ...]:
    """Build the candidates that the store does not contain yet.

    One child loads the model and builds one after the other. When it dies, or the model is large, a new one builds the rest.
    """
    place, spent_s = workplace(request.store), request.spent_s
    done = {
        recipe: BuildResult(key=key, recipe=recipe, cached=True)
        for recipe, key in request.builds.items()
        if place.has("candidates", key)
    }
    entry = request.entry if len(done) == len(request.builds) else arrived(request.entry, place)
    while left := {recipe: key for recipe, key in request.builds.items() if recipe not in done}:
        found = _build_in_one_child(replace(request, builds=left, entry=entry, spent_s=spent_s), place)
        done |= {result.recipe: result for result in found}
        spent_s += sum(result.wall_s for result in found)
    return tuple(done[recipe] for recipe in request.builds)


def _build_in_one_child(request: BuildRequest, place: Workplace) -> list[BuildResult]:
    """Return what a child built, and whose failure ended it: the first recipe's, or every recipe's if the model did not load.

    Another recipe may suffer from those before it. It has no result, and is built again in a new child, unless its time was up.
    """
    with staging_folder(str(place.root)) as staging:
        end = _isolated(_build_child, request, staging)
        results, log_bytes = list[BuildResult](), 0
        for result, log_end in end.parts:
            tail = _keep_part_of_log(place, result.key, staging, log_bytes, log_end)
            failure = replace(result.failure, log_tail=tail) if result.failure else None
            results.append(replace(result, failure=failure, peak_bytes=end.peak_bytes))
            log_bytes = log_end
        if end.failure is None:
            return results
        known, left = staging / ARCHITECTURE, list(request.builds.items())[len(results) :]
        if known.exists():
            left = left[:1] if not results or end.failure.kind == "timeout" else []
        wall_s = end.wall_s - sum(result.wall_s for result in results)
        for recipe, key in left:
            _keep_part_of_log(place, key, staging, log_bytes, None)
            results.append(
                BuildResult(
                    key=key,
                    recipe=recipe,
                    failure=end.failure,
                    wall_s=wall_s,
                    peak_bytes=end.peak_bytes,
                    architecture=known.read_text() if known.exists() else "",
                )
            )
            wall_s = 0.0
        return results


def _keep_part_of_log(place: Workplace, key: str, staging: Path, start: int, end: int | None) -> str:
    """Store a part of a child's output as the log of a build, and return its last lines."""
    part = staging / "part.log"
    with contextlib.suppress(OSError):
        part.write_bytes((staging / LOG).read_bytes()[start:end])
    tail = log_tail(part)
    place.keep_log(part, log_path(str(place.root), key))
    return tail


def _build_child(request: BuildRequest, staging: Path) -> Iterator[tuple[BuildResult, int]]:
    """Build and store one candidate after the other. Yield each result, and the number of bytes printed until then."""
    from freezer.freezing.candidates.architecture import architecture_digest
    from freezer.freezing.candidates.build import build as build_candidate
    from freezer.freezing.capture.capture import Attempt
    from freezer.freezing.models.weights import is_large, let_go
    from freezer.freezing.recipes.recipes import RECIPES
    from freezer.freezing.target.target import target_here
    from freezer.hardware.peak_memory import own_process

    started, spent_s = time.monotonic(), request.spent_s
    own_process()
    place, target = workplace(request.store), target_here(request.device_class, request.num_threads)
    subject = load_subject(request.entry, target)
    architecture = architecture_digest(subject, target)
    write_whole(staging / ARCHITECTURE, architecture.encode())
    large = is_large(subject.model)
    attempts = None if large else dict[str, Attempt]()
    for name, key in request.builds.items():
        if spent_s and (why := request.entry.limits.over_build_s(spent_s)):
            yield BuildResult(key=key, recipe=name, failure=Failure(kind=SKIPPED, message=f"{SKIPPED}: {why}")), _printed_bytes()
            continue
        recipe, folder, failure = RECIPES[name], staging / name, None
        folder.mkdir()
        # Inductor needs the memory of a large model, which this process does not use afterwards. Recipes with other ways keep it.
        discard = large and all(lowering == "inductor" for _, lowering in recipe.ways)
        try:
            build_candidate(subject, recipe, target, folder, discard=discard, attempts=attempts)
        except FreezeError as error:
            failure = classify(error)
            if failure.kind != error.kind:
                raise  # of the circumstances, such as memory: a new process may succeed
            traceback.print_exception(error)
            let_go(error)
        wall_s = time.monotonic() - started
        if failure is None:
            write_whole(folder / WALL_TIME, str(wall_s).encode())
            if place.remote is None:  # a bucket's marker has its own digests
                note_digests(folder)
            place.keep(folder, "candidates", key)
        yield BuildResult(key=key, recipe=name, failure=failure, wall_s=wall_s, architecture=architecture), _printed_bytes()
        if large:
            return
        started, spent_s = time.monotonic(), spent_s + wall_s


def _printed_bytes() -> int:
    """In a child: size of its output until now."""
    with contextlib.suppress(OSError, ValueError):  # the user's code may have closed it
        sys.stdout.flush()
        return os.fstat(1).st_size
    return 0


def judge(request: JudgeRequest) -> JudgeResult:
    """Judge the candidates, unless the store contains an undisturbed judge's result for the same ones."""
    place, name = workplace(request.store), judged_name(request.key, request.entry.name, request.failures)
    done = _judged(place, name)
    if done is not None and done.verdict == "kept-previous" and request.entry.limits.allow_regression:
        place.drop("judged", name)
        done = None
    if done is not None:
        return done
    with staging_folder(str(place.root)) as staging:
        # A store in a folder holds the candidates itself; those of a bucket are brought here.
        work = staging if place.remote is not None else place.root / WORK
        folders = {recipe: work / "candidates" / key for recipe, key in request.builds.items()}
        damage = _bring_candidates(place, request, folders)
        if damage is not None:
            return JudgeResult.of_failure(request.key, Failure(kind="disk", code=IntegrityError.code, message=damage))
        end = _judged_by_child(replace(request, entry=arrived(request.entry, place)), staging, list(folders.values()))
        place.keep_log(staging / LOG, log_path(str(place.root), request.key))
        if end.failure is None:
            result: JudgeResult = replace(end.value, judge_s=end.wall_s, peak_bytes=end.peak_bytes)
            is_final = result.verdict != "unstable"
        else:
            result = JudgeResult.of_failure(request.key, end.failure, judge_s=end.wall_s, peak_bytes=end.peak_bytes)
            is_final = decide(end.failure.kind, end.failure.code).kept == "key"
        if not is_final:
            return result
        # Kept until it is published: a driver may die before all classes of a model are judged.
        if not result.has_artifact:
            remove_tree(staging / "judged")
            make_folder(staging / "judged")
        write_whole(staging / "judged" / "result.json", json.dumps(flat_json(result)).encode())
        place.keep(staging / "judged", "judged", name)
        return _judged(place, name) or result  # another campaign may have been faster: its artifact is published


def _judged_by_child(request: JudgeRequest, staging: Path, folders: Sequence[Path]) -> End:
    """Judge in a child; again without the previous artifact or what follows the verdict if the child dies of them."""
    digest, problem = bring_previous(request, staging)
    request = replace(request, previous=digest)
    lost = [f"not compared with the artifact that serves now: {problem}"] if problem else []
    end = _isolated(_judge_child, request, staging, folders)
    if end.failure is not None and (staging / OPENED).exists() and not (staging / FURTHER).exists():
        lost.append(f"not compared with the artifact that serves now: {end.failure.message}")
        request = replace(request, previous=None)
        end = _isolated(_judge_child, request, staging, folders)
    if end.failure is not None and (staging / FURTHER).exists():
        counts = ", ".join(map(str, request.further_threads))
        what = f"not frozen for threads {counts}" if counts else "no further payloads were tried"
        lost.append(f"{what}: {end.failure.message}")
        end = _isolated(_judge_child, replace(request, further_threads=()), staging, folders)
    if lost and end.failure is None:
        end = replace(end, value=replace(end.value, reason="; ".join([end.value.reason, *lost])))
    return end


def _judged(place: Workplace, name: str) -> JudgeResult | None:
    """Return a result in the store, if there is one."""
    done = place.read("judged", name, "result.json")
    return None if done is None else JudgeResult.from_json(json.loads(done))


def _bring_candidates(place: Workplace, request: JudgeRequest, folders: Mapping[str, Path]) -> str | None:
    """Fetch the candidates of a judge to this machine.

    Returns:
        How a candidate is damaged, or None. A damaged one is removed, so that it is built again.
    """
    for recipe, folder in folders.items():
        key = request.builds[recipe]
        try:
            damage = damage_of(folder) if place.bring("candidates", key, folder) else f"the candidate of {recipe} is missing"
        except IntegrityError as error:
            damage = str(error)
        if damage is not None:
            place.drop("candidates", key)
            return f"{damage}; the store's disk is faulty, or somebody changed it"
    return None


def _judge_child(request: JudgeRequest, staging: Path, folders: Sequence[Path]) -> JudgeResult:
    from freezer.freezing.candidates.candidate import Candidate
    from freezer.freezing.freeze import keep_eager
    from freezer.freezing.models.sources import find_function
    from freezer.freezing.models.weights import weights_digest
    from freezer.freezing.packaging.assemble import assemble
    from freezer.freezing.target.target import target_here
    from freezer.freezing.validation.judge import judge as judge_candidates
    from freezer.freezing.validation.other_payloads import with_other_payloads
    from freezer.runtime.devices import host_fingerprint

    come_first()
    entry, target = request.entry, target_here(request.device_class, (request.num_threads, *request.further_threads))
    subject = load_subject(entry, target)
    candidates = [Candidate.read(folder) for folder in folders]
    metric = find_function(entry.task_metric, entry.search_path) if entry.task_metric else None
    judgement = judge_candidates(
        subject,
        candidates,
        target,
        limits=entry.limits,
        policy=request.policy,
        objective=entry.objective,
        task_metric=metric,
        incumbent=open_previous(request.previous, staging, target) if request.previous else None,
    )
    if judgement.winner is not None and not (staging / FURTHER).exists():
        (staging / FURTHER).mkdir()
        judgement = with_other_payloads(subject, judgement, target, staging / FURTHER)
    provenance = {"source": str(entry.source), "campaign": request.campaign, "weights": weights_digest(subject.model)}
    folder, has_artifact = staging / "judged" / "artifact", judgement.winner is not None
    if has_artifact:
        assemble(subject, judgement, target, dest=folder, provenance=provenance, failures=request.failures)
    elif judgement.verdict == "kept-eager" and target.device_class.kind == "cuda":
        artifact, served = keep_eager(
            subject,
            target,
            dest=folder,
            limits=entry.limits,
            policy=request.policy,
            provenance=provenance,
            failures=request.failures,
        )
        judgement, has_artifact = replace(judgement, reason=f"{judgement.reason}; {served}"), artifact is not None
    summary = _summary(request, judgement, host_fingerprint(target.device))
    return replace(summary, has_artifact=has_artifact)


def load_subject(entry: Entry, target: Target | None = None) -> Subject:
    """Return the subject of an entry, on the device of the target if given; see `freezer.freezing.freeze.load_subject`."""
    from freezer.freezing.freeze import load_subject as load
    from freezer.freezing.models.subject import SubjectOptions
    from freezer.runtime.devices import CPU

    options = SubjectOptions(
        preserve=entry.preserve,
        reset=entry.reset,
        points=entry.points,
        fill_up=entry.fill_up,
        device=target.device if target else CPU,
    )
    return load(entry.source, entry.name, entry.spec, Path(entry.samples) if entry.samples else None, options)


def _summary(request: JudgeRequest, judgement: Judgement, host: Mapping[str, Any]) -> JudgeResult:
    """Return a judgement as the ledger stores it."""
    best = judgement.best
    eager = judgement.eager_latency_ms
    latency_ms = {"eager_p50": eager["p50"], **best.latency_ms} if eager and best and best.latency_ms else None
    metric = None
    if judgement.task_metric is not None:
        metric = {"eager": judgement.task_metric}
        if best is not None and best.task_metric is not None:
            metric[best.candidate.recipe] = best.task_metric
    return JudgeResult(
        key=request.key,
        verdict=judgement.verdict,
        reason=judgement.reason,
        recipe=best.candidate.recipe if best else None,
        figures=replace(_figures(best), latency_ms=latency_ms) if best else UNMEASURED,
        clock=judgement.sampling.clock if judgement.sampling else "wall",
        task_metric=metric,
        pareto=judgement.pareto,
        candidates=tuple(_report(trial, request.builds[trial.candidate.recipe], judgement.migration) for trial in judgement.trials),
        host=host,
        previous=judgement.previous,
    )


def _report(trial: Trial, key: str, migration: Migration | None) -> CandidateReport:
    candidate = trial.candidate
    converted = migration is not None and migration.recipe == candidate.recipe
    return CandidateReport(
        recipe=candidate.recipe,
        build_key=key,
        problem=trial.problem,
        capture=candidate.capture,
        lowering=candidate.lowering,
        tried=candidate.attempts,
        build_s=candidate.build_s,
        size_bytes=candidate.size_bytes,
        num_payloads=len(candidate.payloads),
        figures=_figures(trial),
        task_metric=trial.task_metric,
        points=tuple(encode(figures) for figures in trial.points),
        warnings=candidate.warnings,
        strides_equal=trial.strides_equal,
        reports={path: encode(report) for path, report in candidate.shortened_reports(MAX_LISTED_IN_LEDGER).items()},
        migration=encode(migration) if migration and converted else None,
    )


def _figures(trial: Trial) -> Figures:
    return Figures(
        speedup=trial.speedup.value if trial.speedup else None,
        speedup_ci=(trial.speedup.low, trial.speedup.high) if trial.speedup else None,
        drift=trial.drift.summary() if trial.drift else None,
        latency_ms=trial.latency_ms,
    )


def _isolated(child: Any, request: BuildRequest | JudgeRequest, staging: Path, *args: Any) -> End:
    """Run a child in a staging folder, where its output is appended to LOG."""
    num_parts = len(request.builds) if isinstance(request, BuildRequest) else 1
    bounds = replace(_bounds(request.entry.limits, request.device_class), num_parts=num_parts)
    return run_isolated(child, (request, staging, *args), folder=staging, log=staging / LOG, bounds=bounds)


def _bounds(limits: Limits, name: str) -> Bounds:
    """Return the limits of a child: those of the entry, and by default a share of the machine's memory."""
    asked = limits.memory_gb is not None
    memory_bytes = int(limits.memory_gb * 1e9) if limits.memory_gb is not None else int(machine_bytes() * MEMORY_SHARE)
    is_cuda = device_class(name).kind == "cuda"
    return Bounds(timeout_s=limits.timeout_s, memory_bytes=memory_bytes, asked=asked, bounds_requests=not is_cuda)


def come_first() -> int:
    """Give this process and its new threads the best allowed nice value, and return it.

    Ray runs workers at 15 by default, and an unprivileged process cannot lower that.
    """
    for wanted in NICENESS:
        if os.getpriority(os.PRIO_PROCESS, 0) <= wanted:
            break
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, wanted)
            break
    return os.getpriority(os.PRIO_PROCESS, 0)
