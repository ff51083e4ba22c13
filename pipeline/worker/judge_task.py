"""The task that judges all candidates of one model and class ->
STORE/.coldpress/judged/<judge_key>-<model>/

A result is moved to its name atomically, so a repeated task finds it whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from freezer.errors import IntegrityError
from freezer.files import make_folder, write_whole
from freezer.store import WORK
from pipeline.failures import decide
from pipeline.records import Failure, flat_json
from pipeline.sources import arrived
from pipeline.worker.child import End
from pipeline.worker.judge_summary import summary
from pipeline.worker.previous import OPENED, bring_previous, open_previous
from pipeline.worker.requests import JudgeRequest, JudgeResult
from pipeline.worker.task_child import LOG, in_child, load_subject
from pipeline.workspace import (
    Workplace,
    damage_of,
    judged_name,
    log_path,
    remove_tree,
    staging_folder,
    workplace,
)

NICENESS = (-10, 0)
"""Nice values to try, in order: before all other processes if that is allowed, else no worse than
they are.
"""

FURTHER = "further"
"""Folder of a judge's staging with payloads for further thread counts, for slow sizes, and of the
fallback. It exists once the verdict is known; if the process dies from then on, the model is judged
again without them."""


def judge(request: JudgeRequest) -> JudgeResult:
    """Judge the candidates, unless the store contains an undisturbed judge's result for the same
    ones.
    """
    place, name = (
        workplace(request.store),
        judged_name(request.key, request.entry.name, request.failures),
    )
    done = _judged(place, name)
    if (
        done is not None
        and done.verdict == "kept-previous"
        and request.entry.limits.allow_regression
    ):
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
            return JudgeResult.of_failure(
                request.key, Failure(kind="disk", code=IntegrityError.code, message=damage)
            )
        end = _judged_by_child(
            replace(request, entry=arrived(request.entry, place)), staging, list(folders.values())
        )
        place.keep_log(staging / LOG, log_path(str(place.root), request.key))
        if end.failure is None:
            result: JudgeResult = replace(end.value, judge_s=end.wall_s, peak_bytes=end.peak_bytes)
            is_final = result.verdict != "unstable"
        else:
            result = JudgeResult.of_failure(
                request.key, end.failure, judge_s=end.wall_s, peak_bytes=end.peak_bytes
            )
            is_final = decide(end.failure.kind, end.failure.code).kept == "key"
        if not is_final:
            return result
        # Kept until it is published: a driver may die before all classes of a model are judged.
        if not result.has_artifact:
            remove_tree(staging / "judged")
            make_folder(staging / "judged")
        write_whole(staging / "judged" / "result.json", json.dumps(flat_json(result)).encode())
        place.keep(staging / "judged", "judged", name)
        return (
            _judged(place, name) or result
        )  # another campaign may have been faster: its artifact is published


def _judged_by_child(request: JudgeRequest, staging: Path, folders: Sequence[Path]) -> End:
    """Judge in a child; again without the previous artifact or what follows the verdict if the
    child dies of them.
    """
    digest, problem = bring_previous(request, staging)
    request = replace(request, previous=digest)
    lost = [f"not compared with the artifact that serves now: {problem}"] if problem else []
    end = in_child(_judge_child, request, staging, folders)
    died = end.failure is not None and end.failure.kind in (
        "crash",
        "memory",
    )  # after a timeout, the previous artifact serves on
    if (
        end.failure is not None
        and died
        and (staging / OPENED).exists()
        and not (staging / FURTHER).exists()
    ):
        lost.append(f"not compared with the artifact that serves now: {end.failure.message}")
        request = replace(request, previous=None)
        end = in_child(_judge_child, request, staging, folders)
    if end.failure is not None and (staging / FURTHER).exists():
        counts = ", ".join(map(str, request.further_threads))
        what = f"not frozen for threads {counts}" if counts else "no further payloads were tried"
        lost.append(f"{what}: {end.failure.message}")
        end = in_child(_judge_child, replace(request, further_threads=()), staging, folders)
    if lost and end.failure is None:
        end = replace(end, value=replace(end.value, reason="; ".join([end.value.reason, *lost])))
    return end


def _judged(place: Workplace, name: str) -> JudgeResult | None:
    """Return a result in the store, if there is one."""
    done = place.read("judged", name, "result.json")
    return None if done is None else JudgeResult.from_json(json.loads(done))


def _bring_candidates(
    place: Workplace, request: JudgeRequest, folders: Mapping[str, Path]
) -> str | None:
    """Fetch the candidates of a judge to this machine.

    Returns:
        How a candidate is damaged, or None. A damaged one is removed, so that it is built again.
    """
    for recipe, folder in folders.items():
        key = request.builds[recipe]
        try:
            damage = (
                damage_of(folder)
                if place.bring("candidates", key, folder)
                else f"the candidate of {recipe} is missing"
            )
        except IntegrityError as error:
            damage = str(error)
        if damage is not None:
            place.drop("candidates", key)
            return f"{damage}; the store's disk is faulty, or somebody changed it"
    return None


def _judge_child(request: JudgeRequest, staging: Path, folders: Sequence[Path]) -> JudgeResult:
    from freezer.freezing.candidates import Candidate
    from freezer.freezing.freeze import keep_eager
    from freezer.freezing.judging import judge as judge_candidates
    from freezer.freezing.models import weights_digest
    from freezer.freezing.packaging import assemble
    from freezer.freezing.payload_sets import with_other_payloads
    from freezer.freezing.sources import find_function
    from freezer.freezing.target import target_here
    from freezer.runtime.devices import host_fingerprint

    come_first()
    entry, target = (
        request.entry,
        target_here(request.device_class, (request.num_threads, *request.further_threads)),
    )
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
    provenance = {
        "source": str(entry.source),
        "campaign": request.campaign,
        "weights": weights_digest(subject.model),
    }
    folder, has_artifact = staging / "judged" / "artifact", judgement.winner is not None
    if has_artifact:
        assemble(
            subject,
            judgement,
            target,
            dest=folder,
            provenance=provenance,
            failures=request.failures,
        )
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
        judgement, has_artifact = (
            replace(judgement, reason=f"{judgement.reason}; {served}"),
            artifact is not None,
        )
    return replace(
        summary(request, judgement, host_fingerprint(target.device)), has_artifact=has_artifact
    )


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
