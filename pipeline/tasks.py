"""Tasks: what runs on a worker. Each runs its heavy half in an isolated child, and leaves its results in the store.

    probe    what a class's workers build with
    build    one recipe, one model, one class     -> STORE/.coldpress/candidates/<build_key>/
    judge    all candidates of one model and class -> STORE/.coldpress/judged/<judge_key>-<model>/

A result is moved to its name in one step, so a task that is started again finds it whole or not at all. Nothing here imports ray,
and torch only in the children.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freezer.device_class import device_class
from freezer.durable import make_folder, write_whole
from freezer.errors import IntegrityError
from freezer.freezing_record import size_bytes, strides_equal, tried_json
from freezer.limits import Limits, SamplingPolicy
from freezer.store import WORK
from freezer.toolchain import toolchain_with
from pipeline.alone import come_first
from pipeline.candidate_digests import damage_of, note_digests
from pipeline.ending import End
from pipeline.entry import Entry
from pipeline.isolate import PROBE, Memory, run_isolated
from pipeline.known_torch import keep_versions, known_versions
from pipeline.machine import machine_bytes
from pipeline.outcome import CandidateReport, pair
from pipeline.policy import decide
from pipeline.shipping import arrived
from pipeline.staging import own_path, remove_tree, staging_folder
from pipeline.workplace import Workplace, workplace

if TYPE_CHECKING:
    from freezer.judge import Judgement, Trial
    from freezer.migration import Migration
    from freezer.subject import Subject
    from freezer.target import Target

DRIFT = "CP-DRIFT"
"""The code of a rejected outcome."""

MAX_LISTED_IN_LEDGER = 10
"""Names in each list of a report that the ledger keeps; the manifest keeps more."""

WALL_TIME = "wall_s"
"""A file in a candidate's folder: how long its task took, in seconds."""

PROBE_TIMEOUT_S = 120.0
REMOVED: Mapping[str, Any] = {
    "kind": "error",
    "failure": "error",
    "code": "CP-ERROR",
    "message": "what was made is gone from its staging folder: the model's code, or somebody else, removed it meanwhile",
}
MEMORY_SHARE = 0.8
"""Share of the machine's memory that one item may use when its entry sets no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFacts:
    """What the workers of a class build and judge with.

    Attributes:
        memory_bytes: what one item may use there when its entry sets no limit; None if nobody has looked.
    """

    num_threads: int
    toolchain: Mapping[str, Any]
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """One build."""

    key: str
    entry: Entry
    recipe: str
    device_class: str
    num_threads: int
    store: str
    further_threads: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildResult:
    """What became of a build; `failure` is None when there is a candidate in the store.

    Attributes:
        cached: it was there already.
        failure, code, message, log_tail: of a build that failed; see isolate.End.
        wall_s: of this task's child.
        peak_bytes: of the child and its compilers.
        tried_bytes: of a failure of memory, as much as was not enough.
    """

    key: str
    recipe: str
    cached: bool = False
    failure: str | None = None
    code: str | None = None
    message: str = ""
    log_tail: str = ""
    wall_s: float = 0.0
    peak_bytes: int = 0
    tried_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRequest:
    """One judge: of the candidates that `builds` names by recipe; `failures` says of the other recipes why there is none."""

    key: str
    entry: Entry
    builds: Mapping[str, str]
    device_class: str
    num_threads: int
    policy: SamplingPolicy
    campaign: str
    store: str
    failures: Mapping[str, str] = field(default_factory=dict)
    further_threads: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeResult:
    """What a judge found.

    Attributes:
        verdict, reason: of the judgement; `failed` when there is none.
        has_artifact: whether an artifact folder lies in the store, to be published.
        recipe, speedup, speedup_ci, drift, latency_ms, task_metric: as in Outcome.
        candidates: one for each that was judged.
        peak_bytes: of the judge's child.
        tried_bytes: of a failure of memory, as much as was not enough.
    """

    key: str
    verdict: str
    reason: str
    has_artifact: bool = False
    recipe: str | None = None
    failure: str | None = None
    code: str | None = None
    log_tail: str = ""
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    drift: Mapping[str, float | None] | None = None
    latency_ms: Mapping[str, float | None] | None = None
    task_metric: Mapping[str, float] | None = None
    candidates: tuple[CandidateReport, ...] = ()
    host: Mapping[str, Any] | None = None
    judge_s: float = 0.0
    peak_bytes: int = 0
    tried_bytes: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JudgeResult:
        """The result that `asdict` took apart, also after a pass through JSON text."""
        candidates = tuple(CandidateReport.from_json(item) for item in data["candidates"])
        return cls(**{**data, "speedup_ci": pair(data["speedup_ci"]), "candidates": candidates})


def candidate_folder(store: str, key: str) -> Path:
    """Where a build's candidate lies."""
    return Path(store) / WORK / "candidates" / key


