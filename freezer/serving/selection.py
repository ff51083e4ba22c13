"""Select the artifact that serves a process, and record why others do not.

Pure: decides from data, imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from freezer.artifact import Artifact, Claims, Manifest, Signatures, problem_of
from freezer.errors import (
    CanaryError,
    ColdpressError,
    IncompatibleError,
    IntegrityError,
    Refusal,
    StoreUnreachableError,
    last_line,
)
from freezer.hardware import CudaHere, Host, Machine, describe_host
from freezer.hardware import device_class as class_named
from freezer.serving.compatibility import (
    native_payloads,
    refuse_by_class,
    refuse_by_cuda,
    refuse_by_device,
    refuse_by_engine,
    refuse_by_isa,
    refuse_by_runtime,
    refuse_by_threads,
    refuse_by_torch,
    refuse_by_version,
    rungs,
    unserved_gpus,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Options of `load`, `verify` and the speed check; see `load`.

    Attributes:
        runtime: what calls the payloads.
        device: `cpu` or `cuda:N`; None for the device that the artifact is made for.
        trusted_keys: public keys, one of which must have signed the artifact; empty to require no
            signature.
    """

    device_class: str = "auto"
    threads: int | None = None
    strict: bool = False
    limit_isa: bool = False
    canary: bool = True
    device: str | None = None
    cuda_graphs: bool = False
    trusted_keys: Sequence[EllipticCurvePublicKey] = ()
    min_version: int = 0
    runtime: Literal["torch", "native"] = "torch"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingProcess:
    """The process that an artifact would serve in.

    Attributes:
        host, environ: hardware, and the environment that limits it.
        num_threads: that calls may use.
        torch_version: for example `2.13.0+cpu`.
        cuda: GPUs that may serve; read only where a published class needs one.
        engines: versions of the packages of ENGINES that are installed.
    """

    host: Host
    environ: Mapping[str, str]
    num_threads: int
    torch_version: str
    cuda: CudaHere
    engines: Mapping[str, str] = field(default_factory=dict)

    def machine(self, limits: Mapping[str, str] | None = None) -> Machine:
        """The machine as this process sees it, also under further limits of the instruction set."""
        return describe_host(self.host, {**self.environ, **(limits or {})})


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A published artifact of one device class; its files are read when a function is called.

    Attributes:
        manifest: reads the manifest.
        manifest_bytes: reads manifest.json byte for byte.
        signatures: reads the signatures.
        asked: what a signature must vouch for; None for a folder.
        fetch: makes files available locally: those at some paths, or all.
        is_fallback: whether this is the second part of an artifact of an earlier release, which
            needs torch alone.
    """

    device_class: str
    manifest: Callable[[], Manifest]
    manifest_bytes: Callable[[], bytes]
    signatures: Callable[[], Signatures | None]
    fetch: Callable[[Collection[str] | None], Artifact]
    asked: Claims | None = None
    is_fallback: bool = False

    def fallbacks(self) -> tuple[Image, ...]:
        """The part of the artifact that needs torch alone, if it has one and can be read."""
        try:
            found = None if self.is_fallback else self.manifest().without_engine()
        except StoreUnreachableError:
            raise
        except Exception:  # why it cannot be read is recorded by whoever refused it
            found = None
        if found is None:
            return ()
        served = found

        def fetch(paths: Collection[str] | None) -> Artifact:
            return replace(self.fetch(paths), manifest=served)

        return (replace(self, manifest=lambda: served, fetch=fetch, is_fallback=True),)

    def unsigned(self, keys: Sequence[EllipticCurvePublicKey]) -> Refusal | None:
        """Why no trusted key vouches for the artifact; None where one does."""
        manifest_bytes = self.manifest_bytes()
        try:
            problem = problem_of(self.signatures(), manifest_bytes, keys, self.asked)
        except IntegrityError as error:
            problem = str(error)
        if problem is None:
            return None
        of = f" of {self.asked}" if self.asked is not None else ""
        expected = (
            f"one{of} by"
            f" {'the trusted key' if len(keys) == 1 else f'any of {len(keys)} trusted keys'}"
        )
        return Refusal(rung=self.device_class, reason="unsigned", got=problem, expected=expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The first artifact that serves a process.

    Attributes:
        chosen: None where no artifact serves, or `strict` allows no further one.
        refused: artifacts before it, or all, with the reasons.
        aside: published classes for other GPUs. They are not of this machine, so `strict` ignores
            them.
        rest: artifacts after it, most specific first.
    """

    process: ServingProcess
    options: LoadOptions
    chosen: Image | None
    refused: tuple[Refusal, ...]
    aside: tuple[Refusal, ...]
    rest: tuple[Image, ...]

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
        reasons = (
            "; ".join(str(item) for item in self.ladder)
            or "nothing is published for this machine's classes"
        )
        classes = ", ".join(self.process.machine().classes)
        text = f"no artifact serves this machine ({classes})"
        if self.options.strict and self.refused:
            text = (
                f"the best artifact for this machine ({classes}) is refused, and strict=True takes"
                " no other"
            )
        return IncompatibleError(f"{reference}: {text}: {reasons}", self.ladder)


