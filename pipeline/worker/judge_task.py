"""The task that judges all candidates of one model and class ->
STORE/.coldpress/judged/<judge_key>-<model>/

A result is moved to its name atomically, so a repeated task finds it whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.artifact import Artifact
from freezer.errors import IncompatibleError, IntegrityError, NotPublishedError
from freezer.files import make_folder, write_whole
from freezer.freezing.in_hand import FURTHER, PREVIOUS, hold, take
from freezer.hardware import PORTABLE
from freezer.store import WORK, Store
from pipeline.failures import decide, retry_rank
from pipeline.records import Failure, flat_json
from pipeline.worker.child import End
from pipeline.worker.judge_summary import summary
from pipeline.worker.requests import JudgeRequest, JudgeResult
from pipeline.worker.shared_weights import load_shared
from pipeline.worker.task_child import LOG, in_child
from pipeline.workspace import (
    Workplace,
    damage_of,
    judged_name,
    log_path,
    remove_tree,
    staging_folder,
    workplace,
)

if TYPE_CHECKING:
    from freezer.freezing.judging import Incumbent
    from freezer.freezing.target import Target

NICENESS = -10
"""Nice value of a judge, if it may be set: before all other processes."""

MOST_TIMES = 2
"""How many times `limits.timeout_s` the children of a judge may have taken for another to start."""

WITHOUT = {
    PREVIOUS: "not compared with the artifact that serves now",
    FURTHER: "not frozen for further thread counts and sizes",
}
"""Words for a judge without something other than a candidate."""


def judge(request: JudgeRequest) -> JudgeResult:
    """Judge the candidates, unless the store contains an undisturbed judge's result for the same
    ones.
    """
    from pipeline.sources import download_sources  # it imports pyarrow, which children do not need

    place, entry = workplace(request.store), request.entry
    name = judged_name(request.key, entry.name, request.failures)
    stored = _stored(place, name)
    if stored is not None:
        is_final = stored.verdict != "kept-previous" or not entry.limits.allow_regression
        if is_final and stored.verdict != "unstable":
            return stored
        place.drop("judged", name)
    with staging_folder(str(place.root)) as staging:
        # A store in a folder holds the candidates itself; those of a bucket are brought here.
        work = staging if place.remote is not None else place.root / WORK
        folders = {recipe: work / "candidates" / key for recipe, key in request.builds.items()}
        damage = _bring_candidates(place, request, folders)
        if damage is not None:
            failure = Failure(kind="disk", code=IntegrityError.code, message=damage)
            return JudgeResult.of_failure(failure)
        request = replace(request, entry=download_sources(entry, place))
        end, left_out = _judge_in_children(request, staging, folders)
        place.keep_log(staging / LOG, log_path(str(place.root), request.key))
        result, is_final = _result_of(end)
        result = replace(result, left_out=left_out)
        if not is_final:
            return result
        name = judged_name(request.key, entry.name, [*request.failures, *left_out])
        # Kept until it is published: a driver may die before all classes of a model are judged.
        judged = staging / "judged"
        if not result.has_artifact:
            remove_tree(judged)
            make_folder(judged)
        write_whole(judged / "result.json", json.dumps(flat_json(result)).encode())
        place.keep(judged, "judged", name)
        # Another campaign may have been faster: its artifact is published.
        return _stored(place, name) or result


def _result_of(end: End) -> tuple[JudgeResult, bool]:
    """Return the result of a judge, and whether it is kept."""
    failure = end.failure
    if failure is None:
        result: JudgeResult = end.value
        is_final = result.verdict != "unstable" or result.has_artifact
    else:
        result = JudgeResult.of_failure(failure)
        is_final = decide(failure.kind, failure.code).kept == "key"
    return replace(result, judge_s=end.wall_s, peak_bytes=end.peak_bytes), is_final


def _judge_in_children(
    request: JudgeRequest, staging: Path, folders: Mapping[str, Path]
) -> tuple[End, Mapping[str, Failure]]:
    """Judge in a child. If it ends with something in hand, judge in another one without that.

    Returns:
        The end of the last child, with the duration of all; and the candidates that were left out,
        with the reasons. If none is left, the judge has failed.
    """
    digest, problem = bring_previous(request, staging)
    request = replace(request, previous=digest)
    notes = [f"{WITHOUT[PREVIOUS]}: {problem}"] if problem else []
    left_out: dict[str, Failure] = {}
    wall_s = 0.0
    while True:
        end = in_child(_judge_child, request, staging, folders)
        wall_s += end.wall_s
        if end.failure is None:
            reason = "; ".join([end.value.reason, *notes])
            end = replace(end, value=replace(end.value, reason=reason))
            break
        name, _, activity = end.in_hand.partition("\n")
        message = f"failed: {end.failure.kind} while {activity}: {end.failure.message}"
        failure = replace(end.failure, message=message)
        again = _without(request, name, failure)
        if again is None:
            break
        notes.append(f"{WITHOUT.get(name, f'{name} left out')}: {message}")
        if name in request.builds:
            left_out[name] = failure
            if not again.builds or wall_s > MOST_TIMES * request.entry.limits.timeout_s:
                first = min(left_out.values(), key=retry_rank)
                end = replace(end, failure=replace(first, message="; ".join(notes)))
                break
        request = again
    return replace(end, wall_s=wall_s), left_out


def _without(request: JudgeRequest, name: str, failure: Failure) -> JudgeRequest | None:
    """Return a judge without what was in hand; None if the failure is not its fault."""
    if name == FURTHER:
        return replace(request, further=False, further_threads=())
    if failure.kind in ("disk", "infrastructure"):
        return None
    if name == PREVIOUS:
        return replace(request, previous=None)
    builds = {recipe: key for recipe, key in request.builds.items() if recipe != name}
    failures = {**request.failures, name: failure.message}
    if name in request.builds:
        return replace(request, builds=builds, failures=failures)
    return None


def _stored(place: Workplace, name: str) -> JudgeResult | None:
    """Return a result in the store, if there is one."""
    content = place.read("judged", name, "result.json")
    return None if content is None else JudgeResult.from_json(json.loads(content))


def _bring_candidates(
    place: Workplace, request: JudgeRequest, folders: Mapping[str, Path]
) -> str | None:
    """Fetch the candidates of a judge to this machine.

    Returns:
        How a candidate is damaged, or None. A damaged one is removed, so that it is built again.
    """
    for recipe, folder in folders.items():
        key, damage = request.builds[recipe], f"the candidate of {recipe} is missing"
        try:
            if place.bring("candidates", key, folder):
                damage = damage_of(folder) or ""
        except IntegrityError as error:
            damage = str(error)
        if damage:
            place.drop("candidates", key)
            return f"{damage}; the store's disk is faulty, or somebody changed it"
    return None


def _judge_child(request: JudgeRequest, staging: Path, folders: Mapping[str, Path]) -> JudgeResult:
    from freezer.freezing.candidates import Candidate
    from freezer.freezing.judging import judge, open_session
    from freezer.freezing.lowering import objects_kept_in
    from freezer.freezing.payload_sets import with_other_payloads
    from freezer.freezing.sources import find_function
    from freezer.freezing.target import target_here
    from freezer.freezing.write_judged import write_judged

    take_precedence()
    entry = request.entry
    target = target_here(request.device_class, (request.num_threads, *request.further_threads))
    metric = entry.task_metric and find_function(entry.task_metric, entry.search_path)
    subject, of_weights = load_shared(request, target, staging)
    session = open_session(
        subject,
        target,
        limits=entry.limits,
        policy=request.policy,
        objective=entry.objective,
        task_metric=metric or None,
    )
    incumbent = open_previous(request.previous, staging, target) if request.previous else None
    candidates = [Candidate.read(folders[recipe]) for recipe in request.builds]
    judgement = judge(session, candidates, incumbent)
    if judgement.winner is not None and request.further:
        make_folder(staging / "further")
        hold(FURTHER)
        with objects_kept_in(workplace(request.store).objects):
            judgement = with_other_payloads(session, judgement, staging / "further")
    artifact, note = write_judged(
        session,
        judgement,
        dest=staging / "judged" / "artifact",
        provenance={"source": str(entry.source), "campaign": request.campaign},
        failures=request.failures,
    )
    judgement = replace(judgement, reason=judgement.reason + note + of_weights)
    result = summary(request, judgement)
    return replace(result, has_artifact=artifact is not None)


def take_precedence() -> None:
    """Let this process and its new threads run before other processes, if that is allowed.

    Ray runs workers at 15 by default, and an unprivileged process cannot lower that.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) > NICENESS:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)


