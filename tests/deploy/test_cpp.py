"""Deployment without Python: the C++ program of examples/cpp, built against the libtorch in torch's
wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import freezer
from freezer.artifact import (
    FORMAT_VERSION,
    GOLDEN_INPUTS,
    Artifact,
    Needs,
    Payload,
)
from freezer.compare.gate import EAGER_REFERENCE_TOL, POOL_BELOW, SMALL_TENSOR
from freezer.files import digest_file
from freezer.freezing.models import Dims
from freezer.freezing.recipes import RECIPES
from freezer.hardware import DEVICE_CLASSES
from freezer.runtime.tensors import values_of
from freezer.serving.canary import golden_figures, golden_inputs, golden_outputs
from freezer.serving.opening import open_artifact
from freezer.serving.process import LoadOptions
from tests.conftest import Frozen, Several
from tests.support.commands import Done, finished, output
from tests.support.models import TinyConv, scripted_module, seeded
from tests.support.models_state import InPlace
from tests.support.steps import (
    BATCH,
    HERE,
    QUICK_OPTIONS,
    copy_of,
    flip_a_byte,
    random_inputs,
    rewritten,
    with_golden,
)

SOURCE = Path(__file__).parents[2] / "examples" / "cpp"
LINE = re.compile(r" *(\d+)  +([\d.]+|inf)? +([\d.e+-]+)  ([^:]+)(?:: (.+))?")
"""The line of one output of a golden set: error ratio, largest absolute error, name, and problem.
"""

LIMITS = {name for device_class in DEVICE_CLASSES.values() for name in device_class.limits}


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build folder of the program, which compiles without warnings."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is missing: apt-get install cmake")
    folder = tmp_path_factory.mktemp("cpp") / "build"
    options = [
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
        "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",
    ]
    configured = finished("cmake", "-S", SOURCE, "-B", folder, *options)
    for package, debian in {"nlohmann_json": "nlohmann-json3-dev", "OpenSSL": "libssl-dev"}.items():
        if configured.returncode and package in configured.stderr:
            pytest.skip(f"{package} is missing: apt-get install {debian}")
    assert configured.returncode == 0, configured.stderr
    output("cmake", "--build", folder)
    return folder


@pytest.fixture(scope="session")
def program(build: Path) -> Path:
    return build / "coldpress-verify"


def run(program: Path, *args: object, **environ: str) -> Done:
    unlimited = {name: value for name, value in os.environ.items() if name not in LIMITS}
    return finished(program, *args, env={**unlimited, **environ})


def frozen(
    model: nn.Module,
    inputs: Any,
    out: Path,
    recipe: str = "torchscript-frozen",
    dims: Dims | None = None,
    reset: str | None = None,
) -> Artifact:
    options = replace(QUICK_OPTIONS, recipes=[recipe], reset=reset)
    result = freezer.freeze(model, inputs, out=out, dims=dims, options=options)
    assert result.artifact is not None, (result.reason, result.failures)
    return result.artifact


def check_same_as_python(program: Path, artifact: Artifact, *, num_wrong: int = 0) -> list[str]:
    """Compare the figures and problems of the program with those of the library's canary; return
    the names of the outputs.
    """
    opened = open_artifact(artifact, torch.get_num_threads(), LoadOptions(canary=False))
    golden = golden_outputs(artifact)
    manifest, answers = artifact.manifest, {}
    reset = manifest.recipe.reset
    for index, inputs in enumerate(golden_inputs(artifact)):
        if index and reset:
            opened.preserved[reset]()
        if not index or reset or not manifest.stateful:
            answers[index] = [values_of(leaf) for leaf in opened.leaves(**inputs)]
    figures = golden_figures(manifest, golden, answers)
    assert sum(figure.problem is not None for figure in figures) == num_wrong
    done = run(program, artifact.folder)
    assert done.returncode == bool(num_wrong), done.stdout + done.stderr
    lines = list(filter(None, map(LINE.fullmatch, done.stdout.splitlines())))
    for line, figure in zip(lines, figures, strict=True):
        expected = (figure.set_index, figure.output, figure.problem)
        assert (int(line[1]), line[4], line[5]) == expected, line
        ratio = figure.error_ratio and pytest.approx(figure.error_ratio, rel=1e-6, abs=0.006)
        assert (line[2] and float(line[2])) == ratio, line
        assert float(line[3]) == pytest.approx(figure.max_abs_err, rel=0.006), line
    return [line[4] for line in lines]


def refused(program: Path, artifact: Artifact, **environ: str) -> str:
    """The reason of a refusal before anything runs."""
    done = run(program, artifact.folder, **environ)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    return done.stderr


def scaled(relative: float) -> Callable[[Tensor], Tensor]:
    return lambda r: r * (1 + relative) if r.is_floating_point() or r.is_complex() else r


class Many(nn.Module):
    """Takes a nested input, and returns many dtypes in a dict, NaN and Inf among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, state: tuple[Tensor, dict[str, Tensor]]) -> dict[str, Any]:
        y = self.linear(x) + state[0]
        big = self.linear(x).repeat(1, 400) * state[1]["scale"]
        return {
            "zeta": y,
            "float": big,
            "half": big.half(),
            "bfloat16": big.bfloat16(),
            "double": y.double(),
            "complex": torch.complex(y, state[0]),
            "complex_double": (torch.complex(y.double(), state[0].double()), y.argmax(1)),
            "infinite": torch.log(y.round()) / y.round(),
            "positive": [y > 0, y.to(torch.uint8), None, y.to(torch.int16)],
            "alpha": torch.ones(x.shape[0], 0),
        }


