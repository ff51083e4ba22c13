"""Inductor builds: report counts, patches of torch, and settings."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from freezer.artifact.sections import FreezingReport
from freezer.errors import BuildError, IntegrityError
from freezer.freezing.candidates.build import build
from freezer.freezing.candidates.candidate import Candidate
from freezer.freezing.lowering.inductor import inductor
from freezer.freezing.lowering.inductor.inductor_report import graph_text, program_of, report_of
from freezer.freezing.lowering.inductor.observer import watching
from freezer.freezing.lowering.inductor.torch_patches import clip_windows, own_cache, weight_packing
from freezer.freezing.lowering.inductor.weight_table import write_table
from freezer.freezing.models.subject import Subject
from freezer.freezing.models.weights import weights_digest
from freezer.freezing.recipes.recipes import RECIPES, Recipe
from freezer.freezing.target.target import target_here
from freezer.runtime.inductor_loader import TABLE, open_inductor
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.tensors import program_tensors
from tests.freezer.models_inductor import OF_PYTHON_MODULE, Known, Scalars, Wide
from tests.models import seeded
from tests.steps import HERE, python, random_inputs, subject_of

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

    def changes(self) -> dict[str, int]:
        return {change.name: change.count for change in self.report.changes}

    def notes(self) -> dict[str, str]:
        return {change.name: change.note for change in self.report.changes}


def built(model: nn.Module, folder: Path, recipe: Recipe, x: Tensor = X, *, discard: bool = False) -> Built:
    subject = subject_of(model, {"x": x})
    folder.mkdir()
    before = dict(os.environ)
    candidate = build(subject, recipe, TARGET, folder, discard=discard)
    (report,) = candidate.reports.values()
    return Built(subject=subject, candidate=candidate, report=report, environment=(before, dict(os.environ)))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Known, with its weights beside the library."""
    recipe = replace(RECIPES["inductor-frozen"], settings=BESIDE)
    return built(seeded(Known), tmp_path_factory.mktemp("frozen") / "candidate", recipe)


