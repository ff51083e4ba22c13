"""OpenVINO payloads: conversion, what they answer, what is refused, and a freeze that a fresh
process serves.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import BuildError, ContractError
from freezer.freezing.candidates import Candidate
from freezer.freezing.lowering import open_vino
from freezer.freezing.models import Subject
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import Target
from freezer.hardware import device_class
from freezer.spec import Dim
from tests.support.models import seeded
from tests.support.steps import (
    BATCH,
    candidate_of,
    captured_by,
    python,
    quickly,
    random_inputs,
    subject_of,
)

pytest.importorskip("openvino")

SETTINGS = RECIPES["openvino"].settings
SEQUENCE = Dim(name="sequence", min=2, max=16)


class Attention(nn.Module):
    """An encoder layer whose outputs have many dtypes and layouts: new, equal to an input, and
    constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 50)
        self.register_buffer("labels", torch.arange(50))

    def forward(
        self, ids: Tensor, mask: Tensor, scale: Tensor, unused: Tensor
    ) -> dict[str, Tensor]:
        hidden = self.layer(self.embedding(ids), src_key_padding_mask=mask)
        return {
            "logits": self.head(hidden) * scale,
            "transposed": hidden.transpose(1, 2),
            "half": hidden.half(),
            "bfloat16": (ids > 20).bfloat16(),
            "longest": (~mask).sum(-1).amax(),
            "empty": hidden[:0],
            "labels": self.labels,
            "ids": ids,
            "mask": mask,
        }


class Bessel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.special.bessel_j0(x)
        return found


def sentences(batch: int, sequence: int) -> dict[str, Tensor]:
    ids = torch.arange(batch * sequence).reshape(batch, sequence) * 7 % 50
    mask = torch.arange(sequence) > torch.arange(batch)[:, None] + 1
    return {"ids": ids, "mask": mask, "scale": torch.tensor(1.5), "unused": torch.zeros(2)}


DIMS = {name: {0: BATCH, 1: SEQUENCE} for name in ("ids", "mask")}


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> tuple[Subject, Candidate]:
    subject = subject_of(seeded(Attention), sentences(2, 7), DIMS)
    return subject, candidate_of(
        subject, "openvino", tmp_path_factory.mktemp("openvino") / "candidate"
    )


@pytest.mark.parametrize("sizes", [(1, 2), (2, 7), (4, 16)])
def test_answers_like_eager_in_every_size(
    attention: tuple[Subject, Candidate], sizes: tuple[int, int]
) -> None:
    subject, candidate = attention
    inputs = sentences(*sizes)
    with torch.no_grad():
        expected = seeded(Attention).eval()(**inputs)
    for name, got in candidate.open(subject)(**inputs).items():
        assert (got.dtype, got.stride()) == (expected[name].dtype, expected[name].stride()), name
        torch.testing.assert_close(got, expected[name], msg=name)


def test_sixteen_threads_call_at_once(attention: tuple[Subject, Candidate]) -> None:
    subject, candidate = attention
    served = candidate.open(subject)
    sizes = [(1 + number % 4, 2 + number % 15) for number in range(16)]
    expected = [served(**sentences(*size))["logits"] for size in sizes]

    def is_right(number: int) -> bool:
        return torch.equal(served(**sentences(*sizes[number]))["logits"], expected[number])

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(is_right, [*range(16)] * 20))


def test_integers_beyond_32_bits_are_refused(attention: tuple[Subject, Candidate]) -> None:
    subject, candidate = attention
    inputs = sentences(1, 2)
    with pytest.raises(ContractError):
        candidate.open(subject)(**inputs | {"ids": inputs["ids"] + 2**40})


def test_operator_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no counterpart of aten\.special_bessel_j0\.default"):
        candidate_of(
            subject_of(Bessel(), {"x": random_inputs(2, 3)}), "openvino", tmp_path / "candidate"
        )


def test_other_classes_than_the_machines_are_refused(tmp_path: Path) -> None:
    captured = captured_by(subject_of(Bessel(), {"x": random_inputs(2, 3)}), "export")
    target = Target(device_class=device_class("cuda-sm90"), num_threads=1)
    with pytest.raises(BuildError) as caught:
        open_vino.build(captured, tmp_path / "all.ovir", target, SETTINGS)
    assert caught.value.code == "CP-DEVICE-CLASS"


SERVE = """
import sys
import torch
import freezer
model = freezer.load(sys.argv[1])
assert not model.ladder, model.ladder
inputs, expected = torch.load(f"{sys.argv[1]}.pt")
with torch.no_grad():
    torch.testing.assert_close(dict(model(**inputs)), expected)
print(model.manifest.recipe.name)
"""


@pytest.mark.slow
def test_fresh_process_serves_a_frozen_model(tmp_path: Path) -> None:
    model, inputs = seeded(Attention), sentences(2, 7)
    result = quickly(model, inputs, tmp_path / "attention", "openvino", dims=DIMS)
    assert (result.verdict, result.failures) == ("published", {}), result.reason
    with torch.no_grad():
        torch.save((inputs, model(**inputs)), tmp_path / "attention.pt")
    assert python(SERVE, tmp_path / "attention") == "openvino\n"
