"""TORCHSCRIPT: a tiny model for every row of "Corners" about TorchScript in
docs/reference/what-freezes.md.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from freezer.runtime.loaders import torchscript_deprecations_silenced
from tests.support.cases import DIFFERS, DIFFERS_LATER, SCRIPTED, VALUES, Case
from tests.support.models import scripted_module
from tests.support.steps import random_inputs

X = random_inputs(2, 4)


def traced_methods(model: nn.Module, **inputs: Any) -> nn.Module:
    with torchscript_deprecations_silenced():
        return torch.jit.trace_module(model.eval(), inputs)


# Tasks


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Forking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        task = torch.jit.fork(doubled, x)
        return torch.jit.wait(task) + x


# Functions and methods


@torch.jit.script_if_tracing
def rows_until_negative(x: Tensor) -> Tensor:
    num_rows = 0
    for row in x:
        if float(row.sum()) < 0:
            break
        num_rows += 1
    return x.sum() * num_rows


class ScriptIfTracing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rows_until_negative(x)


class HoldsTraced(nn.Module):
    """Branches on values around a module that was traced."""

    def __init__(self) -> None:
        super().__init__()
        with torchscript_deprecations_silenced():
            self.part = torch.jit.trace(nn.Linear(4, 4).eval(), X)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) if float(x.sum()) > 0 else x


class Ignoring(nn.Module):
    """Calls a Python method that TorchScript leaves to Python, so it cannot be saved."""

    @torch.jit.ignore
    def python(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.python(x) if float(x.sum()) > 0 else x


class UnusedButCalled(nn.Module):
    @torch.jit.unused
    def python(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.python(x) if float(x.sum()) > 0 else x


class TwoMethods(nn.Module):
    """Has a method beside forward; torch.jit.trace_module traces both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + x


class ScriptingOtherwise(nn.Module):
    """Does something else in TorchScript."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return x + 1
        return x * 2 if float(x.sum()) > 0 else x * 3


with torchscript_deprecations_silenced():

    @torch.jit.script
    def scaled(x: Tensor, factor: float = 2.0, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            x = x + bias
        return x * factor if float(x.sum()) > 0 else x

    @torch.jit.interface
    class Shape(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pass


class Doubler(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def typed_hook(module: nn.Module, given: tuple[Tensor], result: Tensor) -> Tensor:
    return result + 1


class ScriptMethods(nn.Module):
    """Functions and methods that torch.jit.script takes."""

    part: Shape

    def __init__(self) -> None:
        super().__init__()
        self.part, self.linear = Doubler(), nn.Linear(4, 4)
        self.linear.register_forward_hook(typed_hook)

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return x + 1

    @torch.jit.unused
    def python(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    @torch.jit._overload_method
    def scale(self, x: Tensor, by: int) -> Tensor:
        pass

    @torch.jit._overload_method
    def scale(self, x: Tensor, by: float) -> Tensor:  # noqa: F811
        pass

    def scale(self, x, by):  # noqa: F811
        return x * by

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.python(x)
        x = scaled(self.linear(self.part.forward(x)), bias=x)
        if torch.jit.is_scripting():
            return self.scale(x, 2)
        return self.scale(x, 2.0) if float(x.sum()) > 0 else self.scale(x, 2)


# Attributes


class ScriptAttributes(nn.Module):
    """Attributes that torch.jit.script takes."""

    __constants__ = ("factor",)
    depth: Final[int]
    sizes: list[int]
    table: dict[str, Tensor]
    pair: tuple[int, float]
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.factor = 3, 2.0
        self.sizes, self.table, self.pair, self.bias = (
            [1, 2],
            {"scale": torch.ones(4) * 2},
            (3, 0.5),
            None,
        )
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.table["scale"] * self.sizes[1] + self.pair[1]
        bias = self.bias
        if bias is not None:
            x = x + bias
        for index, part in enumerate(self.parts):
            x = part(x) * (index + 1)
        for part in self.named.values():
            x = part(x)
        for _ in range(self.depth):
            x = x * self.factor if float(x.sum()) > 0 else x
        return x


class ChangedContainers(nn.Module):
    """Remembers its calls in a list and in a dict."""

    seen: list[Tensor]
    last: dict[str, Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.last = [], {"x": torch.zeros(4)}

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.sum(0))
        out = x + self.last["x"] + float(len(self.seen))
        self.last["x"] = x.sum(0)
        return out


class Routing(nn.Module):
    """Chooses a module of a ModuleList by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[int(x.sum() > 0)](x)


