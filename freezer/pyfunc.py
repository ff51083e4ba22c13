"""Loader that MLflow's pyfunc calls for a registered artifact. Imports no mlflow.

    model = mlflow.pyfunc.load_model("models:/resnet50@cpu-x86-64-v4")
    model.predict({"pixel_values": array})

Inputs are converted to the contract's dtype only if no value can change, with one exception: a
pandas DataFrame may have float64 where float32 is expected, because pandas uses float64 for every
column of floats, and MLflow casts in the same way. Other dtypes raise ContractError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from freezer.artifact import (
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    MANIFEST,
    Artifact,
    Payload,
    torch_folder,
)
from freezer.codec import read_record
from freezer.errors import ContractError, IntegrityError
from freezer.files import scratch_folder
from freezer.runtime.frozen_model import FrozenModel
from freezer.serving.load import load
from freezer.spec import TensorSpec, take_apart
from freezer.store import Store

if TYPE_CHECKING:
    import numpy as np

STORE_POINTER = "store.json"
"""File in place of an artifact that stays in its store: a `StorePointer`."""


@dataclass(frozen=True, kw_only=True, slots=True)
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
        path: of the folder.
        model_config: `threads`, `limit_isa` and `device`; see `freezer.load`.

    Raises:
        IncompatibleError: the artifact does not serve this machine, thread count or torch.
        IntegrityError: the bytes differ from the published ones, or the store has another artifact
            than was registered.
    """
    folder, config = Path(path), model_config or {}
    threads, limit_isa, device = (
        config.get("threads"),
        bool(config.get("limit_isa")),
        config.get("device"),
    )
    pointer = folder / STORE_POINTER
    if not pointer.is_file():
        return PyfuncModel(load(folder, threads=threads, limit_isa=limit_isa, device=device))
    place = read_record(StorePointer, pointer.read_bytes(), origin=str(pointer))
    store, registered = Store.open(place.store), Artifact.read(folder).manifest
    version = store.version(f"{place.model}:{place.version}")
    needed = [
        item.path
        for item in registered.contents
        if isinstance(item, Payload) or item.path in (GOLDEN_INPUTS, GOLDEN_OUTPUTS)
    ]
    with scratch_folder() as scratch:
        folder = Path(scratch) / "artifact"
        found = store.materialize(version, place.device_class, folder, paths=needed)
        if len(version.images_of(place.device_class)) > 1:
            store.materialize(version, place.device_class, torch_folder(folder), rank=1)
        if replace(found.manifest, version=None) == replace(
            registered, version=None
        ):  # before a payload is opened
            return PyfuncModel(
                load(found.folder, threads=threads, limit_isa=limit_isa, device=device)
            )
    raise IntegrityError(
        f"store {place.store} has another {place.model}:{place.version} for {place.device_class}"
        f" than was registered ({MANIFEST} differs); register it again"
    )


class PyfuncModel:
    """A frozen model behind pyfunc's `predict`.

    Attributes:
        model: the frozen model.
    """

    def __init__(self, model: FrozenModel) -> None:
        self.model = model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
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
        specs = {item.name: item for item in self.model.inputs.tensors}
        items = {item.name: item for item in self.model.inputs.items}
        loose = hasattr(model_input, "columns") and hasattr(
            model_input, "to_numpy"
        )  # a DataFrame, without importing pandas
        ready: dict[str, Any] = {}
        for name, value in _by_name(model_input, specs, loose=loose).items():
            for path, leaf in take_apart(items[name], value) if name in items else [(name, value)]:
                if path in ready:
                    raise ContractError(
                        f"input {path!r} is given twice; expected it within {name!r}, or by its"
                        " path"
                    )
                given = _tensor(leaf, specs[path], loose=loose) if path in specs else leaf
                ready[path] = given.to(self.model.device) if isinstance(given, Tensor) else given
        return _to_numpy(self.model(**ready))

    def get_raw_model(self) -> FrozenModel:
        """The frozen model, for `get_raw_model` of MLflow's PyFuncModel."""
        return self.model


def _by_name(
    model_input: Any, specs: Mapping[str, TensorSpec], *, loose: bool
) -> Mapping[str, Any]:
    """The inputs by name."""
    if isinstance(model_input, Mapping):
        return {str(name): value for name, value in model_input.items()}
    if loose and all(len(item.shape) == 1 for item in specs.values()):
        return {str(name): model_input[name].to_numpy() for name in model_input.columns}
    if loose and len(specs) != 1:
        shapes = ", ".join(f"{item.name} {list(item.shape)}" for item in specs.values())
        raise ContractError(
            f"got a DataFrame, whose columns have rank 1; expected {shapes}: pass arrays by name"
        )
    if len(specs) != 1:
        raise ContractError(
            f"got one {type(model_input).__name__}; expected inputs by name: {', '.join(specs)}"
        )
    (name,) = specs
    return {name: model_input.to_numpy() if loose else model_input}


def _tensor(value: Any, item: TensorSpec, *, loose: bool) -> Any:
    """Convert an array to a tensor of the contract's dtype; other values are returned unchanged."""
    import numpy as np

    if isinstance(value, Tensor) or not isinstance(value, np.ndarray | np.generic):
        return value
    array = np.asarray(value)
    if item.dtype == "bfloat16":
        raise ContractError(
            f"input {item.name!r}: got an array of {array.dtype}, expected bfloat16, which numpy"
            " lacks; pass a tensor"
        )
    dtype = np.dtype(item.dtype)
    if not _converts(array, dtype, loose=loose):
        raise ContractError(
            f"input {item.name!r}: got dtype {array.dtype}, expected {item.dtype}; convert it with"
            f" .astype({item.dtype!r})"
        )
    # torch does not share read-only memory.
    return torch.from_numpy(array.astype(dtype, order="C", copy=not array.flags.writeable))


def _converts(array: np.ndarray, dtype: np.dtype, *, loose: bool) -> bool:
    """Whether an array can be converted to another dtype of the same kind without changing
    values.
    """
    import numpy as np

    integral = array.dtype.kind in "iu" and dtype.kind in "iu"
    if array.dtype.kind != dtype.kind and not integral:
        return False
    if np.can_cast(array.dtype, dtype, "safe"):
        return True
    if not loose:
        return False
    return bool(np.array_equal(array.astype(dtype), array)) if integral else dtype.kind == "f"


def _to_numpy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {name: _to_numpy(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_to_numpy(item) for item in value)
    return value
