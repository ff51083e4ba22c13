"""Read the MLmodel of a downloaded model: the file to load, its code, its inputs.

Nothing is unpickled or executed.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freezer.codec import Json, frozen
from freezer.errors import SourceError
from freezer.spec import DTYPES, INTEGRAL
from freezer.store import NAME

if TYPE_CHECKING:
    import numpy as np
    from mlflow.models import Model
    from mlflow.types import TensorSpec

    Array = np.ndarray[Any, Any]

MLMODEL = "MLmodel"
FLAVOR = "pytorch"
EXPORTED, SERIALIZED = "model.pt2", "model.pth"
"""File names of mlflow.pytorch by serialization format."""

TORCHSCRIPT_ENTRY = "*/code/*"
"""An entry in the zip of every TorchScript file, but not of a pickled module."""

NAMELESS = "input_0"
"""Name of a single unnamed input, as `declared_spec` names the first of a list.

Several inputs always have names.
"""

Inputs = dict[str, Json] | list[Json]
"""The catalog's field `inputs`: by name, or in order."""

Dims = dict[str, dict[str, int]]
"""The catalog's field `dims`."""

BATCH = "batch"
LEAST_BATCH_MAX = 8

SLUG_DIGITS = 8
SLUG_CHARS = 100


@frozen
class Described:
    """A downloaded model.

    Attributes:
        kind: content of `path`: an exported program, TorchScript, or a pickled module.
        path: the file to load.
        code: folders for the search path that were logged with the model.
        inputs: the catalog's field `inputs`: by name, or a list if the signature has no names; None
            without signature and example, and for an exported program.
        dims: the catalog's field `dims`.
        samples: the input example by input name (`input_0` if unnamed); None without one, or
            without `inputs`.
    """

    kind: Literal["export", "torchscript", "pickle"]
    path: Path
    code: tuple[Path, ...] = ()
    inputs: Inputs | None = None
    dims: Dims = field(default_factory=dict)
    samples: dict[str, Array] | None = None


def describe(folder: Path, *, inputs: bool = True) -> Described:
    """Describe a downloaded version.

    A -1 in the signature becomes a dim named `batch` in axis 0, from 1 to 8 or to the example's
    size if that is larger; in other axes it is fixed to the example's size. The range of an integer
    input is that of the example's values.

    Args:
        folder: folder of `download`.
        inputs: whether to derive the inputs; False if the entry declares its own.

    Raises:
        SourceError: it is not a torch model, a file is missing, or its inputs are ambiguous (code
            CP-REGISTRY-INPUTS).
    """
    model = _read(folder)
    flavor = model.flavors.get(FLAVOR)
    if flavor is None:
        found = ", ".join(sorted(model.flavors)) or "none"
        raise registry_error(
            f"the model has the MLflow flavors {found}; expected {FLAVOR}: log it with"
            " mlflow.pytorch.log_model, or name its source by python:MODULE:FUNCTION"
        )
    kind, path = _file(_inside(folder, str(flavor.get("model_data", "data"))))
    code = flavor.get("code")
    described = Described(kind=kind, path=path, code=(_inside(folder, str(code)),) if code else ())
    if kind == "export" or not inputs:
        return described
    example = _Example(model, folder)
    declared, dims = example.fields()
    return replace(described, inputs=declared, dims=dims, samples=example.samples)


