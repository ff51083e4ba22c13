"""Copies of a source model, and calls of them; the source model stays as it is.

Failures become errors that name the model. Random numbers: restore the caller's generators, and
detect drawing.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from freezer.errors import JudgeError, described
from freezer.runtime.devices import CPU, DEPTH, moved_to_device
from freezer.runtime.input_sets import InputSet
from freezer.runtime.loaders import torchscript_deprecations_silenced
from freezer.runtime.tensors import (
    comparable,
    dtype_name,
    in_double,
    same_bytes,
    same_tensors,
    tensors_in,
)
from freezer.spec import InputSpec, bind

NUM_MORE_CALLS = 16
"""A fair coin falls the same way this often once in 65,536 times."""

ROUNDING = 1e-3
"""Relative to an output's size: smaller differences may come from the order of a sum."""

PROBLEM = (
    "eager's answers to the same inputs differ, but this one's are always the same: a value that"
    " was drawn or read during the capture (random, NumPy, the time, a global) was baked in; draw"
    " with torch (torch.rand), or make it an input"
)

Model = Callable[..., object]

Outputs = Sequence[Sequence[Tensor]]
"""Output tensors of each call."""

NamedTensors = Mapping[str, Tensor]
"""Tensors by input path."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def copied(model: nn.Module) -> nn.Module:
    """Deep-copy a model without torch.compile's wrappers and backward hooks, which serving never
    calls.

    Also copies tensors that copy.deepcopy refuses: those that a hook computes
    (torch.nn.utils.weight_norm), and sparse tensors in a compressed layout. Scripted functions are
    shared. Buffers that overlap in memory overlap in the copy too.
    """
    memo: dict[int, object] = {}
    # with gradients, the parameters of a copied ScriptModule are not leaves, and .double() warns
    with torch.no_grad():
        for value in pytree.tree_leaves([vars(module) for module in _plain_modules(model)]):
            if isinstance(value, torch.jit.ScriptFunction):
                memo[id(value)] = value
            elif isinstance(value, Tensor) and (value.layout in _COMPRESSED or not value.is_leaf):
                memo[id(value)] = value.detach().clone()
        whole = copy.deepcopy(model, memo)
    whole = _unwrapped(whole)
    for module in _plain_modules(whole):
        for name, part in module._modules.items():
            if part is not None:
                module._modules[name] = _unwrapped(part)
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # a copy is compacted at every call on a GPU
    return whole


def device_of_model(model: nn.Module, inputs: Iterable[Tensor] = ()) -> torch.device:
    """The device of a model's first parameter or buffer; without any, of its first input; otherwise
    the CPU.
    """
    tensors = chain(model.parameters(), model.buffers(), inputs)
    return next((tensor.device for tensor in tensors), CPU)


def model_on(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy a model to a device.

    Also moves what `Module.to` does not: tensors in attributes and in lists, tuples and dicts
    there, constants of a TorchScript graph, and the device named in an exported program's graph. A
    device named in TorchScript code stays.
    """
    with torch.no_grad(), torchscript_deprecations_silenced():
        if isinstance(model, ScriptModule):
            return reloaded(model, device)  # which also moves the constants of its graph
        moved = copied(model).to(device)
        for part in _plain_modules(moved):
            attributes = vars(part)
            for name, value in list(attributes.items()):
                if name not in ("_parameters", "_buffers", "_modules"):
                    attributes[name] = moved_to_device(value, device, DEPTH)
            if isinstance(part, GraphModule):
                _rename_devices(part, device)
        return moved


def reloaded(module: nn.Module, device: torch.device) -> ScriptModule:
    """A copy of a ScriptModule on a device through a file; unlike a deep copy it shares no graph
    with the module.
    """
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    loaded: ScriptModule = torch.jit.load(file, map_location=device)
    return loaded


def _rename_devices(module: GraphModule, device: torch.device) -> None:
    """Make a graph of torch.export create its tensors on a device."""
    for node in module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
        if node.target is torch.ops.aten.to.device:
            tensor, _, *others = node.args
            node.args = (tensor, device, *others)
    module.recompile()


