"""Turn an error of torch into one sentence: its meaning, the user's source line, and a remedy from
remedies.py.

The full text stays in the cause and in the candidate's evidence.
"""

from __future__ import annotations

import re

from freezer.errors import CaptureError, ColdpressError
from freezer.freezing.diagnostics.remedies import FAMILIES, Family, explain
from freezer.freezing.diagnostics.source_lines import line_of_stack, marked_in, raised_at

_FILE = re.compile(r'(\s+at)?\s+File "')
_ADDRESS = re.compile(r" at:? 0x[0-9a-f]+")  # differs between runs
_INTERPRETER = "The following operation failed in the TorchScript interpreter"
_EXPLANATION = re.compile(r"^ *Explanation: (?P<text>.+)$", re.MULTILINE)


def export_sentence(error: Exception) -> str:
    """Why torch.export refused a model."""
    text = str(error)
    if text.startswith("Constraints violated"):
        why = ", ".join(
            _first_sentence(line) for line in re.findall(r"^  - (.*)$", text, re.MULTILINE)[:2]
        )
        fixes = [
            line.strip()
            for line in text.partition("Suggested fixes:\n")[2].partition("\n\n")[0].splitlines()
        ]
        return (
            f"{text.partition('!')[0]}: {why}{', suggested: ' if fixes else ''}{', '.join(fixes)}"
        )
    if known := _known(error, "export", line_of_stack(text) or raised_at(error)):
        return known
    explained = _EXPLANATION.search(text)
    why = f" ({_first_sentence(explained['text'])})" if explained else ""
    return f"{_first_line(error)}{why}{_at(line_of_stack(text) or raised_at(error))}"


def trace_sentence(error: Exception) -> str:
    """Why torch.jit.trace refused a model."""
    return (
        _known(error, "trace", raised_at(error)) or f"{_first_line(error)}{_at(raised_at(error))}"
    )


def script_sentence(error: Exception) -> str:
    """Why torch.jit.script, freeze or save refused a model."""
    text = str(error).rpartition("The error stack is reproduced here:")[
        2
    ]  # the error in a method that forward calls
    where = marked_in(text) or raised_at(error)
    if known := _known(error, "script", where, text):
        return known
    lines = [line.strip() for line in _FILE.split(text, 1)[0].splitlines() if line.strip()]
    if not lines or lines[0].startswith(_INTERPRETER):
        return run_sentence(error)
    return f"{_first_sentence(lines[0])}{_at(where)}"


def inductor_sentence(error: Exception) -> str:
    """Why Inductor refused a graph."""
    return _known(error, "inductor", None) or _first_sentence(_whole(error).splitlines()[0])


def onnx_sentence(error: Exception) -> str:
    """Why a program could not be converted to ONNX, or optimized by ONNX Runtime."""
    causes = [error]
    while causes[-1].__cause__ is not None and isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):  # the exporter wraps the cause in a page of advice
        if known := _known(cause, "onnx", None):
            return known
    return _first_sentence(_whole(causes[-1]).splitlines()[0])


def openvino_sentence(error: Exception) -> str:
    """Why OpenVINO refused a program: the last line of its message, after the failed checks."""
    return _known(error, "openvino", None) or _first_sentence(
        _whole(error).strip().splitlines()[-1]
    )


def code_of(error: Exception) -> str | None:
    """A code of docs/errors.md that is more specific than the failed capture or lowering; None if
    there is none.
    """
    if isinstance(error, ColdpressError):
        return error.code
    found = (explain(_whole(error), family) for family in FAMILIES)
    return next((item.code for item in found if item and item.code), None)


def run_sentence(error: Exception) -> str:
    """Why a captured program failed: TorchScript's interpreter puts the error last, after its own
    traceback.
    """
    if known := _known(error, "run", None):
        return known
    lines = str(error).strip().splitlines() or ["no message"]
    last = lines[-1] if lines[0].startswith(_INTERPRETER) else lines[0]
    return f"{type(error).__name__}: {last.removeprefix(f'{type(error).__name__}: ')}"


def _known(
    error: Exception, family: Family, where: str | None, text: str | None = None
) -> str | None:
    """The remedy of an error as a sentence; None for an unknown error, or one of Coldpress
    itself.
    """
    if isinstance(error, ColdpressError):
        return None
    found = explain(_ADDRESS.sub("", _whole(error) if text is None else text), family)
    return f"{found.means}{_at(where)}; {found.remedy}" if found else None


def _whole(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return (
        lines[0]
        if isinstance(error, CaptureError)
        else _first_sentence(f"{type(error).__name__}: {lines[0]}")
    )


def _first_sentence(line: str) -> str:
    return _ADDRESS.sub("", line.partition(". ")[0]).strip().rstrip(".:")


def _at(where: str | None) -> str:
    return f" at {where.removesuffix(':')}" if where else ""