FOLDER = "previous"
"""Folder of a judge's staging with the artifact."""


def bring_previous(request: JudgeRequest, staging: Path) -> tuple[str | None, str]:
    """Bring the artifact that `latest` has for the class of a judge.

    Args:
        request: of the judge.
        staging: folder of the judge.

    Returns:
        The digest of its image manifest, or None, and the reason if it cannot be read.

    Raises:
        StoreUnreachableError: the store cannot be read.
    """
    if request.device_class == PORTABLE:
        return None, ""
    store = Store.open(request.store, create=True)
    try:
        version = store.version(request.entry.name)
        image = version.images.get(request.device_class)
        if image is None:
            return None, ""
        make_folder(staging / FOLDER)
        store.materialize(version, request.device_class, staging / FOLDER)
    except NotPublishedError:
        return None, ""
    except IntegrityError as error:
        return None, str(error)
    return image.digest, ""


def open_previous(digest: str, staging: Path, target: Target) -> Incumbent:
    """Open the artifact that `bring_previous` brought, as a deployment does, to learn whether it
    serves here.

    Args:
        digest: of its image manifest.
        staging: folder of the judge.
        target: of the judge.
    """
    from freezer.freezing.judging import Incumbent
    from freezer.serving.load import load

    artifact = Artifact.read(staging / FOLDER)
    problem = None
    made_for = target.device_class
    device = str(target.device) if made_for.kind == "cuda" else None
    take(PREVIOUS, "opening")
    try:
        load(
            artifact.folder,
            device_class=made_for.name,
            threads=target.num_threads,
            device=device,
            strict=True,
        )
    except IncompatibleError as error:
        problem = "; ".join(map(str, error.ladder))
    take("")
    return Incumbent(
        folder=artifact.folder,
        manifest=artifact.manifest,
        digest=digest,
        problem=problem,
    )
