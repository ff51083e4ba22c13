"""Verify an artifact on this machine: signature, digests, canary, and optionally speed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from freezer.artifact import GOLDEN_EAGER, Artifact
from freezer.errors import (
    CanaryError,
    ColdpressError,
    IncompatibleError,
    IntegrityError,
    Refusal,
    UsageError,
    without_torch,
)
from freezer.files import digest_file
from freezer.hardware import PORTABLE
from freezer.runtime.accuracy import Judged
from freezer.runtime.contract import OpenModel
from freezer.runtime.tensor_files import golden_sets
from freezer.serving.canary import CanaryFigure, run_canary
from freezer.serving.images import Image, images_of, resolve_reference
from freezer.serving.load import process_here
from freezer.serving.opening import open_artifact
from freezer.serving.process import LoadOptions
from freezer.serving.selection import Selection, failure, select_image
from freezer.spec import Accuracy, unflatten

if TYPE_CHECKING:
    from freezer.serving.speed import SpeedCheck


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of `verify`.

    Attributes:
        device_class: of the verified artifact.
        num_files: files whose digests were compared.
        figures: of the canary, one for each golden set and output.
        ladder: artifacts that were refused before this one.
        speed: compared with the portable artifact; None if not requested, or if the portable
            artifact itself serves.
        accuracy: judged again on the samples; None if not requested.
    """

    device_class: str
    num_files: int
    figures: tuple[CanaryFigure, ...]
    ladder: tuple[Refusal, ...]
    speed: SpeedCheck | None = None
    accuracy: Judged | None = None


class VerifyKeywords(TypedDict, total=False):
    """Fields of LoadOptions that `verify` takes."""

    device_class: str
    threads: int | None
    device: str | None
    min_version: int
    trusted_keys: Sequence[str | Path]


def verify(
    reference: str | Path,
    *,
    store: str | None = None,
    speed: bool = False,
    samples: str | Path | None = None,
    **keywords: Unpack[VerifyKeywords],
) -> Verification:
    """Verify the artifact that `load` would serve here: signature, digests and canary.

    Unlike `load`, it raises on damage and on a failing canary instead of trying the next artifact.

    Args:
        reference, store, keywords: see `load`.
        speed: also compare its speed with the portable artifact of the same version; the best
            artifact must serve.
        samples: the file of samples that a lower precision was judged on, to judge it again here.

    Raises:
        IncompatibleError: no artifact serves here; with `speed`, the best one does not.
        IntegrityError, CanaryError: bytes or outputs differ, or no trusted key signed them.
        UsageError: there is no portable artifact to compare the speed with, or no lower precision
            to judge; or torch, which both need, is not installed.
        SpeedError: it is less than half as fast as its manifest promises.
    """
    options = LoadOptions(**keywords)
    if options.as_numpy and (speed or samples):
        raise without_torch("a check of speed or accuracy")
    with ExitStack() as stack:
        images = images_of(reference, resolve_reference(reference, store), stack)
        classes = [image.device_class for image in images]
        selection = select_image(images, process_here(options, classes))
        image = _chosen(reference, selection)
        base = None
        if speed:
            _check_best(reference, selection)
            if image.device_class != PORTABLE:
                base = _portable_beside(reference, images)
        return _verified(reference, selection, image.fetch(None), base, samples)


