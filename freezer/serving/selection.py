"""Select the artifact that serves a process, and record why others do not.

Decides from manifests and signatures; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from freezer.artifact import Manifest
from freezer.codec import frozen
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
from freezer.serving.compatibility import (
    refusal_of,
    refuse,
    refuse_by_class,
    rungs,
    unserved_gpus,
)
from freezer.serving.images import Image
from freezer.serving.process import ServingProcess


@frozen
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
        assert self.chosen is not None
        return _first(
            replace(
                self,
                chosen=None,
                refused=(*self.refused, refusal),
                rest=(*self.chosen.fallbacks(), *self.rest),
            )
        )

    def error(self, reference: object) -> IncompatibleError:
        """The error of a selection without a chosen artifact."""
        classes = ", ".join(self.process.machine().classes)
        text = f"no artifact serves this machine ({classes})"
        if self.process.options.strict and self.refused:
            text = f"the best artifact ({classes}) is refused, and strict=True takes no other"
        reasons = "; ".join(map(str, self.ladder)) or "nothing is published for these classes"
        return IncompatibleError(f"{reference}: {text}: {reasons}", self.ladder)


def select_image(
    images: Sequence[Image],
    process: ServingProcess,
) -> Selection:
    """Select the most specific artifact that serves a process.

    Manifests are read in order, only until one serves; with `strict` also those after a refused
    one, for their reasons.

    Args:
        images: artifacts of one version.
        process: process to serve in.

    Raises:
        UsageError: `options.device_class` is unknown.
    """
    machine = process.machine()
    wanted = process.options.device_class
    published = tuple(dict.fromkeys(image.device_class for image in images))
    names = rungs(published, machine)
    aside: list[Refusal] = []
    if wanted == "auto":
        aside = unserved_gpus(published, machine)
        set_aside = {refusal.rung for refusal in aside}
        unserved = [] if names else [name for name in published if name not in set_aside]
    else:
        class_named(wanted)
        unserved = [] if wanted in names else [wanted]
        names = [wanted] if wanted in names else []
    refused = [refuse_by_class(name, published, machine) for name in unserved]
    rest: list[Image] = []
    for name in names:
        rest += [image for image in images if image.device_class == name]
    return _first(
        Selection(process=process, aside=tuple(aside), refused=tuple(refused), rest=tuple(rest))
    )


def _first(selection: Selection) -> Selection:
    refused = list(selection.refused)
    rest = list(selection.rest)
    chosen: Image | None = None
    while rest and chosen is None:
        image = rest.pop(0)
        refusal = _refusal(image, selection.process)
        if refusal is not None:
            refused.append(refusal)
            rest[:0] = image.fallbacks()
        elif not (selection.process.options.strict and refused):
            chosen = image
    return replace(
        selection,
        chosen=chosen,
        refused=tuple(refused),
        rest=tuple(rest),
    )


def _refusal(image: Image, process: ServingProcess) -> Refusal | None:
    """Why an artifact does not serve a process; None where it does."""
    try:
        refusal = _too_early(image, process.options.min_version)
        if refusal is None and process.trusted_keys:
            refusal = image.unsigned(process.trusted_keys)
        return refusal or refusal_of(image.manifest(), process)
    except StoreUnreachableError:
        raise
    except Exception as error:  # an artifact that cannot be read is refused, and the next is tried
        return failure(image.device_class, error)


def _too_early(
    image: Image,
    min_version: int,
) -> Refusal | None:
    if image.asked is None or image.asked.version >= min_version:
        return None
    got = f"version {image.asked.version}"
    return refuse(image.device_class, "rolled_back", got, f"version {min_version} or later")


def failure(
    device_class: str,
    error: Exception,
) -> Refusal:
    """The refusal of an artifact that could not be read or opened."""
    got = str(error) if isinstance(error, ColdpressError) else last_line(error)
    if isinstance(error, IntegrityError):
        return refuse(device_class, "tampered", got, "the published digest")
    if isinstance(error, CanaryError):
        return refuse(device_class, "canary", got, "the golden outputs")
    return refuse(device_class, "does_not_open", got, "a payload that opens")


def in_words(
    refusal: Refusal,
    images: Sequence[Image],
    selection: Selection,
) -> str:
    """A refusal in words: what serves instead, how much slower it is expected to be, and why."""
    assert selection.chosen is not None
    served = selection.chosen.manifest()
    slower = ""
    with suppress(Exception):  # the refused manifest may be what cannot be read
        refused = next(image for image in images if image.device_class == refusal.rung)
        slower = _slowdown(refused.manifest(), served, selection.process.num_threads)
    serves = served.device_class
    if serves == refusal.rung:
        serves = f"{serves} ({served.recipe.name}, which needs torch alone)"
    return f"{serves} serves instead of {refusal.rung}{slower}; refused: {refusal}"


def _slowdown(refused: Manifest, served: Manifest, num_threads: int) -> str:
    """How much slower an artifact is expected to be than a refused one, by the speedups over eager
    in their manifests; empty where one was not timed.
    """
    before = refused.latency and refused.latency.speedup_with(num_threads)
    now = served.latency and served.latency.speedup_with(num_threads)
    if not before or not now:
        return ""
    return (
        f"; calls are expected to take {before / now:.1f} times as long ({now:.2f} instead of"
        f" {before:.2f} times as fast as eager, by the manifests)"
    )
