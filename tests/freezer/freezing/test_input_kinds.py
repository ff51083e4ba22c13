"""Inputs of every kind, from declaration to answer: nested, optional, omitted, empty, absent, and
of every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import freezer
from freezer.artifact import Artifact
from freezer.cli.app import app
from freezer.errors import ContractError, JudgeError
from freezer.freezing.freeze import freeze_source
from freezer.freezing.models import Dims, Subject, prepare
from freezer.freezing.sources import parse_source
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.tensor_files import read_samples
from freezer.spec import DTYPES, Dim, InputSpec, declared_spec, match_headers, read_header
from tests.support.commands import invoked
from tests.support.models import Calling, scripted_module, seeded
from tests.support.steps import (
    QUICK_OPTIONS,
    artifact_of,
    candidate_of,
    judgement_of,
    quickly,
    subject_of,
)

BATCH = Dim(name="batch", min=1, max=4)


class Recurrent(nn.Module):
    """Takes a tensor, a tuple, a dict, a list, and two optional inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell = nn.Embedding(20, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(
        self,
        ids: Tensor,
        state: tuple[Tensor, Tensor],
        opts: dict[str, Tensor],
        extra: list[Tensor],
        scale: float = 2.0,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.cell(self.words(ids), state)
        y = y * opts["gain"] * scale + opts["shift"] + extra[0]
        if bias is not None:
            y = y + bias
        return y, state


DECLARED: dict[str, Any] = {
    "ids": {"shape": ["batch", 3], "dtype": "int64"},
    "state": {"tuple": [{"shape": [1, "batch", 4]}, {"shape": [1, "batch", 4]}]},
    "opts": {"dict": {"shift": {"shape": [4]}, "gain": {"shape": [1], "range": [1, 2]}}},
    "extra": {"list": [{"shape": [1]}]},
    "bias": {"value": None},
}
PATHS = ["ids", "state.0", "state.1", "opts.shift", "opts.gain", "extra.0"]


def declared() -> InputSpec:
    return declared_spec(DECLARED, {"batch": {"max": 4}})


def served(subject: Subject, recipe: str, folder: Path) -> FrozenModel:
    """Build and judge a candidate, and open it as a deployment would."""
    candidate = candidate_of(subject, recipe, folder)
    found = judgement_of(subject, [candidate])
    assert found.verdict == "published", found.reason
    return candidate.open(subject)


def values(batch: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "ids": torch.randint(0, 20, (batch, 3), generator=generator),
        "state": (normal(1, batch, 4), normal(1, batch, 4)),
        "opts": {"gain": normal(1), "shift": normal(4)},
        "extra": [normal(1)],
    }


def by_path(given: dict[str, Any]) -> dict[str, Tensor]:
    flat = {"ids": given["ids"], "extra.0": given["extra"][0]}
    flat |= {f"state.{index}": tensor for index, tensor in enumerate(given["state"])}
    return flat | {f"opts.{key}": tensor for key, tensor in given["opts"].items()}


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The portable artifact of a Recurrent. Do not write to it."""
    out = tmp_path_factory.mktemp("nested") / "out"
    source = parse_source("python:tests.freezer.freezing.test_input_kinds:recurrent", folder=Path())
    options = replace(QUICK_OPTIONS, recipes=["portable"], device_class="portable")
    freeze_source(source, spec=declared(), samples=None, out=out, options=options)
    return Artifact.read(out)


def recurrent() -> nn.Module:
    return seeded(Recurrent)


def test_manifest_and_golden_files_name_leaves_by_path(nested: Artifact) -> None:
    spec = nested.manifest.inputs
    assert (spec.tensors[0].indices, spec.tensors[0].range) == ((0, 19), (0, 19)), (
        "found from the embedding"
    )
    found, given = (
        each.each(lambda item: replace(item, indices=None, range=None))
        for each in (spec, declared())
    )
    assert found == given
    golden = load_file(nested.folder / "golden" / "inputs.safetensors")
    assert {name.partition("/")[2] for name in golden} == set(PATHS)
    assert len(golden) == len(nested.manifest.golden) * len(PATHS)
    model = freezer.load(nested.folder)
    for batch in (1, 3):
        torch.testing.assert_close(model(**values(batch)), recurrent()(**values(batch)))


def test_nested_example_inputs_give_the_spec(tmp_path: Path) -> None:
    dims = {"ids": {0: BATCH}, "state.0": {1: BATCH}, "state.1": {1: BATCH}}
    model = scripted_module(recurrent())
    frozen = published(model, {**values(2), "scale": 3.0}, tmp_path / "out", dims=dims)
    assert [tensor.name for tensor in frozen.inputs.tensors] == [
        "ids", "state.0", "state.1", "opts.gain", "opts.shift", "extra.0"
    ]  # fmt: skip
    assert frozen.inputs.constants == {"scale": 3.0}
    assert frozen.manifest is not None
    assert frozen.manifest.payloads[0].convention == "native", "called like its source"
    other = values(4)
    torch.testing.assert_close(frozen(**other), recurrent()(**other, scale=3.0))
    torch.testing.assert_close(frozen(**other, scale=3.0), frozen(**other))
    with pytest.raises(ContractError):
        frozen(**other, scale=2.0)


def test_frozen_model_takes_leaves_by_path(nested: Artifact) -> None:
    model, given = freezer.load(nested.folder), values(2)
    expected = model(**given)
    leaves = by_path(given)
    torch.testing.assert_close(model(**leaves), expected)
    h, c = leaves.pop("state.0"), leaves.pop("state.1")
    torch.testing.assert_close(model(state=(h, c), **leaves), expected)
    wrong_inputs: list[dict[str, Any]] = [
        {"state": (h,)},
        {"state": (h, c.double())},
        {"opts": {"scale": h}},
        {"state.0": h},
    ]
    for wrong in wrong_inputs:
        with pytest.raises(ContractError):
            model(**(given | wrong))


def test_sample_files_name_leaves_by_path(nested: Artifact, tmp_path: Path) -> None:
    path, out = tmp_path / "samples.safetensors", tmp_path / "out.safetensors"
    sets = {}
    for index in range(3):
        for name, leaf in by_path(values(index + 1)).items():
            sets[f"{index}/{name}"] = leaf
    save_file(sets, path)
    assert match_headers(read_header(path), declared()) == [{"batch": size} for size in (1, 2, 3)]
    subject = prepare("recurrent", recurrent(), declared(), read_samples(path))
    assert list(subject.sets[0].tensors) == PATHS
    arguments = [str(nested.folder), "--input", str(path), "--output", str(out)]
    done = invoked(app, "run", *arguments)
    assert done.exit_code == 0, done.output
    answers = load_file(out)
    for index in range(3):
        y, (h, _) = recurrent()(**values(index + 1))
        torch.testing.assert_close(answers[f"{index}/0"], y.detach())
        torch.testing.assert_close(answers[f"{index}/1.0"], h.detach())


class Echo(nn.Module):
    """Returns each input and a number computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, given: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            name: (x.clone(), x.to(torch.complex64).abs().sum() * self.weight)
            for name, x in given.items()
        }


def of_dtype(dtype: str) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    values = torch.tensor([[0, 1, 1], [1, 0, 0]])
    return (values * (1 - 2j)).to(kind) if kind.is_complex else values.to(kind)


def test_every_dtype_and_empty_tensors_round_trip(tmp_path: Path) -> None:
    given = {dtype: of_dtype(dtype) for dtype in DTYPES} | {
        "none": torch.zeros(0, 4),
        "no_ids": torch.zeros(2, 0, dtype=torch.int64),
    }
    frozen = published(Echo().eval(), [given], tmp_path / "out")
    answers = frozen(given)
    for name, x in given.items():
        again, total = answers[name]
        assert (again.dtype, again.shape) == (x.dtype, x.shape)
        assert torch.equal(again, x)
        assert float(total) == pytest.approx(float(x.abs().double().sum() if name != "bool" else 3))
    assert {output.dtype for output in frozen.outputs} == set(DTYPES)


class Table(nn.Module):
    """Takes no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, power: int = 2) -> Tensor:
        return self.weight**power


def published(model: nn.Module, inputs: Any, out: Path, dims: Dims | None = None) -> FrozenModel:
    artifact_of(quickly(model, inputs, out, dims=dims))
    return freezer.load(out, strict=True)


def test_artifact_without_tensor_inputs(tmp_path: Path) -> None:
    frozen = published(Table(), {}, tmp_path / "out")
    assert torch.equal(frozen(), torch.arange(4.0) ** 2)
    given, written = tmp_path / "empty.npz", tmp_path / "out.safetensors"
    given.write_bytes(b"PK\x05\x06" + bytes(18))
    arguments = [str(tmp_path / "out"), "--input", str(given), "--output", str(written)]
    done = invoked(app, "run", *arguments)
    assert done.exit_code == 0, done.output
    assert torch.equal(load_file(written)["output"], torch.arange(4.0) ** 2)


class Optional(nn.Module):
    """Takes two optional tensors."""

    def forward(
        self, x: Tensor, first: Tensor | None = None, *, last: Tensor | None = None
    ) -> Tensor:
        if first is not None:
            x = x + first
        return x if last is None else x * last


X = torch.arange(3.0)
GIVEN, NONE = {"shape": [3]}, {"value": None}


@pytest.mark.parametrize(
    ("inputs", "expected", "recipe"),
    [
        ({"x": GIVEN, "first": NONE, "last": GIVEN}, X * X, "torchscript-frozen"),
        ({"x": GIVEN, "last": GIVEN}, X * X, "portable"),
        ([GIVEN, NONE], X, "torchscript-frozen"),
    ],
)
def test_optional_tensors_given_omitted_or_none(
    inputs: Any, expected: Tensor, recipe: str, tmp_path: Path
) -> None:
    spec = declared_spec(inputs, {})
    model = served(prepare("optional", Optional().eval(), spec), recipe, tmp_path / "c")
    tensors = {item.name: None if item.name in spec.constants else X for item in spec.inputs}
    assert torch.equal(model(**tensors), expected)
    assert torch.equal(model(*tensors.values()), expected)


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(0), lambda x: x.numpy().fill(3), lambda x: x.unsqueeze_(0)]
)
def test_writing_into_an_input_is_refused(write: Callable[[Tensor], Any]) -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result = x + 1
            write(x)
            return result

    with pytest.raises(JudgeError) as caught:
        prepare("m", Writing().eval(), declared_spec({"x": {"shape": [2]}}, {}))
    assert caught.value.code == "CP-INPUT-WRITTEN"


@pytest.mark.parametrize(
    "function",
    [lambda x: x.to(torch.uint16), lambda x: (x, [x.to_sparse()]), lambda x: x.to("meta")],
)
def test_outputs_that_cannot_be_compared_are_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(JudgeError) as caught:
        prepare("m", Calling(function).eval(), declared_spec({"x": {"shape": [2, 2]}}, {}))
    assert caught.value.code == "CP-OUTPUTS"


class Graph(nn.Module):
    """Sums over edges, whose ends are below the number of nodes."""

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        return x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


def test_edges_of_graphs_keep_below_the_nodes() -> None:
    example = {"x": torch.ones(30, 8), "edges": torch.arange(60).reshape(2, 30) % 30}
    dims = {"x": {0: Dim(name="nodes", min=5, max=50)}}
    spec = subject_of(Graph().eval(), example, dims).spec
    assert spec.tensors[1].relation == "below"
