"""Inductor builds: reports, patches of torch, and settings."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from freezer.artifact import FreezingReport
from freezer.errors import IntegrityError
from freezer.files import write_whole
from freezer.freezing.candidates import Candidate, build
from freezer.freezing.lowering.inductor.torch_patches import (
    clip_windows,
    multiply_single_positions,
    own_cache,
)
from freezer.freezing.models import Subject, weights_digest
from freezer.freezing.recipes import RECIPES, Recipe
from freezer.freezing.target import target_here
from freezer.runtime.loaders import open_inductor
from freezer.runtime.native import TABLE, read_package
from freezer.runtime.tensors import program_tensors
from tests.support.commands import output
from tests.support.models import seeded
from tests.support.models_inductor import OF_PYTHON_MODULE, Known, Scalars, Wide
from tests.support.steps import HERE, random_inputs, subject_of

X = random_inputs(2, 3, 8, 8)
TARGET = target_here(HERE, torch.get_num_threads())
BESIDE = {**RECIPES["inductor-frozen"].settings, "weights_beside_above_mb": 0.0}
"""Settings that put even the smallest weights beside the library."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model, what became of it, and the process's state before and after."""

    subject: Subject
    candidate: Candidate
    report: FreezingReport
    environment: tuple[Mapping[str, str], Mapping[str, str]]

    @property
    def payload(self) -> Path:
        return self.candidate.folder / self.candidate.payloads[0].path


def built(
    model: nn.Module, folder: Path, recipe: Recipe, x: Tensor = X, *, discard: bool = False
) -> Built:
    subject = subject_of(model, {"x": x})
    folder.mkdir()
    before = dict(os.environ)
    candidate = build(subject, recipe, TARGET, folder, discard=discard)
    (report,) = candidate.reports.values()
    return Built(
        subject=subject, candidate=candidate, report=report, environment=(before, dict(os.environ))
    )


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Known, with its weights beside the library.

    The linker keeps libraries that are not needed, as it does where they define what others define
    too."""
    folder = tmp_path_factory.mktemp("frozen")
    script = (
        '#!/bin/sh\ncase "$*" in *-shared*) set -- -Wl,--no-as-needed "$@" ;; esac\nexec g++ "$@"\n'
    )
    write_whole(folder / "g++", script.encode(), mode=0o755)
    recipe = replace(RECIPES["inductor-frozen"], settings=BESIDE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(folder / "g++"))
        return built(seeded(Known), folder / "candidate", recipe)


@pytest.fixture(scope="module")
def unpacked(frozen: Built, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The same without packed weights, built after it in the same process, and with the weights in
    the library."""
    folder = tmp_path_factory.mktemp("unpacked") / "candidate"
    return built(seeded(Known), folder, RECIPES["inductor-unpacked"])


def assert_answers_as_eager(one: Built) -> None:
    served = one.candidate.open(one.subject)
    for x in (X, random_inputs(2, 3, 8, 8, seed=1)):
        for got, expected in zip(served(x), seeded(Known)(x), strict=True):
            assert got.stride() == expected.stride()
            torch.testing.assert_close(got, expected)


def test_frozen_model_answers_with_eagers_strides(frozen: Built) -> None:
    assert_answers_as_eager(frozen)


def test_payload_needs_the_cpu_library_alone(frozen: Built) -> None:
    with read_package(frozen.payload).shared_library() as library:
        listed = output("objdump", "-p", library)
    needed = {line.split()[1] for line in listed.splitlines() if "NEEDED" in line}
    assert {name for name in needed if "torch" in name} == {"libtorch_cpu.so"}


@pytest.mark.slow
def test_packing_is_decided_per_build(unpacked: Built) -> None:
    assert_answers_as_eager(unpacked)
    assert {name for name in unpacked.report.ops_after if name != "kernel of Inductor"} == {
        "aten.convolution.default",
        "aten.addmm.out",
    }
    assert unpacked.report.notes[-1] == "The weights are stored in the shared library (0.0 MB)."


@pytest.mark.slow
def test_an_unfrozen_program_keeps_its_weights(tmp_path: Path) -> None:
    made = built(seeded(Known), tmp_path / "candidate", RECIPES["inductor-unfrozen"])
    assert_answers_as_eager(made)


def test_constant_outputs_are_copies(frozen: Built) -> None:
    run = open_inductor(frozen.payload, BESIDE)
    given = run(X)[1]
    given.add_(1)
    model = seeded(Known)
    assert isinstance(model, Known)
    assert torch.equal(run(X)[1], model.given)
    del run
    assert torch.equal(given, model.given + 1)


