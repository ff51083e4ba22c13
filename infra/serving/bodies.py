"""Bodies of requests and answers: JSON, or a .safetensors file. Arrays are numpy's for the native
runtime, else tensors.

JSON has no dtypes: its numbers take those of the contract, if no value changes but by rounding of
floats.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import deserialize

from freezer.errors import ContractError, first_line
from freezer.runtime.native import Array
from freezer.runtime.tensor_files import check_fit, tensor_bytes
from freezer.spec import Header, InputSpec, TensorSpec, header_of, pairs_in, take_apart

_KINDS: Mapping[str, str] = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""Kinds of numpy's dtypes that JSON's values may have, by the kind of the contract's dtype."""


BODY_BYTES, VALUE_BYTES = 1 << 20, 64
"""Limit of a body: a constant, and bytes for each value, as indented JSON has."""


async def read_body(chunks: AsyncIterable[bytes], inputs: InputSpec) -> bytes:
    """Read a body.

    Raises:
        ContractError: it is larger than any that has these inputs.
    """
    largest = {dim.name: dim.max for dim in inputs.dims}
    num_values = sum(math.prod(tensor.at(largest)) for tensor in inputs.tensors)
    limit = BODY_BYTES + VALUE_BYTES * num_values
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            raise ContractError(
                f"the body has more than {limit} bytes, enough for the largest inputs; send fewer"
                " in a request"
            )
    return bytes(body)


def read_json(body: bytes, inputs: InputSpec, *, native: bool) -> dict[str, Any]:
    """The inputs in a JSON object: nested lists by input name, or in the structure of the source
    model's input.

    Raises:
        ContractError: the body is not such an object, or a value does not fit the dtype; the model
            checks names and shapes.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ContractError(
            f"the body is not JSON: {error}; expected an object of inputs by name"
        ) from None
    if not isinstance(given, dict):
        names = ", ".join(item.name for item in inputs.inputs)
        raise ContractError(
            f"the body is a JSON {type(given).__name__}; expected an object with {names}"
        )
    items, tensors = (
        {item.name: item for item in inputs.items},
        {item.name: item for item in inputs.tensors},
    )
    found: dict[str, Any] = {}
    for name, value in given.items():
        for path, leaf in take_apart(items[name], value) if name in items else [(name, value)]:
            found[path] = _array(tensors[path], leaf, native=native) if path in tensors else leaf
    return found


def _array(item: TensorSpec, value: Any, *, native: bool) -> Any:
    dtype = np.dtype("float32" if item.dtype == "bfloat16" else item.dtype)  # numpy lacks bfloat16
    array = None
    try:
        given: Array = np.asarray(value)
        if given.size == 0 or given.dtype.kind in _KINDS.get(dtype.kind, ""):
            with np.errstate(over="raise"):
                array = given.astype(dtype)
    except (
        ValueError,
        FloatingPointError,
    ):  # lists of different lengths; a number beyond the dtype
        pass
    if array is None or (dtype.kind in "iu" and not np.array_equal(array, given)):
        raise ContractError(
            f"input {item.name!r}: got values that are not all {item.dtype}, or lists of different"
            f" lengths; expected nested lists of {item.dtype} {list(item.shape)}"
        )
    if native:
        return array
    import torch

    return torch.from_numpy(array).to(getattr(torch, item.dtype))


def read_safetensors(body: bytes, inputs: InputSpec, *, native: bool) -> dict[str, Any]:
    """The inputs in the bytes of a .safetensors file.

    Raises:
        ContractError: the body is not such a file, or names, dtypes or shapes differ from the
            contract.
    """
    headers: dict[str, Header] = {}
    try:
        stored = dict(deserialize(body))  # type: ignore[no-untyped-call]
        length = int.from_bytes(body[:8], "little")
        pairs = pairs_in(json.loads(body[8 : 8 + length]).get("__metadata__"))
        for name, entry in stored.items():
            headers[name] = header_of(entry["dtype"], entry["shape"], paired=name in pairs)
    except Exception as error:  # safetensors and json share no base class
        raise ContractError(
            f"the body is not a .safetensors file: {first_line(error)}; write one with"
            " safetensors.torch.save"
        ) from None
    check_fit([headers], inputs, "the body")
    read = _stored_array if native else _stored_tensor
    return {name: read(stored[name]["data"], *headers[name]) for name in headers}


def _stored_array(data: bytearray, dtype: str, shape: Sequence[int]) -> Array:
    return np.ndarray(shape, np.dtype(dtype), buffer=data)


def _stored_tensor(data: bytearray, dtype: str, shape: Sequence[int]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
    return flat.reshape(shape)


def write_json(outputs: Mapping[str, Any]) -> bytes:
    """Nested lists by output name; NaN and infinity as Python's json reads and writes them.

    Raises:
        ContractError: an output is complex.
    """
    values = {name: leaf.tolist() for name, leaf in outputs.items()}
    try:
        return json.dumps(values).encode()
    except TypeError:
        raise ContractError(
            "an output is complex, which JSON lacks; send the inputs as a .safetensors file with"
            " content-type application/octet-stream"
        ) from None


def write_safetensors(outputs: Mapping[str, Any], *, native: bool) -> bytes:
    """The bytes of a .safetensors file with the outputs by name."""
    if native:
        from safetensors.numpy import save as save_arrays

        return bytes(save_arrays(dict(outputs)))
    return tensor_bytes(outputs)
