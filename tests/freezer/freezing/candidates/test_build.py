"""Builds: candidates, refusals, and the record of a build."""

from __future__ import annotations

import copy
import gc
import json
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from freezer.artifact import PayloadKind
from freezer.errors import BuildError, CaptureError
from freezer.files import digest_file
from freezer.freezing.candidates import Candidate, build
from freezer.freezing.candidates.candidate import CANDIDATE
from freezer.freezing.capture import Attempt
from freezer.freezing.models import weights_digest
from freezer.freezing.recipes import RECIPES, CaptureName, Recipe
from freezer.freezing.target import target_here
from freezer.runtime.tensors import leaves_of
from tests.support.lines import place_of
from tests.support.models import (
    AttributeCounter,
    Branching,
    Calling,
    Counter,
    Halving,
    Listing,
    ReassignedCounter,
    mlp,
    seeded,
)
from tests.support.steps import BATCH, HERE, candidate_of, random_inputs, subject_of

X = random_inputs(2, 4)


def test_candidate_round_trip(tmp_path: Path) -> None:
    subject = subject_of(mlp(), {"x": X}, {"x": {0: BATCH}})
    candidate = candidate_of(subject, "torchscript-frozen", tmp_path / "candidate")
    assert Candidate.read(tmp_path / "candidate") == candidate
    (payload,) = candidate.payloads
    path = tmp_path / "candidate" / payload.path
    assert (payload.digest, payload.size_bytes) == (digest_file(path), path.stat().st_size)
    assert payload.dims == (BATCH,)
    assert payload.num_threads is None
    assert candidate.weights == weights_digest(mlp())
    assert [item["capture"] for item in candidate.tried] == ["as-is", "trace"]
    with pytest.raises(FileNotFoundError):
        Candidate.read(tmp_path)
    record = tmp_path / "candidate" / CANDIDATE
    record.write_text(json.dumps({**json.loads(record.read_text()), "stateful": False}))
    assert Candidate.read(tmp_path / "candidate") == candidate, (
        "fields of earlier versions are ignored"
    )


@pytest.mark.parametrize("recipe", ["torchscript-frozen", "portable"])
@pytest.mark.parametrize("model", [Branching, Halving])
def test_data_dependent_control_flow_is_scripted(
    model: type[nn.Module], recipe: str, tmp_path: Path
) -> None:
    subject = subject_of(model(), {"x": X}, {"x": {0: BATCH}})
    candidate = candidate_of(subject, recipe, tmp_path / "candidate")
    assert candidate.capture == "script"
    assert candidate.tried[-1] == {
        "payload": "all",
        "capture": "script",
        "lowering": "torchscript",
        "outcome": "captured and lowered",
    }
    served = candidate.open(subject)
    for x in (X.abs(), -X.abs(), X * 100, random_inputs(4, 4)):
        assert torch.equal(served(x), model()(x))
        assert torch.equal(served(x=x), model()(x))


@pytest.fixture
def whatever_works() -> Recipe:
    """Ways of which most are not for a Python module."""
    ways: list[tuple[CaptureName, PayloadKind]] = [
        (name, "torchscript") for name in ("convert", "as-is", "trace", "script")
    ]
    return replace(RECIPES["torchscript-frozen"], ways=(("export", "exported"), *ways))


def built(model: nn.Module, recipe: Recipe, folder: Path) -> Candidate:
    folder.mkdir()
    return build(
        subject_of(model, {"x": X}), recipe, target_here(HERE, torch.get_num_threads()), folder
    )


def test_ways_are_tried_in_order(whatever_works: Recipe, tmp_path: Path) -> None:
    candidate = built(Branching(), whatever_works, tmp_path / "candidate")
    assert (candidate.capture, candidate.lowering) == ("script", "torchscript")
    assert [(item["payload"], item["capture"]) for item in candidate.tried] == [
        ("all", name) for name in ("export", "convert", "as-is", "trace", "script")
    ]
    outcomes = [item["outcome"] for item in candidate.tried]
    assert outcomes[0].startswith("torch.export: data-dependent control flow: ")
    assert outcomes[1:3] == ["not tried: the source is not TorchScript"] * 2
    assert outcomes[3].startswith("the trace ")
    assert outcomes[4] == "captured and lowered"
    files = ["evidence/all-0-export-error.txt", "evidence/all-3-trace-error.txt"]
    assert {
        str(path.relative_to(candidate.folder))
        for path in (candidate.folder / "evidence").glob("*-error.txt")
    } == set(files)
    assert (
        "Could not guard on data-dependent expression" in (candidate.folder / files[0]).read_text()
    ), "the error in full"
    assert not any("deprecated" in line for line in candidate.warnings)


def test_error_has_every_reason_and_line(whatever_works: Recipe, tmp_path: Path) -> None:
    place = re.escape(place_of(Listing.forward, "sorted("))
    reasons = (
        f"export: torch.export: .*{place}.*",
        f"trace: the trace .*{place}.*",
        f"script: torch.jit.script: .*[Ll]ambda.* at {place}.*",
    )
    with pytest.raises(CaptureError, match=f"^{'; '.join(reasons)}$") as caught:
        built(Listing(), whatever_works, tmp_path / "candidate")
    assert caught.value.code.startswith("CP-TRACE-"), "the finer code of those that were tried"
    whole = "".join(traceback.format_exception(caught.value))
    assert "Could not guard on data-dependent expression" in whole, (
        "the whole texts are in the cause"
    )


