"""The part of a frozen model that is the same for tensors and arrays: bind and check the inputs of
a call, choose the payload, and rebuild the result. Imports no torch.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from freezer.artifact import Manifest, Payload, is_exact, payload_at, payloads_within
from freezer.errors import ContractError, Refusal
from freezer.spec import InputSpec, NestedSpec, OutputSpec, OutputStructure, TensorSpec, take_apart

Runner = Callable[..., Any]
"""Runs an open payload."""


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


class OpenModel:
    """A model behind its input contract.

    Args:
        spec: the input spec.
        outputs: names, dtypes and ranks of the outputs.
        structure: structure of a result.
        payloads: open payloads for one thread count, or for any; the first that accepts the sizes
            of a call serves it.
        manifest: manifest of the artifact; None for a candidate.
        ladder: artifacts that were refused before this one at load.
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
    ) -> None:
        self.inputs = spec
        self.outputs = outputs
        self.manifest = manifest
        self.ladder = tuple(ladder)
        self._binding = InputBinding(spec)
        self._payloads = tuple(payloads)
        self._dims = tuple(dim.name for dim in spec.dims)
        self._exact: dict[tuple[int, ...], OpenPayload] = {}
        for opened in payloads:
            sizes = {dim.name: dim.min for dim in opened.payload.dims}
            if is_exact(opened.payload) and set(sizes) == set(self._dims):
                self._exact.setdefault(tuple(sizes[name] for name in self._dims), opened)
        self._rebuild = rebuilder(structure)

    def payload_for(self, shape: Mapping[str, int], threads: int | None = None) -> Payload:
        """The payload that serves inputs of these sizes.

        Args:
            shape: the size of every declared dim by name; `{}` where none is declared.
            threads: choose among all payloads of the artifact for a process that may use this many
                threads; by default among the open ones.

        Raises:
            ContractError: no payload serves these sizes, or they are not those of the declared
                dims.
        """
        if set(shape) != set(self._dims):
            names = ", ".join(self._dims)
            expected = f"those of {names}" if names else "{}: the model declares no dim"
            raise ContractError(f"got sizes of {sorted(shape)}, expected {expected}")
        if threads is None:
            return self._choose(shape).payload
        payloads = self.manifest.payloads if self.manifest else self._open_payloads()
        payload = payload_at(payloads_within(payloads, threads), shape)
        if payload is None:
            raise _unserved(f"{dict(shape)} with {threads} threads", payloads)
        return payload

    def _choose(self, point: Mapping[str, int]) -> OpenPayload:
        """The open payload that serves a call by its sizes: one for exactly these sizes, else the
        first that accepts them.

        Raises:
            ContractError: none does.
        """
        exact = self._exact.get(tuple(point[name] for name in self._dims))
        if exact is not None:
            return exact
        for opened in self._payloads:
            if opened.payload.accepts(point):
                return opened
        raise _unserved(f"{dict(point)}", self._open_payloads())

    def _open_payloads(self) -> tuple[Payload, ...]:
        return tuple(opened.payload for opened in self._payloads)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ContractError(
            "a frozen model cannot be copied or pickled: its payload is open in this process; call"
            " freezer.load in each process",
            code="CP-FROZEN",
        )

    def __repr__(self) -> str:
        made_for = "a candidate"
        if self.manifest is not None:
            made_for = f"{self.manifest.model} for {self.manifest.device_class}"
        return f"{type(self).__name__}({made_for}; {', '.join(self._binding.names)})"


def _unserved(call: str, payloads: Sequence[Payload]) -> ContractError:
    sizes = {payload.path: ", ".join(map(str, payload.dims)) for payload in payloads}
    listed = "; ".join(f"{path} ({dims})" if dims else path for path, dims in sizes.items())
    return ContractError(f"no payload serves {call}; the artifact holds {listed}")


