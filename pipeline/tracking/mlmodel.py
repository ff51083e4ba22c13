"""What the MLmodel of a downloaded model says: the file to load, the code it needs, its inputs. Nothing is unpickled or run."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freezer.errors import SourceError
from freezer.spec.items import DTYPES, INTEGRAL

if TYPE_CHECKING:
    import numpy as np
    from mlflow.models import Model
    from mlflow.types import TensorSpec

MLMODEL = "MLmodel"
FLAVOR = "pytorch"
EXPORTED, SERIALIZED = "model.pt2", "model.pth"
"""What mlflow.pytorch calls the file of each serialization format."""

TORCHSCRIPT_ENTRY = "*/code/*"
"""An entry that the zip of every TorchScript file has, and no pickled module's."""

NAMELESS = "input_0"
"""The name of a lone input without one: what `declared_spec` gives the first of a list. Several always have names."""

BATCH = "batch"
LEAST_BATCH_MAX = 8

EXAMPLE_DTYPES: Mapping[str, str] = {"float64": "float32"}
"""Examples are kept as JSON, which knows no dtypes; without a signature a fraction is what torch makes of it by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """A downloaded model.

    Attributes:
        kind: what `path` holds: an exported program, TorchScript, or a pickled module.
        path: of the file to load.
        code: folders for the search path, which the model was logged with.
        needs_trust: loading it runs code that came with it.
        inputs: as a catalog's field `inputs` takes them: by name, or a list when the signature has no names; None where neither
            signature nor example says, and of an exported program, which knows its own.
        dims: as a catalog's field `dims` takes them.
        samples: the input example, one set by input name; `input_0` where inputs have no names. None where there is none.
    """

    kind: Literal["export", "torchscript", "pickle"]
    path: Path
    code: tuple[Path, ...] = ()
    needs_trust: bool = False
    inputs: dict[str, Any] | list[Any] | None = None
    dims: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, np.ndarray[Any, Any]] | None = None


def describe(folder: Path, *, inputs: bool = True) -> Described:
    """What a downloaded version is.

    A -1 of the signature is a dim named `batch` in axis 0, from 1 to 8 or the example's size if that is more; in another axis it is
    fixed to the example's size. Integer inputs take the example's least and greatest value as their range.

    Args:
        folder: from `download`.
        inputs: whether to find out about inputs; False where the entry declares its own, and nothing can go wrong about them.

    Raises:
        SourceError: it is no model of torch's, a file is missing, or its inputs cannot be told (code CP-REGISTRY-INPUTS).
    """
    model = _read(folder)
    flavor = model.flavors.get(FLAVOR)
    if flavor is None:
        found = ", ".join(sorted(model.flavors)) or "none"
        raise SourceError(
            f"the model has the MLflow flavors {found}; expected {FLAVOR}: log it with mlflow.pytorch.log_model, or name its "
            "source by python:MODULE:FUNCTION",
            code="CP-REGISTRY-FLAVOR",
        )
    kind, path = _file(_inside(folder, str(flavor.get("model_data", "data"))))
    example = _Example(model, folder)
    declared, dims = example.fields() if inputs and kind != "export" else (None, {})
    return Described(
        kind=kind,
        path=path,
        code=tuple(_inside(folder, str(name)) for name in (flavor.get("code"),) if name),
        needs_trust=kind == "pickle",
        inputs=declared,
        dims=dims,
        samples=example.samples,
    )


def _read(folder: Path) -> Model:
    from mlflow.models import Model

    try:
        return Model.load(str(folder / MLMODEL))
    except Exception as error:  # yaml's, mlflow's and Python's own
        raise SourceError(f"{folder / MLMODEL} cannot be read: {type(error).__name__}: {error}", code="CP-REGISTRY") from error


def _inside(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise SourceError(f"{MLMODEL} names {name!r}, which lies outside of the model's folder", code="CP-REGISTRY")
    return path


def _file(data: Path) -> tuple[Literal["export", "torchscript", "pickle"], Path]:
    """The file that mlflow.pytorch wrote, and what it is."""
    if (data / EXPORTED).is_file():
        return "export", data / EXPORTED
    path = data / SERIALIZED
    if not path.is_file():
        raise SourceError(
            f"{data} holds neither {EXPORTED} nor {SERIALIZED}, which mlflow.pytorch writes; log the model again",
            code="CP-REGISTRY",
        )
    try:
        with zipfile.ZipFile(path) as archive:
            scripted = any(fnmatch(name, TORCHSCRIPT_ENTRY) for name in archive.namelist())
    except zipfile.BadZipFile:
        scripted = False  # the oldest form of torch.save
    return "torchscript" if scripted else "pickle", path


class _Example:
    """The signature and the input example of a model, brought together.

    Attributes:
        samples: the example's arrays by name; None where there is none, or it is nothing that a torch model takes.
    """

    def __init__(self, model: Model, folder: Path) -> None:
        schema = model.signature.inputs if model.signature is not None else None
        self._specs: Sequence[TensorSpec] = schema.inputs if schema is not None and schema.is_tensor_spec() else ()
        self._rows = False
        self._problem: str | None = None
        self.samples: dict[str, np.ndarray[Any, Any]] | None = None
        try:
            self.samples = self._arrays(model.load_input_example(str(folder)))
        except (
            Exception
        ) as error:  # a file that is missing or damaged, or does not fit the signature: mlflow has no one type for it
            self._problem = f"the input example cannot be read: {type(error).__name__}: {error}"

    def fields(self) -> tuple[dict[str, Any] | list[Any] | None, dict[str, Any]]:
        """The fields `inputs` and `dims` of a catalog's entry.

        Raises:
            SourceError: the signature leaves open what the example does not say.
        """
        if self._problem is not None:
            raise _unclear(self._problem)
        dims = _Dims()
        if self._specs:
            declared = {name: self._from_spec(spec, name, dims) for name, spec in self._named().items()}
            keyword = all(spec.name for spec in self._specs)
        elif self.samples is not None:
            declared = {name: _from_array(name, array, dims if self._rows else None) for name, array in self.samples.items()}
            keyword = list(self.samples) != [NAMELESS]
        else:
            return None, {}
        return (declared if keyword else list(declared.values())), dims.declared

    def _named(self) -> dict[str, TensorSpec]:
        return {spec.name or NAMELESS: spec for spec in self._specs}

    def _from_spec(self, spec: TensorSpec, name: str, dims: _Dims) -> dict[str, Any]:
        dtype, given = spec.type.name, list(spec.shape)
        if dtype not in DTYPES:
            raise _unclear(f"the signature's input {name!r} is of dtype {dtype}, which torch has no tensors of")
        array = (self.samples or {}).get(name)
        if array is not None and array.ndim != len(given):
            raise _unclear(f"the signature's input {name!r} has the shape {given}, and the input example's {list(array.shape)}")
        shape: list[int | str] = []
        for axis, size in enumerate(given):
            if size != -1:
                shape.append(int(size))
            elif axis == 0:
                shape.append(dims.batch(array.shape[0] if array is not None else None))
            elif array is not None:
                shape.append(int(array.shape[axis]))
            else:
                raise _unclear(
                    f"the signature's input {name!r} has the shape {given}, and no input example says what axis {axis} is"
                )
        return {"shape": shape, "dtype": dtype, **_range(array, dtype, name)}

    def _arrays(self, example: Any) -> dict[str, np.ndarray[Any, Any]] | None:
        import numpy as np

        self._rows = hasattr(example, "to_numpy")  # a pandas.DataFrame; pandas ships no types
        if self._rows:
            example = example.to_numpy(dtype=np.float32)  # as mlflow.pytorch gives it to a model
        if isinstance(example, np.ndarray):
            example = {next(iter(self._named()), NAMELESS): example}
        if not isinstance(example, Mapping) or not all(isinstance(array, np.ndarray) for array in example.values()):
            return None
        specs = self._named()
        arrays = {
            str(name): np.ascontiguousarray(
                array, dtype=specs[name].type if name in specs else EXAMPLE_DTYPES.get(array.dtype.name, array.dtype)
            )
            for name, array in example.items()
        }
        return arrays if all(array.dtype.name in DTYPES for array in arrays.values()) else None


class _Dims:
    """The batch dims of a model's inputs: inputs whose examples are of one size share a dim."""

    def __init__(self) -> None:
        self._names: dict[int | None, str] = {}
        self.declared: dict[str, Any] = {}

    def batch(self, size: int | None) -> str:
        """The name of the dim that is of this size in the example."""
        name = self._names.setdefault(size, f"{BATCH}_{len(self._names)}" if self._names else BATCH)
        self.declared[name] = {"min": 1, "max": max(LEAST_BATCH_MAX, size or 0)}
        return name


def _from_array(name: str, array: np.ndarray[Any, Any], rows: _Dims | None) -> dict[str, Any]:
    shape: list[int | str] = [int(size) for size in array.shape]
    if rows is not None and shape:
        shape[0] = rows.batch(array.shape[0])
    return {"shape": shape, "dtype": array.dtype.name, **_range(array, array.dtype.name, name)}


def _range(array: np.ndarray[Any, Any] | None, dtype: str, name: str) -> dict[str, Any]:
    if array is None or not array.size or dtype not in INTEGRAL or dtype == "bool":
        return {}
    low, high = int(array.min()), int(array.max())
    return {} if "mask" in name.lower() and low >= 0 and high <= 1 else {"range": [low, high]}  # a mask is generated as one


def _unclear(message: str) -> SourceError:
    return SourceError(f"{message}; write `inputs:` (and `dims:`) in the catalog's entry", code="CP-REGISTRY-INPUTS")
