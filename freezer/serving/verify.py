"""Verify an artifact on this machine: digests, signature of a call, canary; and its speed, when asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from freezer.artifact.folder import folder_of
from freezer.artifact.signatures import read_keys
from freezer.errors import IncompatibleError, IntegrityError, Refusal, SpeedCheck, UsageError
from freezer.hardware.device_classes import PORTABLE
from freezer.hardware.machine import detect
from freezer.runtime.cuda import with_index
from freezer.serving.canary import CanaryFigure, run_canary
from freezer.serving.compatibility import rungs
from freezer.serving.load import open_artifact
from freezer.serving.resolve import budget_here, find_rungs, refusal_here, refuse_unsigned
from freezer.serving.speed import check_speed, portable_of
from freezer.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was verified.

    Attributes:
        device_class: of the artifact that serves here.
        num_files: whose digests were compared.
        figures: of the canary, one for each golden set and output.
        ladder: rungs that were refused before this one.
        speed: of the artifact against the portable one; None where it was not asked for, or the portable one itself serves.
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
) -> Verification:
    """Verify what `load` would serve here: every digest, the input contract, the canary.

    Unlike `load`, it passes over a rung only for what its manifest says; damaged bytes and a failing canary are raised.

    Args:
        reference, store, device_class, threads, device, trusted_keys: as of `load`.
        speed: time it against the portable artifact too. A rung that is refused is then the answer, and none is timed instead.
        portable: folder of the portable artifact; by default it is taken from the store.

    Raises:
        IncompatibleError: no rung is made for this machine, thread count and torch; or with `speed` the first is not.
        IntegrityError, CanaryError: the bytes, or the outputs, are not what was published; or no trusted key has signed it.
        SpeedError: it is less than half as fast as its manifest promises.
    """
    if portable is not None and not speed:
        raise UsageError("--portable names what --speed compares with; give both")
    num_threads, where = budget_here(threads), None if device is None else with_index(device)
    ladder: list[Refusal] = []
    with ExitStack() as stack:
        keys = read_keys(trusted_keys)
        for rung in find_rungs(reference, store, device_class, stack):
            name, manifest = rung.name, rung.manifest()
            refused = refusal_here(manifest, num_threads, limit_isa=False, device=where)
            if refused is not None:
                ladder.append(refused)
                continue
            if keys and (unsigned := refuse_unsigned(rung, keys)):
                raise IntegrityError(
                    f"{reference}: {unsigned}; sign it with `coldpress sign`, or do not serve it", code="CP-UNSIGNED"
                )
            base = None
            if speed:
                _check_first(reference, name, ladder, store, wanted=device_class)
                if name != PORTABLE:
                    base = portable_of(reference, manifest, store=store, portable=portable, stack=stack)
            artifact = rung.fetch(None)
            artifact.verify()
            model = open_artifact(artifact, num_threads, asked=threads is not None, canary=False, device=where)
            figures = run_canary(artifact, model)
            checked = check_speed(artifact, base, num_threads, device=model.device) if base is not None else None
            num_files = len(manifest.contents)
            return Verification(device_class=name, num_files=num_files, figures=tuple(figures), ladder=tuple(ladder), speed=checked)
    reasons = "; ".join(str(item) for item in ladder) or "nothing is published for this machine's classes"
    raise IncompatibleError(f"{reference}: no artifact serves this machine ({', '.join(detect().classes)}): {reasons}", ladder)


def _check_first(reference: str | Path, serves: str, ladder: Sequence[Refusal], store: str | None, *, wanted: str) -> None:
    """Refuse to time a lesser rung than the one that this machine's hardware should serve.

    Raises:
        IncompatibleError: a better rung is refused, or the environment takes its class away and leaves the portable one.
    """
    if ladder:
        reasons = "; ".join(str(item) for item in ladder)
        raise IncompatibleError(f"{reference}: {reasons}; {serves} would serve instead, so nothing was timed", ladder)
    if serves != PORTABLE or wanted != "auto" or folder_of(reference) is not None:
        return
    published = list(Store.open(store or "store").version(str(reference)).images)
    machine = detect()
    taken_away = [name for name in rungs(published, detect({})) if name not in rungs(published, machine)]
    if taken_away:
        limits = "; ".join(f"{name}: {machine.why_not.get(name, 'the environment limits this process')}" for name in taken_away)
        raise IncompatibleError(f"{reference}: {limits}; {serves} would serve instead, so nothing was timed: unset the limit")
