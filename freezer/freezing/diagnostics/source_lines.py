"""The line of the user's own source behind an error, a warning or a mark of TorchScript: `model.py:12: if x.sum() > 0:`.

What lies in torch, in freezer or in Python's standard library is not the user's.
"""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path, PurePath

import torch

_MARK = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n(?:.*\n)*?(?P<code>.*)\n *~+( <--- HERE)?\n?')
_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): .*$", re.MULTILINE)
_STACK = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+).*\n(?P<code>.*)$', re.MULTILINE)
_SAVED = "Serialized   File "  # then the lines of TorchScript's own code in the file that a module was loaded from
_FREEZER = Path(__file__).parents[2]
_OTHERS = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, _FREEZER, sysconfig.get_path("stdlib")))
_OWN = f"{_FREEZER}/"
_PACKAGES = ("/site-packages/", "/dist-packages/")


def raised_at(error: BaseException | None) -> str | None:
    """The user's line nearest to where an error, or what it was raised from, arose; None where no line was the user's."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if _is_users(frame.filename):
                return _line(frame.filename, frame.lineno or 0, frame.line or "")
        error = error.__cause__ or error.__context__
    return None


def running_at() -> str | None:
    """The user's line that runs now, the innermost; None where no line is the user's. What calls freezer is not meant."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    ours = [index for index, frame in enumerate(frames) if frame.f_code.co_filename.startswith(_OWN)]
    for frame in frames[: ours[-1]] if ours else frames:
        if _is_users(frame.f_code.co_filename):
            file, number = frame.f_code.co_filename, frame.f_lineno
            return _line(file, number, linecache.getline(file, number))
    return None


def warned_at(said: warnings.WarningMessage) -> str | None:
    """The user's line that a warning is about; None where the line is not the user's."""
    return _line(said.filename, said.lineno, linecache.getline(said.filename, said.lineno)) if _is_users(said.filename) else None


def marked_in(text: str) -> str | None:
    """The line that TorchScript marks in an error or a source range; None without a mark.

    Where several are marked, a call inside a call, it is the innermost that is the user's, or the innermost where none is.
    """
    marks = [(found["file"], int(found["line"]), found["code"]) for found in _MARK.finditer(text)]
    if not marks:
        return None
    return _line(*next((mark for mark in marks if _is_users(mark[0])), marks[0]))


def line_of_node(source_range: str) -> str | None:
    """The user's line that a node of TorchScript's graph was made of, scripted or traced; torch's own where none is the user's.

    Args:
        source_range: what `node.sourceRange()` gives; empty of what no line stands for.
    """
    text = source_range.partition(_SAVED)[0]
    frames = [] if _MARK.search(text) else [(found["file"], int(found["line"])) for found in _FRAME.finditer(text)]
    if frames:  # of the call that was traced, innermost first
        file, number = next((frame for frame in frames if _is_users(frame[0])), frames[0])
        return _line(file, number, linecache.getline(file, number)).removesuffix(": ")
    return marked_in(text) or marked_in(source_range)


def line_of_stack(stack_trace: str | None) -> str | None:
    """The user's line in what torch.export keeps of a node's origin, the innermost last; None where no line is the user's."""
    for found in reversed(list(_STACK.finditer(stack_trace or ""))):
        if _is_users(found["file"]):
            return _line(found["file"], int(found["line"]), found["code"]).removesuffix(": ")
    return None


def _is_users(file: str) -> bool:
    if file.startswith("<") or "/site-packages/torch/" in file:  # the second: a file that was scripted on another machine
        return False
    return not any(file.startswith(folder) and not any(part in file[len(folder) - 1 :] for part in _PACKAGES) for folder in _OTHERS)


def _line(file: str, number: int, code: str) -> str:
    return f"{PurePath(file).name}:{number}: {code.strip()}"