class Scripted(nn.Module):
    """TorchScript with constants among its inputs, which returns tuples, lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(
        self,
        x: Tensor,
        factor: float,
        bias: float | None,
        times: int,
        mode: str,
        twice: bool,
        mask: Tensor,
    ) -> tuple[dict[str, Tensor], list[Tensor], int]:
        y = self.linear(x) * factor * times * mask
        if bias is not None:
            y = y + bias
        if mode == "fast" and twice:
            y = y * 2
        return {"logits": y, "probs": y.softmax(1)}, [y.argmax(1), y > 0], times


CONSTANTS: Mapping[str, Any] = {"factor": 2, "bias": 3, "times": 3, "mode": "fast", "twice": True}
"""TorchScript takes `factor` and `bias` as floats."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    inputs = {"x": random_inputs(2, 4), "state": (random_inputs(2, 3), {"scale": torch.ones(1)})}
    return frozen(seeded(Many), inputs, tmp_path_factory.mktemp("many") / "many")


def test_its_constants_are_the_librarys() -> None:
    text = "".join(path.read_text() for path in SOURCE.glob("*.cpp"))
    found = dict(re.findall(r"constexpr \S+ k(\w+) = ([\d.e-]+);", text))
    assert {name: float(value) for name, value in found.items()} == {
        "FormatVersion": FORMAT_VERSION,
        "PoolBelow": POOL_BELOW,
        "SmallTensor": SMALL_TENSOR,
        "EagerReferenceTol": EAGER_REFERENCE_TOL,
    }
    for level in ("cpu-x86-64-v3", "cpu-x86-64-v4"):
        limits = DEVICE_CLASSES[level].limits.items()
        assert " ".join(f"{name}={value}" for name, value in limits) in text


@pytest.mark.slow
def test_frozen_artifacts_answer_as_in_python(
    program: Path, inductor: Frozen, scripted: Frozen, tmp_path: Path
) -> None:
    inputs, folder = {"x": random_inputs(2, 3, 16, 16)}, tmp_path / "optimized"
    optimized = frozen(inductor.model, inputs, folder, "torchscript-optimized")
    assert optimized.manifest.recipe.settings["optimize_for_inference"]
    for artifact in (inductor.artifact, scripted.artifact, optimized):
        assert check_same_as_python(program, artifact) == ["output"] * len(artifact.manifest.golden)


