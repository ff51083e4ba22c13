"""Load models of a store as a deployment does. Usage:

    python -m tests.fleet.serve STORE RUNTIME MODEL...

Prints by model what serves and its answer, or why nothing does. MODEL may be a folder. Every
machine computes the same inputs.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np

import freezer
from freezer.errors import IncompatibleError


def inputs(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Numbers between -1 and 1."""
    counted = np.arange(math.prod(shape)) * 37 % 101
    return (counted.reshape(shape) / 64 - 0.75).astype(np.float32)


def served(model: str, store: str, runtime: Any) -> dict[str, Any]:
    """What serves a model here."""
    try:
        loaded: Any = freezer.load(model, store=store, threads=1, runtime=runtime)
    except IncompatibleError as error:
        return {"refused": [refusal.reason for refusal in error.ladder]}
    answer = loaded(inputs(loaded.manifest.inputs.tensors[0].shape))
    return {
        "class": loaded.manifest.device_class,
        "answer": np.asarray(answer).flatten().tolist(),
        "imports_torch": "torch" in sys.modules,
    }


def main(store: str, runtime: str, *models: str) -> None:
    """Print what serves each model."""
    print(json.dumps({model: served(model, store, runtime) for model in models}))


if __name__ == "__main__":
    main(*sys.argv[1:])
