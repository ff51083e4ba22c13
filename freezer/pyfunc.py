"""Loader that MLflow's pyfunc calls for a registered artifact. Imports no mlflow, and torch only if
a payload needs it.

    model = mlflow.pyfunc.load_model("models:/resnet50@cpu-x86-64-v4")
    model.predict({"pixel_values": array})

Inputs are converted to the contract's dtype only if no value can change, with one exception: a
pandas DataFrame may have float64 where float32 is expected, because pandas uses float64 for every
column of floats, and MLflow casts in the same way. Other dtypes raise ContractError.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from freezer.artifact import (
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    MANIFEST,
    Artifact,
    Manifest,
    torch_folder,
)
from freezer.codec import frozen, read_record
from freezer.errors import ContractError, IntegrityError
from freezer.files import read_document, scratch_folder
from freezer.runtime.arrays import Array
from freezer.runtime.contract import InputBinding, OpenModel
from freezer.serving.load import load
from freezer.spec import TensorSpec

STORE_POINTER = "store.json"
"""File in place of an artifact that stays in its store: a `StorePointer`."""


@frozen
class StorePointer:
    """The artifact that was registered by reference."""

    store: str
    model: str
    version: int
    device_class: str


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> PyfuncModel:
    """Load an artifact folder, or the artifact in a store that the folder points to. MLflow
    requires this name.

    Args:
        path: path of the folder.
        model_config: `threads`, `limit_isa` and `device`; see `freezer.load`.

    Raises:
        IncompatibleError: the artifact does not serve this machine, thread count or torch.
        IntegrityError: the bytes differ from the published ones, or the store has another artifact
            than was registered.
    """
    config = model_config or {}
    with ExitStack() as stack:
        folder = Path(path)
        pointer = folder / STORE_POINTER
        if pointer.is_file():
            target = read_record(StorePointer, read_document(pointer), origin=str(pointer))
            registered = Artifact.read(folder).manifest
            folder = stack.enter_context(scratch_folder()) / "artifact"
            _fetch(target, registered, folder)
        model = load(
            folder,
            threads=config.get("threads"),
            limit_isa=bool(config.get("limit_isa")),
            device=config.get("device"),
            arrays="numpy",
        )
    return PyfuncModel(model)


def _fetch(
    pointer: StorePointer,
    registered: Manifest,
    folder: Path,
) -> None:
    """Fetch the files of the registered artifact that a call needs.

    Raises:
        IntegrityError: the store has another artifact.
    """
    from freezer.store import Store

    store = Store.open(pointer.store)
    name = pointer.device_class
    version = store.version(f"{pointer.model}:{pointer.version}")
    others = [file.path for file in registered.files]
    payloads = [file.path for file in registered.contents if file.path not in others]
    stored = store.materialize(
        version,
        name,
        folder,
        paths=[*payloads, GOLDEN_INPUTS, GOLDEN_OUTPUTS],
    )
    if replace(stored.manifest, version=None) != replace(registered, version=None):
        raise IntegrityError(
            f"store {pointer.store} has another {pointer.model}:{pointer.version} for {name} than"
            f" was registered ({MANIFEST} differs); register it again"
        )
    if len(version.images_of(name)) > 1:
        store.materialize(
            version,
            name,
            torch_folder(folder),
            rank=1,
        )


class PyfuncModel:
    """A frozen model behind pyfunc's `predict`.

    Attributes:
        model: the frozen model, which returns numpy arrays.
    """

    def __init__(self, model: OpenModel) -> None:
        self.model = model
        self._binding = InputBinding(model.inputs)

    def predict(
        self,
        model_input: Any,
        params: Mapping[str, Any] | None = None,
    ) -> Any:
        """The model's result as numpy arrays, in the model's structure; bfloat16 becomes float32.

        Args:
            model_input: arrays or tensors by input name or path, or nested like the model's inputs;
                one array or tensor for a model with one tensor input; or a DataFrame: its columns
                are the inputs if all have rank 1, its values the single input.
            params: must be empty.

        Raises:
            ContractError: an input is missing, unknown, or does not meet the contract.
        """
        if params:
            raise ContractError(f"got params {sorted(params)}; a frozen model only takes inputs")
        specs = {spec.name: spec for spec in self._binding.tensors}
        # A DataFrame, without importing pandas.
        loose = hasattr(model_input, "columns") and hasattr(model_input, "to_numpy")
        named = _by_name(model_input, specs, loose=loose)
        leaves = self._binding.bind((), named)
        for path in specs.keys() & leaves.keys():
            leaves[path] = _converted(leaves[path], specs[path], loose=loose)
        return self.model(**leaves)

    def get_raw_model(self) -> OpenModel:
        """The frozen model, for `get_raw_model` of MLflow's PyFuncModel."""
        return self.model


def _by_name(
    model_input: Any,
    specs: Mapping[str, TensorSpec],
    *,
    loose: bool,
) -> Mapping[str, object]:
    """The inputs by name."""
    if isinstance(model_input, Mapping):
        return {str(name): value for name, value in model_input.items()}
    ranks = {len(spec.shape) for spec in specs.values()}
    if loose and ranks == {1}:
        return {str(name): model_input[name].to_numpy() for name in model_input.columns}
    if len(specs) != 1:
        given = "a DataFrame" if loose else type(model_input).__name__
        shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in specs.values())
        raise ContractError(f"got {given}; expected arrays by name: {shapes}")
    values = model_input.to_numpy() if loose else model_input
    return dict.fromkeys(specs, values)


def _converted(value: object, spec: TensorSpec, *, loose: bool) -> object:
    """Convert an array to the contract's dtype; other values are returned unchanged."""
    if isinstance(value, np.ndarray | np.generic) and spec.dtype != "bfloat16":
        dtype = np.dtype(spec.dtype)
        if _converts(np.asarray(value), dtype, loose=loose):
            return value.astype(dtype)
    return value


def _converts(
    array: Array,
    dtype: np.dtype[Any],
    *,
    loose: bool,
) -> bool:
    """Whether an array can be converted to another dtype of the same kind without changing
    values.
    """
    integral = array.dtype.kind in "iu" and dtype.kind in "iu"
    if array.dtype.kind != dtype.kind and not integral:
        return False
    if np.can_cast(array.dtype, dtype, "safe"):
        return True
    if integral:
        return loose and np.array_equal(array.astype(dtype), array)
    return loose and dtype.kind == "f"