@pytest.mark.slow
def test_weights_beside_the_library_are_opened(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES["inductor-frozen"]
    beside = {**recipe.settings, "weights_beside_above_mb": 0.0}
    monkeypatch.setitem(RECIPES, recipe.name, replace(recipe, settings=beside))
    artifact = frozen(
        seeded(TinyConv), {"x": random_inputs(2, 3, 16, 16)}, tmp_path / "beside", recipe.name
    )
    with zipfile.ZipFile(artifact.folder / artifact.manifest.payloads[0].path) as package:
        assert any(name.endswith("coldpress-constants.json") for name in package.namelist())
    check_same_as_python(program, artifact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "num_wrong"),
    [
        (scaled(0.0), 0),
        (scaled(5e-4), 0),
        (scaled(2e-2), 7),
        (lambda r: ~r if r.dtype == torch.bool else r, 1),
    ],
)
def test_every_dtype_is_compared_with_an_eager_reference(
    program: Path,
    many: Artifact,
    tmp_path: Path,
    change: Callable[[Tensor], Tensor],
    num_wrong: int,
) -> None:
    assert (many.manifest.reference, many.manifest.payloads[0].convention) == ("eager", "flat")
    changed = with_golden(many, tmp_path / "changed", change)
    outputs = set(check_same_as_python(program, changed, num_wrong=num_wrong))
    assert outputs >= {"zeta", "complex_double.1", "infinite", "positive.3", "alpha"}
    assert "positive.2" not in outputs, "it is None"


@pytest.mark.slow
@pytest.mark.parametrize("positional", [False, True])
def test_a_native_payload_is_called_with_its_constants(
    program: Path, tmp_path: Path, positional: bool
) -> None:
    inputs = {"x": random_inputs(2, 4), **CONSTANTS, "mask": torch.ones(2, 3)}
    given = list(inputs.values()) if positional else inputs
    artifact = frozen(scripted_module(seeded(Scripted)), given, tmp_path / "native")
    assert artifact.manifest.payloads[0].convention == "native"
    assert artifact.manifest.inputs.style == ("positional" if positional else "keyword")
    assert set(check_same_as_python(program, artifact)) == {"0.logits", "0.probs", "1.0", "1.1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "reset"), [("torchscript-frozen", None), ("torchscript-optimized", "reset")]
)
def test_a_stateful_model_starts_from_its_initial_state(
    program: Path, tmp_path: Path, recipe: str, reset: str | None
) -> None:
    dims = {"x": {0: BATCH}}
    artifact = frozen(
        scripted_module(seeded(InPlace)),
        {"x": random_inputs(2, 4)},
        tmp_path / "model",
        recipe,
        dims=dims,
        reset=reset,
    )
    assert artifact.manifest.stateful
    num_sets = len(artifact.manifest.golden)
    assert num_sets > 1
    assert check_same_as_python(program, artifact) == ["output"] * (num_sets if reset else 1)


@pytest.mark.slow
def test_a_damaged_file_is_not_opened(program: Path, inductor: Frozen, tmp_path: Path) -> None:
    damaged = copy_of(inductor.artifact, tmp_path / "damaged")
    path = damaged.folder / "payloads" / "all.pt2"
    flip_a_byte(path)
    assert f"{path} is sha256:" in refused(program, damaged)
    with path.open("ab") as file:
        file.write(b"more")
    assert f"{path} is " in refused(program, damaged)
    path.unlink()
    assert f"{path} is missing" in refused(program, damaged)