def _read(folder: Path) -> Model:
    from mlflow.models import Model

    try:
        return Model.load(str(folder / MLMODEL))
    except Exception as error:
        raise registry_error(
            f"{folder / MLMODEL} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _inside(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise registry_error(f"{MLMODEL} names {name!r}, which is outside of the model's folder")
    return path


def _file(data: Path) -> tuple[Literal["export", "torchscript", "pickle"], Path]:
    """Return the file that mlflow.pytorch wrote, and its kind."""
    if (data / EXPORTED).is_file():
        return "export", data / EXPORTED
    path = data / SERIALIZED
    if not path.is_file():
        raise registry_error(
            f"{data} has neither {EXPORTED} nor {SERIALIZED}, which mlflow.pytorch writes; log the"
            " model again"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            scripted = any(fnmatch(name, TORCHSCRIPT_ENTRY) for name in archive.namelist())
    except zipfile.BadZipFile:
        scripted = False  # the legacy format of torch.save
    return "torchscript" if scripted else "pickle", path


class _Example:
    """Signature and input example of a model.

    Attributes:
        samples: the example's arrays by name; None without an example, or if it does not consist of
            arrays.
    """

    def __init__(self, model: Model, folder: Path) -> None:
        schema = model.signature.inputs if model.signature is not None else None
        self._specs: Sequence[TensorSpec] = ()
        if schema is not None and schema.is_tensor_spec():
            self._specs = schema.inputs
        self._rows = False
        try:
            self.samples = self._arrays(model.load_input_example(str(folder)))
        # a missing or damaged file, or one that does not match the signature
        except Exception as error:
            raise _unclear(
                f"the input example cannot be read: {type(error).__name__}: {error}"
            ) from error

    def fields(self) -> tuple[Inputs | None, Dims]:
        """Return the fields `inputs` and `dims` of a catalog's entry.

        Raises:
            SourceError: neither the signature nor the example determines a shape.
        """
        dims = _BatchDims()
        if self._specs:
            declared = {
                name: self._declared(name, spec.type.name, spec.shape, dims)
                for name, spec in self._named().items()
            }
            keyword = all(spec.name for spec in self._specs)
        elif self.samples is not None:
            batches = [-1] if self._rows else []
            declared = {
                name: self._declared(
                    name, array.dtype.name, (*batches, *array.shape[len(batches) :]), dims
                )
                for name, array in self.samples.items()
            }
            keyword = list(self.samples) != [NAMELESS]
        else:
            return None, {}
        return (declared if keyword else list(declared.values())), dims.declared

    def _named(self) -> dict[str, TensorSpec]:
        return {spec.name or NAMELESS: spec for spec in self._specs}

    def _declared(self, name: str, dtype: str, given: Sequence[int], dims: _BatchDims) -> Json:
        """The field of an input; a size of -1 varies."""
        if dtype not in DTYPES:
            raise _unclear(
                f"the signature's input {name!r} has dtype {dtype}, which torch does not support"
            )
        array = (self.samples or {}).get(name)
        if array is not None and array.ndim != len(given):
            raise _unclear(
                f"the signature's input {name!r} has shape {list(given)}, but the input example has"
                f" {list(array.shape)}"
            )
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
                    f"the signature's input {name!r} has shape {list(given)}, and no input example"
                    f" gives the size of axis {axis}"
                )
        return {"shape": shape, "dtype": dtype, **_range(array, dtype, name)}

    def _arrays(self, example: object) -> dict[str, Array] | None:
        import numpy as np

        if hasattr(example, "to_numpy"):  # a pandas.DataFrame; pandas ships no types
            self._rows = True
            example = example.to_numpy(dtype=np.float32)  # the same as mlflow.pytorch
        specs = self._named()
        if isinstance(example, np.ndarray):
            example = {next(iter(specs), NAMELESS): example}
        if not isinstance(example, Mapping):
            return None
        arrays = {}
        # Examples are stored as JSON, without dtypes; without a signature, fractions get torch's
        # default dtype.
        for name, array in example.items():
            if not isinstance(array, np.ndarray):
                return None
            dtype = np.dtype(np.float32) if array.dtype == np.float64 else array.dtype
            if name in specs:
                dtype = specs[name].type
            arrays[str(name)] = np.ascontiguousarray(array, dtype=dtype)
        supported = all(array.dtype.name in DTYPES for array in arrays.values())
        return arrays if supported else None


class _BatchDims:
    """Batch dims of a model's inputs: inputs whose examples have the same size share a dim."""

    def __init__(self) -> None:
        self._names: dict[int | None, str] = {}
        self.declared: Dims = {}

    def batch(self, size: int | None) -> str:
        """Return the name of the dim with this size in the example."""
        new = f"{BATCH}_{len(self._names)}" if self._names else BATCH
        name = self._names.setdefault(size, new)
        self.declared[name] = {"min": 1, "max": max(LEAST_BATCH_MAX, size or 0)}
        return name


def _range(array: Array | None, dtype: str, name: str) -> Json:
    if array is None or not array.size or dtype not in INTEGRAL or dtype == "bool":
        return {}
    low, high = int(array.min()), int(array.max())
    if "mask" in name.lower() and low >= 0 and high <= 1:  # masks are generated
        return {}
    return {"range": [low, high]}


def registry_error(message: str) -> SourceError:
    """Return the error of a registered model that cannot be a source."""
    return SourceError(message, code="CP-REGISTRY")


def _unclear(message: str) -> SourceError:
    return SourceError(
        f"{message}; write `inputs:` (and `dims:`) in the catalog's entry",
        code="CP-REGISTRY-INPUTS",
    )


def slug(name: str) -> str:
    """Return a registry's name as an entry's name; a valid name stays. Two names never share a
    slug.

    A changed name gets the first digits of its SHA-256: `Credit Risk (v2)` becomes
    `credit-risk-v2-` and 8 digits.
    """
    if NAME.fullmatch(name) and len(name) <= SLUG_CHARS:
        return name
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9._]+", "-", plain)
    single = re.sub(r"[._-]*-[._-]*|[._]{2,}", "-", words)[:SLUG_CHARS].strip("._-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:SLUG_DIGITS]
    return f"{single}-{digest}" if single else f"model-{digest}"
