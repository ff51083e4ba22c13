"""A frozen model: payloads behind the input contract. The raw payloads check nothing, so everything is checked here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from freezer.artifact.manifest import Manifest, Payload
from freezer.artifact.payload_selection import is_exact, serving, set_within
from freezer.errors import ContractError, Refusal
from freezer.runtime.cuda import current
from freezer.runtime.cuda_graphs import CudaGraphs
from freezer.runtime.devices import CPU
from freezer.runtime.input_contract import wrong_tensor
from freezer.runtime.precision import full_on_gpu
from freezer.runtime.preserved import REFUSED, Preserved, copied, read, refusal
from freezer.runtime.pytree import leaves_of, rebuilder
from freezer.runtime.threads import own_count, threads
from freezer.spec.inputs import InputSpec
from freezer.spec.items import InputItem, NestedSpec, TensorSpec, put_together, take_apart
from freezer.spec.outputs import OutputSpec, OutputStructure


@dataclass(frozen=True, kw_only=True)
class OpenPayload:
    """A payload and the runner that its lowering gave."""

    payload: Payload
    run: Callable[..., Any]


class FrozenModel:
    """A callable that keeps to its input contract.

    Inputs are given by name, or by position in the order of `inputs`; tensors in tuples, lists and dicts as the source takes them,
    or each by its path (`**{"state.0": h}`). A list does for a tuple, and a tuple for a list. Name, dtype, device, rank and every
    size are checked, and strides are made contiguous, which is what payloads were built for. The result has the form that the
    source model gives; a dataclass or ModelOutput comes back as a mapping with the same attributes, keys and positions.

    Calls run with the thread count of the payload that serves them; the calling thread's own is put back afterwards. A call is
    served by the most special payload that takes its sizes: `payload_for` says which.

    On a GPU inputs must lie on `device`, and outputs do; calls run on that device's current stream in full precision, whatever the
    process allows (precision.py), and are not waited for.

    Attributes and methods that freezing preserved are read, set and called as the source's: `model.version = 2`, `model.reset()`,
    `model.sub.version`. Where the name is one of this class's own, as `inputs` is, `model.preserved["inputs"]` reaches it. Nothing
    else can be set. What nn.Module can do besides (`.to()`, `.half()`, `.train()`, `.parameters()`) is refused, each with its
    remedy; `.eval()` and `.train(False)` give the model itself.

    Attributes:
        inputs: the input spec.
        outputs: the output tensors' names, dtypes and ranks.
        manifest: of the artifact; None while candidates are judged.
        ladder: what was tried before this artifact at load, and why not.
        preserved: all attributes and methods that freezing preserved, by name, those of submodules dotted; indexing reads, sets
            and calls them.
        training: False.
        device: that inputs must lie on: the CPU, or a GPU with its index.

    Args:
        payloads: for one thread count, or for any; of several that take a call's sizes the first serves it.
        preserve: names of what freezing preserved. It belongs to one payload, so there must be one.
        num_threads: what payloads that are for any thread count run with; None for the calling thread's own.
        cuda_graphs: of a GPU, capture the calls that payloads of one size serve (cuda_graphs.py).

    Raises:
        NotPreservedError: the payload lacks a name that should be preserved.
    """

    def __init__(
        self,
        *,
        spec: InputSpec,
        outputs: tuple[OutputSpec, ...],
        structure: OutputStructure,
        payloads: Sequence[OpenPayload],
        manifest: Manifest | None = None,
        ladder: Sequence[Refusal] = (),
        preserve: Sequence[str] = (),
        num_threads: int | None = None,
        device: torch.device = CPU,
        cuda_graphs: bool = False,
    ) -> None:
        if preserve and len(payloads) != 1:
            raise ContractError(
                f"{', '.join(preserve)}: preserved by one payload, but {len(payloads)} are open; freeze the model anew"
            )
        self.inputs = spec
        self.outputs = outputs
        self.manifest = manifest
        self.ladder = tuple(ladder)
        self._rebuild = rebuilder(structure)
        self._payloads = tuple(payloads)
        self._num_threads = num_threads
        self._checks = tuple((item, getattr(torch, item.dtype)) for item in spec.tensors)
        self._names = tuple(item.name for item in spec.inputs)
        nested = any(isinstance(item, NestedSpec) for item in spec.inputs)
        self._items = {item.name: item for item in spec.items} if nested else None
        """All items by path; None where every input is a leaf, which is quicker."""
        self._constants = spec.constants
        self._dims = {dim.name: dim for dim in spec.dims}
        self._exact, self._ranged = _by_sizes(payloads, tuple(self._dims))
        self.training = False
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._graphs = CudaGraphs(device) if cuda_graphs else None
        # Last: from here on, what is set goes to the payload, or is refused.
        only = payloads[0] if preserve else None
        self.preserved = Preserved(
            preserve, only.run if only else None, (only.payload.num_threads or num_threads) if only else None, device
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result.

        Raises:
            ContractError: an input is missing, unknown, or not what the contract says.
        """
        values = self._bind(args, kwargs) if self._items is None else self._bind_nested(args, kwargs, self._items)
        tensors, point = self._check(values)
        opened = self._choose(point)
        wanted = opened.payload.num_threads or self._num_threads
        if wanted is None or wanted == own_count():
            return self._run(opened, tensors)
        with threads(wanted):
            return self._run(opened, tensors)

    def payload_for(self, shape: Mapping[str, int], threads: int | None = None) -> Payload:
        """The payload that serves inputs of these sizes.

        Args:
            shape: the size of every declared dim, by its name; `{}` where none is declared.
            threads: of a process that may use so many, what would serve it, of all that the artifact holds; by default what serves
                here.

        Raises:
            ContractError: none does, or the sizes are not those of the declared dims.
        """
        if set(shape) != set(self._dims):
            raise ContractError(
                f"got sizes of {sorted(shape)}, expected those of {', '.join(self._dims) or 'no dim: none is declared'}"
            )
        if threads is None:
            return self._choose(shape).payload
        held = self.manifest.payloads if self.manifest else tuple(opened.payload for opened in self._payloads)
        found = serving(set_within(held, threads), shape)
        if found is None:
            raise ContractError(f"no payload serves {dict(shape)} with {threads} threads; {_held(held)}")
        return found

    def eval(self) -> FrozenModel:
        """The model itself: it is in eval mode for good."""
        return self

    def train(self, mode: bool = True) -> FrozenModel:
        """The model itself where `mode` is False.

        Raises:
            ContractError: training is asked for; code CP-FROZEN.
        """
        if mode:
            refusal("train")()
        return self

    def __getattr__(self, name: str) -> Any:
        """What was preserved under a name that is not the class's own; a function that refuses, where nn.Module has a method."""
        preserved = self.__dict__.get("preserved")
        if preserved is None or (name.startswith("_") and name not in preserved):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in REFUSED and name not in preserved:
            return refusal(name)
        return read(preserved, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "preserved" not in self.__dict__:
            object.__setattr__(self, name, value)
        elif name in self.__dict__ or hasattr(type(self), name):
            there = f"; use model.preserved[{name!r}]" if name in self.preserved else ""
            raise ContractError(f"{name!r} of a frozen model cannot be set: it is the frozen model's own{there}", code="CP-FROZEN")
        else:
            self.preserved[name] = value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name.partition(".")[0] for name in self.preserved)})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise copied()

    def __repr__(self) -> str:
        made_for = f"{self.manifest.model} for {self.manifest.device_class}" if self.manifest else "a candidate"
        return f"FrozenModel({made_for}; {', '.join(self._names)})"

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._names):
            raise ContractError(f"got {len(args)} positional inputs, expected at most {len(self._names)}: {', '.join(self._names)}")
        values = dict(zip(self._names, args, strict=False))
        for name, value in kwargs.items():
            if name in values or name not in self._names:
                what = "is given twice" if name in values else "is unknown"
                raise ContractError(f"input {name!r} {what}; expected {', '.join(self._names)}")
            values[name] = value
        return values

    def _bind_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any], items: Mapping[str, InputItem]) -> dict[str, Any]:
        """The leaves that were given, by path: within their wholes, or by paths of their own."""
        if len(args) > len(self._names):
            raise ContractError(f"got {len(args)} positional inputs, expected at most {len(self._names)}: {', '.join(self._names)}")
        values: dict[str, Any] = {}
        for name, value in (*zip(self._names, args, strict=False), *kwargs.items()):
            if name not in items:
                raise ContractError(f"input {name!r} is unknown; expected {', '.join(self._names)}, or their parts by path")
            for path, leaf in take_apart(items[name], value):
                if path in values:
                    raise ContractError(f"input {path!r} is given twice; expected it within {name!r}, or by its path")
                values[path] = leaf
        return values

    def _check(self, values: dict[str, Any]) -> tuple[list[Tensor], dict[str, int]]:
        """The tensors as a payload may read them, and their point. On the path of every call: the messages are made elsewhere."""
        tensors: list[Tensor] = []
        point: dict[str, int] = {}
        for item, dtype in self._checks:
            tensor = values.pop(item.name, None)
            if (
                not isinstance(tensor, Tensor)
                or tensor.dtype is not dtype
                or not (tensor.is_cpu if self._on_cpu else tensor.device == self.device)
                or tensor.layout is not torch.strided
            ):
                raise ContractError(wrong_tensor(item, tensor, self.device))
            if tensor.shape != item.shape and not self._fits(item, tensor, point):
                raise ContractError(self._wrong_shape(item, tensor, point))
            # A lazy conjugate or negative shares memory with its source: a payload, which reads memory, would not see it.
            if tensor.is_neg() or tensor.is_conj():
                tensor = tensor.resolve_conj().resolve_neg()
            tensors.append(tensor if tensor.is_contiguous() else tensor.contiguous())
        for name, value in values.items():
            if isinstance(value, Tensor) or value != self._constants[name]:
                got = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise ContractError(
                    f"input {name!r}: got {got}, but {self._constants[name]!r} was baked in when the model was frozen"
                )
        return tensors, point

    def _fits(self, item: TensorSpec, tensor: Tensor, point: dict[str, int]) -> bool:
        """Whether every size is the declared one, or within its dim's bounds and the same as before."""
        if tensor.dim() != len(item.shape):
            return False
        for size, expected in zip(tensor.shape, item.shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    return False
            else:
                dim = self._dims[expected]
                if point.setdefault(expected, size) != size or size not in dim.sizes:
                    return False
        return True

    def _wrong_shape(self, item: TensorSpec, tensor: Tensor, point: Mapping[str, int]) -> str:
        bounds = ", ".join(str(dim) for dim in self._dims.values())
        expected = f"{list(item.shape)} with {bounds}" if bounds else f"{list(item.shape)}"
        so_far = f", {dict(point)} in the inputs before it" if point else ""
        return f"input {item.name!r}: got shape {list(tensor.shape)}, expected {expected}{so_far}"

    def _choose(self, point: Mapping[str, int]) -> OpenPayload:
        exact = self._exact.get(tuple(point[name] for name in self._dims))
        if exact is not None:
            return exact
        for opened in self._ranged:
            if opened.payload.accepts(point):
                return opened
        raise ContractError(f"no payload serves {dict(point)}; {_held([opened.payload for opened in self._payloads])}")

    def _run(self, opened: OpenPayload, tensors: list[Tensor]) -> Any:
        with torch.no_grad():
            if self._on_cpu:
                return self._rebuild(self._leaves(opened, tensors))
            with current(self.device):
                call = partial(self._full, opened)
                return self._rebuild(self._graphs.run(opened.payload, call, tensors) if self._graphs else call(tensors))

    def _full(self, opened: OpenPayload, tensors: list[Tensor]) -> Sequence[Tensor]:
        """The output tensors on a GPU. A graph holds what was launched so, and needs this no more when it is replayed."""
        with full_on_gpu():
            return self._leaves(opened, tensors)

    def _leaves(self, opened: OpenPayload, tensors: list[Tensor]) -> Sequence[Tensor]:
        """The output tensors that a payload gives, in order."""
        if opened.payload.convention == "flat":
            found: Sequence[Tensor] = opened.run(*tensors)
            return found
        leaves = {item.name: tensor for (item, _), tensor in zip(self._checks, tensors, strict=True)}
        if self._items is None:
            values = {**self._constants, **leaves}
        else:
            values = {item.name: put_together(item, leaves) for item in self.inputs.inputs}
        if self.inputs.style == "positional":
            return leaves_of(opened.run(*(values[name] for name in self._names)))
        return leaves_of(opened.run(**{name: values[name] for name in self._names}))


def _by_sizes(
    payloads: Sequence[OpenPayload], names: tuple[str, ...]
) -> tuple[dict[tuple[int, ...], OpenPayload], tuple[OpenPayload, ...]]:
    """Payloads for one size of every dim, by these sizes in the order of the names; and the others."""
    exact: dict[tuple[int, ...], OpenPayload] = {}
    ranged: list[OpenPayload] = []
    for opened in payloads:
        sizes = {dim.name: dim.min for dim in opened.payload.dims}
        if is_exact(opened.payload) and set(sizes) == set(names):
            exact.setdefault(tuple(sizes[name] for name in names), opened)
        else:
            ranged.append(opened)
    return exact, tuple(ranged)


def _held(payloads: Sequence[Payload]) -> str:
    """What there is, as the end of a message."""
    sizes = {payload.path: ", ".join(str(dim) for dim in payload.dims) for payload in payloads}
    return "the artifact holds " + "; ".join(f"{path} ({text})" if text else path for path, text in sizes.items())
