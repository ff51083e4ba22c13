"""Source lines of test models, as messages show them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def place_of(function: Callable[..., Any], part: str) -> str:
    """`file.py:12: code` of the first line of a function that contains a part."""
    lines, first = inspect.getsourcelines(function)
    index = next(index for index, line in enumerate(lines) if part in line)
    return f"{Path(inspect.getfile(function)).name}:{first + index}: {lines[index].strip()}"
