"""Optional packages, and the command that installs them. Coldpress itself is on no package index,
so no command names one of its extras.
"""

from __future__ import annotations

import shlex

LEAST = {
    "cryptography": "44",
    "nncf": "3.4",
    "onnx": "1.19",
    "onnxruntime": "1.20",
    "onnxscript": "0.5",
    "openvino": "2025.0",
    "pyarrow": "18",
    "requests": "2.32",
    "torchao": "0.18",
    "transformers": "4.56",
}
"""The oldest versions that Coldpress works with, as in pyproject.toml."""


def install_command(*names: str, **needed: str) -> str:
    """Return the command that installs optional packages, or upgrades them.

    Args:
        needed: oldest versions that an artifact needs, by package.
    """
    least = LEAST | needed
    return shlex.join(["pip", "install", *(f"{name}>={least[name]}" for name in names)])
