"""Open an artifact folder: verify -> open -> canary. Imports torch only if payloads or results need
it.

What an engine interprets is verified before it opens it, and with trusted keys so is all. Weights
apart are only numbers, which are verified while the engine packs them, and before the canary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Thread

from freezer.artifact import Artifact, FileRef, Payload, weights_of
from freezer.errors import Refusal
from freezer.runtime.contract import OpenModel
from freezer.runtime.native import open_arrays
from freezer.serving.canary import run_canary
from freezer.serving.compatibility import needed_files, runs_without_torch
from freezer.serving.process import LoadOptions


def open_artifact(
    artifact: Artifact, num_threads: int, options: LoadOptions, *, ladder: Sequence[Refusal] = ()
) -> OpenModel:
    """Verify the needed files of an artifact folder, open its payloads, and run the canary.

    Args:
        artifact: artifact that serves this machine.
        num_threads: threads that calls may use; payloads for this count are opened, else those for
            the largest count below it.
        options: `threads`, `canary`, `device` and `arrays` apply; with `trusted_keys` private
            copies are opened.
        ladder: artifacts that were refused before this one.

    Raises:
        IntegrityError, CanaryError: the bytes or the outputs differ from the published ones.
    """
    payloads, paths = needed_files(artifact.manifest, num_threads, options)
    weights = () if options.trusted_keys else weights_of(payloads)
    with ExitStack() as stack:
        held = artifact.held(paths, stack, private=bool(options.trusted_keys))
        others = (item for item in held.manifest.contents if item not in weights)
        held.verify(tuple(item for item in others if item.path in paths))
        open_again = partial(_open, held, payloads, num_threads, options, ladder)
        with _verified_meanwhile(held, weights):
            model = open_again()
        if options.canary:
            run_canary(held, model, smallest=True)
            if artifact.manifest.stateful:
                model = open_again()
    return model


@contextmanager
def _verified_meanwhile(artifact: Artifact, weights: tuple[FileRef, ...]) -> Iterator[None]:
    """Verify weights while the block opens them.

    Raises:
        IntegrityError: they differ, in place of what the block raised for that reason.
    """
    errors: list[BaseException] = []

    def verify() -> None:
        try:
            artifact.verify(weights)
        except BaseException as error:
            errors.append(error)

    verifying = Thread(target=verify)
    verifying.start()
    try:
        yield
    finally:
        verifying.join()
        if errors and isinstance(sys.exception(), Exception | None):  # a person may stop the load
            raise errors.pop()


def _open(
    artifact: Artifact,
    payloads: Sequence[Payload],
    num_threads: int,
    options: LoadOptions,
    ladder: Sequence[Refusal],
) -> OpenModel:
    if runs_without_torch(artifact.manifest, options):
        return open_arrays(artifact, payloads, num_threads, ladder)
    from freezer.runtime.open_tensors import calls_of, open_tensors

    calls = calls_of(artifact, options.threads, options.device, as_numpy=options.as_numpy)
    return open_tensors(artifact, payloads, num_threads, ladder, calls)
