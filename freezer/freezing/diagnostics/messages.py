"""Turn an error of torch or of an engine into one sentence: its meaning, the user's source line,
and a remedy (REMEDIES).

The full text stays in the cause and in the candidate's evidence.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

from freezer.errors import ColdpressError, without_places
from freezer.freezing.diagnostics.source_lines import line_of_stack, marked_in, raised_at

_FILE_MARK = re.compile(r'(\s+at)?\s+File "')
_ADDRESS = re.compile(r" at:? 0x[0-9a-f]+")  # differs between runs
_INTERPRETER = "The following operation failed in the TorchScript interpreter"
_STACK = "The error stack is reproduced here:"


class Remedy(NamedTuple):
    """The meaning of one kind of message.

    Attributes:
        pattern: regular expression to search for in the whole message.
        means: the problem, as a sentence without a full stop. It may use the pattern's groups.
        remedy: the fix, likewise.
    """

    pattern: str
    means: str
    remedy: str


Family = Literal["script", "trace", "export", "inductor", "onnxruntime", "openvino", "run"]

NOT_WRITTEN = (
    r"inline_container\.cc:\d+\] \. (?!PytorchStreamReader)|terminate called after throwing an"
    r" instance of 'std::__ios_failure'"
)
"""Messages of torch's file writer when the disk is full or fails. torch.jit.save may then end the
process: a small file is only written when it is closed, and C++ alone reports the failure. """

ROOM = "free space on the disks of temporary files and of the store, or repair them"

_PYTHON_CALL = Remedy(
    r"Could not export Python function call '(?P<name>[^']*)'",
    "forward calls the Python function {name!r} (`@torch.jit.ignore` or torch.autograd.Function),"
    " which no file can hold",
    "mark it `@torch.jit.unused` if serving never calls it, else write it in torch's operations, or"
    " call it outside",
)
_SPARSE = Remedy(
    r"Sparse(Csr)?(CPU|TensorImpl)|layout_impl is only implemented",
    "the graph holds sparse tensors, which only torchscript-frozen takes",
    "use it, or make them dense with .to_dense()",
)
_OTHER_OPERATIONS = (
    "write it in other operations of torch, or use inductor-frozen or torchscript-frozen"
)
_NODE = Remedy(
    r"while running (?P<node>\w+) node\. Name:[^\n]*? Status Message: (?P<why>[^\n]+)",
    "ONNX Runtime cannot run its operator {node} as the model uses it ({why})",
    _OTHER_OPERATIONS,
)

REMEDIES: Mapping[Family, tuple[Remedy, ...]] = {
    "script": (
        _PYTHON_CALL,
        Remedy(
            r"Unknown type annotation: '(?P<type>(?!<)[^']*)'",
            "the annotation {type!r} is text, which TorchScript only reads in some places",
            "remove `from __future__ import annotations` from the model's module, and the quotes"
            " around its annotations",
        ),
        Remedy(
            r"Unknown type (annotation|name):? '(<class ')?(?P<type>[^'>]*)'",
            "TorchScript does not know the type {type!r}",
            "annotate with Tensor, int, float, bool, str, or list, dict, tuple and Optional of"
            " them, or call it outside forward",
        ),
        Remedy(
            r"has no attribute '(?P<name>\w+)' \(This attribute exists on the Python module, but we"
            r" failed to convert Python type: '(?P<type>[^']*)'",
            "forward uses the attribute {name!r}, a {type}, which TorchScript does not know",
            "compute its value in __init__, or decorate its class with @torch.jit.script if it"
            " holds plain types",
        ),
        Remedy(
            r"Expected a default value of type Tensor \(inferred\) on parameter \"(?P<name>\w+)\"",
            "the parameter {name!r} has no type, so TorchScript assumes a Tensor",
            "annotate it, as in `{name}: int = 2`",
        ),
        Remedy(
            r"to be of type 'Tensor' because it was not annotated|"
            r"was not annotated with an explicit type it is assumed to be type 'Tensor'",
            "a parameter has no type, so TorchScript assumes a Tensor, but its argument is another"
            " type",
            "annotate the parameters and results of the functions that forward calls",
        ),
        Remedy(
            r"Compiled functions can't take variable number of arguments",
            "a function takes *args, **kwargs or keyword-only defaults, which TorchScript does not"
            " take",
            "name its parameters, with types",
        ),
        Remedy(
            r"Expected integer literal for index|Unable to extract string literal index",
            "a ModuleList, Sequential or ModuleDict is indexed by a variable",
            "iterate (`for i, part in enumerate(self.parts)`) and call the chosen one",
        ),
        Remedy(
            r"Type mismatch: (?P<name>\w+) is set to type (?P<first>[^\n]+) in the true branch and "
            r"type (?P<other>[^\n]+?) in the",
            "the variable {name!r} is {first} in one branch and {other} in the other",
            "give it one type in both, such as torch.tensor(2) for 2, or use two names",
        ),
        Remedy(
            r"python value of type '(?P<type>[^']*)' cannot be used as a value",
            "a Python value of type {type!r} is used in place of a tensor or number",
            "make it an attribute of the module, or skip it with `torch.jit.is_scripting()`",
        ),
        Remedy(
            r"'?(?P<type>[\w\[\], ()]+)'? object has no attribute or method '(?P<name>\w+)'",
            "TorchScript's {type} has no {name!r}",
            "use torch's own operations in forward; move NumPy and Python code before or after the"
            " model",
        ),
        Remedy(
            r"(Python builtin <built-in (function|method)|undefined value) (?P<name>\w+)",
            "TorchScript does not know {name!r}",
            "use torch's own operations (torch.rand for random numbers), or compute it in __init__",
        ),
        Remedy(
            r"Expected a single top-level function",
            "a hook that is a lambda, which TorchScript does not compile",
            "write it as a `def` with types, or remove the hook",
        ),
        Remedy(
            r"^OSError: [Cc](an't|ould not) get source",
            "TorchScript compiles source code, and forward's is in no file",
            "define the model in a module",
        ),
        Remedy(
            r"Unknown builtin op: (?P<name>[\w:]+)",
            "TorchScript has no operation {name}",
            "use another operation of torch, or torch.export (inductor-frozen, portable)",
        ),
        Remedy(
            r"(?P<what>Lambda|[\w ]+?) aren't supported",
            "TorchScript does not take {what}",
            "rewrite it in plain Python: `def`, `if`, `for`, `while`",
        ),
    ),
    "trace": (
        Remedy(
            r"Cannot insert a Tensor that requires grad as a constant",
            "forward uses a tensor that requires grad and is not registered as a parameter or"
            " buffer",
            "register it (nn.Parameter, nn.ParameterList, register_buffer), or .detach() it",
        ),
        Remedy(
            r"torch\.jit\.trace a dynamo-optimized function",
            "forward calls torch.cond or a compiled function, which a trace cannot follow",
            "use torch.export for torch.cond (inductor-frozen, portable), and remove torch.compile",
        ),
        _PYTHON_CALL,
    ),
    "export": (
        Remedy(
            r"function `\w+Observer\.forward` should not be traced|activation_post_process",
            "the model holds observers, which collect statistics for quantization",
            "convert it (convert_fx) before freezing, or freeze the unprepared model",
        ),
        Remedy(
            r"data-dependent",
            "data-dependent control flow: a branch, a size or a number depends on the values of a"
            " tensor",
            "use torch.where or torch.cond",
        ),
        Remedy(
            r"(UnsupportedOperatorException|unsupported operator): (?P<name>(aten|prims)\.[\w.]+)",
            "the operator {name} has no fake kernel, which gives the shape of its result",
            "write it in other operations of torch, or use torchscript-frozen",
        ),
        Remedy(
            r"(UnsupportedOperatorException: |unsupported operator: |no fake impl registered for"
            r" <?(CustomOpDef\()?)(?P<name>[\w.:]+)",
            "the operator {name} has no fake kernel, so torch.export does not know the shape of its"
            " result",
            "write one with torch.library.register_fake",
        ),
        Remedy(
            r"pack_padded_sequence|type must be tuple of ints,but got FakeTensor",
            "a size comes from the values of a tensor, like the lengths of packed sequences",
            "pass the padded batch and mask its results, or use torchscript-frozen",
        ),
        Remedy(
            r"torch\.autograd\.grad|functorch tracing|"
            r"fake tensor in the exported program constant's list",
            "forward computes gradients, or keeps a tensor between calls",
            "write the gradient in torch's operations, or serve the model in eager mode",
        ),
        Remedy(
            r"\.numpy\(\) is not supported",
            "forward uses NumPy",
            "use torch's own operations in forward, or move NumPy code before or after the model",
        ),
        Remedy(
            r"torch\.classes\.quantized|UserDefinedObjectVariable\(ScriptObject\)|QuantizedCPU",
            "the model holds quantized layers of torch.ao.quantization, whose packed weights"
            " torch.export cannot follow",
            "freeze the float model, or quantize it with torchao's quantize_ or PT2E",
        ),
    ),
    "inductor": (
        Remedy(
            r"C\+\+ compile error(?s:.*?)\nOutput:(?s:.*?)\n"
            r"(/\S*/)?(?P<line>[^\n]*(error|undefined reference|cannot find)\b[^\n]*)",
            "the C++ compiler failed: {line}",
            "`CXX=... coldpress doctor` tries another one",
        ),
        _SPARSE,
    ),
    "onnxruntime": (
        Remedy(
            r"No ONNX function found for <OpOverload\(op='(?P<name>[\w:.]+)', overload='\w+'\)>|"
            r"No ONNX function found for (?P<other>[\w:.<>=', ()]+?)\.? Failure",
            "the operator {name}{other} has no counterpart in ONNX",
            _OTHER_OPERATIONS,
        ),
        _SPARSE,
        _NODE,
        Remedy(
            r"Could not find an implementation for (?P<name>\w+)\(\d+\)|"
            r"Type '[^']*' of input parameter \([^)]*\) of operator \((?P<other>\w+)\)",
            "ONNX Runtime has no {name}{other} for these dtypes on a CPU",
            "use float32 there, or inductor-frozen or torchscript-frozen",
        ),
    ),
    "openvino": (
        Remedy(
            r"No conversion rule found for operations: (?P<names>[^\n]+)",
            "OpenVINO has no counterpart of {names}",
            _OTHER_OPERATIONS,
        ),
        _SPARSE,
        Remedy(
            r"Conversion is failed for: (?P<names>[\w:., ]+)",
            "OpenVINO cannot convert {names} as the model uses it",
            _OTHER_OPERATIONS,
        ),
    ),
    "run": (
        _NODE,
        Remedy(
            r"annotated to be ignored and cannot be run",
            "forward calls a method marked @torch.jit.unused",
            "mark methods that serving calls with @torch.jit.export, or not at all",
        ),
    ),
}
"""Remedies by the origin of the message. The first pattern found in a message wins."""


_ANY = (
    Remedy(NOT_WRITTEN, "torch could not write the file", ROOM),
    Remedy(
        r"required keyword attribute 'value' is undefined",
        "torch.jit.optimize_for_inference was applied to the source, and torch cannot store its"
        " result",
        "give the source without it; the recipe torchscript-optimized applies it",
    ),
)
_INSTEAD: Mapping[Family, str] = {
    "inductor": "; use torchscript-frozen",
    "onnxruntime": "; use inductor-frozen or torchscript-frozen",
    "openvino": "; use inductor-frozen or torchscript-frozen",
}
"""Remedies for the other messages of engines."""


def sentence(error: Exception, family: Family) -> str:
    """What an error of a family means, at which of the user's lines, and what to do about it.

    An error without a known remedy is its type and the first sentence of its message (of messages
    that begin with a traceback or with failed checks, the last line), and for an engine the recipes
    to use instead.
    """
    if isinstance(error, ColdpressError):
        return str(error)
    text = without_places(str(error)).rpartition(_STACK)[
        2
    ]  # the error in a method that forward calls
    line = None
    if family not in ("inductor", "onnxruntime", "openvino"):
        line = marked_in(text) or line_of_stack(text) or raised_at(error)
    place = f" at {line.removesuffix(':')}" if line else ""
    kind = type(error).__name__
    known = explain(_ADDRESS.sub("", f"{kind}: {text}"), family)
    if known:
        return f"{known.means}{place}; {known.remedy}"
    lines = text.strip().splitlines() or ["no message"]
    at_end = family == "openvino" or lines[0].startswith(_INTERPRETER)
    message = _FILE_MARK.split(lines[-1 if at_end else 0])[0].removeprefix(f"{kind}: ")
    first, _, _ = _ADDRESS.sub("", message).partition(". ")
    return f"{kind}: {first.strip().rstrip('.:')}{place}{_INSTEAD.get(family, '')}"


def explain(text: str, family: Family) -> Remedy | None:
    """The remedy for a message, with the groups filled in; None if no pattern of its family
    matches.
    """
    for pattern, means, remedy in (*REMEDIES[family], *_ANY):
        found = re.search(pattern, text)
        if found:
            groups = {name: value.strip() for name, value in found.groupdict("").items()}
            return Remedy(pattern, means.format(**groups), remedy.format(**groups))
    return None


def root_cause(error: Exception) -> Exception:
    """The first of the errors that led to this one: converters wrap it in pages of advice."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Silence warnings, and what these loggers say below errors; converters report each of their
    passes, and torch warns of itself.
    """
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
