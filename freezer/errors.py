"""The exceptions of Coldpress, all of them.

    ColdpressError
    ├── UsageError                what a person asked for cannot be done as asked
    │   ├── SpecError             an input spec or a dim is wrong
    │   ├── CatalogError          a catalog entry is wrong (names the entry and the field)
    │   └── MissingDependencyError  an optional package is needed (names the install command)
    ├── FreezeError               one model could not be frozen; `kind` is the type of the outcome
    │   ├── SourceError           the model or its samples could not be loaded
    │   ├── CaptureError          no graph could be made of the model
    │   ├── BuildError            a lowering could not turn the graph into a payload
    │   └── JudgeError            the candidates could not be compared at all
    ├── StoreError
    │   ├── StoreUnreachableError the store cannot be read or written
    │   └── NotPublishedError     no such model, version or device class in the store
    ├── IntegrityError            bytes are not those that were published: tampering or damage
    ├── IncompatibleError         no artifact can serve this machine; carries the ladder
    ├── CanaryError               the artifact does not give its golden outputs on this machine
    ├── ContractError             a call broke the input contract of a frozen model
    └── InfrastructureError       Ray or MLflow failed, not a model

Tampering (IntegrityError), incompatibility (IncompatibleError) and misuse (UsageError, ContractError) are different types,
so that a deployment can treat them differently. Every error survives pickling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freezer.ladder import Refusal


class ColdpressError(Exception):
    """What a person or a machine did wrong. The message says what, got, expected and the remedy."""


class UsageError(ColdpressError):
    """Something was asked for that cannot be done as asked."""


class SpecError(UsageError):
    """An input spec, a dim or a sample is wrong."""


class CatalogError(UsageError):
    """A catalog entry is wrong.

    Args:
        message: what is wrong, what was expected, and the remedy.
        entry: the name of the entry, or its place in the catalog when it has no name.
        field: the field that is wrong, in dotted form.
    """

    def __init__(self, message: str, *, entry: str | None = None, field: str | None = None) -> None:
        place = ", ".join(part for part in (f"entry {entry!r}" if entry else "", f"field {field!r}" if field else "") if part)
        super().__init__(f"{place}: {message}" if place else message)
        self._message, self.entry, self.field = message, entry, field

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_catalog_error, (self._message, self.entry, self.field)


def _rebuild_catalog_error(message: str, entry: str | None, field: str | None) -> CatalogError:
    return CatalogError(message, entry=entry, field=field)


class MissingDependencyError(UsageError):
    """A package that this use needs is not installed; the message holds the command that installs it."""


class FreezeError(ColdpressError):
    """One model could not be frozen. `kind` becomes the type of the failed outcome."""

    kind = "freeze"


class SourceError(FreezeError):
    """The model, its weights or its samples could not be loaded."""

    kind = "source"


class CaptureError(FreezeError):
    """No graph could be made of the model by the captures that the recipe allows."""

    kind = "capture"


class BuildError(FreezeError):
    """A lowering could not turn a captured graph into a payload."""

    kind = "build"


class JudgeError(FreezeError):
    """The candidates could not be compared: the eager model itself does not run."""

    kind = "judge"


class StoreError(ColdpressError):
    """Something about a store."""


class StoreUnreachableError(StoreError):
    """The store cannot be read or written."""


class NotPublishedError(StoreError):
    """The store holds no such model, version or device class."""


class IntegrityError(ColdpressError):
    """Bytes differ from those that were published: tampering, or damage."""


class IncompatibleError(ColdpressError):
    """No artifact of the model can serve this machine.

    Args:
        message: the model and the reason of every rung.
        ladder: what was tried, in order, and why each rung was refused.
    """

    def __init__(self, message: str, ladder: Sequence[Refusal] = ()) -> None:
        super().__init__(message)
        self.ladder = tuple(ladder)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.ladder)


class CanaryError(ColdpressError):
    """The golden inputs do not give the golden outputs on this machine."""


class ContractError(ColdpressError, ValueError):
    """A call broke the input contract of a frozen model: name, dtype, device, rank or a dim."""


class InfrastructureError(ColdpressError):
    """Ray or MLflow failed, not a model."""