class LooseParameters(nn.Module):
    """Parameters in a plain list, which no module knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


# What TorchScript cannot read: each also branches on values, so that neither a trace nor an export
# is right


class Lambda(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sorted([x, x * 2], key=lambda item: float(item.sum()))[0]


class AsText(nn.Module):
    """Has annotations that are text, as `from __future__ import annotations` makes all of a
    module.
    """

    sizes: "list[int]"

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sizes[1] if float(x.sum()) > 0 else x


class Try(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return x * 2 if float(x.sum()) > 0 else x
        except RuntimeError:
            return x


# Hooks


def hooked(model: nn.Module) -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    linear.register_forward_hook(lambda module, given, result: result + 1)
    model.linear = linear
    return model


class Hooked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class HookedOnValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.sum()) > 0 else x


TORCHSCRIPT: Mapping[str, Case] = {
    # TorchScript's own
    "`torch.jit.fork`, `wait`": Case(make=Forking),
    "`torch.jit.script_if_tracing`": Case(make=ScriptIfTracing, exported=VALUES),
    (
        "scripted functions, `@torch.jit.export`, `@torch.jit.interface`, overloads,"
        " `torch.jit.is_scripting()`, typed hooks"
    ): Case(make=ScriptMethods, exported=VALUES),
    "a traced module within one that branches on values": Case(make=HoldsTraced, exported=SCRIPTED),
    "`torch.jit.trace_module` with several methods": Case(
        make=lambda: traced_methods(TwoMethods(), forward=X, encode=X)
    ),
    "`@torch.jit.ignore`": Case(
        make=Ignoring,
        says="which no file can hold at models_torchscript.py:.*; mark it `@torch.jit.unused`",
        exported=VALUES,
    ),
    "`@torch.jit.unused`, but called": Case(
        make=UnusedButCalled,
        says=(
            r"a method marked @torch\.jit\.unused at .*; mark methods that serving calls with"
            r" @torch\.jit\.export"
        ),
        exported=VALUES,
    ),
    "`torch.jit.is_scripting()` with a different result": Case(
        make=ScriptingOtherwise,
        says="the script differs from the model on input set 0",
        exported=VALUES,
    ),
    (
        "list, dict, tuple, `Optional`, `Final` and `__constants__` attributes, `nn.ModuleList`,"
        " `nn.ModuleDict`"
    ): Case(make=ScriptAttributes, exported=VALUES),
    "a scripted module that branches on values": Case(
        make=lambda: scripted_module(ScriptAttributes()),
        exported="PyTorch's converter: data-dependent control flow",
    ),
    "lists and dicts that `forward` changes": Case(make=ChangedContainers, exported=DIFFERS_LATER),
    "a module of a `ModuleList` chosen by a value": Case(
        make=Routing,
        says=r"indexed by a variable at models_torchscript\.py:.*; iterate \(`for i, part",
        exported=VALUES,
    ),
    "parameters in a plain list": Case(make=LooseParameters),
    # What TorchScript cannot read, and hooks
    "`from __future__ import annotations`, with annotated attributes": Case(
        make=AsText,
        says=(
            r"the annotation 'list\[int\]' is text, .*; remove `from __future__ import annotations`"
        ),
        exported=VALUES,
    ),
    (
        "untyped arguments, `**kwargs`, lambdas, f-strings, recursion, `.tolist()`, custom"
        " classes, variables of two types"
    ): Case(
        make=Lambda,
        says="does not take Lambda at models_torchscript.py:.*; rewrite it in plain Python",
        exported=VALUES,
    ),
    "`try` and `except`": Case(
        make=Try,
        says="does not take try blocks at models_torchscript.py:.*; rewrite it in plain Python",
        exported=DIFFERS,
    ),
    "forward hooks and pre-hooks": Case(make=lambda: hooked(Hooked())),
    "untyped hooks of a model that needs a script": Case(
        make=lambda: hooked(HookedOnValues()),
        says="a hook that is a lambda, .*; write it as a `def` with types, or remove the hook",
        exported=VALUES,
    ),
}


class LateState(nn.Module):
    """Answers otherwise after 20 calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2 + (self.calls > 20)
