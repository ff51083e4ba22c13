"""Which failure an exception causes."""

from __future__ import annotations

import errno
import os

import pytest

from freezer.errors import BuildError, CaptureError, InfrastructureError, SpecError
from pipeline.failures import classify


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
TRIED = ExceptionGroup(
    "tried",
    [
        BuildError("no graph"),
        RuntimeError("[enforce fail at inline_container.cc:747] . PytorchStreamWriter failed"),
    ],
)
COMPILER = "inductor: g++: fatal error: "


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (CaptureError("no graph"), "capture", "CP-CAPTURE"),
        (SpecError("no dim"), "spec", "CP-SPEC"),
        (InfrastructureError("gone", code="CP-TRACKING"), "infrastructure", "CP-TRACKING"),
        (KeyError("weights"), "error", "CP-ERROR"),
        (chained(BuildError("inductor: failed"), NO_ROOM), "disk", "CP-DISK"),
        (
            BuildError("inductor: error writing to /tmp/x.s: No space left on device"),
            "disk",
            "CP-DISK",
        ),
        (chained(BuildError("all failed"), TRIED), "disk", "CP-DISK"),
        (ValueError("I/O error: Input/output error (os error 5) at path"), "disk", "CP-DISK"),
        (BuildError(f"{COMPILER}Killed signal terminated program cc1plus"), "memory", "CP-MEMORY"),
        (BuildError("inductor: CUDA error: out of memory"), "memory", "CP-MEMORY-GPU"),
        (
            BuildError(f"{COMPILER}vfork: Resource temporarily unavailable"),
            "infrastructure",
            "CP-INFRASTRUCTURE",
        ),
        (
            chained(CaptureError("no graph"), RuntimeError("can't start new thread")),
            "infrastructure",
            "CP-INFRASTRUCTURE",
        ),
    ],
)
def test_exceptions_are_classified(error: Exception, kind: str, code: str) -> None:
    failure = classify(error)
    assert (failure.kind, failure.code) == (kind, code)
    assert str(error) in failure.message


def test_a_cyclic_chain_is_classified() -> None:
    first, second = CaptureError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert classify(first).kind == "capture"
