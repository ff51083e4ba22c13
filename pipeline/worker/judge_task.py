"""The task that judges all candidates of one model and class ->
STORE/.coldpress/judged/<judge_key>-<model>/

A result is moved to its name atomically, so a repeated task finds it whole or not at all.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.errors import IntegrityError
from freezer.files import make_folder, write_whole
from freezer.freezing.in_hand import FURTHER, PREVIOUS, hold
from freezer.store import WORK
from pipeline.failures import kept_after, retry_rank
from pipeline.records import Failure, flat_json
from pipeline.worker.child import End
from pipeline.worker.previous import bring_previous, open_previous
from pipeline.worker.requests import JudgeRequest, JudgeResult, summary
from pipeline.worker.sandbox import LOG
from pipeline.worker.shared_weights import load_shared
from pipeline.worker.task_child import in_child
from pipeline.workspace import (
    Workplace,
    be_nice,
    damage_of,
    judged_name,
    remove_tree,
    staging_folder,
    workplace,
)

if TYPE_CHECKING:
    from freezer.freezing.judging import Judgement, Session

NICENESS = -10
"""Nice value of a judge, if it may be set: before all other processes."""

_Folders = Mapping[str, Path]
"""Of candidates, by recipe."""

MOST_TIMES = 2
"""How many times `limits.timeout_s` the children of a judge may have taken for another to start."""
WITHOUT = {
    PREVIOUS: "not compared with the artifact that serves now",
    FURTHER: "not frozen for further thread counts and sizes",
}
"""Words for a judge without something other than a candidate."""


def judge(request: JudgeRequest) -> tuple[JudgeResult, ...]:
    """Judge the candidates, and those of `request.beside`, unless the store contains results of
    undisturbed judges for the same ones; return a result for each.
    """
    place = workplace(request.store)
    if request.beside is None:
        return (_stored_result(place, request) or _judge(place, request)[0],)
    requests = (replace(request, beside=None), request.beside)
    is_stored = any(_stored_result(place, each) for each in requests)
    results = (None, None) if is_stored else _judge(place, request)
    return tuple(result or judge(each)[0] for each, result in zip(requests, results, strict=True))


def _stored_result(place: Workplace, request: JudgeRequest) -> JudgeResult | None:
    """Return the result of an undisturbed judge in the store; remove another one."""
    name = judged_name(request.key, request.entry.name, request.failures)
    stored = _stored(place, name)
    if stored is None:
        return None
    is_final = stored.verdict != "kept-previous" or not request.entry.limits.allow_regression
    if is_final and stored.verdict != "unstable":
        return stored
    place.drop("judged", name)
    return None


def _judge(place: Workplace, request: JudgeRequest) -> tuple[JudgeResult, JudgeResult | None]:
    """Judge in children, and store the results that are kept. That of `beside` is None if it has to
    be judged alone.
    """
    from pipeline.sources import download_sources  # it imports pyarrow, which children do not need

    beside = request.beside
    with staging_folder(place.root) as staging:
        # A store in a folder holds the candidates itself; those of a bucket are brought here.
        work = staging if place.remote is not None else place.root / WORK
        builds = {**request.builds, **(beside.builds if beside else {})}
        folders = {recipe: work / "candidates" / key for recipe, key in builds.items()}
        damage = _bring_candidates(place, request.builds, folders)
        if damage is not None:
            failure = Failure(kind="disk", code=IntegrityError.code, message=damage)
            return JudgeResult.of_failure(failure), None
        if beside and _bring_candidates(place, beside.builds, folders):
            request, beside = replace(request, beside=None), None  # it fails alone
        request = replace(request, entry=download_sources(request.entry, place))
        end, left_out = _judge_in_children(request, staging, folders)
        place.keep_log(staging / LOG, request.key)
        result, is_final = _result_of(end)
        result = replace(result, left_out=left_out)
        if is_final:
            failures = [*request.failures, *left_out]
            result = _keep(place, staging / request.device_class, request, result, failures)
        if beside is None or len(end.parts) < (1 if end.failure else 2):
            return result, None
        of_beside = replace(end.parts[0], peak_bytes=end.peak_bytes)
        if not of_beside.contest:
            folder = staging / beside.device_class
            of_beside = _keep(place, folder, beside, of_beside, beside.failures)
        return result, of_beside


def _keep(
    place: Workplace,
    judged: Path,
    request: JudgeRequest,
    result: JudgeResult,
    failures: Collection[str],
) -> JudgeResult:
    """Store a result with its artifact until it is published: a driver may die before all classes
    of a model are judged. Return the stored one: another campaign may have been faster.
    """
    name = judged_name(request.key, request.entry.name, failures)
    if not result.has_artifact:
        remove_tree(judged)
        make_folder(judged)
    write_whole(judged / "result.json", json.dumps(flat_json(result)).encode())
    place.keep(judged, "judged", name)
    return _stored(place, name) or result


def _result_of(end: End) -> tuple[JudgeResult, bool]:
    """Return the result of a judge, and whether it is kept."""
    failure = end.failure
    if failure is None:
        result: JudgeResult = end.parts[-1]
        is_final = (result.verdict != "unstable" or result.has_artifact) and not result.contest
    else:
        result = JudgeResult.of_failure(failure)
        is_final = kept_after(failure) == "key"
    return replace(result, judge_s=end.wall_s, peak_bytes=end.peak_bytes), is_final


def _judge_in_children(
    request: JudgeRequest, staging: Path, folders: _Folders
) -> tuple[End, Mapping[str, Failure]]:
    """Judge in a child; if it ends with something in hand, in another one without that.

    Returns:
        The end of the last child, with the duration of all, and first the result of `beside` if
        there is one; the candidates left out, and why. If none is left, the judge has failed.
    """
    request, notes = _with_previous(request, staging)
    left_out, wall_s = dict[str, Failure](), 0.0
    parts: tuple[JudgeResult, ...] = ()
    while True:
        end = in_child(_judge_child, request, staging, folders)
        wall_s += end.wall_s
        failure = end.failure
        if failure is None:
            *others, last = end.parts
            last = replace(last, reason="; ".join([last.reason, *notes]))
            return replace(end, parts=(*parts, *others, last), wall_s=wall_s), left_out
        name, _, activity = end.in_hand.partition("\n")
        if request.beside is not None and name and not end.parts:
            request = replace(request, beside=None)  # it is judged alone
            continue
        request, parts = replace(request, beside=None), parts or end.parts
        end = replace(end, parts=parts)
        text = f"failed: {failure.kind} while {activity}: {failure.message}"
        failure = replace(failure, message=text)
        again = _without(request, name, failure)
        if again is None:
            break
        notes.append(f"{WITHOUT.get(name, f'{name} left out')}: {text}")
        if name in request.builds:
            left_out[name] = failure
            if not again.builds or wall_s > MOST_TIMES * request.entry.limits.timeout_s:
                first = min(left_out.values(), key=retry_rank)
                end = replace(end, failure=replace(first, message="; ".join(notes)))
                break
        request = again
    return replace(end, wall_s=wall_s), left_out


def _with_previous(request: JudgeRequest, staging: Path) -> tuple[JudgeRequest, list[str]]:
    """Bring the artifacts that serve now; return the request with them, and why one is missing."""
    digest, problem = bring_previous(request, staging)
    request = replace(request, previous=digest)
    if request.beside is not None:
        digest, _ = bring_previous(request.beside, staging)
        request = replace(request, beside=replace(request.beside, previous=digest))
    return request, [f"{WITHOUT[PREVIOUS]}: {problem}"] if problem else []


def _without(request: JudgeRequest, name: str, failure: Failure) -> JudgeRequest | None:
    """Return a judge without what was in hand; None if the failure is not its fault."""
    if name == FURTHER:
        return replace(request, further=False, threads=request.threads[:1])
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


def _bring_candidates(place: Workplace, builds: Mapping[str, str], folders: _Folders) -> str | None:
    """Fetch the candidates of a judge to this machine.

    Returns:
        How a candidate is damaged, or None. A damaged one is removed, so that it is built again.
    """
    for recipe, key in builds.items():
        folder, damage = folders[recipe], f"the candidate of {recipe} is missing"
        try:
            if place.bring("candidates", key, folder):
                damage = damage_of(folder) or ""
        except IntegrityError as error:
            damage = str(error)
        if damage:
            place.drop("candidates", key)
            return f"{damage}; the store's disk is faulty, or somebody changed it"
    return None


def _judge_child(request: JudgeRequest, staging: Path, folders: _Folders) -> Iterator[JudgeResult]:
    """Judge the candidates of `beside`, then those of the request; write what they publish."""
    from freezer.freezing.judging import open_session
    from freezer.freezing.sources import find_function
    from freezer.freezing.target import target_here

    # Ray runs workers at 15 by default, and an unprivileged process cannot lower that.
    if os.getpriority(os.PRIO_PROCESS, 0) > NICENESS:
        be_nice(NICENESS)
    entry = request.entry
    target = target_here(request.device_class, request.threads)
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
    session = replace(session, work=Path(tempfile.mkdtemp(prefix="repaired-", dir=staging)))
    for each in (request.beside, request):
        if each is not None:
            result = _judge_one(each, session, staging, folders)
            yield replace(result, reason=result.reason + of_weights)


def _judge_one(
    request: JudgeRequest, session: Session, staging: Path, folders: _Folders
) -> JudgeResult:
    from freezer.freezing.candidates import Candidate
    from freezer.freezing.judging import for_portable, judge
    from freezer.freezing.lowering import objects_kept_in
    from freezer.freezing.payload_sets import with_other_payloads
    from freezer.freezing.write_judged import write_judged

    started = time.monotonic()
    if request.device_class != session.target.device_class.name:
        session = for_portable(session, request.threads, request.entry.limits, request.policy)
    if request.inherits:
        session = replace(session, timed=False)
    incumbent = None
    if request.previous:
        incumbent = open_previous(request.previous, staging, session.target)
    candidates = [Candidate.read(folders[recipe]) for recipe in request.builds]
    judgement = judge(session, candidates, incumbent)
    if request.inherits:
        judgement, why = _inherited(session, judgement, request)
        if why:
            return JudgeResult(verdict="failed", reason=why, contest=why)
    if judgement.winner is not None and request.further:
        further = Path(tempfile.mkdtemp(prefix="further-", dir=staging))
        hold(FURTHER)
        with objects_kept_in(workplace(request.store).objects):
            judgement = with_other_payloads(session, judgement, further)
        hold("")
    artifact, note = write_judged(
        session,
        judgement,
        dest=staging / request.device_class / "artifact",
        provenance={"source": str(request.entry.source), "campaign": request.campaign},
        failures=request.failures,
    )
    result = summary(request, replace(judgement, reason=judgement.reason + note))
    return replace(result, has_artifact=artifact is not None, judge_s=time.monotonic() - started)


def _inherited(
    session: Session, judgement: Judgement, request: JudgeRequest
) -> tuple[Judgement, str]:
    """An untimed judgement whose winner inherits a speed, and why it cannot; empty if it does."""
    from freezer.freezing.judging import confirm_inherited

    if judgement.winner is None or judgement.inherited is None:
        return judgement, f"the recipe that won before does not serve ({judgement.reason})"
    error_ratio = judgement.winner.measured.drift.error_ratio
    if error_ratio is None or error_ratio > request.drift_max:
        return judgement, f"an unusual error ratio ({error_ratio}, above {request.drift_max:.3g})"
    return confirm_inherited(session, judgement) if request.confirms else (judgement, "")