def all_errors(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that it came from."""
    if error is not None:
        yield error
        for other in (
            error.__cause__,
            error.__context__,
            *(error.exceptions if isinstance(error, ExceptionGroup) else ()),
        ):
            yield from all_errors(other)


def programs() -> int:
    gc.collect()
    return sum(type(item) is torch.export.ExportedProgram for item in gc.get_objects())


def test_unfit_ways_are_the_reason(whatever_works: Recipe, tmp_path: Path) -> None:
    only_torchscript = replace(whatever_works, ways=whatever_works.ways[1:3])
    with pytest.raises(
        CaptureError,
        match=r"^convert: the source is not TorchScript; as-is: the source is not TorchScript$",
    ):
        built(Branching(), only_torchscript, tmp_path / "candidate")
    assert not (tmp_path / "candidate" / "evidence").exists()


class Pair(NamedTuple):
    total: Tensor
    sign: Tensor


def named(x: Tensor) -> Pair:
    return Pair(x * 2, x > 0) if bool(x.sum() > 0) else Pair(x * 3, x < 0)


def nested(x: Tensor) -> tuple[Tensor, tuple[dict[str, Tensor], None]]:
    return (x, ({"deep": x * 2}, None)) if bool(x.sum() > 0) else (x, ({"deep": x * 3}, None))


@pytest.mark.parametrize(
    ("function", "recipe"), [(named, "portable"), (nested, "torchscript-frozen")]
)
def test_script_keeps_the_result_structure(
    function: Callable[[Tensor], Any], recipe: str, tmp_path: Path
) -> None:
    subject = subject_of(Calling(function), {"x": X})
    candidate = candidate_of(subject, recipe, tmp_path / "candidate")
    assert candidate.capture == "script"
    for x in (X.abs(), -X.abs()):
        expected, got = function(x), candidate.open(subject)(x)
        assert type(got).__name__ == type(expected).__name__
        assert (
            list(got) == list(expected) if isinstance(expected, dict) else len(got) == len(expected)
        )
        assert getattr(got, "_fields", None) == getattr(expected, "_fields", None)
        assert all(
            torch.equal(one, other)
            for one, other in zip(leaves_of(got), leaves_of(expected), strict=True)
        )


@pytest.mark.parametrize("model", [AttributeCounter, ReassignedCounter, Counter])
def test_frozen_script_keeps_its_state(model: type[nn.Module], tmp_path: Path) -> None:
    subject = subject_of(seeded(model), {"x": X})
    only_script = replace(RECIPES["torchscript-frozen"], ways=(("script", "torchscript"),))
    (tmp_path / "candidate").mkdir()
    candidate = build(
        subject, only_script, target_here(HERE, torch.get_num_threads()), tmp_path / "candidate"
    )
    served, eager = candidate.open(subject), seeded(model)
    assert all(torch.equal(served(X), eager(X)) for _ in range(4))
    assert torch.equal(candidate.open(subject)(X), seeded(model)(X)), (
        "a new instance has the initial state"
    )


class Unsaved(nn.Module):
    """Calls Python, which TorchScript compiles around and cannot save."""

    @torch.jit.ignore
    def python(self, x):  # type: ignore[no-untyped-def]
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.python(x)
        return y if bool(x.sum() > 0) else -y


def test_unsaveable_script_names_the_line(tmp_path: Path) -> None:
    place = re.escape(place_of(Unsaved.forward, "self.python"))
    with pytest.raises(BuildError, match=rf"; script: torchscript: .*'python'.* at {place}"):
        candidate_of(subject_of(Unsaved(), {"x": X}), "torchscript-frozen", tmp_path / "candidate")


def test_inductor_refuses_state(tmp_path: Path) -> None:
    subject = subject_of(seeded(Counter), {"x": X})
    with pytest.raises(BuildError, match=r"a call changes count, and the payload would lose it"):
        candidate_of(subject, "inductor-frozen", tmp_path / "candidate")
    served, eager = (
        candidate_of(subject, "portable", tmp_path / "portable").open(subject),
        seeded(Counter),
    )
    assert all(torch.equal(served(X), eager(X)) for _ in range(2))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            mlp(),
            (
                "torchscript-frozen",
                "torchscript-exact",
                "openvino",
                "onnxruntime",
                "inductor-frozen",
                "portable",
            ),
        ),
        (seeded(Counter), ("torchscript-frozen", "torchscript-exact", "portable", "portable")),
    ],
    ids=["stateless", "stateful"],
)
def test_recipes_share_captures(model: nn.Module, names: Sequence[str], tmp_path: Path) -> None:
    subject, target = subject_of(model, {"x": X}), target_here(HERE, torch.get_num_threads())
    attempts: dict[str, Attempt] = {}
    for number, name in enumerate(names):
        (folder := tmp_path / str(number)).mkdir()
        served, eager = (
            build(subject, RECIPES[name], target, folder, attempts=attempts).open(subject),
            copy.deepcopy(model),
        )
        for _ in range(2):
            torch.testing.assert_close(leaves_of(served(X)), leaves_of(eager(X)))
    kept = attempts["all"].capture("export") is attempts["all"].capture("export")
    assert kept == (not isinstance(model, Counter)), (
        "those of a model with state are made anew, in its initial state"
    )
