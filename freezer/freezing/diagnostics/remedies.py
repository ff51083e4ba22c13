"""REMEDIES: what TorchScript and torch.export say of a model that they do not take, what it means, and what to do about it.

A message is matched against the patterns in their order; the first that is found tells. `means` and `remedy` may use the pattern's
named groups. A message that no pattern knows is told in its own words. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PYTHON_CALL = "CP-PYTHON-CALL"
FAKE_KERNEL = "CP-FAKE-KERNEL"


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """What one kind of message means.

    Attributes:
        pattern: a regular expression that is searched for in the whole message.
        means: what is wrong, in one sentence without its end.
        remedy: what to do, likewise.
        code: of docs/errors.md, where it says more than that the capture failed.
    """

    pattern: str
    means: str
    remedy: str
    code: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What a message means, and what to do."""

    means: str
    remedy: str
    code: str | None


SCRIPT: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"Could not export Python function call '(?P<name>[^']*)'",
        means="forward calls the Python function {name!r} (`@torch.jit.ignore` or torch.autograd.Function), which no file can hold",
        remedy="mark it `@torch.jit.unused` if serving never calls it, else write it in torch's operations, or call it outside",
        code=PYTHON_CALL,
    ),
    Remedy(
        pattern=r"Unknown type annotation: '(?P<type>(?!<)[^']*)'",
        means="the annotation {type!r} is text, which TorchScript reads in some places only",
        remedy="remove `from __future__ import annotations` from the model's module, and the quotes around its annotations",
    ),
    Remedy(
        pattern=r"Unknown type (annotation|name):? '(<class ')?(?P<type>[^'>]*)'",
        means="TorchScript does not know the type {type!r}",
        remedy="annotate with Tensor, int, float, bool, str, or list, dict, tuple and Optional of them, or call it outside forward",
    ),
    Remedy(
        pattern=r"has no attribute '(?P<name>\w+)' \(This attribute exists on the Python module, but we failed to convert Python "
        r"type: '(?P<type>[^']*)'",
        means="forward uses the attribute {name!r}, a {type}, which TorchScript does not know",
        remedy="work its value out in __init__ and keep that, or decorate its class with @torch.jit.script if it holds plain types",
    ),
    Remedy(
        pattern=r"Expected a default value of type Tensor \(inferred\) on parameter \"(?P<name>\w+)\"",
        means="the parameter {name!r} has no type, so TorchScript takes it for a Tensor",
        remedy="annotate it, as in `{name}: int = 2`",
    ),
    Remedy(
        pattern=r"to be of type 'Tensor' because it was not annotated|"
        r"was not annotated with an explicit type it is assumed to be type 'Tensor'",
        means="a parameter has no type, so TorchScript takes it for a Tensor, and it is given something else",
        remedy="annotate the parameters and results of what forward calls",
    ),
    Remedy(
        pattern=r"Compiled functions can't take variable number of arguments",
        means="a function takes *args, **kwargs or keyword-only defaults, which TorchScript does not take",
        remedy="name its parameters, with types",
    ),
    Remedy(
        pattern=r"keyword-arg expansion is not supported",
        means="a call expands **kwargs, which TorchScript does not take",
        remedy="write its arguments out",
    ),
    Remedy(
        pattern=r"(method|function) '(?P<name>[^']*)' is called recursively",
        means="{name!r} calls itself, which TorchScript does not take",
        remedy="write it as a loop",
    ),
    Remedy(
        pattern=r"Expected integer literal for index",
        means="a ModuleList or Sequential is indexed by a variable",
        remedy="go over it (`for i, part in enumerate(self.parts)`) and call the one that is meant",
    ),
    Remedy(
        pattern=r"Unable to extract string literal index",
        means="a ModuleDict is indexed by a text that is no literal",
        remedy="go over it (`for name, part in self.parts.items()`) and call the one that is meant",
    ),
    Remedy(
        pattern=r"is not compatible with interface (__torch__\.)?(?P<name>[\w.]+)",
        means="a submodule does not have the methods of the interface {name}",
        remedy="give its methods the interface's parameters: the same names, order and types",
    ),
    Remedy(
        pattern=r"Type mismatch: (?P<name>\w+) is set to type (?P<one>[^\n]+) in the true branch and "
        r"type (?P<other>[^\n]+?) in the",
        means="the variable {name!r} is {one} in one branch and {other} in the other",
        remedy="give it one type in both, such as torch.tensor(2) for 2, or names of their own",
    ),
    Remedy(
        pattern=r"Return value was annotated as having type (?P<one>[^\n]+?) but is actually of type (?P<other>[^\n]+)",
        means="a function says that it gives {one}, and gives {other}",
        remedy="annotate what it gives; without an annotation it is a Tensor",
    ),
    Remedy(
        pattern=r"Expected type hint for result of tolist",
        means="the result of .tolist() has no type",
        remedy="annotate the variable that takes it, as in `values: list[float] = x.tolist()`",
    ),
    Remedy(
        pattern=r"Expected a single top-level function",
        means="the source of a function, such as a hook that is a lambda, is no `def` of its own",
        remedy="write it as a `def` with types, or remove the hook before freezing",
    ),
    Remedy(
        pattern=r"Failed to get source for (?P<name>[^\n]+?) using inspect",
        means="the source of {name} cannot be read: it was made at run time, as a dataclass's methods are, or typed in",
        remedy="write it out in a file, or use a tuple or NamedTuple instead",
    ),
    Remedy(
        pattern=r"python value of type '(?P<type>[^']*)' cannot be used as a value",
        means="a Python value of type {type!r} is used in place of a tensor or number",
        remedy="keep it as an attribute of the module, which TorchScript reads, or leave it out behind `torch.jit.is_scripting()`",
    ),
    Remedy(
        pattern=r"'?(?P<type>[\w\[\], ]+)'? object has no attribute or method '(?P<name>\w+)'",
        means="TorchScript's {type} has no {name!r}",
        remedy="use torch's own operations in forward; what is NumPy's or Python's goes before or after the model",
    ),
    Remedy(
        pattern=r"Python builtin <built-in (function|method) (?P<name>\w+)",
        means="forward calls Python's own {name!r}, which TorchScript does not know",
        remedy="use torch's own operations (torch.rand for random numbers), or work it out in __init__",
    ),
    Remedy(
        pattern=r"undefined value (?P<name>\w+)",
        means="TorchScript does not know the name {name!r}",
        remedy="use torch's own operations, or work it out in __init__",
    ),
    Remedy(
        pattern=r"Lambda aren't supported",
        means="TorchScript does not take lambdas",
        remedy="write it as a `def`, or use torch's own operations",
    ),
    Remedy(
        pattern=r"Unknown builtin op: (?P<name>[\w:]+)",
        means="TorchScript has no operation {name}",
        remedy="use another operation of torch, or leave the model to torch.export (inductor-frozen, portable)",
    ),
    Remedy(
        pattern=r"(?P<what>[\w ]+?) aren't supported",
        means="TorchScript does not take {what}",
        remedy="write that place in plain Python: `def`, `if`, `for`, `while`",
    ),
    Remedy(
        pattern=r"Arguments for call are not valid",
        means="a function or operation is called with types that it does not take",
        remedy="annotate what is passed to it; without an annotation it is taken for a Tensor",
    ),
)
"""Of torch.jit.script, freeze and save."""

