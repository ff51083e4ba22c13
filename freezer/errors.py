"""The exceptions of Coldpress.

    ColdpressError
    ├── UsageError                a request cannot be carried out
    │   ├── SpecError             an input spec, a dim or a sample is wrong
    │   ├── CatalogError          a catalog entry is wrong (names the entry and the field)
    │   └── MissingDependencyError  an optional package is missing (names the install command)
    ├── FreezeError               one model could not be frozen; `kind` is the type of the outcome
    │   ├── SourceError           the model or its samples could not be loaded
    │   ├── CaptureError          the model could not be captured as a graph
    │   ├── BuildError            a lowering could not turn the graph into a payload
    │   │   └── LeakError         a payload contains instructions that its device class lacks
    │   └── JudgeError            the candidates could not be compared
    ├── StoreError
    │   ├── StoreUnreachableError the store cannot be read or written
    │   └── NotPublishedError     the store lacks the model, version or device class
    ├── IntegrityError            bytes differ from what was published: tampering or damage
    ├── IncompatibleError         no artifact can serve this machine; has the ladder of refusals
    ├── CanaryError               the artifact does not reproduce its golden outputs here
    ├── SpeedError                the artifact is much slower here than its manifest says
    ├── ContractError             a call violates the input contract of a frozen model
    │   └── NotPreservedError     freezing did not keep an attribute or method
    └── InfrastructureError       Ray or MLflow failed, not a model

Tampering (IntegrityError), incompatibility (IncompatibleError) and misuse (UsageError,
ContractError) are different types, so deployments can treat them differently. Every error survives
pickling and has a code (`CP-…`), its class's own or a finer one; docs/reference/errors.md lists
causes and remedies by code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

OK, FAILED, USAGE, INFRASTRUCTURE, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes of commands, documented in docs/reference/contract.md: success; refused, or an outcome
failed; an invalid request; Ray, MLflow or the store failed; stopped by a person. """


def expected_names(got: str, names: Iterable[str]) -> str:
    """Return the part of a message that lists the valid names, and suggests the closest to the one
    given.
    """
    from difflib import get_close_matches

    known = list(names)
    close = get_close_matches(got, known, n=1)
    return f"expected {', '.join(known) or 'none'}" + (
        f"; did you mean {close[0]!r}?" if close else ""
    )


def without_credentials(text: str) -> str:
    """Return a text whose URLs have neither user nor query. Texts with locations are printed, and
    stored in manifests, ledgers and MLflow.
    """
    text = re.sub(r"(?<=://)[^/\s]*@", "", text)
    return re.sub(r"((?:://|url: )[^\s?#]*)[?#][^\s'\"]*", r"\1", text)


