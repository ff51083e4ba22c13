"""Bodies of `POST /predict` and its answers: JSON, or a .safetensors file.

JSON has no dtypes: its numbers take those of the contract, if no value changes but by rounding of
floats.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from fastapi import Response
from fastapi.responses import JSONResponse

from freezer.errors import ContractError, first_line
from freezer.runtime.arrays import Array, name_of, narrowed, widened
from freezer.runtime.tensor_files import array_bytes, arrays_in, check_fit
from freezer.spec import InputSpec, TensorSpec, take_apart

_KINDS: Mapping[str, str] = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""Kinds of numpy's dtypes that JSON's values may have, by the kind of the contract's dtype."""


JSON, BINARY = "application/json", "application/octet-stream"

BODY_BYTES, VALUE_BYTES = 1 << 20, 64
"""Limit of a body: a constant, and bytes for each value, as indented JSON has."""


class BodyForm(Protocol):
    """The form of one request and of its answer.

    Attributes:
        invalid: HTTP status of a request that violates the contract.
    """

    invalid: int

    def read(self, body: bytes, model: Any) -> dict[str, Any]:
        """The inputs by name, as the model takes them.

        Raises:
            ContractError: the body has another form, or asks for what the model lacks.
        """

    def write(self, outputs: Mapping[str, Any], labels: Mapping[str, str]) -> Response:
        """The answer with some outputs by name, from the artifact with these labels."""

    def refuse(self, status: int, detail: str) -> Response:
        """An answer without outputs."""


class OwnForm:
    """The form of `POST /predict`: a .safetensors file as `application/octet-stream`, or JSON.

    Args:
        media_type: of the request.
    """

    invalid = 422

    def __init__(self, media_type: str) -> None:
        self._binary = media_type.startswith(BINARY)

    def read(self, body: bytes, model: Any) -> dict[str, Any]:
        """See BodyForm."""
        read = read_safetensors if self._binary else read_json
        return read(body, model.inputs)

    def write(self, outputs: Mapping[str, Any], labels: Mapping[str, str]) -> Response:
        """See BodyForm."""
        if self._binary:
            return Response(array_bytes(outputs), media_type=BINARY)
        return Response(write_json(outputs), media_type=JSON)

    def refuse(self, status: int, detail: str) -> Response:
        """See BodyForm."""
        return refusal(status, detail)


def refusal(status: int, detail: str, key: str = "detail") -> Response:
    """A response without outputs; with 503 the client may try again in a second."""
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse({key: detail}, status, headers=headers)


async def read_body(chunks: AsyncIterable[bytes], inputs: InputSpec) -> bytes:
    """Read a body.

    Raises:
        ContractError: it is larger than any that has these inputs.
    """
    largest = inputs.largest_point()
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


def read_json(body: bytes, inputs: InputSpec) -> dict[str, Any]:
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
    items = {item.name: item for item in inputs.items}
    tensors = {item.name: item for item in inputs.tensors}
    found: dict[str, Any] = {}
    for name, value in given.items():
        for path, leaf in take_apart(items[name], value) if name in items else [(name, value)]:
            found[path] = array_of(tensors[path], leaf) if path in tensors else leaf
    return found


def array_of(item: TensorSpec, value: Any, shape: Sequence[int] | None = None) -> Array:
    """The array of nested lists.

    Args:
        item: input that it is for.
        value: the nested lists, or one number.
        shape: of the array, whose values are in this order; None: as the lists are nested.

    Raises:
        ContractError: the values do not fit the dtype or the shape.
    """
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
    if shape is not None:
        if array.size != math.prod(shape):
            raise ContractError(
                f"input {item.name!r}: got {array.size} values, expected {math.prod(shape)} for"
                f" shape {list(shape)}"
            )
        array = array.reshape(shape)
    return narrowed(array) if item.dtype == "bfloat16" else array


def read_safetensors(body: bytes, inputs: InputSpec) -> dict[str, Array]:
    """The inputs in the bytes of a .safetensors file.

    Raises:
        ContractError: the body is not such a file, or names, dtypes or shapes differ from the
            contract.
    """
    try:
        arrays = arrays_in(body)
    except Exception as error:  # safetensors and json share no base class
        raise ContractError(
            f"the body cannot be read as a .safetensors file: {first_line(error)}; write one with"
            " safetensors.torch.save or safetensors.numpy.save"
        ) from None
    headers = {name: (name_of(array.dtype), array.shape) for name, array in arrays.items()}
    check_fit([headers], inputs, "the body")
    return arrays


def write_json(outputs: Mapping[str, Array]) -> bytes:
    """Nested lists by output name; NaN and infinity as Python's json reads and writes them.

    Raises:
        ContractError: an output is complex.
    """
    values = {name: widened(leaf).tolist() for name, leaf in outputs.items()}
    try:
        return json.dumps(values).encode()
    except TypeError:
        raise ContractError(
            "an output is complex, which JSON lacks; send the inputs as a .safetensors file with"
            " content-type application/octet-stream"
        ) from None
