"""NativeModel: Inductor payloads behind the input contract, with numpy arrays instead of tensors.

Imports no torch.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from freezer.runtime.contract import OpenModel, check_indices, input_error
from freezer.runtime.native.torch_library import Array
from freezer.spec import TensorSpec


class NativeModel(OpenModel):
    """A callable that enforces its input contract, like FrozenModel, without torch in the process.

    Inputs are numpy arrays, given by name or position as to a FrozenModel. Names, dtypes, ranks and
    sizes are checked, and strides corrected. Outputs are C-contiguous numpy arrays that own their
    memory, in the structure of the source model's result.

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

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """The model's result.

        Raises:
            ContractError: an input is missing, unknown, or does not meet the contract; with the
                code CP-FROZEN, the process was forked after the model was loaded.
            RuntimeError: the payload's code reports an error.
        """
        return self._rebuild(self.leaves(*args, **kwargs))

    def leaves(
        self,
        /,  # an input may be named `self`
        *args: object,
        **kwargs: object,
    ) -> list[Array]:
        """The output arrays in the order of `outputs`; raises as a call does."""
        if self._process_id != os.getpid():
            self._refuse_after_fork()
        arrays, point = self._binding.leaves(args, kwargs, _checked)
        opened = self._choose(point)
        outputs: list[Array] = opened.run(arrays)
        return outputs


def _checked(
    item: TensorSpec,
    value: object,
) -> Array:
    """An input as a payload may read it."""
    if not isinstance(value, np.ndarray | np.generic):
        got = "nothing" if value is None else type(value).__name__
        raise input_error(
            item, f"got {got}, expected a numpy array of {item.dtype} {list(item.shape)}"
        )
    array = np.asarray(value)
    if array.dtype != item.dtype:
        raise input_error(
            item,
            f"got dtype {array.dtype}, expected {item.dtype}; convert it with"
            f" .astype({item.dtype!r})",
        )
    if item.indices is not None and array.size:
        check_indices(item, int(array.min()), int(array.max()))
    return array if array.flags.carray else np.require(array, requirements=("C", "A", "W"))
