"""The user's source line behind an error, a warning or a range of TorchScript: `model.py:12: if
x.sum() > 0:`.

Lines of torch, freezer and Python's standard library are not the user's.
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

_MARK = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n(?:.*\n)*?(?P<code>.*)\n *~+( <---'
    r" HERE)?\n?"
)
_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): .*$", re.MULTILINE)
_STACK = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+).*\n(?P<code>.*)$', re.MULTILINE)
# followed by lines of TorchScript's code in the file that the module was loaded from
_SAVED = "Serialized   File "
_FREEZER = Path(__file__).parents[2]
_OTHERS = tuple(
    f"{folder}/" for folder in (Path(torch.__file__).parent, _FREEZER, sysconfig.get_path("stdlib"))
)
_OWN = f"{_FREEZER}/"
_PACKAGES = ("/site-packages/", "/dist-packages/")


def raised_at(error: BaseException | None) -> str | None:
    """The innermost of the user's lines that raised an error, or its cause; None if no line is the
    user's.
    """
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if _is_users(frame.filename):
                return _line(frame.filename, frame.lineno or 0, frame.line or "")
        error = error.__cause__ or error.__context__
    return None


def running_at() -> str | None:
    """The innermost of the user's lines that runs now, below freezer's own; None if no line is the
    user's.
    """
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    ours = [
        index for index, frame in enumerate(frames) if frame.f_code.co_filename.startswith(_OWN)
    ]
    for frame in frames[: ours[-1]] if ours else frames:
        if _is_users(frame.f_code.co_filename):
            file, number = frame.f_code.co_filename, frame.f_lineno
            return _line(file, number, linecache.getline(file, number))
    return None


def warned_at(said: warnings.WarningMessage) -> str | None:
    """The line of a warning; None if it is not the user's."""
    return (
        _line(said.filename, said.lineno, linecache.getline(said.filename, said.lineno))
        if _is_users(said.filename)
        else None
    )


def marked_in(text: str) -> str | None:
    """The line that TorchScript marks in an error or a source range: of several the innermost of
    the user, or the innermost.

    Returns:
        None without a mark.
    """
    marks = [(found["file"], int(found["line"]), found["code"]) for found in _MARK.finditer(text)]
    if not marks:
        return None
    return _line(*next((mark for mark in marks if _is_users(mark[0])), marks[0]))


def line_of_node(source_range: str) -> str | None:
    """The user's line of a node of a TorchScript graph, scripted or traced; torch's own if none is
    the user's.

    Args:
        source_range: the result of `node.sourceRange()`; may be empty.
    """
    text = source_range.partition(_SAVED)[0]
    frames = (
        []
        if _MARK.search(text)
        else [(found["file"], int(found["line"])) for found in _FRAME.finditer(text)]
    )
    if frames:  # a traced call, innermost first
        file, number = next((frame for frame in frames if _is_users(frame[0])), frames[0])
        return _line(file, number, linecache.getline(file, number)).removesuffix(": ")
    return marked_in(text) or marked_in(source_range)


def line_of_stack(stack_trace: str | None) -> str | None:
    """The user's line in a stack trace of torch.export, innermost last; None if no line is the
    user's.
    """
    for found in reversed(list(_STACK.finditer(stack_trace or ""))):
        if _is_users(found["file"]):
            return _line(found["file"], int(found["line"]), found["code"]).removesuffix(": ")
    return None


def _is_users(file: str) -> bool:
    if (
        file.startswith("<") or "/site-packages/torch/" in file
    ):  # the second: scripted on another machine
        return False
    return not any(
        file.startswith(folder) and not any(part in file[len(folder) - 1 :] for part in _PACKAGES)
        for folder in _OTHERS
    )


def _line(file: str, number: int, code: str) -> str:
    return f"{PurePath(file).name}:{number}: {code.strip()}"
