"""Remedies: what messages of TorchScript, torch.export, Inductor and ONNX mean, and what to do
about them. Imports no torch.

The first pattern found in a message wins. `means` and `remedy` may use the pattern's named groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

PYTHON_CALL = "CP-PYTHON-CALL"
FAKE_KERNEL = "CP-FAKE-KERNEL"


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """The meaning of one kind of message.

    Attributes:
        pattern: regular expression to search for in the whole message.
        means: the problem, as a sentence without a full stop.
        remedy: the fix, likewise.
        code: a code of docs/errors.md that is more specific than the failed capture.
    """

    pattern: str
    means: str
    remedy: str
    code: str | None = None


SCRIPT: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"Could not export Python function call '(?P<name>[^']*)'",
        means=(
            "forward calls the Python function {name!r} (`@torch.jit.ignore` or"
            " torch.autograd.Function), which no file can hold"
        ),
        remedy=(
            "mark it `@torch.jit.unused` if serving never calls it, else write it in torch's"
            " operations, or call it outside"
        ),
        code=PYTHON_CALL,
    ),
    Remedy(
        pattern=r"Unknown type annotation: '(?P<type>(?!<)[^']*)'",
        means="the annotation {type!r} is text, which TorchScript only reads in some places",
        remedy=(
            "remove `from __future__ import annotations` from the model's module, and the quotes"
            " around its annotations"
        ),
    ),
    Remedy(
        pattern=r"Unknown type (annotation|name):? '(<class ')?(?P<type>[^'>]*)'",
        means="TorchScript does not know the type {type!r}",
        remedy=(
            "annotate with Tensor, int, float, bool, str, or list, dict, tuple and Optional of"
            " them, or call it outside forward"
        ),
    ),
    Remedy(
        pattern=(
            r"has no attribute '(?P<name>\w+)' \(This attribute exists on the Python module, but we"
            r" failed to convert Python "
            r"type: '(?P<type>[^']*)'"
        ),
        means="forward uses the attribute {name!r}, a {type}, which TorchScript does not know",
        remedy=(
            "compute its value in __init__, or decorate its class with @torch.jit.script if it"
            " holds plain types"
        ),
    ),
    Remedy(
        pattern=(
            r"Expected a default value of type Tensor \(inferred\) on parameter \"(?P<name>\w+)\""
        ),
        means="the parameter {name!r} has no type, so TorchScript assumes a Tensor",
        remedy="annotate it, as in `{name}: int = 2`",
    ),
    Remedy(
        pattern=r"to be of type 'Tensor' because it was not annotated|"
        r"was not annotated with an explicit type it is assumed to be type 'Tensor'",
        means=(
            "a parameter has no type, so TorchScript assumes a Tensor, but its argument is another"
            " type"
        ),
        remedy="annotate the parameters and results of the functions that forward calls",
    ),
    Remedy(
        pattern=r"Compiled functions can't take variable number of arguments",
        means=(
            "a function takes *args, **kwargs or keyword-only defaults, which TorchScript does not"
            " take"
        ),
        remedy="name its parameters, with types",
    ),
    Remedy(
        pattern=r"keyword-arg expansion is not supported",
        means="a call expands **kwargs, which TorchScript does not take",
        remedy="write out its arguments",
    ),
    Remedy(
        pattern=r"(method|function) '(?P<name>[^']*)' is called recursively",
        means="{name!r} calls itself, which TorchScript does not take",
        remedy="write it as a loop",
    ),
    Remedy(
        pattern=r"Expected integer literal for index",
        means="a ModuleList or Sequential is indexed by a variable",
        remedy="iterate (`for i, part in enumerate(self.parts)`) and call the chosen one",
    ),
    Remedy(
        pattern=r"Unable to extract string literal index",
        means="a ModuleDict is indexed by a text that is not a literal",
        remedy="iterate (`for name, part in self.parts.items()`) and call the chosen one",
    ),
    Remedy(
        pattern=(
            r"Type mismatch: (?P<name>\w+) is set to type (?P<one>[^\n]+) in the true branch and "
            r"type (?P<other>[^\n]+?) in the"
        ),
        means="the variable {name!r} is {one} in one branch and {other} in the other",
        remedy="give it one type in both, such as torch.tensor(2) for 2, or use two names",
    ),
    Remedy(
        pattern=(
            r"Return value was annotated as having type (?P<one>[^\n]+?) but is actually of type"
            r" (?P<other>[^\n]+)"
        ),
        means="a function is annotated to return {one}, but returns {other}",
        remedy="fix the annotation; without one, TorchScript assumes a Tensor",
    ),
    Remedy(
        pattern=r"Expected type hint for result of tolist",
        means="the result of .tolist() has no type",
        remedy="annotate its variable, as in `values: list[float] = x.tolist()`",
    ),
    Remedy(
        pattern=r"Expected a single top-level function",
        means="the source of a function, such as a hook that is a lambda, is not a `def`",
        remedy="write it as a `def` with types, or remove the hook before freezing",
    ),
    Remedy(
        pattern=r"Failed to get source for (?P<name>[^\n]+?) using inspect",
        means=(
            "the source of {name} cannot be read: it was generated at run time, like a dataclass's"
            " methods, or typed in"
        ),
        remedy="write it in a file, or use a tuple or NamedTuple instead",
    ),
    Remedy(
        pattern=r"python value of type '(?P<type>[^']*)' cannot be used as a value",
        means="a Python value of type {type!r} is used in place of a tensor or number",
        remedy="make it an attribute of the module, or skip it with `torch.jit.is_scripting()`",
    ),
    Remedy(
        pattern=r"'?(?P<type>[\w\[\], ]+)'? object has no attribute or method '(?P<name>\w+)'",
        means="TorchScript's {type} has no {name!r}",
        remedy=(
            "use torch's own operations in forward; move NumPy and Python code before or after the"
            " model"
        ),
    ),
    Remedy(
        pattern=r"(Python builtin <built-in (function|method)|undefined value) (?P<name>\w+)",
        means="TorchScript does not know {name!r}",
        remedy=(
            "use torch's own operations (torch.rand for random numbers), or compute it in __init__"
        ),
    ),
    Remedy(
        pattern=r"Lambda aren't supported",
        means="TorchScript does not take lambdas",
        remedy="write it as a `def`, or use torch's own operations",
    ),
    Remedy(
        pattern=r"Unknown builtin op: (?P<name>[\w:]+)",
        means="TorchScript has no operation {name}",
        remedy="use another operation of torch, or torch.export (inductor-frozen, portable)",
    ),
    Remedy(
        pattern=r"(?P<what>[\w ]+?) aren't supported",
        means="TorchScript does not take {what}",
        remedy="rewrite it in plain Python: `def`, `if`, `for`, `while`",
    ),
    Remedy(
        pattern=r"Arguments for call are not valid",
        means="a function or operation is called with types that it does not take",
        remedy="annotate its arguments; without an annotation, TorchScript assumes a Tensor",
    ),
)
"""Messages of torch.jit.script, freeze and save."""

TRACE: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"Cannot insert a Tensor that requires grad as a constant",
        means=(
            "forward uses a tensor that requires grad and is not registered as a parameter or"
            " buffer"
        ),
        remedy="register it (nn.Parameter, nn.ParameterList, register_buffer), or .detach() it",
    ),
    Remedy(
        pattern=r"torch\.jit\.trace a dynamo-optimized function",
        means="forward calls torch.cond or a compiled function, which a trace cannot follow",
        remedy=(
            "use torch.export for torch.cond (inductor-frozen, portable), and remove torch.compile"
        ),
    ),
    Remedy(
        pattern=r"did not have observable data dependence with trace inputs",
        means="an output does not depend on the inputs",
        remedy="remove it from the result, or add it to another output",
    ),
)
"""Messages of torch.jit.trace."""

EXPORT: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"function `\w+Observer\.forward` should not be traced|activation_post_process",
        means="the model holds observers, which collect statistics for quantization",
        remedy="convert it (convert_fx) before freezing, or freeze the unprepared model",
    ),
    Remedy(
        pattern=r"data-dependent",
        means=(
            "data-dependent control flow: a branch, a size or a number depends on the values of a"
            " tensor"
        ),
        remedy="use torch.where or torch.cond",
    ),
    Remedy(
        pattern=(
            r"(UnsupportedOperatorException: |unsupported operator: |no fake impl registered for"
            r" <?(CustomOpDef\()?)"
            r"(?P<name>[\w.:]+)"
        ),
        means=(
            "the operator {name} has no fake kernel, so torch.export does not know the shape of its"
            " result"
        ),
        remedy="write one with torch.library.register_fake",
        code=FAKE_KERNEL,
    ),
    Remedy(
        pattern=r"pack_padded_sequence|type must be tuple of ints,but got FakeTensor",
        means="a size comes from the values of a tensor, like the lengths of packed sequences",
        remedy="pass the padded batch and mask its results, or use torchscript-frozen",
    ),
    Remedy(
        pattern=r"torch\.autograd\.grad|fake tensor in the exported program constant's list",
        means="forward computes gradients, or keeps a tensor between calls",
        remedy="write the gradient in torch's operations, or serve the model in eager mode",
    ),
    Remedy(
        pattern=r"\.numpy\(\) is not supported",
        means="forward uses NumPy",
        remedy=(
            "use torch's own operations in forward, or move NumPy code before or after the model"
        ),
    ),
    Remedy(
        pattern=r"torch\.classes\.quantized|UserDefinedObjectVariable\(ScriptObject\)|QuantizedCPU",
        means=(
            "the model holds quantized layers of torch.ao.quantization, whose packed weights"
            " torch.export cannot follow"
        ),
        remedy="freeze the float model, or quantize it with torchao's quantize_ or PT2E",
    ),
)
"""Messages of torch.export."""

INDUCTOR: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"Sparse(Csr)?(CPU|TensorImpl)|layout_impl is only implemented",
        means="the graph holds sparse tensors, which Inductor does not compile",
        remedy="use torchscript-frozen, or make them dense",
    ),
)
"""Messages of Inductor."""

SPARSE = Remedy(
    pattern=r"layout_impl is only implemented for TensorImpl subclasses",
    means="torch cannot decompose an operation on sparse weights",
    remedy="make them dense with .to_dense(), or use torchscript-frozen",
)

ONNX: tuple[Remedy, ...] = (
    Remedy(
        pattern=(
            r"No ONNX function found for <OpOverload\(op='(?P<name>[\w:.]+)', overload='\w+'\)>|"
            r"No ONNX function found for (?P<other>[\w:.<>=', ()]+?)\.? Failure"
        ),
        means="the operator {name}{other} has no counterpart in ONNX",
        remedy=(
            "write it in other operations of torch, or use inductor-frozen or torchscript-frozen"
        ),
    ),
    SPARSE,
    Remedy(
        pattern=r"Could not find an implementation for (?P<name>\w+)\(\d+\)",
        means="ONNX Runtime has no {name} for these dtypes on a CPU",
        remedy="use float32 there, or inductor-frozen or torchscript-frozen",
    ),
)
"""Messages of torch.onnx.export and ONNX Runtime."""

OPENVINO: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"No conversion rule found for operations: (?P<names>[\w:., ]+)",
        means="OpenVINO has no counterpart of {names}",
        remedy=(
            "write it in other operations of torch, or use inductor-frozen or torchscript-frozen"
        ),
    ),
    SPARSE,
    Remedy(
        pattern=r"Conversion is failed for: (?P<names>[\w:., ]+)",
        means="OpenVINO cannot convert {names} as the model uses it",
        remedy=(
            "write it in other operations of torch, or use inductor-frozen or torchscript-frozen"
        ),
    ),
)
"""Messages of OpenVINO's converter."""