def test_dropped_model_unmaps_its_weights(frozen: Built, tmp_path: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    opened = tmp_path / "opened.pt2"
    opened.write_bytes(frozen.payload.read_bytes())
    for _ in range(3):
        run = open_inductor(opened, BESIDE)
        outputs = run(X)
        assert mappings() == 1
        del run
        assert mappings() == 0
    for answer, expected in zip(outputs, seeded(Known)(X), strict=True):
        torch.testing.assert_close(answer, expected)


def test_unmappable_weights_are_copied(
    frozen: Built, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = open_inductor(frozen.payload, BESIDE)(X)
    monkeypatch.delattr(torch._C._aoti, "AOTIModelContainerRunnerCpu")
    found = open_inductor(frozen.payload, BESIDE)(X)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert "cannot map the weights" in caplog.text
    assert "they are copied, which needs twice their size" in caplog.text


@pytest.mark.parametrize(
    ("size_bytes", "compression"), [(5, zipfile.ZIP_STORED), (4, zipfile.ZIP_DEFLATED)]
)
def test_weights_that_differ_from_their_table_are_refused(
    size_bytes: int, compression: int, tmp_path: Path
) -> None:
    path = tmp_path / "all.pt2"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(
            f"all/extra/{TABLE}", json.dumps({"size_bytes": size_bytes, "constants": []})
        )
        archive.writestr("all/data/aotinductor/model/model.blob", b"1234")
    with pytest.raises(IntegrityError):
        open_inductor(path, BESIDE)


def test_build_leaves_the_process_and_the_model_unchanged(frozen: Built) -> None:
    before, after = frozen.environment
    assert after == before
    assert weights_digest(frozen.subject.model) == weights_digest(seeded(Known))
    assert [path.name for path in frozen.payload.parent.iterdir()] == ["all.pt2"], "no cache"
    assert {"capture", "compile", "package", "instructions"} == set(frozen.report.phases_s)
    assert (frozen.report.memory_peak_bytes or 0) > 0


def test_scalars_vectors_and_discarded_weights(tmp_path: Path) -> None:
    model = seeded(Scalars)
    one = built(model, tmp_path / "candidate", RECIPES["inductor-frozen"], discard=True)
    torch.testing.assert_close(one.candidate.open(one.subject)(X), seeded(Scalars)(X))
    assert sum(tensor.untyped_storage().nbytes() for tensor in program_tensors(model)) == 0
    assert OF_PYTHON_MODULE.untyped_storage().nbytes() > 0, (
        "what the model reads and has not is not discarded"
    )
    assert one.candidate.weights == weights_digest(seeded(Scalars))


@pytest.mark.slow
def test_max_autotune_answers_like_eager(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x = random_inputs(1, 512)
    tuned = built(seeded(Wide, 512, 2), tmp_path / "tuned", RECIPES["inductor-max-autotune"], x)
    torch.testing.assert_close(tuned.candidate.open(tuned.subject)(x), seeded(Wide, 512, 2)(x))
    assert tuned.environment[0] == tuned.environment[1]
    assert capfd.readouterr() == ("", "")


def test_cache_is_removed_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")

    def fail() -> None:
        with own_cache(tmp_path) as cache:
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)
            (cache / "weights").write_bytes(b"x")
            raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        fail()
    assert list(tmp_path.iterdir()) == []
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize(
    ("args", "clipped"),
    [
        (
            {
                "kernel_size": (50, 3),
                "ceil_mode": True,
                "padding": (2, 1),
                "count_include_pad": False,
            },
            [9, 3],
        ),
        ({"kernel_size": 3, "ceil_mode": True}, [3, 3]),
    ],
)
def test_pool_windows_are_clipped(args: dict[str, Any], clipped: list[int]) -> None:
    x = random_inputs(2, 3, 5, 7)
    traced = make_fx(lambda tensor: nn.functional.avg_pool2d(tensor, **args), tracing_mode="fake")(
        x
    )
    clip_windows(traced.graph)
    traced.recompile()
    (pool,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.avg_pool2d.default)
    assert pool.args[1] == clipped
    assert torch.equal(traced(x), nn.functional.avg_pool2d(x, **args))


@pytest.mark.parametrize(
    ("layer", "size", "convolutions"),
    [
        (nn.Conv2d(6, 4, 1), (1, 6, 1, 1), 0),
        (nn.Conv1d(6, 4, 1), (1, 6, 1), 0),
        (nn.Conv2d(6, 4, 1), (2, 6, 1, 1), 1),
        (nn.Conv2d(6, 4, 1, stride=2), (1, 6, 2, 2), 1),
        (nn.Conv2d(6, 4, 1, groups=2), (1, 6, 1, 1), 1),
        (nn.ConvTranspose2d(6, 4, 1), (1, 6, 1, 1), 1),
    ],
    ids=str,
)
def test_convolutions_over_one_position_are_products(
    layer: nn.Module, size: tuple[int, ...], convolutions: int
) -> None:
    x = random_inputs(*size)
    weights = [weight.detach() for weight in layer.parameters()]
    traced = make_fx(partial(_call, layer), tracing_mode="fake")(weights, x)
    multiply_single_positions(traced.graph)
    traced.recompile()
    assert (
        len(traced.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default))
        == convolutions
    )
    torch.testing.assert_close(traced(weights, x), layer(x))


def _call(layer: nn.Module, weights: list[Tensor], x: Tensor) -> Any:
    names = [name for name, _ in layer.named_parameters()]
    return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), x)