TRACE: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"Cannot insert a Tensor that requires grad as a constant",
        means="forward uses a tensor that requires grad, and that no module knows as its parameter or buffer",
        remedy="make it one (nn.Parameter, nn.ParameterList, register_buffer), or .detach() it",
    ),
    Remedy(
        pattern=r"torch\.jit\.trace a dynamo-optimized function",
        means="forward calls torch.cond, or what was given to torch.compile, which a trace cannot follow",
        remedy="leave torch.cond to torch.export (inductor-frozen, portable), and take torch.compile out",
    ),
    Remedy(
        pattern=r"did not have observable data dependence with trace inputs",
        means="an output does not depend on the inputs",
        remedy="leave it out of the result, or add it to one that does",
    ),
)
"""Of torch.jit.trace."""

EXPORT: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"function `\w+Observer\.forward` should not be traced|activation_post_process",
        means="the model holds observers, which gather statistics for quantization",
        remedy="convert it (convert_fx) before freezing, or freeze the model that it was prepared from",
    ),
    Remedy(
        pattern=r"data-dependent",
        means="data-dependent control flow: a branch, a size or a number depends on the values of a tensor",
        remedy="use torch.where or torch.cond",
    ),
    Remedy(
        pattern=r"(UnsupportedOperatorException: |unsupported operator: )(?P<name>[\w.:]+)",
        means="the operator {name} has no fake kernel, so torch.export does not know the shape that it gives",
        remedy="write one with register_fake, in torch's module library",
        code=FAKE_KERNEL,
    ),
    Remedy(
        pattern=r"no fake impl registered for <?(CustomOpDef\()?(?P<name>[\w.:]+)",
        means="the operator {name} has no fake kernel, so torch.export does not know the shape that it gives",
        remedy="write one with register_fake, in torch's module library",
        code=FAKE_KERNEL,
    ),
    Remedy(
        pattern=r"pack_padded_sequence|type must be tuple of ints,but got FakeTensor",
        means="a size comes from the values of a tensor, as the lengths of packed sequences do",
        remedy="give the padded batch and mask its results, or leave it to torchscript-frozen",
    ),
    Remedy(
        pattern=r"torch\.autograd\.grad|fake tensor in the exported program constant's list",
        means="forward differentiates, or keeps a tensor of its own call",
        remedy="write the gradient out in torch's operations, or leave the model to eager",
    ),
    Remedy(
        pattern=r"\.numpy\(\) is not supported",
        means="forward goes to NumPy",
        remedy="use torch's own operations in forward, or leave NumPy before or after the model",
    ),
    Remedy(
        pattern=r"torch\.classes\.quantized|UserDefinedObjectVariable\(ScriptObject\)|QuantizedCPU",
        means="the model holds quantized layers of torch.ao.quantization, whose packed weights torch.export cannot follow",
        remedy="freeze the float model, or quantize it with torchao's quantize_ or PT2E",
    ),
)
"""Of torch.export."""