def build_wall_s(store: str, key: str) -> float:
    """The wall time of a build whose driver died before it could keep that in the ledger; 0 where it is not known."""
    try:
        return float(workplace(store).read("candidates", key, WALL_TIME) or 0.0)
    except (OSError, ValueError):
        return 0.0


def judged_name(key: str, model: str, missing: Collection[str] = ()) -> str:
    """The name of the folder of a judge's result.

    Args:
        key: of the judge.
        model: models that are the same but for their names share a key, and each has an artifact.
        missing: recipes of the key that were not built. They may be another time, or in another campaign: that is another result.
    """
    without = hashlib.sha256(" ".join(sorted(missing)).encode()).hexdigest()[:16]
    return f"{key}-{model}~{without}" if missing else f"{key}-{model}"


def judged_folder(store: str, key: str, model: str, missing: Collection[str] = ()) -> Path:
    """Where a judge's result and artifact lie until they are published; see `judged_name`."""
    return Path(store) / WORK / "judged" / judged_name(key, model, missing)


def log_path(store: str, key: str) -> Path:
    """Where the whole log of a build or judge lies."""
    return Path(store) / WORK / "logs" / f"{key}.log"


def probe(name: str, num_threads: int) -> ClassFacts:
    """What this worker builds with: as far as torch must be asked, from a child under the worker's own limits.

    Args:
        name: of the device class; one for GPUs has the driver's and the GPU's names too.
        num_threads: that the worker gives out.

    Raises:
        RuntimeError: torch cannot be imported there.
    """
    on_gpu = device_class(name).kind == "cuda"
    memory = _memory(Limits(), cuda=on_gpu)
    known = None if on_gpu else known_versions()
    if known is not None:
        return ClassFacts(num_threads=num_threads, toolchain=toolchain_with(known), memory_bytes=memory.limit_bytes)
    with tempfile.TemporaryDirectory(prefix=PROBE) as folder:
        work = Path(folder)
        end = run_isolated(_probe_child, (name,), folder=work, log=work / "log", timeout_s=PROBE_TIMEOUT_S, memory=memory)
    if end.kind != "ok":
        raise RuntimeError(f"the worker cannot be probed: {end.message}\n{end.log_tail}")
    if not on_gpu:
        keep_versions({part: end.value[part] for part in ("torch", "onednn", "cuda")})
    return ClassFacts(num_threads=num_threads, toolchain=end.value, memory_bytes=memory.limit_bytes)


def _probe_child(name: str) -> Mapping[str, Any]:
    from freezer.target import target_here, toolchain

    return toolchain(target_here(name, 1).device) if device_class(name).kind == "cuda" else toolchain()


def build(request: BuildRequest) -> BuildResult:
    """Build a candidate, unless the store has it."""
    place = workplace(request.store)
    if place.has("candidates", request.key):
        return BuildResult(key=request.key, recipe=request.recipe, cached=True)
    with staging_folder(str(place.root)) as staging:
        end = _isolated(_build_child, replace(request, entry=arrived(request.entry, place)), staging)
        if end.kind == "ok":
            with contextlib.suppress(FileNotFoundError):
                write_whole(staging / "candidate" / WALL_TIME, str(end.wall_s).encode())
                if place.remote is None:  # what goes through a bucket has the digests of its marker
                    note_digests(staging / "candidate")
            if not place.keep(staging / "candidate", "candidates", request.key):
                end = replace(end, **REMOVED)
        return BuildResult(
            key=request.key,
            recipe=request.recipe,
            failure=end.failure,
            code=end.code,
            message=end.message,
            log_tail=end.log_tail,
            wall_s=end.wall_s,
            peak_bytes=end.peak_bytes,
            tried_bytes=end.tried_bytes,
        )


