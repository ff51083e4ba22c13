"""The part of a frozen model that is the same for tensors and arrays: bind and check the inputs of
a call, choose the payload, and rebuild the result. Imports no torch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar, cast

from freezer.artifact import Manifest, Payload
from freezer.errors import ContractError, Refusal, UsageError
from freezer.runtime.arrays import widened
from freezer.spec import (
    InputSpec,
    NestedSpec,
    OutputSpec,
    OutputStructure,
    TensorSpec,
    take_apart,
    unflatten,
)

Runner = Callable[..., Any]
"""Runs an open payload."""


def input_error(spec: TensorSpec, problem: str) -> ContractError:
    """The error for an input that does not meet its spec."""
    return ContractError(f"input {spec.name!r}: {problem}")


def check_indices(spec: TensorSpec, least: int, greatest: int) -> None:
    """Refuse indices that the model's table lacks. An engine would answer with another row, or end
    the process.

    Raises:
        ContractError: the table lacks some.
    """
    if spec.indices is None:
        return
    low, high = spec.indices
    if least < low or high < greatest:
        raise input_error(
            spec,
            f"got values from {least} to {greatest}, expected {low} to {high}, the indices of the"
            " model's table",
        )


class _Leaf(Protocol):
    """A tensor or an array."""

    @property
    def shape(self) -> Sequence[int]: ...


_Checked = TypeVar("_Checked", bound=_Leaf)


@dataclass(frozen=True, kw_only=True)
class OpenPayload:
    """A payload and its runner."""

    payload: Payload
    run: Runner


class OpenModel(ABC):
    """A model behind its input contract.

    Attributes:
        preserved: preserved attributes and methods by name; of a FrozenModel.
        device: that inputs must be on; of a FrozenModel.

    Args:
        spec: the input spec.
        outputs: names, dtypes and ranks of the outputs.
        structure: structure of a result.
        payloads: open payloads for one thread count, or for any; the first that accepts the sizes
            of a call serves it.
        manifest: manifest of the artifact; None for a candidate.
        ladder: artifacts that were refused before this one at load.
    """

    preserved: Any
    device: Any
    _as_numpy = False
    _follow: Callable[..., Any] | None = None

    def __init__(
        self,
        *,
        spec: InputSpec,
        outputs: tuple[OutputSpec, ...],
        structure: OutputStructure,
        payloads: Sequence[OpenPayload],
        manifest: Manifest | None = None,
        ladder: Sequence[Refusal] = (),
    ) -> None:
        self.inputs = spec
        self.outputs = outputs
        self.manifest = manifest
        self.ladder = tuple(ladder)
        self._binding = InputBinding(spec)
        self._payloads = tuple(payloads)
        self._process_id = os.getpid()
        self._structure = structure

    def __call__(self, /, *args: object, **kwargs: object) -> Any:  # an input may be named `self`
        """The model's result.

        Raises:
            ContractError: an input is missing, unknown, or does not meet the contract; with the
                code CP-FROZEN, the process was forked after the model was loaded.
            RuntimeError: the payload's code reports an error.
        """
        return self.result_of(self.leaves(*args, **kwargs))

    @abstractmethod
    def leaves(self, /, *args: object, **kwargs: object) -> Sequence[Any]:
        """The outputs of a call in the order of `outputs`: tensors, or arrays with bfloat16 as
        BFLOAT16. Raises as a call does.
        """

    def payload_for(self, shape: Mapping[str, int]) -> Payload:
        """The open payload that serves inputs of these sizes.

        Args:
            shape: the size of every declared dim by name; `{}` where none is declared.

        Raises:
            ContractError: no payload serves these sizes, or they are not those of the declared
                dims.
        """
        dims = [dim.name for dim in self.inputs.dims]
        if set(shape) != set(dims):
            raise ContractError(f"got sizes of {sorted(shape)}, expected those of {dims}")
        return self._choose(shape).payload

    def result_of(self, leaves: Iterable[Any]) -> Any:
        """The result of a call by its outputs in order."""
        values = map(widened, leaves) if self._as_numpy else leaves
        return unflatten(self._structure, values)

    def named(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """The inputs of a call by path; their values are not checked."""
        return self._binding.bind(args, kwargs)

    def sizes_of(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, int]:
        """The sizes of the declared dims in the inputs of a call."""
        return self._binding.leaves(args, kwargs, lambda _, value: cast(_Leaf, value))[1]

    def watch(self, every_s: float = 30.0, *, sentinel: bool = True) -> Any:
        """A WatchedModel to call in place of this one, which follows the store.

        Args:
            every_s: seconds between two checks of the store.
            sentinel: whether a portable copy checks some calls.

        Raises:
            UsageError: the model was loaded from a folder, or keeps state between calls.
        """
        if self._follow is None:
            raise UsageError("a folder cannot be watched; load MODEL:NAME from a store")
        return self._follow(self, every_s, sentinel)

    def _choose(self, point: Mapping[str, int]) -> OpenPayload:
        """The open payload that serves a call by its sizes.

        Raises:
            ContractError: none does.
        """
        for opened in self._payloads:
            if opened.payload.accepts(point):
                return opened
        paths = ", ".join(opened.payload.path for opened in self._payloads)
        raise ContractError(f"no payload serves {dict(point)}; the artifact has {paths}")

    def _refuse_after_fork(self) -> NoReturn:
        """Raise ContractError: the threads of the payload exist in the parent process only, and a
        call would wait for them for ever.
        """
        raise ContractError(
            f"this model was loaded in process {self._process_id}, and process {os.getpid()} is a"
            " fork of it, without the threads that its payload computes with; call freezer.load in"
            " each process after the fork (gunicorn: no --preload, or load in post_fork)",
            code="CP-FROZEN",
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ContractError(
            "a frozen model cannot be copied or pickled: its payload is open in this process; call"
            " freezer.load in each process",
            code="CP-FROZEN",
        )

    def __repr__(self) -> str:
        kind = type(self).__name__
        names = ", ".join(self._binding.names)
        manifest = self.manifest
        if manifest is None:
            return f"{kind}(a candidate; {names})"
        return f"{kind}({manifest.model} for {manifest.device_class}; {names})"


class InputBinding:
    """Binds the inputs of a call to the leaves of a spec, and checks them.

    Attributes:
        names: names of the inputs, in order.
        tensors: specs of the tensor inputs, in order.
    """

    def __init__(self, spec: InputSpec) -> None:
        self.names = tuple(item.name for item in spec.inputs)
        self.tensors = spec.tensors
        self._items = {item.name: item for item in spec.items}
        self._nested = any(isinstance(item, NestedSpec) for item in spec.inputs)
        self._constants = spec.constants
        self._dims = {dim.name: dim for dim in spec.dims}

    def leaves(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        check: Callable[[TensorSpec, object], _Checked],
    ) -> tuple[list[_Checked], dict[str, int]]:
        """The tensor inputs of a call in order, and the sizes of the named dims. Runs for every
        call: messages are built in other functions.

        Args:
            args: inputs by position.
            kwargs: inputs by name, or their parts by path.
            check: checks one input, None where it is missing, and returns it as a payload may read
                it.

        Raises:
            ContractError: an input is missing, unknown or given twice, or does not meet the spec.
        """
        values = self.bind(args, kwargs)
        leaves: list[_Checked] = []
        point: dict[str, int] = {}
        for spec in self.tensors:
            value = values.pop(spec.name, None)
            leaf = check(spec, value)
            if leaf.shape != spec.shape and not self._fits(spec, leaf.shape, point):
                raise input_error(spec, self._shape_problem(spec, leaf.shape, point))
            leaves.append(leaf)
        for name, value in values.items():  # what remains are constants
            expected = self._constants[name]
            is_tensor = hasattr(value, "__dlpack__")
            if is_tensor or value != expected:
                got = "a tensor" if is_tensor else repr(value)
                raise ContractError(
                    f"input {name!r}: got {got}, but {expected!r} was baked in when the model was"
                    " frozen"
                )
        return leaves, point

    def bind(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> dict[str, object]:
        """The leaves of a call by path; their values are not checked.

        Raises:
            ContractError: an input is unknown or given twice, or a structure differs.
        """
        if len(args) > len(self.names):
            raise ContractError(
                f"got {len(args)} positional inputs, expected at most {len(self.names)}:"
                f" {', '.join(self.names)}"
            )
        by_position = zip(self.names, args, strict=False)
        values: dict[str, object] = {}
        for name, value in (*by_position, *kwargs.items()):
            item = self._items.get(name)
            if item is None:
                raise ContractError(
                    f"input {name!r} is unknown; expected {', '.join(self.names)}, or their parts"
                    " by path"
                )
            parts = take_apart(item, value) if self._nested else ((name, value),)
            for path, leaf in parts:
                if path in values:
                    raise ContractError(f"input {path!r} is given twice; expected it once")
                values[path] = leaf
        return values

    def _fits(
        self,
        spec: TensorSpec,
        shape: Sequence[int],
        point: dict[str, int],
    ) -> bool:
        """Whether every size is the declared one, or within its dim's bounds and the same as in
        earlier inputs, whose sizes are in `point`; those of this one are added.
        """
        if len(shape) != len(spec.shape):
            return False
        sizes: dict[str, int] = {}
        for size, expected in zip(shape, spec.shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    return False
                continue
            known = point.get(expected, sizes.setdefault(expected, size))
            if size != known or size not in self._dims[expected].sizes:
                return False
        point.update(sizes)
        return True

    def _shape_problem(
        self,
        spec: TensorSpec,
        shape: Sequence[int],
        point: Mapping[str, int],
    ) -> str:
        """Describe a shape that does not fit."""
        problem = f"got shape {list(shape)}, expected {list(spec.shape)}"
        if self._dims:
            bounds = ", ".join(map(str, self._dims.values()))
            problem += f" with {bounds}"
        if point:
            problem += f", {dict(point)} in the inputs before it"
        return problem