RUN: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"annotated to be ignored and cannot be run",
        means="forward calls a method marked @torch.jit.unused",
        remedy="mark methods that serving calls with @torch.jit.export, or not at all",
    ),
    Remedy(
        pattern=r"Mismatch between ints consumed and num_ints",
        means=(
            "the package passes a complex number to an operation wrongly, which is a defect of"
            " AOTInductor"
        ),
        remedy="use torchscript-frozen",
    ),
)
"""Messages of captured programs and payloads at run time."""

NOT_WRITTEN = (
    r"inline_container\.cc:\d+\] \. (?!PytorchStreamReader)|terminate called after throwing an"
    r" instance of 'std::__ios_failure'"
)
"""Messages of torch's file writer when the disk is full or fails. torch.jit.save may then end the
process: a small file is only written when it is closed, and C++ alone reports the failure. """

ROOM = "free space on the disks of temporary files and of the store, or repair them"

WRITE: tuple[Remedy, ...] = (
    Remedy(pattern=NOT_WRITTEN, means="torch could not write the file", remedy=ROOM),
)
"""Messages of any file writer."""

Family = Literal["script", "trace", "export", "inductor", "onnx", "openvino", "run"]

FAMILIES: Mapping[Family, tuple[Remedy, ...]] = {
    "script": (*SCRIPT, *WRITE),
    "trace": (*TRACE, *SCRIPT[:1]),
    "export": EXPORT,
    "inductor": (*INDUCTOR, *WRITE),
    "onnx": (*ONNX, *WRITE),
    "openvino": (*OPENVINO, *WRITE),
    "run": RUN,
}
"""Remedies by the origin of the message."""


def explain(text: str, family: Family) -> Remedy | None:
    """The remedy for a message, with the groups filled in; None if no pattern of its family
    matches.
    """
    for known in FAMILIES[family]:
        if found := re.search(known.pattern, text):
            groups = {name: value or "" for name, value in found.groupdict().items()}
            return replace(
                known, means=known.means.format(**groups), remedy=known.remedy.format(**groups)
            )
    return None
