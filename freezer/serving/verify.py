"""Verify an artifact on this machine: signature, digests, canary, and optionally speed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from freezer.artifact import read_keys
from freezer.errors import (
    ColdpressError,
    IncompatibleError,
    IntegrityError,
    Refusal,
    SpeedCheck,
    UsageError,
)
from freezer.hardware import PORTABLE, describe_host
from freezer.serving.canary import CanaryFigure, run_canary
from freezer.serving.compatibility import rungs
from freezer.serving.images import Image, images_of, resolve_reference
from freezer.serving.opening import open_artifact
from freezer.serving.process import LoadOptions
from freezer.serving.selection import Selection, failure, select_image
from freezer.serving.speed import check_same_weights, check_speed, fetch_portable, read_portable
from freezer.serving.this_process import process_here


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
    """

    device_class: str
    num_files: int
    figures: tuple[CanaryFigure, ...]
    ladder: tuple[Refusal, ...]
    speed: SpeedCheck | None = None


def verify(
    reference: str | Path,
    *,
    store: str | None = None,
    device_class: str = "auto",
    threads: int | None = None,
    speed: bool = False,
    portable: Path | None = None,
    device: str | None = None,
    trusted_keys: Sequence[str | Path] = (),
    min_version: int = 0,
) -> Verification:
    """Verify the artifact that `load` would serve here: its signature, every digest, and the
    canary.

    Unlike `load`, it raises on damaged bytes and on a failing canary instead of trying the next
    artifact.

    Args:
        reference, store, device_class, threads, device, trusted_keys, min_version: see `load`.
        speed: also compare its speed with the portable artifact. Raises if the best artifact is
            refused.
        portable: folder of the portable artifact; by default it is read from the store.

    Raises:
        IncompatibleError: no artifact serves this machine, thread count and torch; the one that
            does fails to open or to answer; with `speed`, the best one does not serve.
        NotPublishedError, StoreUnreachableError: the reference cannot be resolved, or `portable` is
            not an artifact folder.
        IntegrityError, CanaryError: the bytes or the outputs differ from the published ones, or no
            trusted key signed them.
        UsageError: no temporary folder is usable, or no portable artifact was made of the same
            weights.
        SpeedError: it is less than half as fast as its manifest promises.
    """
    if portable is not None and not speed:
        raise UsageError("--portable names the artifact that --speed compares with; give both")
    options = LoadOptions(
        device_class=device_class,
        threads=threads,
        device=device,
        min_version=min_version,
    )
    given = None if portable is None else read_portable(portable)
    with ExitStack() as stack:
        published = resolve_reference(reference, store)
        images = images_of(reference, published, stack)
        process = process_here(options, [image.device_class for image in images])
        selection = select_image(images, process)
        for refusal in selection.refused:
            if refusal.reason == "tampered":
                raise IntegrityError(refusal.got)
        image = selection.chosen
        if image is None:
            raise selection.error(reference)
        keys = read_keys(trusted_keys)
        if keys and (unsigned := image.unsigned(keys)):
            raise IntegrityError(
                f"{reference}: {unsigned}; sign it with `coldpress sign`, or do not serve it",
                code="CP-UNSIGNED",
            )
        if speed:
            _check_best(reference, images, selection)
        base = None
        if speed and image.device_class != PORTABLE:
            base = given or fetch_portable(reference, image.manifest(), published, store, stack)
            check_same_weights(reference, image.manifest(), base)
        fetched = image.fetch(None)
        try:
            artifact = fetched.held(
                [item.path for item in fetched.manifest.contents], stack, private=bool(keys)
            )
            options = replace(process.options, canary=False)
            model = open_artifact(artifact, process.num_threads, options)
            figures = tuple(run_canary(artifact, model))
        except ColdpressError:
            raise
        except (
            Exception
        ) as error:  # a payload may raise anything; load refuses it for the same reason
            refusal = failure(image.device_class, error)
            raise IncompatibleError(
                f"{reference}: {refusal}", (*selection.ladder, refusal)
            ) from error
        return Verification(
            device_class=image.device_class,
            num_files=len(artifact.manifest.contents),
            figures=figures,
            ladder=selection.refused,
            speed=(
                None
                if base is None
                else check_speed(artifact, base, process.num_threads, device=model.device)
            ),
        )


def _check_best(reference: str | Path, images: Sequence[Image], selection: Selection) -> None:
    """Refuse to time an artifact if this machine's hardware should serve a better one.

    Raises:
        IncompatibleError: a better artifact is refused, or the environment limits this process to
            the portable class.
    """
    assert selection.chosen is not None
    serves, process = selection.chosen.device_class, selection.process
    reasons = [str(item) for item in selection.refused]
    remedy = ""
    if not reasons and serves == PORTABLE and process.options.device_class == "auto":
        published, machine = [image.device_class for image in images], process.machine()
        unlimited = rungs(published, describe_host(process.host, {}))
        lost = [name for name in unlimited if name not in rungs(published, machine)]
        reasons = [
            f"{name}: {machine.why_not.get(name, 'the environment limits this process')}"
            for name in lost
        ]
        remedy = ": unset the limit"
    if reasons:
        text = (
            f"{reference}: {'; '.join(reasons)}; {serves} would serve instead, so nothing was"
            f" timed{remedy}"
        )
        raise IncompatibleError(text, selection.refused)
