"""Verify an artifact on this machine: digests, signature of a call, canary."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from freezer.canary import CanaryFigure, run_canary
from freezer.device_class import detect
from freezer.errors import IncompatibleError
from freezer.ladder import Refusal
from freezer.load import find_rungs, open_artifact, refusal_here


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was verified.

    Attributes:
        device_class: of the artifact that serves here.
        num_files: whose digests were compared.
        figures: of the canary, one for each golden set and output.
        ladder: rungs that were refused before this one.
    """

    device_class: str
    num_files: int
    figures: tuple[CanaryFigure, ...]
    ladder: tuple[Refusal, ...]


def verify(
    reference: str | Path, *, store: str | None = None, device_class: str = "auto", threads: int | None = None
) -> Verification:
    """Verify what `load` would serve here: every digest, the input contract, the canary.

    Unlike `load`, it passes over a rung only for what its manifest says; damaged bytes and a failing canary are raised.

    Args:
        reference, store, device_class, threads: as of `load`.

    Raises:
        IncompatibleError: no rung is made for this machine, thread count and torch.
        IntegrityError, CanaryError: the bytes, or the outputs, are not what was published.
    """
    num_threads = threads or torch.get_num_threads()
    ladder: list[Refusal] = []
    with ExitStack() as stack:
        for name, read, fetch in find_rungs(reference, store, device_class, stack):
            manifest = read()
            refused = refusal_here(manifest, num_threads, limit_isa=False)
            if refused is not None:
                ladder.append(refused)
                continue
            artifact = fetch()
            artifact.verify()
            figures = run_canary(artifact, open_artifact(artifact, num_threads, canary=False))
            num_files = len(manifest.contents)
            return Verification(device_class=name, num_files=num_files, figures=tuple(figures), ladder=tuple(ladder))
    reasons = "; ".join(str(item) for item in ladder) or "nothing is published for this machine's classes"
    raise IncompatibleError(f"{reference}: no artifact serves this machine ({', '.join(detect().classes)}): {reasons}", ladder)
