"""What a capture raised, as one sentence for people, with the user's own source line. The whole text stays in the cause."""

from __future__ import annotations

import re

from freezer.errors import CaptureError
from freezer.source_lines import marked_in, raised_at

_FILE = re.compile(r'(\s+at)?\s+File "')
_ADDRESS = re.compile(r" at:? 0x[0-9a-f]+")  # two runs say the same
_VALUES = "data-dependent"
_INTERPRETER = "The following operation failed in the TorchScript interpreter"


def export_sentence(error: Exception) -> str:
    """Why torch.export did not take a model."""
    text = str(error)
    if _VALUES in text:
        where = raised_at(error)
        return f"{_VALUES} control flow: a branch, a size or a number depends on the values of a tensor{_at(where)}"
    if text.startswith("Constraints violated"):
        why = ", ".join(_first_sentence(line) for line in re.findall(r"^  - (.*)$", text, re.MULTILINE)[:2])
        fixes = [line.strip() for line in text.partition("Suggested fixes:\n")[2].partition("\n\n")[0].splitlines()]
        return f"{text.partition('!')[0]}: {why}{', suggested: ' if fixes else ''}{', '.join(fixes)}"
    return f"{_first_line(error)}{_at(raised_at(error))}"


def trace_sentence(error: Exception) -> str:
    """Why torch.jit.trace did not take a model."""
    return f"{_first_line(error)}{_at(raised_at(error))}"


def script_sentence(error: Exception) -> str:
    """Why torch.jit.script, freeze or save did not take a model."""
    text = str(error).rpartition("The error stack is reproduced here:")[2]  # what went wrong in a method that forward calls
    lines = [line.strip() for line in _FILE.split(text, 1)[0].splitlines() if line.strip()]
    if not lines or lines[0].startswith(_INTERPRETER):
        return run_sentence(error)
    return f"{_first_sentence(lines[0])}{_at(marked_in(text) or raised_at(error))}"


def run_sentence(error: Exception) -> str:
    """Why a captured program does not run: TorchScript's interpreter puts what happened last, behind its own traceback."""
    lines = str(error).strip().splitlines() or ["no message"]
    last = lines[-1] if lines[0].startswith(_INTERPRETER) else lines[0]
    return f"{type(error).__name__}: {last.removeprefix(f'{type(error).__name__}: ')}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0] if isinstance(error, CaptureError) else _first_sentence(f"{type(error).__name__}: {lines[0]}")


def _first_sentence(line: str) -> str:
    return _ADDRESS.sub("", line.partition(". ")[0]).strip().rstrip(".:")


def _at(where: str | None) -> str:
    return f" at {where}" if where else ""
