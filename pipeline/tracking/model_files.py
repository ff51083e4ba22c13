"""Files of a registered version besides its artifact: MLmodel with the signature, and the code and
the packages that MLflow serves it with.

`freezer` itself is in no package index, so each version holds the part of it that serves, as one
zip file on Python's search path.
"""

from __future__ import annotations

import io
import platform
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

import freezer
from freezer.artifact import MANIFEST, Manifest

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

DATA = "artifact"
LOADER = "freezer.pyfunc"

LOAD_SETTINGS = {"threads": None, "limit_isa": False}
"""Options of `mlflow.pyfunc.load_model(..., model_config={...})`, passed on to freezer.load."""

CODE = "code/freezer.zip"
PYTHON_ENV = "python_env.yaml"

REQUIREMENTS = (
    "archspec>=0.2.5",
    "mlflow>=3.1",
    "numpy>=1.26",
    "nvidia-ml-py>=12.560",
    "safetensors>=0.7",
)
"""Packages that serving needs, besides torch: those of pyproject.toml, but an older MLflow than
campaigns need.
"""

NOT_SERVING = ("cli", "freezing")
"""Packages of `freezer` that serving never imports."""


def write_model_files(
    folder: Path,
    manifest: Manifest,
    model_id: str,
    run_id: str | None,
) -> None:
    """Write everything that a registered version has besides the artifact's own files."""
    from mlflow.models import Model

    (folder / DATA / MANIFEST).write_bytes(manifest.to_bytes())
    model = Model(
        run_id=run_id,
        model_id=model_id,
        signature=signature_of(manifest),
        model_size_bytes=sum(item.size_bytes for item in manifest.contents),
    )
    # The same as mlflow.pyfunc.add_to_model; importing that module takes a second.
    model.add_flavor(
        "python_function",
        loader_module=LOADER,
        data=DATA,
        python_version=platform.python_version(),
        code=CODE,
        env=_write_environment(folder, manifest.needs.torch, manifest.engines),
        config=dict(LOAD_SETTINGS),
    )
    # Model.save writes the same with PyYAML's Python code, which takes ten times as long.
    (folder / "MLmodel").write_text(
        yaml.dump(model.to_dict(), Dumper=yaml.CSafeDumper, default_flow_style=False)
    )


def signature_of(manifest: Manifest) -> ModelSignature | None:
    """Return the signature: tensors by path, -1 for named dims; None if numpy lacks a dtype
    (bfloat16).
    """
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    inputs, outputs = manifest.inputs.tensors, manifest.outputs
    dtypes = {*(spec.dtype for spec in inputs), *(spec.dtype for spec in outputs)}
    if not inputs or "bfloat16" in dtypes:
        return None
    given = []
    for spec in inputs:
        shape = tuple(-1 if isinstance(size, str) else size for size in spec.shape)
        given.append(TensorSpec(np.dtype(spec.dtype), shape, spec.name))
    returned = [TensorSpec(np.dtype(spec.dtype), (-1,) * spec.rank, spec.name) for spec in outputs]
    return ModelSignature(inputs=Schema(given), outputs=Schema(returned))


def _write_environment(folder: Path, torch: str, engines: Sequence[str]) -> dict[str, str]:
    """Write code, requirements.txt and python_env.yaml; return MLflow's `env`, file names by
    environment manager.

    Args:
        folder: folder of the version.
        torch: major and minor version that made the artifact. The environment has exactly this one,
            which was judged.
        engines: packages that its payloads need besides torch.
    """
    (folder / CODE).parent.mkdir()
    (folder / CODE).write_bytes(_zipped())
    requirements = [*REQUIREMENTS, f"torch=={torch}.*", *engines]
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    environment = {
        "python": platform.python_version(),
        "build_dependencies": ["pip"],
        "dependencies": ["-r requirements.txt"],
    }
    (folder / PYTHON_ENV).write_text(yaml.dump(environment, Dumper=yaml.CSafeDumper))
    return {"virtualenv": PYTHON_ENV}


@lru_cache(maxsize=1)
def _zipped() -> bytes:
    """Return the serving part of `freezer` as a zip file; the same bytes for the same code."""
    root, buffer = Path(str(freezer.__file__)).parent, io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if name.parts[0] not in NOT_SERVING:
                archive.writestr(
                    zipfile.ZipInfo(f"{root.name}/{name.as_posix()}"),
                    path.read_bytes(),
                    zipfile.ZIP_DEFLATED,
                )
    return buffer.getvalue()
