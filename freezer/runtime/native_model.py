"""NativeModel: Inductor payloads behind the input contract, with numpy arrays instead of tensors.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from freezer.artifact import Manifest, Payload
from freezer.errors import ContractError, Refusal
from freezer.runtime.input_binding import InputBinding
from freezer.runtime.libtorch import Array
from freezer.runtime.payload_choice import OpenPayload, PayloadChoice
from freezer.runtime.rebuilding import rebuilder
from freezer.spec import TensorSpec


class NativeModel:
    """A callable that enforces its input contract, like FrozenModel, without torch in the process.

    Inputs are numpy arrays, or other objects with `__dlpack__` on the CPU, given by name or
    position as to a FrozenModel. Names, dtypes, ranks and sizes are checked, and strides corrected.
    Outputs are C-contiguous numpy arrays that own their memory, in the structure of the source
    model's result.

    Calls of several threads run one after the other within a payload, each with the payload's
    number of threads.

    Attributes:
        inputs: the input spec.
        outputs: names, dtypes and ranks of the outputs.
        manifest: of the artifact.
        ladder: artifacts that were refused before this one at load.

    Args:
        payloads: Inductor payloads for one thread count; the first that accepts the sizes of a call
            serves it.
    """

    def __init__(
        self, manifest: Manifest, payloads: Sequence[OpenPayload], ladder: Sequence[Refusal] = ()
    ) -> None:
        self.inputs = manifest.inputs
        self.outputs = manifest.outputs
        self.manifest = manifest
        self.ladder = tuple(ladder)
        self._binding = InputBinding(manifest.inputs)
        self._checks = tuple((item, np.dtype(item.dtype)) for item in manifest.inputs.tensors)
        self._choice = PayloadChoice(
            payloads, [dim.name for dim in manifest.inputs.dims], manifest.payloads
        )
        self._rebuild = rebuilder(manifest.structure)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result.

        Raises:
            ContractError: an input is missing, unknown, or does not meet the contract.
            RuntimeError: the payload's code reports an error.
        """
        return self._rebuild(self.leaves(*args, **kwargs))

    def leaves(self, *args: Any, **kwargs: Any) -> list[Array]:
        """The output arrays in the order of `outputs`; raises as a call does."""
        values, arrays, point = self._binding.bind(args, kwargs), list[Array](), dict[str, int]()
        for item, dtype in self._checks:
            array = _array(item, values.pop(item.name, None))
            if array.dtype != dtype:
                got = (
                    array.dtype.name
                    if array.dtype.isnative
                    else f"{array.dtype.name} in another byte order"
                )
                raise ContractError(
                    f"input {item.name!r}: got dtype {got}, expected {dtype}; convert it with"
                    f" .astype({dtype.name!r})"
                )
            if array.shape != item.shape and not self._binding.fits(item, array.shape, point):
                raise ContractError(self._binding.shape_problem(item, array.shape, point))
            arrays.append(
                array if array.flags.carray else np.require(array, requirements=("C", "A", "W"))
            )
        self._binding.check_constants(values, np.ndarray)
        found: list[Array] = self._choice.choose(point).run(arrays)
        return found

    def payload_for(self, shape: Mapping[str, int], threads: int | None = None) -> Payload:
        """See `FrozenModel.payload_for`."""
        return self._choice.payload_for(shape, threads)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ContractError(
            "a frozen model cannot be copied or pickled: its payload is open in this process; call"
            " freezer.load in each process",
            code="CP-FROZEN",
        )

    def __repr__(self) -> str:
        return (
            f"NativeModel({self.manifest.model} for {self.manifest.device_class};"
            f" {', '.join(self._binding.names)})"
        )


def _array(item: TensorSpec, given: Any) -> Array:
    """An input as an array that shares its memory."""
    if isinstance(given, np.ndarray):
        return given
    if isinstance(given, np.generic):
        return np.asarray(given)
    if not hasattr(given, "__dlpack__"):
        got = "nothing" if given is None else type(given).__name__
        expected = (
            f"a numpy array, or an object with __dlpack__, of {item.dtype} {list(item.shape)}"
        )
        raise ContractError(f"input {item.name!r}: got {got}, expected {expected}")
    try:
        array: Array = np.from_dlpack(given)
    except (
        BufferError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # another device, or a dtype that numpy lacks
        raise ContractError(
            f"input {item.name!r}: numpy cannot read the {type(given).__name__}: {error}"
        ) from error
    return array
