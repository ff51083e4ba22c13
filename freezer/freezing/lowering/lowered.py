"""Result of a lowering, and wall times of its phases."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import torch

from freezer.artifact import FreezingReport


@contextlib.contextmanager
def timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    """Record the wall time of the block in seconds, unless it raises."""
    started = time.monotonic()
    yield
    phases_s[name] = time.monotonic() - started


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """Result of a lowering.

    Attributes:
        report: the report, without sizes, time of the capture, and memory, which the build adds.
        texts: readable forms of the frozen model by file name: `code.txt`, `graph.txt`.
        layouts: layout of packed weights by dtype.
    """

    report: FreezingReport = field(default_factory=FreezingReport)
    texts: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)


CODE, GRAPH = "code.txt", "graph.txt"
_CAPTURED = "captured-"
"""Prefix of the names of texts of the captured model."""

_PLACE = re.compile(r"(?P<before># (?:File: )?)(?P<file>/[^\s:]+)(?=:\d+)")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")


def captured_texts(program: Any) -> dict[str, str]:
    """Code and graph of an ExportedProgram or a ScriptModule, by file name."""
    exported = isinstance(program, torch.export.ExportedProgram)
    try:
        texts = exported_texts(program) if exported else torchscript_texts(program)
    except Exception as error:  # a program that cannot be printed may still be frozen
        texts = {CODE: f"The captured program cannot be printed: {type(error).__name__}: {error}\n"}
    return {f"{_CAPTURED}{name}": text for name, text in texts.items()}


def exported_texts(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Code and graph of an exported program; the graph includes its signature and the ranges of its
    sizes.
    """
    signature = str(program.graph_signature).strip()
    graph = f"{program.graph}\n\n{signature}\n"
    if program.range_constraints:
        graph += "\n# ranges\n"
    for symbol, bounds in program.range_constraints.items():
        graph += f"# {symbol}: {bounds}\n"
    code = program.graph_module.print_readable(print_output=False)
    return {CODE: shortened(code), GRAPH: shortened(graph)}


def torchscript_texts(module: Any, methods: Sequence[str] = ("forward",)) -> dict[str, str]:
    """Code of a ScriptModule and its submodules, and inlined graphs of its methods."""
    graphs = []
    for method in methods:
        graph = module._c._get_method(method).inlined_graph
        graphs.append(f"# {method}\n{graph}")
    return {CODE: _code(module, methods), GRAPH: shortened("\n".join(graphs))}


def shortened(text: str) -> str:
    """Shorten source paths, so that the text does not depend on the machine: `# model.py:12`, `#
    torch/nn/functional.py:1491`.
    """
    return _PLACE.sub(_short, text)


def _short(place: re.Match[str]) -> str:
    path = place["file"]
    inside = _INSTALLED.sub("", path)
    if inside == path:
        inside = PurePosixPath(path).name
    return place["before"] + inside


def _code(module: Any, methods: Sequence[str]) -> str:
    """Code of the methods and of submodules; equal code of several submodules is printed once,
    under all their names.
    """
    parts = [module._c._get_method(method).code for method in methods]
    names: dict[str, list[str]] = {}
    for name, submodule in module.named_modules():
        if name and "forward" in submodule._c._method_names():
            code = submodule._c._get_method("forward").code
            names.setdefault(code, []).append(name)
    for code, same in names.items():
        parts.append(f"# {', '.join(same)}\n{code}")
    return "\n".join(parts)
