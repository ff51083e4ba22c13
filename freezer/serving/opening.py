"""Open an artifact folder: verify -> open -> canary. Imports torch only if payloads or results need
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from freezer.artifact import Artifact, Payload
from freezer.errors import Refusal
from freezer.runtime.contract import OpenModel
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
    with ExitStack() as stack:
        held = artifact.held(paths, stack, private=bool(options.trusted_keys))
        open_again = partial(_open, held, payloads, num_threads, options, ladder)
        model = open_again()
        if options.canary:
            run_canary(held, model, smallest=True)
            if artifact.manifest.stateful:
                model = open_again()
    return model


def _open(
    artifact: Artifact,
    payloads: Sequence[Payload],
    num_threads: int,
    options: LoadOptions,
    ladder: Sequence[Refusal],
) -> OpenModel:
    if runs_without_torch(artifact.manifest, options):
        from freezer.runtime.native import open_arrays

        return open_arrays(artifact, payloads, num_threads, ladder)
    from freezer.runtime.open_tensors import calls_of, open_tensors

    calls = calls_of(artifact, options.threads, options.device, as_numpy=options.as_numpy)
    return open_tensors(artifact, payloads, num_threads, ladder, calls)
