"""Environment of a registered version: the code and the packages that MLflow serves it with.

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

import yaml

import freezer

CODE = "code/freezer.zip"
PYTHON_ENV, CONDA = "python_env.yaml", "conda.yaml"

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


def write_environment(folder: Path, torch: str, engines: Sequence[str] = ()) -> dict[str, str]:
    """Write code, requirements.txt, python_env.yaml and conda.yaml; return MLflow's `env`, file
    names by environment manager.

    Args:
        folder: of the version.
        torch: major and minor version that made the artifact. The environment has exactly this one,
            which was judged.
        engines: packages that its payloads need besides torch.
    """
    (folder / CODE).parent.mkdir()
    (folder / CODE).write_bytes(_zipped())
    for name, text in _environments(torch, tuple(engines)).items():
        (folder / name).write_text(text)
    return {"virtualenv": PYTHON_ENV, "conda": CONDA}


@lru_cache(maxsize=8)
def _environments(torch: str, engines: Sequence[str]) -> dict[str, str]:
    """Return the texts of the environment's files, by name."""
    requirements, python = [*REQUIREMENTS, f"torch=={torch}.*", *engines], platform.python_version()
    conda_dependencies = [f"python={python}", "pip", {"pip": requirements}]
    documents = {
        PYTHON_ENV: {
            "python": python,
            "build_dependencies": ["pip"],
            "dependencies": ["-r requirements.txt"],
        },
        CONDA: {
            "name": "coldpress",
            "channels": ["conda-forge"],
            "dependencies": conda_dependencies,
        },
    }
    texts = {
        name: yaml.dump(document, Dumper=yaml.CSafeDumper) for name, document in documents.items()
    }
    return {"requirements.txt": "".join(f"{line}\n" for line in requirements), **texts}


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