def _plain_modules(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if not isinstance(part, ScriptModule)]


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrappers."""
    while type(module).__name__ == "OptimizedModule":
        module = cast(nn.Module, module._orig_mod)
    return module


class SourceCall:
    """A copy of the model to call. Leaves the caller's random stream unchanged."""

    def __init__(self, name: str, model: nn.Module) -> None:
        try:
            self._copy = copied(model).eval()
        except Exception as error:
            raise JudgeError(
                f"{name}: the model cannot be copied, which freezing requires: {described(error)};"
                " move what cannot be copied out of the model, or define __deepcopy__"
            ) from error

    def __call__(self, spec: InputSpec, tensors: NamedTensors) -> Any:
        """The result of the copy."""
        with torch.random.fork_rng(devices=[]):
            return call_source(self._copy, spec, tensors)


class DtypesSeen(TorchDispatchMode):
    """Collects the floating-point dtypes of results, such as those of an autocast region."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.dtypes: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Any = (),
        kwargs: Any = None,
    ) -> object:
        """Run an operator, and record its results' dtypes."""
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.is_floating_point():
                self.dtypes.add(dtype_name(tensor.dtype))
        return result


def first_result(
    name: str,
    model: nn.Module,
    spec: InputSpec,
    item: InputSet,
) -> Any:
    """The result of the first call.

    Raises:
        JudgeError: the eager model fails (code CP-EAGER), or writes into its inputs (code
            CP-INPUT-WRITTEN).
    """
    given = item.cloned()
    versions = {path: _version(tensor) for path, tensor in given.items()}
    source = SourceCall(name, model)
    try:
        result = source(spec, given)
    except Exception as error:
        raise JudgeError(
            f"{name}: the eager model fails on its inputs: {described(error)}", code="CP-EAGER"
        ) from error
    for path, tensor in given.items():
        if _version(tensor) != versions[path] or not same_bytes(tensor, item.tensors[path]):
            raise JudgeError(
                f"{name}: a call writes into its input {path!r}, which would change the caller's"
                " tensors; start forward with a copy (`x = x.clone()`), or return the new value",
                code="CP-INPUT-WRITTEN",
            )
    return result


def _version(tensor: Tensor) -> int:
    """A counter of writes into a tensor, including those that leave its values unchanged."""
    return 0 if tensor.is_inference() else tensor._version


def call_source(model: Model, spec: InputSpec, tensors: NamedTensors) -> Any:
    """The source model's result, without gradients."""
    args, kwargs = bind(spec, tensors)
    with torch.no_grad():
        return model(*args, **kwargs)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of torch (on the CPU and on GPUs in use), Python and NumPy, which
    models and compilers draw from.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with torch.random.fork_rng(devices=range(num_gpus)):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def positions() -> object:
    """States of the generators of torch, Python and NumPy, which change when something is drawn.

    A model's own are not included.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    of_torch = [state.tolist() for state in states]
    return of_torch, random.getstate(), pickle.dumps(np.random.get_state())


def same_each_time(ask_again: Callable[[], bool]) -> bool:
    """Whether a model always gives the same answer. If it draws random numbers, it is asked several
    times.

    Args:
        ask_again: repeats a call; returns whether the answer is the same as before.
    """
    before = positions()
    if not ask_again():
        return False
    if positions() == before:
        return True
    return all(ask_again() for _ in range(NUM_MORE_CALLS))


def baked_in(
    eager: Outputs,
    candidate: Outputs,
    ask: Callable[[], list[Tensor]],
) -> str | None:
    """The problem of a candidate with a constant output where eager's is random; None if there is
    no such output.

    Args:
        eager, candidate: answers to one input set of equally many calls, at least two.
        ask: calls the candidate once more.
    """
    constants = candidate[0]

    def is_suspect(index: int) -> bool:
        varies = any(_apart(eager[0][index], answer[index]) for answer in eager[1:])
        return varies and all(same_tensors(constants[index], each[index]) for each in candidate)

    suspects = [index for index in range(len(constants)) if is_suspect(index)]
    for _ in range(NUM_MORE_CALLS):
        if not suspects:
            return None
        answer = ask()
        suspects = [each for each in suspects if same_tensors(constants[each], answer[each])]
    return PROBLEM if suspects else None


def _apart(first: Tensor, second: Tensor) -> bool:
    """Whether two answers differ by more than rounding."""
    if first.shape != second.shape or not comparable(first):
        return not torch.equal(first, second)
    expected, got = in_double(first).nan_to_num(), in_double(second).nan_to_num()
    noise = float((expected - got).abs().square().sum())
    signal = float(expected.abs().square().sum())
    return noise > ROUNDING**2 * signal
