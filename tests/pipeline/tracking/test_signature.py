"""MLflow signatures of nested inputs and unusual dtypes."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from freezer.artifact import Manifest
from freezer.freezing.freeze import FreezeOptions, freeze
from freezer.spec import OutputSpec, declared_spec
from pipeline.tracking.model_files import DATA, signature_of, write_model_files
from tests.support.steps import QUICK, manifest_of, plain_payload


def manifest_with(dtype: str) -> Manifest:
    items = {
        "x": {"shape": ["batch", 0, 4], "dtype": dtype},
        "state": {"tuple": [{"shape": [], "dtype": dtype}, {"value": 1}]},
    }
    output = OutputSpec(name="output", dtype=dtype, rank=0)
    return manifest_of(
        plain_payload(), inputs=declared_spec(items, {"batch": {"max": 4}}), outputs=(output,)
    )


@pytest.mark.parametrize("dtype", ["float16", "bool", "complex64", "bfloat16"])
def test_signatures_omit_dtypes_that_numpy_lacks(dtype: str) -> None:
    found = signature_of(manifest_with(dtype))
    if dtype == "bfloat16":
        assert found is None
        return
    assert found is not None
    expected = [("x", np.dtype(dtype), (-1, 0, 4)), ("state.0", np.dtype(dtype), ())]
    assert [(item.name, item.type, item.shape) for item in found.inputs] == expected


class Sum(nn.Module):
    """[batch, 3] and a tuple and a dict of the like."""

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor], opts: dict[str, Tensor]) -> Tensor:
        return x + state[0] + state[1] * opts["scale"]


def test_nested_inputs_are_passed_by_path(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    result = freeze(
        Sum().eval(),
        {"x": x, "state": (x, x), "opts": {"scale": x}},
        out=tmp_path / DATA,
        options=FreezeOptions(device_class="portable", policy=QUICK),
    )
    assert result.artifact is not None, result.reason
    write_model_files(tmp_path, result.artifact.manifest, "m-0", None)
    model = mlflow.pyfunc.load_model(str(tmp_path))
    arrays = {name: x.numpy() for name in ("x", "state.0", "state.1", "opts.scale")}
    np.testing.assert_array_equal(model.predict(arrays), (x + x + x * x).numpy())
