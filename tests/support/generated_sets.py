"""Digests of generated inputs, to be compared between platforms:

    python -m tests.support.generated_sets

prints them as JSON; tests/golden/generated-sets.json has what they should be.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from freezer.runtime.input_sets import generate
from freezer.runtime.tensors import bytes_of
from freezer.spec import declared_spec

GOLDEN = Path(__file__).parents[1] / "golden" / "generated-sets.json"

INPUTS = json.loads("""{
"x": {"shape": ["n", 700]},
"within": {"shape": ["n", 3], "range": [-0.1, 0.7]},
"wide": {"shape": ["n"], "dtype": "float64"},
"half": {"shape": ["n", 5], "dtype": "float16"},
"brain": {"shape": ["n", 5], "dtype": "bfloat16"},
"wave": {"shape": ["n", 2], "dtype": "complex64"},
"ids": {"shape": ["n", 4], "dtype": "int64", "range": [0, 30521]},
"coins": {"shape": ["n"], "dtype": "bool"},
"attention_mask": {"shape": ["n", 9], "dtype": "int64"}
}""")
"""An input of each kind."""


def digests() -> dict[str, str]:
    """The digest of all sets of each input."""
    sets = generate(declared_spec(INPUTS, {"n": {"max": 40}}))
    found = {}
    for name in INPUTS:
        tensors = torch.cat([bytes_of(each.tensors[name]) for each in sets])
        found[name] = hashlib.sha256(tensors.numpy().tobytes()).hexdigest()
    return found


if __name__ == "__main__":
    print(json.dumps(digests(), indent=1))
