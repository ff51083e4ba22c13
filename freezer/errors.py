"""The exceptions of Coldpress, all of them.

    ColdpressError
    ├── UsageError                what a person asked for cannot be done as asked
    │   ├── SpecError             an input spec or a dim is wrong
    │   ├── CatalogError          a catalog entry is wrong (names the entry and the field)
    │   ├── MissingDependencyError  an optional package is needed (names the install command)
    │   └── CudaGraphsError       calls of the artifact cannot be captured as CUDA graphs
    ├── FreezeError               one model could not be frozen; `kind` is the type of the outcome
    │   ├── SourceError           the model or its samples could not be loaded
    │   ├── CaptureError          no graph could be made of the model
    │   ├── BuildError            a lowering could not turn the graph into a payload
    │   │   └── LeakError         a payload holds instructions that its device class does not have
    │   └── JudgeError            the candidates could not be compared at all
    ├── StoreError
    │   ├── StoreUnreachableError the store cannot be read or written
    │   └── NotPublishedError     no such model, version or device class in the store
    ├── IntegrityError            bytes are not those that were published: tampering or damage
    ├── IncompatibleError         no artifact can serve this machine; carries the ladder
    ├── CanaryError               the artifact does not give its golden outputs on this machine
    ├── SpeedError                the artifact is not as fast on this machine as its manifest promises
    ├── ContractError             a call broke the input contract of a frozen model
    │   └── NotPreservedError     an attribute or method that freezing did not keep
    └── InfrastructureError       Ray or MLflow failed, not a model

Tampering (IntegrityError), incompatibility (IncompatibleError) and misuse (UsageError, ContractError) are different types,
so that a deployment can treat them differently. Every error survives pickling, and carries a code (`CP-…`), its class's own or a
finer one, which docs/errors.md explains with cause and remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class ColdpressError(Exception):
    """What a person or a machine did wrong. The message says what, got, expected and the remedy.

    Args:
        message: one sentence.
        code: where it says more than the class's own.

    Attributes:
        code: looked up in docs/errors.md.
    """

    code: str = "CP-ERROR"

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code

    @property
    def coded(self) -> str:
        """The message behind its code: how people are shown the error."""
        return f"{self.code}: {self}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, up to 400 characters; the name of its type where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:400]


def last_line(error: BaseException) -> str:
    """The last line of an error's text, up to 400 characters; the name of its type where it has no text."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)[:400]


class UsageError(ColdpressError):
    """Something was asked for that cannot be done as asked."""

    code = "CP-USAGE"


class SpecError(UsageError):
    """An input spec, a dim or a sample is wrong."""

    code = "CP-SPEC"


class CatalogError(UsageError):
    """A catalog entry is wrong.

    Args:
        message: what is wrong, what was expected, and the remedy.
        entry: the name of the entry, or its place in the catalog when it has no name.
        field: the field that is wrong, in dotted form.
        place: file and line, or row, of the entry.
        code: where it says more than the class's own.
    """

    code = "CP-CATALOG"

    def __init__(
        self, message: str, *, entry: str | None = None, field: str | None = None, place: str | None = None, code: str | None = None
    ) -> None:
        where = (place or "", f"entry {entry!r}" if entry else "", f"field {field!r}" if field else "")
        text = ", ".join(part for part in where if part)
        super().__init__(f"{text}: {message}" if text else message, code=code)
        self._message, self.entry, self.field, self.place = message, entry, field, place

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_catalog_error, (self._message, self.entry, self.field, self.place, self.code)


def _rebuild_catalog_error(message: str, entry: str | None, field: str | None, place: str | None, code: str) -> CatalogError:
    return CatalogError(message, entry=entry, field=field, place=place, code=code)


class MissingDependencyError(UsageError):
    """A package that this use needs is not installed; the message holds the command that installs it."""

    code = "CP-DEPENDENCY"


class CudaGraphsError(UsageError):
    """Calls of an artifact cannot be captured as CUDA graphs, which `load(cuda_graphs=True)` asks for."""

    code = "CP-CUDA-GRAPHS"


class FreezeError(ColdpressError):
    """One model could not be frozen. `kind` becomes the type of the failed outcome."""

    kind = "freeze"
    code = "CP-FREEZE"


class SourceError(FreezeError):
    """The model, its weights or its samples could not be loaded."""

    kind = "source"
    code = "CP-SOURCE"