def select_image(
    images: Sequence[Image],
    process: ServingProcess,
    options: LoadOptions,
    older: Mapping[str, int] | None = None,
) -> Selection:
    """Select the most specific artifact that serves a process.

    Manifests are read in order, only until one serves; with `strict` also those after a refused
    one, for their reasons.

    Args:
        images: of one version.
        process, options: to serve in, and how.
        older: classes that only older versions have, with the number of the newest of these; a
            better one than any of `images` is a refusal.

    Raises:
        UsageError: `options.device_class` is unknown.
    """
    machine, wanted = process.machine(), options.device_class
    by_class: dict[str, list[Image]] = {}
    for image in images:
        by_class.setdefault(image.device_class, []).append(image)
    names = rungs(by_class, machine)
    aside: list[Refusal] = []
    refused: list[Refusal] = []
    if wanted != "auto":
        class_named(wanted)
        names = [name for name in names if name == wanted]
        refused = [] if names else [refuse_by_class(wanted, by_class, machine)]
    else:
        aside = unserved_gpus(by_class, machine)
        known = {item.rung for item in aside}
        refused = (
            []
            if names
            else [
                refuse_by_class(name, by_class, machine) for name in by_class if name not in known
            ]
        )
        better = takewhile(
            lambda name: name not in by_class, rungs({**by_class, **(older or {})}, machine)
        )
        refused += [refuse_by_version(name, (older or {})[name]) for name in better]
    runnable = tuple(image for name in names for image in by_class[name])
    return _first(
        Selection(
            process=process,
            options=options,
            chosen=None,
            refused=tuple(refused),
            aside=tuple(aside),
            rest=runnable,
        )
    )


def slowdown(refused: Manifest, serving: Manifest, num_threads: int) -> str:
    """How much slower an artifact is expected to be than a refused one, by the speedups over eager
    in their manifests.
    """
    found = [
        item.latency.speedup_with(num_threads) if item.latency else None
        for item in (refused, serving)
    ]
    if not found[0] or not found[1]:
        return "how much slower is unknown, as not both were timed"
    times = f"calls are expected to take {found[0] / found[1]:.1f} times as long"
    return (
        f"{times} ({found[1]:.2f} instead of {found[0]:.2f} times as fast as eager, by the"
        " manifests)"
    )


def _first(selection: Selection) -> Selection:
    refused, rest = list(selection.refused), list(selection.rest)
    while rest:
        image = rest.pop(0)
        found = _refusal(image, selection.process, selection.options)
        if found is not None:
            refused.append(found)
            rest[:0] = image.fallbacks()
        elif not (selection.options.strict and refused):
            return replace(selection, chosen=image, refused=tuple(refused), rest=tuple(rest))
    return replace(selection, refused=tuple(refused), rest=())


def _refusal(image: Image, process: ServingProcess, options: LoadOptions) -> Refusal | None:
    """Why an artifact does not serve a process; None where it does, if need be under the limits
    that `limit_isa` allows.
    """
    limits = class_named(image.device_class).limits if options.limit_isa else {}
    try:
        if image.asked is not None and image.asked.version < options.min_version:
            got, expected = (
                f"version {image.asked.version}",
                f"version {options.min_version} or later",
            )
            return Refusal(
                rung=image.device_class, reason="rolled_back", got=got, expected=expected
            )
        if options.trusted_keys and (unsigned := image.unsigned(options.trusted_keys)):
            return unsigned
        manifest = image.manifest()
        if options.runtime == "native":
            if foreign := refuse_by_runtime(manifest):
                return foreign
            manifest = replace(manifest, payloads=native_payloads(manifest))
        return (
            refuse_by_device(manifest, options.device)
            or refuse_by_cuda(manifest, process.cuda)
            or refuse_by_torch(manifest, process.torch_version, canary=options.canary)
            or refuse_by_engine(manifest, process.engines)
            or refuse_by_threads(manifest, process.num_threads)
            or (
                refuse_by_isa(manifest, process.machine())
                and refuse_by_isa(manifest, process.machine(limits))
            )
        )
    except StoreUnreachableError:
        raise
    except Exception as error:  # an artifact that cannot be read is refused, and the next is tried
        return failure(image.device_class, error)


def failure(device_class: str, error: Exception) -> Refusal:
    """The refusal of an artifact that could not be read or opened."""
    reason, expected = "does_not_open", "a payload that opens"
    if isinstance(error, IntegrityError):
        reason, expected = "tampered", "the published digest"
    elif isinstance(error, CanaryError):
        reason, expected = "canary", "the golden outputs"
    got = str(error) if isinstance(error, ColdpressError) else last_line(error)
    return Refusal(rung=device_class, reason=reason, got=got, expected=expected)
