"""The user's source line behind an error or a warning: `model.py:12: if x.sum() > 0:`.

Lines of torch, freezer and Python's standard library are not the user's.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path, PurePath

_MARK = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n(?:.*\n)*?(?P<code>.*)\n *~+( <---'
    r" HERE)?\n?"
)
_STACK = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+).*\n(?P<code>.*)$', re.MULTILINE)
_FREEZER = f"{Path(__file__).parents[2]}/"
_TORCH = importlib.util.find_spec("torch")
_LIBRARIES = (
    _FREEZER,
    f"{sysconfig.get_path('stdlib')}/",
    *(f"{folder}/" for folder in (_TORCH and _TORCH.submodule_search_locations) or ()),
)
_PACKAGES = ("/site-packages/", "/dist-packages/")
_ENGINES = re.compile(r"-packages/(torch|onnxruntime|onnxscript|onnx_ir|openvino)/")


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
    frames = [
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_stack(sys._getframe(1))
    ]
    own = [index for index, (file, _) in enumerate(frames) if file.startswith(_FREEZER)]
    below = frames[: own[-1]] if own else frames
    return next((_line(file, number) for file, number in below if _is_users(file)), None)


def warned_at(warning: warnings.WarningMessage) -> str | None:
    """The line of a warning; None if it is not the user's."""
    return _line(warning.filename, warning.lineno) if _is_users(warning.filename) else None


def marked_in(text: str) -> str | None:
    """The line that TorchScript marks in an error or a source range: of several the innermost of
    the user, or the innermost.

    Returns:
        None without a mark.
    """
    marks = list(_MARK.finditer(text))
    if not marks:
        return None
    mark = next((mark for mark in marks if _is_users(mark["file"])), marks[0])
    return _line(mark["file"], int(mark["line"]), mark["code"])


def line_of_stack(stack_trace: str | None) -> str | None:
    """The user's line in a stack trace of torch.export, innermost last; None if no line is the
    user's.
    """
    for frame in reversed(list(_STACK.finditer(stack_trace or ""))):
        if _is_users(frame["file"]):
            return _line(frame["file"], int(frame["line"]), frame["code"]).removesuffix(": ")
    return None


def _is_users(file: str) -> bool:
    # the second: also scripted on another machine
    if file.startswith("<") or _ENGINES.search(file):
        return False
    for folder in _LIBRARIES:
        rest = file[len(folder) - 1 :]
        if file.startswith(folder) and not any(part in rest for part in _PACKAGES):
            return False
    return True


def _line(file: str, number: int, code: str | None = None) -> str:
    text = linecache.getline(file, number) if code is None else code
    return f"{PurePath(file).name}:{number}: {text.strip()}"
