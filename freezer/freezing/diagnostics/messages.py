"""Turn an error of torch into one sentence: its meaning, the user's source line, and a remedy from
remedies.py.

The full text stays in the cause and in the candidate's evidence.
"""

from __future__ import annotations

import re

from freezer.errors import CaptureError, ColdpressError
from freezer.freezing.diagnostics.remedies import Family, explain
from freezer.freezing.diagnostics.source_lines import line_of_stack, marked_in, raised_at

_FILE = re.compile(r'(\s+at)?\s+File "')
_ADDRESS = re.compile(r" at:? 0x[0-9a-f]+")  # differs between runs
_INTERPRETER = "The following operation failed in the TorchScript interpreter"
_STACK = "The error stack is reproduced here:"
_EXPLANATION = re.compile(r"^ *Explanation: (?P<text>.+)$", re.MULTILINE)


def export_sentence(error: Exception) -> str:
    """Why torch.export refused a model."""
    text = str(error)
    line = line_of_stack(text) or raised_at(error)
    known = _known(error, "export", line)
    if known:
        return known
    explained = _EXPLANATION.search(text)
    why = f" ({_first_sentence(explained['text'])})" if explained else ""
    return f"{_first_line(error)}{why}{_at(line)}"


def trace_sentence(error: Exception) -> str:
    """Why torch.jit.trace refused a model."""
    line = raised_at(error)
    return _known(error, "trace", line) or f"{_first_line(error)}{_at(line)}"


def script_sentence(error: Exception) -> str:
    """Why torch.jit.script, freeze or save refused a model."""
    text = str(error).rpartition(_STACK)[2]  # the error in a method that forward calls
    line = marked_in(text) or raised_at(error)
    known = _known(error, "script", line, text)
    if known:
        return known
    message = _FILE.split(text, maxsplit=1)[0].strip()
    if not message or message.startswith(_INTERPRETER):
        return run_sentence(error)
    return f"{_first_sentence(message.splitlines()[0])}{_at(line)}"


def inductor_sentence(error: Exception) -> str:
    """Why Inductor refused a graph."""
    return _known(error, "inductor") or _first_sentence(_whole(error).splitlines()[0])


def onnx_sentence(error: Exception) -> str:
    """Why a program could not be converted to ONNX, or optimized by ONNX Runtime."""
    causes = [error]
    while isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):  # the exporter wraps the cause in a page of advice
        known = _known(cause, "onnx")
        if known:
            return known
    return _first_sentence(_whole(causes[-1]).splitlines()[0])


def openvino_sentence(error: Exception) -> str:
    """Why OpenVINO refused a program: the last line of its message, after the failed checks."""
    last = _whole(error).strip().splitlines()[-1]
    return _known(error, "openvino") or _first_sentence(last)


def run_sentence(error: Exception) -> str:
    """Why a captured program failed: TorchScript's interpreter puts the error last, after its own
    traceback.
    """
    known = _known(error, "run")
    if known:
        return known
    lines = str(error).strip().splitlines() or ["no message"]
    line = lines[-1] if lines[0].startswith(_INTERPRETER) else lines[0]
    kind = type(error).__name__
    return f"{kind}: {line.removeprefix(f'{kind}: ')}"


def _known(
    error: Exception, family: Family, line: str | None = None, text: str | None = None
) -> str | None:
    """The remedy of an error as a sentence; None for an unknown error, or one of Coldpress
    itself.
    """
    if isinstance(error, ColdpressError):
        return None
    found = explain(_ADDRESS.sub("", _whole(error) if text is None else text), family)
    return f"{found.means}{_at(line)}; {found.remedy}" if found else None


def _whole(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    if isinstance(error, CaptureError):
        return lines[0]
    return _first_sentence(f"{type(error).__name__}: {lines[0]}")


def _first_sentence(line: str) -> str:
    return _ADDRESS.sub("", line.partition(". ")[0]).strip().rstrip(".:")


def _at(line: str | None) -> str:
    return f" at {line.removesuffix(':')}" if line else ""