@pytest.mark.slow
def test_what_it_cannot_serve_is_refused(
    program: Path, portable: Frozen, scripted: Frozen, tmp_path: Path
) -> None:
    assert "payloads/all.pt2 is of kind 'exported'" in refused(program, portable.artifact)
    copied = copy_of(scripted.artifact, tmp_path / "copied")
    manifest = copied.manifest
    payload = manifest.payloads[0]
    step = (replace(payload, dims=(replace(BATCH, min=2, multiple_of=2),)),)
    unknown: Any = "tflite"
    cases: Mapping[str, dict[str, Any]] = {
        "format_version 99": {"format_version": 99},
        "an artifact for cuda-sm90": {"device_class": "cuda-sm90"},
        "class_mismatch": {"device_class": "cpu-neoverse-v2"},
        "torch_too_old": {"needs": Needs(torch="99.0")},
        "of kind 'tflite'": {"payloads": (replace(payload, kind=unknown),)},
        "'../all.pt', which is outside": {"payloads": (replace(payload, path="../all.pt"),)},
        GOLDEN_INPUTS: {"files": ()},
        "no golden set": {"golden": ()},
        'no payload serves the sizes {"batch":1}': {"payloads": step},
    }
    for message, changes in cases.items():
        assert message in refused(program, rewritten(copied, **changes))
    (copied.folder / "manifest.json").write_text('{"format_version": 1}')
    assert "copied/manifest.json is not a Coldpress manifest" in refused(program, copied)


@pytest.mark.slow
def test_another_cpu_is_refused_before_the_payload_is_opened(
    program: Path, inductor: Frozen, tmp_path: Path
) -> None:
    assert "class_mismatch" in refused(program, inductor.artifact, ONEDNN_MAX_CPU_ISA="SSE41")
    assert "class_mismatch" in refused(program, inductor.artifact, ATEN_CPU_CAPABILITY="default")
    if HERE != "cpu-x86-64-v4":
        above = copy_of(inductor.artifact, tmp_path / "above", device_class="cpu-x86-64-v4")
        assert "class_mismatch" in refused(program, above)
        return
    lesser = copy_of(inductor.artifact, tmp_path / "lesser", device_class="cpu-x86-64-v3")
    assert "isa_mismatch: weights packed for cpu-x86-64-v3" in refused(program, lesser)
    assert run(program, lesser.folder, **DEVICE_CLASSES["cpu-x86-64-v3"].limits).returncode == 0


@pytest.mark.slow
def test_payloads_for_too_many_threads_are_not_opened(
    program: Path, several: Several, tmp_path: Path
) -> None:
    """Payloads for the program's own thread count serve, else those for the largest count
    below it.
    """
    check_same_as_python(program, several.artifact)
    broken = copy_of(several.artifact, tmp_path / "broken")
    payloads = []
    for payload in broken.manifest.payloads:
        path = broken.folder / payload.path
        if payload.num_threads == 2:
            path.write_bytes(b"no package")
        payloads.append(replace(payload, digest=digest_file(path), size_bytes=path.stat().st_size))

    def opens(payloads: list[Payload], num_threads: int) -> bool:
        artifact = rewritten(broken, payloads=tuple(payloads))
        done = run(program, artifact.folder, OMP_NUM_THREADS=str(num_threads))
        assert done.returncode == 0 or payloads != above or "threads_mismatch" in done.stderr
        return done.returncode == 0

    counts = {2: 3}
    three = [replace(item, num_threads=counts.get(item.num_threads or 0, 1)) for item in payloads]
    above = [payload for payload in three if payload.num_threads == 3]
    assert opens(payloads, 1)
    assert not opens(payloads, 2)
    assert opens(three, 2)
    assert not opens(above, 2)


@pytest.mark.slow
def test_an_installed_program_needs_only_the_c_library(
    build: Path, inductor: Frozen, tmp_path: Path
) -> None:
    app, scratch = tmp_path / "app", tmp_path / "scratch"
    scratch.mkdir()
    output("cmake", "--install", build, "--prefix", app)
    loaded = re.findall(r"(\S+) => (\S+)", finished("ldd", app / "coldpress-verify").stdout)
    outside = {name.split(".")[0] for name, path in loaded if not Path(path).is_relative_to(app)}
    assert outside <= {"libc", "libm", "libdl", "libpthread", "librt"}
    assert {"libtorch_cpu.so", "libgomp.so.1", "libcrypto.so.3"} <= {name for name, _ in loaded}
    output(app / "coldpress-verify", inductor.artifact.folder, env={"TMPDIR": str(scratch)})
    assert list(scratch.iterdir()) == [], "the unpacked package was not removed"
    shutil.rmtree(app)  # libtorch is large
