"""The sizes that an exported program takes: refusals of torch.export and guards of programs, in the
words of a catalog.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch.export import ExportedProgram

from freezer.errors import CaptureError, first_line
from freezer.freezing.capture.program import sizes_text
from freezer.freezing.diagnostics import sentence
from freezer.spec import InputSpec, all_sizes, combinations, distinct

NUM_SIZES = 8192
"""The most combinations of sizes to try."""

DIMS = "CP-EXPORT-DIMS"
"""Code of a program that takes fewer sizes than declared."""

FIXED = "specialized it to be a constant"
"""What torch.export says of a size that it treats as a constant."""

_SIZE = re.compile(
    r"L\['\w+'\]\[(\d+)\]\.size\(\)\[(\d+)\]|\btensors_(\d+)(?:_\d+)?\.size\(\)\[(\d+)\]"
)
_VIOLATED = re.compile(r"^Constraints violated \((?P<names>[^)]*)\)")
_CONSTANT = re.compile(
    rf"You marked (?P<name>\S+) as dynamic but your code {FIXED} \((?P<size>\d+)\).*"
)
_MAX_CONDITIONS = 2


def refusal(error: Exception, spec: InputSpec) -> CaptureError:
    """The error for an exception of torch.export; if sizes are the reason, it names them and how to
    declare them.
    """
    text = str(error)
    violated = _VIOLATED.match(text)
    if not violated:
        return CaptureError(f"torch.export: {sentence(error, 'export')}")
    mentioned = re.findall(r"[A-Za-z]\w*", violated["names"].replace("*_", " "))
    names = [dim.name for dim in spec.dims if dim.name in mentioned]
    lines = re.findall(r"^  - (.*)$", text, re.MULTILINE)
    guards = [line.rpartition("satisfy the generated guard ")[2].rstrip(".") for line in lines]
    guards = [_CONSTANT.sub(r"\g<name> == \g<size>", guard) for guard in guards]
    needed = list(dict.fromkeys(with_names(guard, spec) for guard in guards))[:_MAX_CONDITIONS]
    _, _, fixes = text.partition("Suggested fixes:\n")
    return CaptureError(
        f"torch.export: no program takes all declared sizes of {' and '.join(names)}: it needs "
        f"{' and '.join(needed)}; {_remedy(fixes, names)}",
        code=DIMS,
    )


def _remedy(fixes: str, names: Collection[str]) -> str:
    """The fixes that torch.export suggests for dims (multiples, bounds, or another dim or a
    number), in the words of a catalog.
    """
    remedies = []
    for name, value in re.findall(r"^ *(\w+) = (.+)$", fixes, re.MULTILINE):
        multiple = [("multiple_of", number) for number in re.findall(r"^(\d+)\*", value)]
        bounds = re.findall(r"\b(min|max)=(\d+)", value)
        declared = ", ".join(map(": ".join, multiple or bounds))
        if name in names and declared:
            remedies.append(f"declare {declared} for {name}")
        elif name in names:
            remedies.append(f"write {value} for {name} in the shapes")
    default = "declare other bounds, or remove the condition on sizes from forward"
    return " and ".join(remedies) or default


def guards_of(program: ExportedProgram, spec: InputSpec) -> tuple[str, ...]:
    """Conditions on inputs, in words: bounds and multiples of dims, guards, and run-time
    assertions.
    """
    texts = [str(dim) for dim in spec.dims if dim.varies]
    for guard in program._guards_code or ():
        text = with_names(guard, spec)
        size, _, expected = text.partition(" == ")
        if size != expected and not size.isdigit():
            texts.append(text)
    for node in program.graph.nodes:
        if node.target is torch.ops.aten._assert_scalar.default:
            texts.append(str(node.args[1]))
    return tuple(dict.fromkeys(texts))


def check_guards(program: ExportedProgram, spec: InputSpec) -> None:
    """Check that the guards of a program take all declared sizes.

    torch.export raises if a declared range does not fit. But some guards narrow a range silently (a
    size that a reshape halves must not be 2), and a lowering that checks no guards would return
    wrong numbers for such sizes.

    Raises:
        CaptureError: the program does not take a size; code CP-EXPORT-DIMS.
    """
    guards = program.module()._guards_fn
    points = list(spec.points())
    points += all_sizes(spec)
    points += combinations(spec)
    for point in distinct(points)[:NUM_SIZES]:
        inputs = [
            torch.empty(
                tensor.at(point),
                dtype=getattr(torch, tensor.dtype),
                device="meta",
            )
            for tensor in spec.tensors
        ]
        try:
            guards(*inputs)  # type: ignore[operator]  # a module
        except (AssertionError, ArithmeticError, RuntimeError) as error:
            guard = with_names(first_line(error).removeprefix("Guard failed: "), spec)
            raise CaptureError(
                f"torch.export: the program does not take {sizes_text(point)} ({guard}); declare"
                " only sizes that it takes",
                code=DIMS,
            ) from None


def with_names(guard: str, spec: InputSpec) -> str:
    """A condition of torch.export with the names of dims, or of inputs and axes."""

    def name(match: re.Match[str]) -> str:
        index, axis = map(int, filter(None, match.groups()))
        tensor = spec.tensors[index]
        size = tensor.shape[axis]
        return size if isinstance(size, str) else f"{tensor.name}.shape[{axis}]"

    return _SIZE.sub(name, guard)