def _verified(
    reference: str | Path,
    selection: Selection,
    fetched: Artifact,
    base: Artifact | None,
    samples: str | Path | None,
) -> Verification:
    """Verify every digest, run the canary, judge a lower precision on samples and compare the speed
    with `base`, if given.
    """
    process = selection.process
    device_class = fetched.manifest.device_class
    paths = [ref.path for ref in fetched.manifest.contents]
    with ExitStack() as stack:
        try:
            options = replace(process.options, canary=False)
            artifact = fetched.held(paths, stack, private=bool(options.trusted_keys))
            artifact.verify()
            model = open_artifact(artifact, process.num_threads, options)
            figures = run_canary(artifact, model)
            accuracy = judge_again(artifact, model, Path(samples)) if samples else None
        except ColdpressError:
            raise
        except Exception as error:  # a payload may raise anything; `load` refuses it, too
            refusal = failure(device_class, error)
            ladder = (*selection.ladder, refusal)
            raise IncompatibleError(f"{reference}: {refusal}", ladder) from error
        checked = None
        if base is not None:
            from freezer.serving.speed import check_speed

            checked = check_speed(artifact, base, process.num_threads, device=model.device)
    return Verification(
        device_class=device_class,
        num_files=len(paths),
        figures=tuple(figures),
        ladder=selection.refused,
        speed=checked,
        accuracy=accuracy,
    )


def judge_again(artifact: Artifact, model: OpenModel, samples: Path) -> Judged:
    """Judge an artifact of a lower precision on this machine by its budget.

    Raises:
        UsageError: it has no lower precision, the file is another one, or eager's answers are not
            in the artifact.
        CanaryError: it does not keep the budget here.
    """
    from freezer.runtime.devices import called_on
    from freezer.runtime.held_out import judge_answers, read_held_out
    from freezer.runtime.tensors import to_tensor

    manifest, record = artifact.manifest, artifact.manifest.accuracy
    stored = artifact.folder / GOLDEN_EAGER
    if record is None or not record.digest:
        raise UsageError(f"{manifest.model} was judged on no samples; omit them")
    if digest_file(samples) != record.digest:
        raise UsageError(f"{samples} is not the file that {manifest.model} was judged on")
    if not stored.is_file():
        raise UsageError("eager's answers are too large to be in the artifact; freeze it again")
    budget = Accuracy(
        samples=samples, labels=record.labels, metric=record.metric, **dict(record.budget)
    )
    held_out = read_held_out(budget, manifest.inputs, num_apart=record.samples["search"])
    names = [output.name for output in manifest.outputs]
    sets = golden_sets(stored, names, len(held_out.judged))
    eager = [unflatten(manifest.structure, map(to_tensor, each.values())) for each in sets]
    call = called_on(model, model.device)
    answers = (call(**inputs.cloned()) for inputs, _ in held_out.judged)
    judged = judge_answers(held_out, held_out.judged, eager, answers, record.num_candidates)
    if judged.problem:
        raise CanaryError(
            f"{manifest.model} for {manifest.device_class}: {judged.problem}; do not serve it here"
        )
    return judged


def _chosen(reference: str | Path, selection: Selection) -> Image:
    """The image that serves.

    Raises:
        IntegrityError: one before it was tampered with, or no trusted key signed it.
        IncompatibleError: none serves.
    """
    for refusal in selection.refused:
        if refusal.reason == "tampered":
            raise IntegrityError(refusal.got)
        if refusal.reason == "unsigned":
            raise IntegrityError(
                f"{reference}: {refusal}; sign it with `coldpress sign`, or do not serve it",
                code="CP-UNSIGNED",
            )
    if selection.chosen is None:
        raise selection.error(reference)
    return selection.chosen


def _check_best(reference: str | Path, selection: Selection) -> None:
    """Refuse to time an artifact if a better one is refused.

    Raises:
        IncompatibleError: one is.
    """
    if selection.refused:
        reasons = "; ".join(map(str, selection.refused))
        raise IncompatibleError(
            f"{reference}: {reasons}; another would serve instead, so nothing was timed",
            selection.refused,
        )


def _portable_beside(reference: str | Path, images: Sequence[Image]) -> Artifact:
    """The portable artifact of the same version.

    Raises:
        UsageError: the version has none, or the reference is a folder.
    """
    for image in images:
        if image.device_class == PORTABLE:
            return image.fetch(None)
    raise UsageError(
        f"{reference} has no portable artifact to compare the speed with; name a version of a store"
        " that has one"
    )
