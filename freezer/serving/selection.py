"""Select the artifact that serves a process, and record why others do not.

Decides from manifests and signatures; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from freezer.artifact import Manifest
from freezer.errors import (
    CanaryError,
    ColdpressError,
    IncompatibleError,
    IntegrityError,
    Refusal,
    StoreUnreachableError,
    last_line,
)
from freezer.hardware import device_class as class_named
from freezer.serving.compatibility import refusal_of, refuse_by_class, rungs, unserved_gpus
from freezer.serving.images import Image
from freezer.serving.process import ServingProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The first artifact that serves a process.

    Attributes:
        process: process to serve in.
        chosen: None where no artifact serves, or `strict` allows no further one.
        refused: artifacts before it, or all, with the reasons.
        aside: published classes for other GPUs. They are not of this machine, so `strict` ignores
            them.
        rest: artifacts after it, most specific first.
    """

    process: ServingProcess
    chosen: Image | None = None
    refused: tuple[Refusal, ...] = ()
    aside: tuple[Refusal, ...] = ()
    rest: tuple[Image, ...] = ()

    @property
    def ladder(self) -> tuple[Refusal, ...]:
        """Every refusal."""
        return (*self.aside, *self.refused)

    def after(self, refusal: Refusal) -> Selection:
        """The next selection, after the chosen artifact was refused while it was opened."""
        rest = (*(self.chosen.fallbacks() if self.chosen else ()), *self.rest)
        return _first(replace(self, chosen=None, refused=(*self.refused, refusal), rest=rest))

    def error(self, reference: object) -> IncompatibleError:
        """The error of a selection without a chosen artifact."""
        classes = ", ".join(self.process.machine().classes)
        text = f"no artifact serves this machine ({classes})"
        if self.process.options.strict and self.refused:
            text = (
                f"the best artifact for this machine ({classes}) is refused, and strict=True takes"
                " no other"
            )
        reasons = "; ".join(map(str, self.ladder))
        reasons = reasons or "nothing is published for this machine's classes"
        return IncompatibleError(f"{reference}: {text}: {reasons}", self.ladder)


def select_image(
    images: Sequence[Image], process: ServingProcess, older: Mapping[str, int] | None = None
) -> Selection:
    """Select the most specific artifact that serves a process.

    Manifests are read in order, only until one serves; with `strict` also those after a refused
    one, for their reasons.

    Args:
        images: artifacts of one version.
        process: process to serve in.
        older: classes that only older versions have, with the number of the newest of these; a
            better one than any of `images` is a refusal.

    Raises:
        UsageError: `options.device_class` is unknown.
    """
    machine, wanted = process.machine(), process.options.device_class
    published = tuple(dict.fromkeys(image.device_class for image in images))
    names, aside, refused = rungs(published, machine), list[Refusal](), list[Refusal]()
    if wanted != "auto":
        class_named(wanted)
        names = [wanted] if wanted in names else []
        if not names:
            refused.append(refuse_by_class(wanted, published, machine))
    else:
        aside = unserved_gpus(published, machine)
        if not names:
            others = {refusal.rung for refusal in aside}
            unserved = [name for name in published if name not in others]
            refused += [refuse_by_class(name, published, machine) for name in unserved]
        for name in rungs([*published, *(older or ())], machine):
            if older is None or name not in older:
                break
            refused.append(_only_in(name, older[name]))
    runnable: list[Image] = []
    for name in names:
        runnable += [image for image in images if image.device_class == name]
    selection = Selection(process=process, aside=tuple(aside), refused=tuple(refused))
    return _first(replace(selection, rest=tuple(runnable)))


def _only_in(device_class: str, number: int) -> Refusal:
    """The refusal of a device class that only an older version has."""
    return Refusal(
        rung=device_class,
        reason="older_version",
        got=f"only version {number} has it",
        expected=f"it in this version (freeze it again, or load version {number})",
    )


def _first(selection: Selection) -> Selection:
    refused, rest = list(selection.refused), list(selection.rest)
    while rest:
        image = rest.pop(0)
        refusal = _refusal(image, selection.process)
        if refusal is not None:
            refused.append(refusal)
            rest[:0] = image.fallbacks()
        elif not (selection.process.options.strict and refused):
            return replace(selection, chosen=image, refused=tuple(refused), rest=tuple(rest))
    return replace(selection, refused=tuple(refused), rest=())


def _refusal(image: Image, process: ServingProcess) -> Refusal | None:
    """Why an artifact does not serve a process; None where it does."""
    try:
        return (
            _too_early(image, process.options.min_version)
            or (image.unsigned(process.trusted_keys) if process.trusted_keys else None)
            or refusal_of(image.manifest(), process)
        )
    except StoreUnreachableError:
        raise
    except Exception as error:  # an artifact that cannot be read is refused, and the next is tried
        return failure(image.device_class, error)


def _too_early(image: Image, min_version: int) -> Refusal | None:
    if image.asked is None or image.asked.version >= min_version:
        return None
    return Refusal(
        rung=image.device_class,
        reason="rolled_back",
        got=f"version {image.asked.version}",
        expected=f"version {min_version} or later",
    )


def failure(device_class: str, error: Exception) -> Refusal:
    """The refusal of an artifact that could not be read or opened."""
    reason, expected = "does_not_open", "a payload that opens"
    if isinstance(error, IntegrityError):
        reason, expected = "tampered", "the published digest"
    elif isinstance(error, CanaryError):
        reason, expected = "canary", "the golden outputs"
    got = str(error) if isinstance(error, ColdpressError) else last_line(error)
    return Refusal(rung=device_class, reason=reason, got=got, expected=expected)


def in_words(refusal: Refusal, images: Sequence[Image], selection: Selection) -> str:
    """A refusal in words: what serves instead, how much slower it is expected to be, and why."""
    assert selection.chosen is not None
    served, slower = selection.chosen.manifest(), ""
    with suppress(Exception):  # the refused manifest may be what cannot be read
        refused = next(image for image in images if image.device_class == refusal.rung).manifest()
        slower = f"; {_slowdown(refused, served, selection.process.num_threads)}"
    serves = served.device_class
    if serves == refusal.rung:
        serves = f"{serves} ({served.recipe.name}, which needs torch alone)"
    return f"{serves} serves instead of {refusal.rung}{slower}; refused: {refusal}"


def _slowdown(refused: Manifest, served: Manifest, num_threads: int) -> str:
    """How much slower an artifact is expected to be than a refused one, by the speedups over eager
    in their manifests.
    """
    before = refused.latency.speedup_with(num_threads) if refused.latency else None
    now = served.latency.speedup_with(num_threads) if served.latency else None
    if not before or not now:
        return "how much slower is unknown, as not both were timed"
    return (
        f"calls are expected to take {before / now:.1f} times as long ({now:.2f} instead of"
        f" {before:.2f} times as fast as eager, by the manifests)"
    )