class CaptureError(FreezeError):
    """No graph could be made of the model by the captures that the recipe allows."""

    kind = "capture"
    code = "CP-CAPTURE"


class BuildError(FreezeError):
    """A lowering could not turn a captured graph into a payload."""

    kind = "build"
    code = "CP-BUILD"


class LeakError(BuildError):
    """A payload holds instructions that CPUs of its device class do not all have."""

    kind = "isa_leak"
    code = "CP-ISA-LEAK"


class JudgeError(FreezeError):
    """The candidates could not be compared: the eager model itself does not run."""

    kind = "judge"
    code = "CP-JUDGE"


class StoreError(ColdpressError):
    """Something about a store."""

    code = "CP-STORE"


class StoreUnreachableError(StoreError):
    """The store cannot be read or written."""

    code = "CP-STORE-UNREACHABLE"


class NotPublishedError(StoreError):
    """The store holds no such model, version or device class."""

    code = "CP-NOT-PUBLISHED"


class IntegrityError(ColdpressError):
    """Bytes differ from those that were published: tampering, or damage."""

    code = "CP-INTEGRITY"


class IncompatibleError(ColdpressError):
    """No artifact of the model can serve this machine.

    Args:
        message: the model and the reason of every rung.
        ladder: what was tried, in order, and why each rung was refused.
    """

    code = "CP-INCOMPATIBLE"

    def __init__(self, message: str, ladder: Sequence[Refusal] = ()) -> None:
        super().__init__(message)
        self.ladder = tuple(ladder)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.ladder), {"code": self.code}


class CanaryError(ColdpressError):
    """The golden inputs do not give the golden outputs on this machine."""

    code = "CP-CANARY"


class SpeedError(ColdpressError):
    """An artifact is less than half as fast here as its manifest promises, or the machine is too busy to tell.

    Args:
        message: what was measured and expected, and what differs here.
        check: the figures; None where it could not be told.
    """

    code = "CP-SPEED"

    def __init__(self, message: str = "", *, check: SpeedCheck | None = None) -> None:
        super().__init__(message)
        self.check = check

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_speed_error, (str(self), self.check, self.code)


def _rebuild_speed_error(message: str, check: SpeedCheck | None, code: str) -> SpeedError:
    error = SpeedError(message, check=check)
    error.code = code
    return error


class ContractError(ColdpressError, ValueError):
    """A call broke the input contract of a frozen model: name, dtype, device, rank or a dim."""

    code = "CP-CONTRACT"


class NotPreservedError(ContractError, AttributeError):
    """A frozen model lacks an attribute or method. It is an AttributeError too, so that `hasattr` answers."""

    code = "CP-NOT-PRESERVED"


class InfrastructureError(ColdpressError):
    """Ray or MLflow failed, not a model."""

    code = "CP-INFRASTRUCTURE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A rung that was not taken.

    Attributes:
        rung: the device class.
        reason: `class_mismatch`, `device_mismatch`, `isa_mismatch`, `threads_mismatch`, `torch_too_old`, `torch_untried`,
            `unsigned`, `tampered`, `does_not_open`, `canary`; and of GPUs those of hardware/cuda_requirements.py.
        got, expected: what was found and what the artifact needs.
    """

    rung: str
    reason: str
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.rung}: {self.reason}: got {self.got}, expected {self.expected}"


@dataclass(frozen=True, kw_only=True)
class SpeedCheck:
    """What was timed. A ratio is how many times as fast as the portable artifact.

    Attributes:
        expected: by the manifests; `measured` here, with its 95% confidence interval from `low` to `high`.
        num_threads, point: that both were timed with.
        median_ms: by device class.
        num_rounds, num_dropped: that were timed undisturbed, and that others disturbed.
    """

    device_class: str
    expected: float
    measured: float
    low: float
    high: float
    num_threads: int
    point: Mapping[str, int]
    median_ms: Mapping[str, float]
    num_rounds: int
    num_dropped: int

    def __str__(self) -> str:
        sizes = "".join(f", {name} {size}" for name, size in self.point.items())
        medians = ", ".join(f"{name} {median:.3g} ms" for name, median in self.median_ms.items())
        interval = f"{self.low:.2f} to {self.high:.2f}"
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"{self.measured:.2f} times as fast as portable here ({interval}; {medians}; {threads}{sizes})"
