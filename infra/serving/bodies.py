"""Bodies of requests and answers: JSON, or a .safetensors file. Arrays are numpy's for the native
runtime, else tensors.

JSON has no dtypes: its numbers take those of the contract, if no value changes but by rounding of
floats.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterable, Mapping
from typing import Any

import numpy as np

from freezer.errors import ContractError
from freezer.runtime.native import Array
from freezer.spec import InputSpec, TensorSpec, take_apart

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


def read_safetensors(body: bytes, *, native: bool) -> dict[str, Any]:
    """The inputs in the bytes of a .safetensors file.

    Raises:
        ContractError: the body is not such a file.
    """
    try:
        if native:
            from safetensors.numpy import load as load_arrays

            return dict(load_arrays(body))
        from safetensors.torch import load

        return dict(load(body))
    except Exception as error:  # of dtypes and shapes that numpy or torch lacks
        raise ContractError(
            f"the body is not a .safetensors file: {error}; write one with safetensors.torch.save"
        ) from None


def write_json(outputs: Mapping[str, Any]) -> bytes:
    """Nested lists by output name; NaN and infinity as Python's json reads and writes them."""
    return json.dumps({name: leaf.tolist() for name, leaf in outputs.items()}).encode()


def write_safetensors(outputs: Mapping[str, Any], *, native: bool) -> bytes:
    """The bytes of a .safetensors file with the outputs by name."""
    if native:
        from safetensors.numpy import save as save_arrays

        return bytes(save_arrays(dict(outputs)))
    import torch
    from safetensors.torch import save

    return bytes(
        save(
            {
                name: leaf.clone(memory_format=torch.contiguous_format)
                for name, leaf in outputs.items()
            }
        )
    )