def _build_child(request: BuildRequest, staging: Path) -> None:
    from freezer.build import build as build_candidate
    from freezer.freeing import is_large
    from freezer.memory import own_process
    from freezer.recipes import RECIPES
    from freezer.target import target_here

    own_process()
    target = target_here(request.device_class, (request.num_threads, *request.further_threads))
    folder = staging / "candidate"
    folder.mkdir()
    subject = load_subject(request.entry, target)
    recipe = RECIPES[request.recipe]
    # This process ends with the build. Inductor needs the memory of a large model; the others rather another way after a failure.
    discard = is_large(subject.model) and all(lowering == "inductor" for _, lowering in recipe.ways)
    build_candidate(subject, recipe, target, folder, discard=discard)


def judge(request: JudgeRequest) -> JudgeResult:
    """Judge the candidates, unless the store has the result of an undisturbed judge of the same ones."""
    place, name = workplace(request.store), judged_name(request.key, request.entry.name, request.failures)
    done = _judged(place, name)
    if done is not None:
        return done
    with staging_folder(str(place.root)) as staging:
        damage = _bring_candidates(place, request, staging)
        if damage is not None:
            return _failed_judge(request, End(kind="disk", failure="disk", code=IntegrityError.code, message=damage))
        end = _isolated(_judge_child, replace(request, entry=arrived(request.entry, place)), staging)
        result = _failed_judge(request, end)
        if end.kind == "ok":
            result = replace(end.value, judge_s=end.wall_s, peak_bytes=end.peak_bytes)
        # Kept until it is published: a driver may die before all classes of a model are judged.
        is_final = decide(result.failure, result.code).kept == "key" if result.failure else result.verdict != "unstable"
        if is_final:
            with contextlib.suppress(FileNotFoundError):
                if not result.has_artifact:
                    remove_tree(staging / "judged")
                    make_folder(staging / "judged")
                write_whole(staging / "judged" / "result.json", json.dumps(asdict(result)).encode())
            if not place.keep(staging / "judged", "judged", name):
                return _failed_judge(request, replace(end, **REMOVED))
            return _judged(place, name) or result  # another campaign's, which was faster: that artifact is published
        return result


def _judged(place: Workplace, name: str) -> JudgeResult | None:
    """A result that lies in the store."""
    done = place.read("judged", name, "result.json")
    return None if done is None else JudgeResult.from_json(json.loads(done))


def _bring_candidates(place: Workplace, request: JudgeRequest, staging: Path) -> str | None:
    """Have the candidates of a judge on this machine.

    Returns:
        What is wrong with one, if anything is: it is gone, or not what was built. It is removed, so that it is built again.
    """
    for recipe, key in request.builds.items():
        folder = _candidate_here(request, staging, key, brought=place.remote is not None)
        try:
            damage = damage_of(folder) if place.bring("candidates", key, folder) else f"the candidate of {recipe} is gone"
        except IntegrityError as error:
            damage = str(error)
        if damage is not None:
            place.drop("candidates", key)
            return f"{damage}, which the store's disk did, or somebody"
    return None


def _candidate_here(request: JudgeRequest, staging: Path, key: str, *, brought: bool) -> Path:
    """Where a judge finds a candidate: in the store's folder, or in its own where the store is in a bucket."""
    return staging / "candidates" / key if brought else candidate_folder(request.store, key)


def _failed_judge(request: JudgeRequest, end: End) -> JudgeResult:
    return JudgeResult(
        key=request.key,
        verdict="failed",
        reason=end.message,
        failure=end.failure,
        code=end.code,
        log_tail=end.log_tail,
        judge_s=end.wall_s,
        peak_bytes=end.peak_bytes,
        tried_bytes=end.tried_bytes,
    )