@pytest.fixture(scope="module")
def unpacked(frozen: Built, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The same without packed weights, built after it in the same process, and with the weights in the library."""
    return built(seeded(Known), tmp_path_factory.mktemp("unpacked") / "candidate", RECIPES["inductor-unpacked"])


def assert_answers_as_eager(one: Built) -> None:
    served = one.candidate.open(one.subject)
    for x in (X, random_inputs(2, 3, 8, 8, seed=1)):
        for got, expected in zip(served(x), seeded(Known)(x), strict=True):
            assert got.stride() == expected.stride()
            torch.testing.assert_close(got, expected)


def test_frozen_model_answers_with_eagers_strides(frozen: Built) -> None:
    assert_answers_as_eager(frozen)


def test_changes_are_counted(frozen: Built) -> None:
    assert frozen.changes() == {
        "dropouts removed": 2,
        "common subexpressions merged": 2,
        "batch norms folded into convolutions": 2,
        "additions and subtractions folded into convolutions": 1,
        "multiplications and divisions folded into convolutions": 1,
        "operators computed into constants": 2,
        "convolution weights laid out channels last": 2,
        "weights packed": 8,
        "activations fused into convolutions and linear layers": 4,
        "loops fused into kernels": frozen.changes()["loops fused into kernels"],
    }
    assert frozen.notes()["activations fused into convolutions and linear layers"] == "2 relu, 1 sigmoid, 1 tanh"
    assert frozen.report.notes[-1].startswith("The weights are stored beside the shared library, and mapped into memory at load")
    assert not any("could not be counted" in note for note in frozen.report.notes)


def test_operators_before_and_after(frozen: Built) -> None:
    before, after = frozen.report.ops_before, frozen.report.ops_after
    assert before["aten.conv2d.default"] == 3
    assert before["aten.batch_norm.default"] == 2
    assert before["aten.linear.default"] == 5
    assert before["aten.dropout.default"] == 2
    kernels = frozen.changes()["loops fused into kernels"], after["kernel of Inductor"]
    assert frozen.notes()["loops fused into kernels"] == f"in {kernels[1]} calls of kernels"
    assert kernels[0] > kernels[1] > 0
    assert {**after, "kernel of Inductor": 0} == {
        "mkldnn._convolution_pointwise.default": 3,
        "mkldnn._linear_pointwise.default": 5,
        "kernel of Inductor": 0,
    }


def test_constants_are_named_and_sized(frozen: Built) -> None:
    model, report = seeded(Known), frozen.report
    left_out = ("unused.weight", "unused.bias", "norm1.num_batches_tracked", "norm2.num_batches_tracked")
    names = [*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())]
    assert set(report.constants) == set(names) - set(left_out)
    assert set(report.unused) == set(left_out)
    assert report.kept == ()
    assert report.num_constants == len(report.constants) - 1, "tied weights are one constant"
    used = {id(t): t for n, t in (*model.named_parameters(), *model.named_buffers()) if n not in left_out}
    assert report.constants_bytes == sum(tensor.numel() * 4 for tensor in used.values())
    # three biases of 8, of which two came with batch norms; the sum of the product; and the buffer that is given back
    assert report.folded_bytes == 4 * (3 * 8 + 100 + 100)


def test_evidence_has_graph_code_and_origins(frozen: Built) -> None:
    evidence = frozen.candidate.folder / "evidence"
    graph, code = (evidence / "all-graph.txt").read_text(), (evidence / "all-code.txt").read_text()
    assert ": of conv1.weight, norm1.running_var, norm1.weight\n" in graph
    assert ": of conv1.bias, norm1.bias, norm1.running_mean, norm1.running_var, norm1.weight\n" in graph
    assert ": of left, right\n" in graph
    assert "mkldnn._convolution_pointwise" in graph
    assert "AOTInductorModel::run_impl" in code
    assert 'extern "C"' in code


def test_failed_observations_lose_the_counts() -> None:
    nothing = {"before": lambda _: None, "frozen": lambda _: None, "lowered": lambda _: None}
    with torchscript_deprecations_silenced(), watching(**nothing) as (watch, hooks):
        hooks["post_grad_custom_post_pass"]("a graph of another torch")
    program = program_of(torch.export.export(seeded(Known), (X,)), prefix="")
    report = report_of(watch, program, {}, ("One note.",))
    assert report.ops_before["aten.conv2d.default"] == 3
    assert (report.num_constants, report.changes, report.ops_after) == (26, (), {})
    assert report.notes[0] == "One note."
    assert "could not be counted; failed to observe the final graph (AttributeError: " in report.notes[1]
    assert graph_text(watch, program) == ""


@pytest.mark.slow
def test_packing_is_decided_per_build(unpacked: Built) -> None:
    assert_answers_as_eager(unpacked)
    assert "weights packed" not in unpacked.changes()
    assert {name for name in unpacked.report.ops_after if name != "kernel of Inductor"} == {
        "aten.convolution.default",
        "aten.addmm.out",
    }
    assert unpacked.changes()["batch norms folded into convolutions"] == 2
    assert unpacked.report.notes[-1].startswith("The weights are stored in the shared library (0.0 MB, not above 128 MB)")
    with weight_packing(wanted=True):
        from torch._inductor.fx_passes import freezing_patterns

        handlers = [
            e.handler for p in freezing_patterns.pass_patterns for es in p.patterns.values() for e in es if hasattr(e, "handler")
        ]
        assert any("mkldnn_fusion" in handler.__module__ for handler in handlers), "and packing is there again"


def test_torchs_loader_opens_separate_weights(frozen: Built) -> None:
    run = torch._C._aoti.AOTIModelPackageLoader(str(frozen.payload), "model", False, 1, -1).run
    own = open_inductor(frozen.payload, BESIDE)
    for one, other in zip(run([X]), own(X), strict=True):
        assert torch.equal(one, other)


def test_constant_outputs_are_copies(frozen: Built) -> None:
    run = open_inductor(frozen.payload, BESIDE)
    given = run(X)[1]
    given.add_(1)
    model = seeded(Known)
    assert isinstance(model, Known)
    assert torch.equal(run(X)[1], model.given)
    del run
    assert torch.equal(given, model.given + 1)


def test_mapped_payload_may_be_removed(frozen: Built, tmp_path: Path) -> None:
    copied = tmp_path / "copied.pt2"
    copied.write_bytes(frozen.payload.read_bytes())
    copied.chmod(0o444)
    run = open_inductor(copied, BESIDE)
    copied.unlink()
    assert torch.equal(run(X)[0], open_inductor(frozen.payload, BESIDE)(X)[0])


def test_dropped_model_unmaps_its_weights(frozen: Built, tmp_path: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    opened = tmp_path / "opened.pt2"
    opened.write_bytes(frozen.payload.read_bytes())
    unpacked = [entry for entry in json.loads(zipfile.ZipFile(opened).read(table_in(opened)))["constants"] if not entry["packed"]]
    assert any(entry["shape"] for entry in unpacked), "of such torch keeps a handle for ever"
    for _ in range(3):
        run = open_inductor(opened, BESIDE)
        outputs = run(X)
        assert mappings() == 1
        del run
        assert mappings() == 0
    for output, expected in zip(outputs, seeded(Known)(X), strict=True):
        torch.testing.assert_close(output, expected)


def table_in(package: Path) -> str:
    return next(name for name in zipfile.ZipFile(package).namelist() if name.endswith(TABLE))


def test_unmappable_weights_are_copied(frozen: Built, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    expected = open_inductor(frozen.payload, BESIDE)(X)
    monkeypatch.delattr(torch._C._aoti, "AOTIModelContainerRunnerCpu")
    found = open_inductor(frozen.payload, BESIDE)(X)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert "cannot map the weights" in caplog.text
    assert "they are copied, which needs twice their size" in caplog.text


@pytest.mark.parametrize(("size_bytes", "compression"), [(5, zipfile.ZIP_STORED), (4, zipfile.ZIP_DEFLATED)])
def test_weights_that_differ_from_their_table_are_refused(size_bytes: int, compression: int, tmp_path: Path) -> None:
    path = tmp_path / "all.pt2"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"all/extra/{TABLE}", write_table([], size_bytes))
        archive.writestr("all/data/aotinductor/model/model.blob", b"1234")
    with pytest.raises(IntegrityError, match=r"all\.pt2: the weights do not match the table; pull the artifact"):
        open_inductor(path, BESIDE)


def test_build_leaves_the_process_and_the_model_unchanged(frozen: Built) -> None:
    before, after = frozen.environment
    assert after == before
    assert weights_digest(frozen.subject.model) == weights_digest(seeded(Known))
    assert sorted(path.name for path in frozen.payload.parent.iterdir()) == ["all.pt2"], "no cache in the candidate"
    assert list(frozen.report.phases_s) == ["capture", "lower", "compile", "package", "instructions"]
    assert (frozen.report.memory_peak_bytes or 0) > 0


def test_scalars_vectors_and_discarded_weights(tmp_path: Path) -> None:
    model = seeded(Scalars)
    one = built(model, tmp_path / "candidate", RECIPES["inductor-frozen"], discard=True)
    assert one.changes()["multiplications and divisions folded into convolutions"] == 2
    assert one.changes()["additions and subtractions folded into convolutions"] == 2
    torch.testing.assert_close(one.candidate.open(one.subject)(X), seeded(Scalars)(X))
    assert sum(tensor.untyped_storage().nbytes() for tensor in program_tensors(model)) == 0
    assert OF_PYTHON_MODULE.untyped_storage().nbytes() > 0, "what the model reads and has not is not discarded"
    assert one.candidate.weights == weights_digest(seeded(Scalars))


TEMPLATE = "CppMicroGemm"
"""In the name of a matrix product in Inductor's own C++."""


@contextlib.contextmanager
def timings_seen() -> Iterator[list[Mapping[str, float]]]:
    """What torch times in this block: for each product that it tunes, the ways to compute it and how long they took, in ms."""
    from torch._inductor import select_algorithm

    seen: list[Mapping[str, float]] = []
    select_algorithm.add_feedback_saver(lambda times, *_: seen.append({choice.name: times[choice] for choice in times}))
    try:
        yield seen
    finally:
        select_algorithm.clear_feedback_savers()


@pytest.mark.slow
def test_max_autotune_takes_the_fastest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x = random_inputs(1, 512)
    with timings_seen() as seen:
        plain = built(seeded(Wide, 512, 2), tmp_path / "plain", RECIPES["inductor-frozen"], x)
        assert seen == []
        tuned = built(seeded(Wide, 512, 2), tmp_path / "tuned", RECIPES["inductor-max-autotune"], x)
    for one in (plain, tuned):
        torch.testing.assert_close(one.candidate.open(one.subject)(x), seeded(Wide, 512, 2)(x))
        assert one.environment[0] == one.environment[1]
    assert capfd.readouterr() == ("", "")
    assert len(seen) == 2, "one for each layer"
    assert all(sorted(TEMPLATE in name for name in times) == [False, True] for times in seen), "oneDNN's, and Inductor's own C++"
    in_templates = sum(TEMPLATE in min(times, key=times.__getitem__) for times in seen)
    by_onednn = [one.report.ops_after.get("mkldnn._linear_pointwise.default", 0) for one in (plain, tuned)]
    assert by_onednn == [2, 2 - in_templates]
    code = [(one.candidate.folder / "evidence" / "all-code.txt").read_text() for one in (plain, tuned)]
    assert ["micro_gemm" in text for text in code] == [False, in_templates > 0]


USERS = {
    "TORCHINDUCTOR_FREEZING": "0",
    "TORCHINDUCTOR_CPP_WEIGHT_PREPACK": "0",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    "TORCHINDUCTOR_LAYOUT_OPTIMIZATION": "0",
    "TORCHINDUCTOR_FORCE_LAYOUT_OPT": "1",
    "TORCHINDUCTOR_KEEP_OUTPUT_STRIDE": "0",
    "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG": "1",
    "TORCHINDUCTOR_CPP_ENABLE_FLOATING_POINT_CONTRACT_FLAG": "fast",
    "TORCHINDUCTOR_CPP_MARCH": "native",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1",
    "TORCHINDUCTOR_ENABLE_LINEAR_BINARY_FOLDING": "1",
    "TORCHINDUCTOR_FX_WRAPPER": "1",
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
    "AOT_INDUCTOR_DEBUG_INTERMEDIATE_VALUE_PRINTER": "2",
}

_EFFECTIVE = """
import json
from freezer.freezing.lowering.inductor.inductor import configuration, known
from freezer.freezing.recipes.recipes import RECIPES
from freezer.freezing.target.target import target_here
from torch._inductor import config
given = configuration(RECIPES["inductor-frozen"].settings["inductor"], target_here({here!r}, 1), beside=False)
with config.patch(known(given)):
    found = config.get_config_copy()
print(json.dumps({{name: repr(value) for name, value in found.items()}}, sort_keys=True))
"""


def test_environment_changes_no_setting() -> None:
    code = _EFFECTIVE.format(here=HERE)
    plain, set_by_user = (json.loads(python(code, env={**os.environ, **more}).splitlines()[-1]) for more in ({}, USERS))
    assert {name: (plain[name], set_by_user[name]) for name in plain if plain[name] != set_by_user[name]} == {}
    assert plain["freezing"] == plain["cpp.weight_prepack"] == plain["layout_optimization"] == "True"


def test_torch_without_a_required_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "REQUIRED", ("freezing", "of another torch"))
    with pytest.raises(BuildError, match=r"has no setting of another torch; use another torch, from 2\.11 on"):
        inductor.known({"freezing": True, "of another torch": 1})
    assert inductor.known({"freezing": True, "of a later torch": 1}) == {"freezing": True}


def test_forced_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config._config["disabled_passes"], "env_value_force", "remove_noop_ops")
    with pytest.raises(BuildError, match=r"forces disabled_passes to be 'remove_noop_ops', .* unset TORCHINDUCTOR_DISABLED_PASSES"):
        inductor.known(inductor.configuration(RECIPES["inductor-frozen"].settings["inductor"], TARGET, beside=False))


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
        ({"kernel_size": 50, "ceil_mode": True}, [5, 7]),
        ({"kernel_size": (50, 3), "ceil_mode": True, "padding": (2, 1), "count_include_pad": False}, [9, 3]),
        ({"kernel_size": 3, "ceil_mode": True}, [3, 3]),
    ],
)
def test_pool_windows_are_clipped(args: dict[str, Any], clipped: list[int]) -> None:
    x = random_inputs(2, 3, 5, 7)
    traced = make_fx(lambda tensor: nn.functional.avg_pool2d(tensor, **args), tracing_mode="fake")(x)
    clip_windows(traced.graph)
    traced.recompile()
    (pool,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.avg_pool2d.default)
    assert pool.args[1] == clipped
    assert torch.equal(traced(x), nn.functional.avg_pool2d(x, **args))
