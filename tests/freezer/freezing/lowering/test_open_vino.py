"""OpenVINO payloads: conversion, what they answer, what is refused, and a freeze that a fresh
process serves.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import BuildError, ContractError
from freezer.freezing.candidates import Candidate
from freezer.freezing.freeze import freeze
from freezer.freezing.lowering import open_vino
from freezer.freezing.models import Subject
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import Target
from freezer.hardware import device_class
from freezer.runtime.loaders.openvino import open_openvino
from freezer.spec import Dim
from tests.support.models import Counter, seeded
from tests.support.steps import (
    BATCH,
    HERE,
    QUICK_OPTIONS,
    candidate_of,
    captured_by,
    python,
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


class Convolution(nn.Module):
    """A convnet with a batch norm, and an output in another order of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layers(x)
        return self.head(found.mean((2, 3))), found.permute(0, 2, 3, 1)


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


def test_outputs_are_new_tensors(attention: tuple[Subject, Candidate]) -> None:
    subject, candidate = attention
    served, inputs = candidate.open(subject), sentences(2, 7)
    first = served(**inputs)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    again = sentences(2, 7) | {"ids": inputs["ids"].flip(1)}
    served(**again)
    assert all(torch.equal(first[name], kept[name]) for name in kept), (
        "a later call does not change them"
    )
    for tensor in first.values():
        tensor.zero_()
    assert torch.equal(inputs["ids"], sentences(2, 7)["ids"])
    assert torch.equal(served(**inputs)["labels"], kept["labels"]), "a caller may write into them"


def test_sixteen_threads_call_at_once(attention: tuple[Subject, Candidate]) -> None:
    subject, candidate = attention
    served, wrong = candidate.open(subject), list[int]()
    sizes = [(1 + number % 4, 2 + number % 15) for number in range(16)]
    expected = [served(**sentences(*size))["logits"] for size in sizes]

    def call(number: int) -> None:
        for _ in range(20):
            if not torch.equal(served(**sentences(*sizes[number]))["logits"], expected[number]):
                wrong.append(number)

    workers = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_integers_beyond_32_bits_are_refused(attention: tuple[Subject, Candidate]) -> None:
    subject, candidate = attention
    inputs = sentences(1, 2)
    with pytest.raises(ContractError):
        candidate.open(subject)(**inputs | {"ids": inputs["ids"] + 2**40})


class Repeated(nn.Module):
    """Returns a result and an input twice each, and a view between them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).relu_()
        return y, y.t(), x, y, x


def test_tensors_returned_twice_are_distinct(tmp_path: Path) -> None:
    x = random_inputs(2, 4)
    subject = subject_of(Repeated(), {"x": x}, {"x": {0: BATCH}})
    found = candidate_of(subject, "openvino", tmp_path / "candidate").open(subject)(x=x)
    for got, expected in zip(found, Repeated()(x), strict=True):
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got, expected)
    found[0].zero_()
    torch.testing.assert_close(found[3], Repeated()(x)[3])


def test_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"openvino: a call changes .*count.*; torchscript-frozen keeps state"
    ) as caught:
        candidate_of(
            subject_of(seeded(Counter), {"x": random_inputs(2, 4)}),
            "openvino",
            tmp_path / "candidate",
        )
    assert caught.value.code == "CP-STATE"


def test_operator_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    says = (
        r"OpenVINO has no counterpart of aten\.special_bessel_j0\.default; write it in other"
        r" operations of torch, or use "
    )
    with pytest.raises(BuildError, match=says):
        candidate_of(
            subject_of(Bessel(), {"x": random_inputs(2, 3)}), "openvino", tmp_path / "candidate"
        )


@pytest.mark.parametrize("name", ["cpu-aarch64", "cuda-sm90"])
def test_other_classes_than_the_machines_are_refused(name: str, tmp_path: Path) -> None:
    captured = captured_by(subject_of(Bessel(), {"x": random_inputs(2, 3)}), "export")
    with pytest.raises(BuildError, match="OpenVINO") as caught:
        open_vino.build(
            captured,
            tmp_path / "all.ovir",
            Target(device_class=device_class(name), num_threads=1),
            SETTINGS,
        )
    assert caught.value.code == "CP-DEVICE-CLASS"


def test_damaged_file_is_refused(attention: tuple[Subject, Candidate], tmp_path: Path) -> None:
    _, candidate = attention
    content = (candidate.folder / candidate.payloads[0].path).read_bytes()
    for damaged in (content[: len(content) // 2], content.replace(b"<net ", b"<not ", 1)):
        (tmp_path / "all.ovir").write_bytes(damaged)
        with pytest.raises(RuntimeError, match=r"all\.ovir: OpenVINO .* does not open it"):
            open_openvino(tmp_path / "all.ovir", SETTINGS)


SERVE = """
import sys
import torch
import freezer
for folder in sys.argv[1:]:
    model = freezer.load(folder)
    assert not model.ladder, model.ladder
    inputs, expected = torch.load(f"{folder}.pt")
    with torch.no_grad():
        found = model(**inputs)
        found = dict(found) if isinstance(expected, dict) else found
        torch.testing.assert_close(found, expected)
    print(model.manifest.recipe.name)
"""


@pytest.mark.slow
def test_fresh_process_serves_frozen_models(tmp_path: Path) -> None:
    options = replace(QUICK_OPTIONS, recipes=["openvino"], device_class=HERE)
    image = {"x": random_inputs(3, 3, 8, 8)}
    for name, model, inputs, dims in (
        ("attention", seeded(Attention).eval(), sentences(2, 7), DIMS),
        ("convolution", seeded(Convolution).eval(), image, {"x": {0: BATCH}}),
    ):
        result = freeze(model, inputs, out=tmp_path / name, dims=dims, options=options)
        assert (result.verdict, result.failures) == ("published", {}), result.reason
        with torch.no_grad():
            torch.save((inputs, model(**inputs)), tmp_path / f"{name}.pt")
    assert python(SERVE, tmp_path / "attention", tmp_path / "convolution") == "openvino\nopenvino\n"