INDUCTOR: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"Sparse(Csr)?(CPU|TensorImpl)|layout_impl is only implemented",
        means="the graph holds sparse tensors, which Inductor does not compile",
        remedy="torchscript-frozen takes them; or make them dense",
    ),
)
"""Of Inductor."""

RUN: tuple[Remedy, ...] = (
    Remedy(
        pattern=r"annotated to be ignored and cannot be run",
        means="forward calls a method marked @torch.jit.unused",
        remedy="mark what serving calls with @torch.jit.export, or not at all",
    ),
    Remedy(
        pattern=r"Mismatch between ints consumed and num_ints",
        means="the package calls an operation with a complex number in a wrong way, which is a defect of AOTInductor",
        remedy="torchscript-frozen serves the model",
    ),
)
"""Of captured programs and payloads when they run."""

NOT_WRITTEN = (
    r"inline_container\.cc:\d+\] \. (?!PytorchStreamReader)|terminate called after throwing an instance of 'std::__ios_failure'"
)
"""What torch's writer of files says when the disk is full, or fails; after that torch.jit.save may end the process.

A small file is written when it is closed: then C++ alone says something, while the process ends.
"""

ROOM = "make room on the disk of temporary files and on the store's, or mend it"

WRITE: tuple[Remedy, ...] = (Remedy(pattern=NOT_WRITTEN, means="torch could not write the file", remedy=ROOM),)
"""Of files, whoever writes them."""

Family = Literal["script", "trace", "export", "inductor", "run"]

FAMILIES: Mapping[Family, tuple[Remedy, ...]] = {
    "script": (*SCRIPT, *WRITE),
    "trace": (*TRACE, *SCRIPT[:1]),
    "export": EXPORT,
    "inductor": (*INDUCTOR, *WRITE),
    "run": RUN,
}
"""The remedies that a capture's messages are looked up in."""


def explain(text: str, family: Family) -> Explanation | None:
    """What a message means, and what to do; None where no pattern of its family is found in it."""
    for known in FAMILIES[family]:
        if found := re.search(known.pattern, text):
            groups = {name: value or "" for name, value in found.groupdict().items()}
            return Explanation(means=known.means.format(**groups), remedy=known.remedy.format(**groups), code=known.code)
    return None
