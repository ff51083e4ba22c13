"""The lowering to ONNX Runtime: what it makes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import BuildError
from freezer.freezing.candidates import Candidate
from freezer.freezing.lowering import onnx_runtime
from freezer.freezing.models import Subject
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import Target
from freezer.hardware import detect, device_class
from freezer.runtime.loaders import LOADERS
from freezer.runtime.tensors import leaves_of
from freezer.spec import Dim
from tests.support.models import Calling
from tests.support.models_engines import Kinds, convnet, encoder
from tests.support.steps import (
    BATCH,
    HERE,
    candidate_of,
    captured_by,
    judgement_of,
    random_inputs,
    subject_of,
)

SETTINGS = RECIPES["onnxruntime"].settings
X = random_inputs(2, 4)
LENGTH = Dim(name="length", min=2, max=9)
IDS = torch.arange(10).reshape(2, 5)


def built(
    model: nn.Module, inputs: Mapping[str, Any], folder: Path, dims: Any = None
) -> tuple[Subject, Candidate]:
    subject = subject_of(model, inputs, dims)
    return subject, candidate_of(subject, "onnxruntime", folder / "candidate")


def strides(tensor: Tensor) -> list[int]:
    """The strides of a dense copy, in dims of more than one element."""
    dense = torch.empty_like(tensor)
    return [stride for stride, size in zip(dense.stride(), dense.shape, strict=True) if size > 1]


def assert_like_eager(subject: Subject, candidate: Candidate) -> None:
    """Every declared size is answered like eager, with its dtypes and strides."""
    model = candidate.open(subject)
    for item in subject.sets:
        with torch.no_grad():
            found, expected = (leaves_of(one(**item.tensors)) for one in (model, subject.model))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
            assert strides(one) == strides(other)


def test_convnet_is_fused_and_keeps_its_layout(tmp_path: Path) -> None:
    subject, candidate = built(
        convnet(), {"image": random_inputs(2, 3, 8, 8)}, tmp_path, {"image": {0: BATCH}}
    )
    assert_like_eager(subject, candidate)
    (report,) = candidate.reports.values()
    assert report.ops_before["aten.batch_norm.default"] == 1
    assert report.ops_after["com.microsoft.FusedConv"] == 1
    assert "BatchNormalization" not in report.ops_after
    assert set(report.phases_s) == {"capture", "convert", "optimize"}
    assert "FusedConv" in (candidate.folder / "evidence" / "all-graph.txt").read_text()


def test_encoder_keeps_two_varying_dims(tmp_path: Path) -> None:
    dims = {name: {0: BATCH, 1: LENGTH} for name in ("ids", "mask")}
    mask = torch.arange(5) >= torch.tensor([[3], [5]])
    assert_like_eager(*built(encoder(), {"ids": IDS, "mask": mask}, tmp_path, dims))


def test_outputs_of_every_dtype_are_like_eagers(tmp_path: Path) -> None:
    given = {"x": random_inputs(3, 4, 5), "flag": torch.tensor([True, False])}
    subject, candidate = built(Kinds(), given, tmp_path)
    run = LOADERS["onnxruntime"](candidate.folder / candidate.payloads[0].path, SETTINGS)
    for one, other in zip(run(*given.values()), subject.model(**given), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert strides(one) == strides(other)
        torch.testing.assert_close(one, other)


def test_failing_operator_is_named(tmp_path: Path) -> None:
    """ONNX has no LSTM with a projection, and torch exports it as one without."""
    model = Calling(nn.LSTM(4, 8, proj_size=3, batch_first=True))
    subject, candidate = built(model, {"x": random_inputs(2, 5, 4)}, tmp_path)
    problem = judgement_of(subject, [candidate]).trials[0].problem
    assert problem is not None
    assert ("LSTM" in problem, "ONNXRuntimeError" in problem, ".py:" in problem) == (
        True,
        False,
        False,
    )


def lowered(model: nn.Module, folder: Path, *, x: Tensor = X, name: str = HERE) -> None:
    """Lower without a recipe, which would refuse some models before."""
    onnx_runtime.build(
        captured_by(subject_of(model, {"x": x}), "export"),
        folder / "all.onnx",
        Target(device_class=device_class(name), num_threads=1),
        SETTINGS,
    )


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            torch.special.bessel_j0,
            r"the operator prims\.bessel_j0 has no counterpart in ONNX; .* use inductor-frozen",
        ),
        (
            lambda x: torch.view_as_complex(x.reshape(2, 2, 2)),
            "an input or output is complex, which the engine lacks",
        ),
        (
            lambda x: (x.bfloat16() @ x.bfloat16().T).float(),
            "ONNX Runtime has no MatMul for these dtypes on a CPU",
        ),
    ],
    ids=["operator", "complex", "dtype"],
)
def test_what_the_engine_lacks_is_named(
    function: Callable[[Tensor], Tensor], says: str, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=says):
        lowered(Calling(function), tmp_path)


@pytest.mark.skipif(
    detect().hardware in (None, "cpu-x86-64-v3", "cpu-aarch64"),
    reason="this machine has no lesser class",
)
def test_lesser_class_is_refused(tmp_path: Path) -> None:
    lesser = next(name for name in reversed(detect().classes) if name != "portable")
    with pytest.raises(BuildError) as caught:
        lowered(Calling(torch.relu), tmp_path, name=lesser)
    assert caught.value.code == "CP-BETTER-CPU"