class ColdpressError(Exception):
    """Base of all errors. The message says what happened, what was expected, and how to fix it.

    Args:
        message: one sentence; credentials in its URLs are removed.
        code: a finer code than the class's own.

    Attributes:
        code: code of the error, listed in docs/reference/errors.md.
        exit_code: exit code of a command that ends with the error.
    """

    code: str = "CP-ERROR"
    exit_code: int = FAILED

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(without_credentials(message))
        if code is not None:
            self.code = code

    @property
    def coded(self) -> str:
        """The code and the message."""
        return f"{self.code}: {self}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(
    kind: type[ColdpressError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> ColdpressError:
    error = kind.__new__(kind, *args)  # without __init__, whose parameters differ between classes
    error.__dict__.update(attributes)
    return error


_PLACES = (
    r"(?m)\[ONNXRuntimeError\] : \d+ : \w+ : "
    r"|Load model from [^\n]*? failed:\s*"
    r"|This is an invalid model\. (In Node, [^\n]*?, Error )?(Type )?(Error: )?"
    r"|\S+\.(cc|cpp|h|hpp|cu):\d+ [^\n]*?\)( \[with [^\]]*\])? (?=\S)"
    r"|^(Exception from|Check '[^\n]*' failed at|While validating node) [^\n]*:\n"
)


def without_places(text: str) -> str:
    """Return a message of ONNX Runtime or OpenVINO without files and functions of its own code."""
    return re.sub(_PLACES, "", text)


def described(error: BaseException) -> str:
    """The type and the text of an error."""
    return f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, up to 400 characters, without places in an engine's code;
    the name of its type where it has no text.
    """
    lines = without_places(str(error)).strip().splitlines()
    return next(iter(lines), type(error).__name__)[:400]


def last_line(error: BaseException) -> str:
    """The last line of an error's text, up to 400 characters; the name of its type where it has no
    text.
    """
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)[:400]


class UsageError(ColdpressError):
    """A request that cannot be carried out."""

    code = "CP-USAGE"
    exit_code = USAGE


class SpecError(UsageError):
    """An input spec, a dim or a sample is wrong."""

    code = "CP-SPEC"


class CatalogError(UsageError):
    """A catalog entry is wrong.

    Args:
        message: what is wrong, what was expected, and how to fix it.
        entry: name of the entry, or its place in the catalog.
        field: the wrong field, in dotted form.
        place: file and line, or row, of the entry.
        code: a finer code than the class's own.
    """

    code = "CP-CATALOG"

    def __init__(
        self,
        message: str,
        *,
        entry: str | None = None,
        field: str | None = None,
        place: str | None = None,
        code: str | None = None,
    ) -> None:
        where = (
            place or "",
            f"entry {entry!r}" if entry else "",
            f"field {field!r}" if field else "",
        )
        text = ", ".join(filter(None, where))
        super().__init__(f"{text}: {message}" if text else message, code=code)
        self.entry, self.field, self.place = entry, field, place


class MissingDependencyError(UsageError):
    """An optional package is not installed; the message contains the install command."""

    code = "CP-DEPENDENCY"


class FreezeError(ColdpressError):
    """One model could not be frozen; `kind` is the type of the failed outcome."""

    kind = "freeze"


class SourceError(FreezeError):
    """The model, its weights or its samples could not be loaded."""

    kind = "source"
    code = "CP-SOURCE"


class CaptureError(FreezeError):
    """No capture of the recipe could make a graph of the model."""

    kind = "capture"
    code = "CP-CAPTURE"


class BuildError(FreezeError):
    """A lowering could not turn a captured graph into a payload."""

    kind = "build"
    code = "CP-BUILD"


class LeakError(BuildError):
    """A payload contains instructions that some CPUs of its device class lack."""

    kind = "isa_leak"
    code = "CP-ISA-LEAK"


class JudgeError(FreezeError):
    """The candidates could not be compared: the eager model itself does not run."""

    kind = "judge"
    code = "CP-JUDGE"


class StoreError(ColdpressError):
    """Base of errors of stores."""


class StoreUnreachableError(StoreError):
    """The store cannot be read or written."""

    code = "CP-STORE-UNREACHABLE"
    exit_code = INFRASTRUCTURE


class NotPublishedError(StoreError):
    """The store lacks the model, version or device class."""

    code = "CP-NOT-PUBLISHED"


class IntegrityError(ColdpressError):
    """Bytes differ from what was published: tampering or damage."""

    code = "CP-INTEGRITY"


class IncompatibleError(ColdpressError):
    """No artifact of the model can serve this machine.

    Args:
        message: the model and all reasons.
        ladder: the refusals, in the order tried.
    """

    code = "CP-INCOMPATIBLE"

    def __init__(self, message: str, ladder: Sequence[Refusal] = ()) -> None:
        super().__init__(message)
        self.ladder = tuple(ladder)


class CanaryError(ColdpressError):
    """The golden inputs do not reproduce the golden outputs on this machine."""

    code = "CP-CANARY"


class SpeedError(ColdpressError):
    """An artifact is less than half as fast here as its manifest says, or the machine is too busy
    to measure it.
    """

    code = "CP-SPEED"


class ContractError(ColdpressError, ValueError):
    """A call violates the input contract of a frozen model: name, dtype, device, rank or a dim."""

    code = "CP-CONTRACT"


class NotPreservedError(ContractError, AttributeError):
    """A frozen model lacks an attribute or method; also an AttributeError, for `hasattr`."""

    code = "CP-NOT-PRESERVED"


class InfrastructureError(ColdpressError):
    """Ray or MLflow failed, not a model."""

    code = "CP-INFRASTRUCTURE"
    exit_code = INFRASTRUCTURE


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """An artifact that was not used, and why.

    Attributes:
        rung: its device class.
        reason: `class_mismatch`, `device_mismatch`, `isa_mismatch`, `threads_mismatch`,
            `runtime_missing`, `torch_too_old`, `torch_untried`, `unsigned`, `rolled_back`,
            `tampered`, `does_not_open`, `canary`, or one of serving/compatibility.py.
        got, expected: what was found, and what the artifact needs.
    """

    rung: str
    reason: str
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.rung}: {self.reason}: got {self.got}, expected {self.expected}"


LEAST = {
    "cryptography": "44",
    "nncf": "3.4",
    "onnx": "1.19",
    "onnxruntime": "1.21",
    "onnxscript": "0.5",
    "openvino": "2025.0",
    "pyarrow": "18",
    "requests": "2.32",
    "torch": "2.11",
    "torchao": "0.18",
    "transformers": "4.56",
}
"""The oldest versions that Coldpress works with, as in pyproject.toml."""


def install_command(*names: str, **needed: str) -> str:
    """Return the command that installs optional packages, or upgrades them.

    Args:
        needed: oldest versions that an artifact needs, by package.
    """
    least = LEAST | needed
    return shlex.join(["pip", "install", *(f"{name}>={least[name]}" for name in names)])


def without_torch(what: str) -> MissingDependencyError:
    """The error for something that needs torch, where it is not installed."""
    return MissingDependencyError(
        f"{what} needs torch, which is not installed; {install_command('torch')}"
    )
