"""ArrayModel: payloads behind the input contract, with numpy arrays instead of tensors. Imports no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from freezer.artifact import Artifact, Payload, thread_counts_of
from freezer.errors import Refusal, first_line
from freezer.runtime.arrays import (
    BFLOAT16,
    Array,
    array_of,
    dtype_of,
    narrowed,
    readable,
    widened,
)
from freezer.runtime.contract import (
    OpenModel,
    OpenPayload,
    Runner,
    check_indices,
    input_error,
)
from freezer.runtime.native.engines import ENGINE_OPENERS
from freezer.runtime.native.payload import NativePayload
from freezer.spec import TensorSpec


class ArrayModel(OpenModel):
    """A callable that enforces its input contract, like FrozenModel, without torch in the process.

    Inputs are numpy arrays, or anything on the CPU that has `__dlpack__` or `__array__`, given by
    name or position as to a FrozenModel. Names, dtypes, ranks and sizes are checked, and strides
    corrected. Outputs are new numpy arrays, in the structure of the source model's result.
    bfloat16, which numpy lacks, is returned as float32; such inputs may be float32, too, if no
    value changes.

    Calls of several threads run one after the other within a payload of Inductor or OpenVINO, each
    with the payload's number of threads.

    Attributes:
        inputs: the input spec.
        outputs: names, dtypes and ranks of the outputs.
        manifest: of the artifact.
        ladder: artifacts that were refused before this one at load.
    """

    _as_numpy = True

    def leaves(self, /, *args: object, **kwargs: object) -> list[Array]:
        """The output arrays in the order of `outputs`; see OpenModel."""
        if self._process_id != os.getpid():
            self._refuse_after_fork()
        arrays, point = self._binding.leaves(args, kwargs, checked_array)
        outputs: list[Array] = self._choose(point).run(arrays)
        return outputs


def open_arrays(
    artifact: Artifact,
    payloads: Sequence[Payload],
    num_threads: int,
    ladder: Sequence[Refusal],
) -> ArrayModel:
    """Open payloads that need no torch in the process, of an artifact whose files were verified.

    Args:
        artifact: the artifact.
        payloads: payloads for one thread count, or for any.
        num_threads: threads that calls may use.
        ladder: artifacts that were refused before this one.
    """
    manifest = artifact.manifest
    count = max(thread_counts_of(payloads), default=num_threads)
    opened = []
    for payload in payloads:
        path = artifact.folder / payload.path
        run: Runner
        if payload.kind == "inductor":
            num_inputs, num_outputs = len(manifest.inputs.tensors), len(manifest.outputs)
            run = NativePayload(path, count, num_inputs, num_outputs)
        else:
            run = ENGINE_OPENERS[payload.kind](path, manifest.recipe.settings, count)
        opened.append(OpenPayload(payload=payload, run=run))
    return ArrayModel(
        spec=manifest.inputs,
        outputs=manifest.outputs,
        structure=manifest.structure,
        payloads=opened,
        manifest=manifest,
        ladder=ladder,
    )


def checked_array(spec: TensorSpec, value: object) -> Array:
    """An input as a payload may read it.

    Raises:
        ContractError: it is neither an array nor a tensor, or has another dtype.
    """
    try:
        array = array_of(value)
    except Exception as error:  # the owner of the memory may raise anything
        raise input_error(
            spec,
            f"got {type(value).__name__} that is not an array: {first_line(error)}; expected"
            f" {spec.dtype} on the CPU",
        ) from error
    if array is None:
        got = "nothing" if value is None else type(value).__name__
        raise input_error(
            spec, f"got {got}, expected an array or tensor of {spec.dtype} {list(spec.shape)}"
        )
    if array.dtype != dtype_of(spec.dtype):
        array = _converted(spec, array)
    if spec.indices is not None and array.size:
        check_indices(spec, int(array.min()), int(array.max()))
    return readable(array)


def _converted(spec: TensorSpec, array: Array) -> Array:
    """float32 in place of bfloat16, if no value changes.

    Raises:
        ContractError: the contract has another dtype, or a value would change.
    """
    if spec.dtype == "bfloat16" and array.dtype == np.float32:
        bits = narrowed(array)
        if np.array_equal(widened(bits), array, equal_nan=True):
            return bits
        raise input_error(spec, "got float32 that bfloat16 lacks; round it to bfloat16")
    got = "bfloat16" if array.dtype == BFLOAT16 else array.dtype
    raise input_error(
        spec,
        f"got dtype {got}, expected {spec.dtype}; convert it with .astype({spec.dtype!r})",
    )