class InputBinding:
    """Binds the inputs of a call to the leaves of a spec, and checks them.

    Attributes:
        names: names of the inputs, in order.
        tensors: specs of the tensor inputs, in order.
    """

    def __init__(self, spec: InputSpec) -> None:
        self.names = tuple(item.name for item in spec.inputs)
        self._items = {item.name: item for item in spec.items}
        self.tensors = spec.tensors
        self._constants = spec.constants
        self._dims = spec.dims
        self._sizes = {dim.name: dim.sizes for dim in spec.dims}
        self._nested = any(isinstance(item, NestedSpec) for item in spec.inputs)

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
        for item in self.tensors:
            leaf = check(item, values.pop(item.name, None))
            if leaf.shape != item.shape and not self._fits(item, leaf.shape, point):
                raise ContractError(self._shape_problem(item, leaf.shape, point))
            leaves.append(leaf)
        for name, value in values.items():  # what remains are constants
            is_tensor = hasattr(value, "__dlpack__")
            if is_tensor or value != self._constants[name]:
                got = "a tensor" if is_tensor else repr(value)
                raise ContractError(
                    f"input {name!r}: got {got}, but {self._constants[name]!r} was baked in when"
                    " the model was frozen"
                )
        return leaves, point

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """The leaves of a call by path; their values are not checked.

        Raises:
            ContractError: an input is unknown or given twice, or a structure differs.
        """
        if len(args) > len(self.names):
            raise ContractError(
                f"got {len(args)} positional inputs, expected at most {len(self.names)}:"
                f" {', '.join(self.names)}"
            )
        values: dict[str, object] = {}
        for name, value in (*zip(self.names, args, strict=False), *kwargs.items()):
            item = self._items.get(name)
            if item is None:
                paths = ", or their parts by path" if self._nested else ""
                raise ContractError(
                    f"input {name!r} is unknown; expected {', '.join(self.names)}{paths}"
                )
            for path, leaf in take_apart(item, value) if self._nested else ((name, value),):
                if path in values:
                    raise ContractError(
                        f"input {path!r} is given twice; expected it once, within {name!r} or by"
                        " its path"
                    )
                values[path] = leaf
        return values

    def _fits(self, item: TensorSpec, shape: Sequence[int], point: dict[str, int]) -> bool:
        """Whether every size is the declared one, or within its dim's bounds and the same as in
        earlier inputs, whose sizes are in `point`; those of this one are added.
        """
        if len(shape) != len(item.shape):
            return False
        for size, expected in zip(shape, item.shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    return False
            elif point.setdefault(expected, size) != size or size not in self._sizes[expected]:
                return False
        return True

    def _shape_problem(
        self, item: TensorSpec, shape: Sequence[int], point: Mapping[str, int]
    ) -> str:
        """Describe a shape that does not fit."""
        bounds = ", ".join(map(str, self._dims))
        expected = f"{list(item.shape)} with {bounds}" if bounds else f"{list(item.shape)}"
        so_far = f", {dict(point)} in the inputs before it" if point else ""
        return f"input {item.name!r}: got shape {list(shape)}, expected {expected}{so_far}"


class NamedOutput(dict[str, Any]):
    """Result in place of the source's dataclass or ModelOutput: access by key, attribute and
    position.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output has no {name!r}; it has {', '.join(self)}") from None

    def __getitem__(self, key: str | int) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def unflatten(structure: OutputStructure, leaves: Sequence[Any]) -> Any:
    """Rebuild the result from its leaves in order; a named structure becomes a NamedOutput."""
    return _unflatten(structure, iter(leaves))


def rebuilder(structure: OutputStructure) -> Callable[[Sequence[Any]], Any]:
    """A function like `unflatten` for one structure, faster for the common ones."""
    if structure.kind == "tensor":
        return lambda leaves: leaves[0]
    if all(item.kind == "tensor" for item in structure.items):
        if structure.kind == "tuple":
            return tuple
        if structure.kind == "named":
            return lambda leaves: NamedOutput(zip(structure.keys, leaves, strict=True))
    return lambda leaves: unflatten(structure, leaves)


def _unflatten(structure: OutputStructure, leaves: Iterator[Any]) -> Any:
    if structure.kind == "tensor":
        return next(leaves)
    if structure.kind == "constant":
        return structure.value
    items = [_unflatten(item, leaves) for item in structure.items]
    if structure.kind == "tuple":
        return tuple(items)
    if structure.kind == "list":
        return items
    if structure.kind == "namedtuple":
        return _named_tuple(structure.type_name.rpartition(".")[2], structure.keys)(*items)
    named = zip(structure.keys, items, strict=True)
    return dict(named) if structure.kind == "dict" else NamedOutput(named)


@functools.cache
def _named_tuple(name: str, keys: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    return namedtuple(name, keys)