def _judge_child(request: JudgeRequest, staging: Path) -> JudgeResult:
    from freezer.assemble import assemble
    from freezer.build import Candidate
    from freezer.judge import judge as judge_candidates
    from freezer.kept_eager import VERDICT, keep_eager, serves_itself
    from freezer.python_modules import find_function
    from freezer.sources import weights_digest
    from freezer.target import host_fingerprint, target_here

    come_first()
    entry, target = request.entry, target_here(request.device_class, (request.num_threads, *request.further_threads))
    subject = load_subject(entry, target)
    brought = (staging / "candidates").is_dir()
    folders = [_candidate_here(request, staging, key, brought=brought) for key in request.builds.values()]
    candidates = [Candidate.read(folder) for folder in folders]
    metric = find_function(entry.task_metric, entry.search_path) if entry.task_metric else None
    judgement = judge_candidates(subject, candidates, target, limits=entry.limits, policy=request.policy, task_metric=metric)
    provenance = {"source": str(entry.source), "campaign": request.campaign, "weights": weights_digest(subject.model)}
    settings: dict[str, Any] = {"limits": entry.limits, "policy": request.policy, "failures": request.failures}
    settings["provenance"] = provenance
    folder, has_artifact = staging / "judged" / "artifact", judgement.winner is not None
    if has_artifact:
        assemble(subject, judgement, target, dest=folder, **settings)
    elif judgement.verdict == VERDICT and serves_itself(target):
        artifact, served = keep_eager(subject, target, work=staging, out=folder, **settings)
        judgement, has_artifact = replace(judgement, reason=f"{judgement.reason}; {served}"), artifact is not None
    return replace(_summary(request, judgement, host_fingerprint(target.device)), has_artifact=has_artifact)


def load_subject(entry: Entry, target: Target | None = None) -> Subject:
    """The subject of an entry, on the device of a target if one is given; see `freezer.freeze.load_subject`."""
    from freezer.freeze import load_subject as load

    samples = Path(entry.samples) if entry.samples else None
    return load(
        entry.source,
        name=entry.name,
        spec=entry.spec,
        samples=samples,
        fill_up=entry.fill_up,
        preserve=entry.preserve,
        reset=entry.reset,
        points=entry.points,
        **({"device": target.device} if target else {}),
    )


def _summary(request: JudgeRequest, judgement: Judgement, host: Mapping[str, Any]) -> JudgeResult:
    """A judgement as the ledger keeps it."""
    best = judgement.best
    eager = judgement.eager_latency_ms
    metric = None
    if judgement.task_metric is not None:
        metric = {"eager": judgement.task_metric}
        if best is not None and best.task_metric is not None:
            metric[best.candidate.recipe] = best.task_metric
    return JudgeResult(
        key=request.key,
        verdict=judgement.verdict,
        reason=judgement.reason,
        code=DRIFT if judgement.verdict == "rejected" else None,
        recipe=best.candidate.recipe if best else None,
        speedup=best.speedup.value if best and best.speedup else None,
        speedup_ci=(best.speedup.low, best.speedup.high) if best and best.speedup else None,
        drift=best.drift.summary() if best and best.drift else None,
        latency_ms={"eager_p50": eager["p50"], **best.latency_ms} if eager and best and best.latency_ms else None,
        task_metric=metric,
        candidates=tuple(_report(trial, request.builds[trial.candidate.recipe], judgement.migration) for trial in judgement.trials),
        host=host,
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
        tried=tuple(tried_json(candidate.tried)),
        build_s=candidate.build_s,
        size_bytes=size_bytes(trial),
        num_payloads=len(candidate.payloads),
        drift=trial.drift.summary() if trial.drift else None,
        latency_ms=trial.latency_ms,
        speedup=trial.speedup.value if trial.speedup else None,
        speedup_ci=(trial.speedup.low, trial.speedup.high) if trial.speedup else None,
        task_metric=trial.task_metric,
        points=tuple(figures.to_json() for figures in trial.points),
        warnings=candidate.warnings,
        strides_equal=strides_equal(trial),
        reports={path: report.to_json(max_listed=MAX_LISTED_IN_LEDGER) for path, report in candidate.reports.items()},
        migration=migration.to_json() if migration and converted else None,
    )


def _isolated(child: Any, request: BuildRequest | JudgeRequest, staging: Path) -> End:
    place = workplace(request.store)
    log = own_path(place.root / WORK, f"{request.key}.log")  # another may be at the same work at the same time
    limits = request.entry.limits
    memory = _memory(limits, cuda=device_class(request.device_class).kind == "cuda")
    end = run_isolated(child, (request, staging), folder=staging, log=log, timeout_s=limits.timeout_s, memory=memory)
    place.keep_log(log, log_path(str(place.root), request.key))
    return end


def _memory(limits: Limits, *, cuda: bool = False) -> Memory:
    asked = limits.memory_gb is not None
    limit_bytes = int(limits.memory_gb * 1e9) if limits.memory_gb is not None else int(machine_bytes() * MEMORY_SHARE)
    return Memory(limit_bytes=limit_bytes, asked=asked, bounds_requests=not cuda)
