"""Lower precision by consent: what is published, refused and detected, on a trained classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import freezer
from freezer.artifact import Artifact
from freezer.errors import CanaryError, SpecError
from freezer.freezing import recipes
from freezer.freezing.candidates import build, mixed_precision
from freezer.freezing.candidates.mixed_precision import keeping
from freezer.freezing.drift import Extreme
from freezer.freezing.freeze import FreezeOptions, FreezeResult, freeze
from freezer.freezing.judging import Trial
from freezer.freezing.lowering import onnx_runtime
from freezer.freezing.models import SubjectOptions, example_spec, prepare
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import class_here, target_here
from freezer.hardware import DEVICE_CLASSES, device_class
from freezer.spec import Accuracy
from tests.support.classifiers import DIMS, Faint, Outlier, classifier, images, write_samples
from tests.support.steps import ANY_SPEED, QUICK, artifact_of, copy_of

PRECISE = class_here((), ("int8", "bf16"))
METRIC = {"metric": "tests.support.classifiers:is_right", "labels": "label"}
OPENVINO = ("openvino", "openvino-bf16", "openvino-int8", "openvino-int8-bf16")

needs_gain = pytest.mark.skipif(
    set(device_class(PRECISE).precisions) != {"bf16", "int8"},
    reason="the hardware does not gain from bf16 and int8",
)


def frozen(
    folder: Path,
    budget: dict[str, Any],
    names: Sequence[str] = OPENVINO,
    *,
    precision: Sequence[str] = ("bf16", "int8"),
    model: nn.Module | None = None,
    fixed: bool = False,
) -> FreezeResult:
    options = FreezeOptions(
        recipes=names,
        num_threads=1,
        limits=ANY_SPEED,
        policy=QUICK,
        precision=precision,
        accuracy=Accuracy(**budget),
    )
    inputs = {"image": images(8, 1)[0]}
    dims = {} if fixed else DIMS
    return freeze(model or classifier(), inputs, out=folder, dims=dims, options=options)


def trials(result: FreezeResult) -> dict[str, Trial]:
    assert result.judgement is not None
    return {trial.recipe: trial for trial in result.judgement.trials}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples") / "held_out.safetensors", 640)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, samples: Path) -> Artifact:
    """An artifact in int8, which alone competes."""
    folder = tmp_path_factory.mktemp("frozen") / "int8"
    budget = {"samples": samples, "top1_agreement_min": 0.97, "cosine_min": 0.9}
    return artifact_of(frozen(folder, budget, ["openvino-int8"], precision=["int8"]))


@needs_gain
def test_int8_is_published_within_its_budget(published: Artifact, samples: Path) -> None:
    manifest: Any = published.manifest
    record = manifest.accuracy
    assert manifest.recipe.precision == record.precision == "int8"
    assert manifest.device_class == PRECISE
    assert record.bounds["top1_agreement"] >= 0.97
    assert record.measured["top1_agreement"] > record.bounds["top1_agreement"]
    assert record.samples == {"calibration": 80, "search": 80, "judged": 480}
    assert record.digest.startswith("sha256:")
    (report, *_) = manifest.freezing.reports.values()
    assert report.precisions["int8"] >= 2
    assert manifest.needs.packages.keys() == {"openvino"}


@needs_gain
def test_published_int8_serves_and_verifies(published: Artifact, samples: Path) -> None:
    model = freezer.load(published.folder, canary=True)
    answer = model(image=images(4, 1)[0])
    assert torch.equal(answer.argmax(-1), classifier()(images(4, 1)[0]).argmax(-1))
    judged = freezer.verify(published.folder, samples=samples).accuracy
    assert judged is not None
    assert judged.problem is None


@needs_gain
def test_verify_finds_a_budget_that_breaks_here(
    published: Artifact, samples: Path, tmp_path: Path
) -> None:
    record: Any = published.manifest.accuracy
    strict = replace(record, budget={"sqnr_db_min": 120.0})
    copied = copy_of(published, tmp_path / "copy", accuracy=strict)
    with pytest.raises(CanaryError):
        freezer.verify(copied.folder, samples=samples)


@needs_gain
def test_canary_uses_the_error_of_the_precision(published: Artifact, tmp_path: Path) -> None:
    wide = [golden.native_rmse["output"] for golden in published.manifest.golden]
    assert min(wide) > 1e-4
    tight = tuple(
        replace(golden, native_rmse=dict.fromkeys(golden.native_rmse, 1e-9))
        for golden in published.manifest.golden
    )
    copied = copy_of(published, tmp_path / "copy", golden=tight)
    with pytest.raises(CanaryError):
        freezer.verify(copied.folder)


@needs_gain
def test_broken_budgets_are_refused(samples: Path, tmp_path: Path) -> None:
    result = frozen(tmp_path / "out", {"samples": samples, "sqnr_db_min": 100.0})
    judged = trials(result)
    assert judged["openvino"].problem is None
    for name in OPENVINO[1:]:
        assert judged[name].problem is not None
        assert name in result.reason
    manifest = artifact_of(result).manifest
    assert (manifest.recipe.name, manifest.accuracy) == ("openvino", None)


@needs_gain
def test_too_few_samples_name_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answers could keep this budget, so none are searched for."""
    searched = mock.Mock()
    monkeypatch.setattr(mixed_precision, "_worst_first", searched)
    few = write_samples(tmp_path / "few.safetensors", 80)
    budget = {"samples": few, "top1_agreement_min": 0.9999}
    result = frozen(tmp_path / "out", budget, ["openvino-int8"], precision=["int8"])
    assert result.verdict == "rejected"
    assert "29956" in result.reason  # log(0.05) / log(0.9999)
    assert not searched.called


@needs_gain
def test_metric_drop_is_judged_with_labels(samples: Path, tmp_path: Path) -> None:
    budget = {"samples": samples, **METRIC, "metric_drop_max": 0.02}
    result = frozen(tmp_path / "out", budget, ["openvino-int8"], precision=["int8"])
    record: Any = artifact_of(result).manifest.accuracy
    assert 0 < record.bounds["metric"] <= 0.02


@needs_gain
def test_generated_inputs_judge_bf16_alone(tmp_path: Path) -> None:
    result = frozen(tmp_path / "out", {"sqnr_db_min": 20.0}, ["openvino-bf16"], precision=["bf16"])
    assert result.verdict == "published", result.reason
    with pytest.raises(SpecError) as refused:
        frozen(tmp_path / "other", {"sqnr_db_min": 20.0}, precision=["int8"])
    assert refused.value.code == "CP-ACCURACY"


@needs_gain
@pytest.mark.parametrize("name", ["openvino-bf16", "openvino-int8", "onnxruntime-int8"])
def test_silent_float32_fails_the_build(
    name: str, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines ignore the property, or leave all products as they are."""
    from freezer.freezing.lowering import open_vino

    settings = {**RECIPES[name].settings, "openvino": recipes.OPENVINO_SETTINGS}
    ignoring = replace(RECIPES[name], settings=settings)
    monkeypatch.setitem(recipes.RECIPES, name, ignoring)
    monkeypatch.setattr(open_vino, "_quantized", lambda model, *_: model)
    monkeypatch.setattr(onnx_runtime, "_quantized", lambda model, *_: model)
    budget = {"samples": samples, "cosine_min": 0.9}
    result = frozen(tmp_path / "out", budget, ["openvino", name])
    assert artifact_of(result).manifest.recipe.name == "openvino"
    assert "stayed in floating point" in result.failures[name]


@needs_gain
def test_weights_in_int8_are_not_enough(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO reports a matrix product in float32 as int8 if its weights are."""
    import openvino

    class Exact(openvino.Core):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.set_property("CPU", {"LP_TRANSFORMS_MODE": "NO"})

    monkeypatch.setattr(openvino, "Core", Exact)
    budget = {"samples": samples, "cosine_min": 0.9}
    result = frozen(tmp_path / "out", budget, ["openvino", "openvino-int8"], precision=["int8"])
    assert "stayed in floating point" in result.failures["openvino-int8"]


class Elementwise(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.tanh(image.flatten(1)) * 3


@needs_gain
def test_models_without_products_stay_float32(samples: Path, tmp_path: Path) -> None:
    budget = {"samples": samples, "cosine_min": 0.9}
    result = frozen(tmp_path / "out", budget, OPENVINO, model=Elementwise().eval())
    assert set(result.failures) == set(OPENVINO[1:])


@needs_gain
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("openvino-int8", {**METRIC, "metric_drop_max": 0.04}),
        ("onnxruntime-int8", {"top1_agreement_min": 0.96}),
        pytest.param("inductor-int8", {"top1_agreement_min": 0.9}, marks=pytest.mark.slow),
    ],
)
def test_layers_that_int8_ruins_stay_exact(
    name: str, budget: dict[str, Any], samples: Path, tmp_path: Path
) -> None:
    fixed = name == "inductor-int8"  # with an eighth of the samples
    budget = {"samples": samples, **budget}
    model = Outlier().eval()
    result = frozen(tmp_path / "out", budget, [name], precision=["int8"], model=model, fixed=fixed)
    manifest = artifact_of(result).manifest
    assert manifest.recipe.settings["kept_nodes"][0] == "linear"
    (report, *_) = manifest.freezing.reports.values()
    assert report.precisions["int8"] >= 1
    assert report.precisions["float32"] == len(report.kept_exact) >= 1
    assert all("budget" in kept.reason for kept in report.kept_exact)


@needs_gain
def test_layers_that_int8_ruins_at_extremes_stay_exact(samples: Path, tmp_path: Path) -> None:
    budget = {"samples": samples, "cosine_min": 0.9}
    names = ["openvino-int8"]
    result = frozen(tmp_path / "out", budget, names, precision=["int8"], model=Faint().eval())
    (trial,) = trials(result).values()
    assert trial.problem is None
    assert "linear" in trial.candidate.settings["kept_nodes"]


@needs_gain
def test_one_search_serves_all_engines(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine builds once more at most."""
    searched = mock.Mock(side_effect=mixed_precision._worst_first)
    built = mock.Mock(side_effect=onnx_runtime.build)
    monkeypatch.setattr(mixed_precision, "_worst_first", searched)
    monkeypatch.setattr(onnx_runtime, "build", built)
    budget = {"samples": samples, "top1_agreement_min": 0.96}
    names = ["openvino-int8", "openvino-int8-bf16", "onnxruntime-int8"]
    model = Outlier().eval()
    result = frozen(tmp_path / "out", budget, names, precision=["int8", "bf16"], model=model)
    kept = [trial.candidate.settings["kept_nodes"] for trial in trials(result).values()]
    assert len(kept) == 3
    assert kept[0] == kept[1] == kept[2]
    assert (searched.call_count, built.call_count) == (1, 2)


@needs_gain
def test_each_budget_is_searched_for(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one model; and a search that fails leaves the whole model in int8 to the judge."""
    searched = mock.Mock(side_effect=RuntimeError("not quantized"))
    monkeypatch.setattr(mixed_precision, "_worst_first", searched)
    model = Outlier().eval()
    for limit in (0.9, 0.96):
        budget = {"samples": samples, "top1_agreement_min": limit}
        names = ["onnxruntime-int8"]
        result = frozen(tmp_path / f"{limit}", budget, names, precision=["int8"], model=model)
        assert result.verdict == "rejected"
        assert trials(result)["onnxruntime-int8"].accuracy is not None
    assert searched.call_count == 2


@needs_gain
def test_kept_nodes_are_not_searched_again(samples: Path, tmp_path: Path) -> None:
    """As for further thread counts."""
    spec, example = example_spec({"image": images(8, 1)[0]}, DIMS)
    options = SubjectOptions(accuracy=Accuracy(samples=samples, sqnr_db_min=100.0))
    subject = prepare("model", classifier(), spec, [example], options)
    recipe = keeping(RECIPES["onnxruntime-int8"], ["conv2d_1"])
    (tmp_path / "candidate").mkdir()
    made = build(subject, recipe, target_here(PRECISE, 1), tmp_path / "candidate")
    assert made.settings == recipe.settings
    (report,) = made.reports.values()
    assert [kept.name for kept in report.kept_exact] == ["node_conv2d_1"]


@needs_gain
def test_masked_attention_is_quantized(tmp_path: Path) -> None:
    """Whose shapes ONNX Runtime's symbolic inference does not find."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=64, intermediate_size=32, **sizes)
    model = transformers.BertForSequenceClassification(config).eval()
    ids = torch.randint(1, 64, (640, 1, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    file = tmp_path / "samples.safetensors"
    save_file(
        {f"{i}/{key}": value for i, row in enumerate(rows) for key, value in row.items()}, file
    )
    options = FreezeOptions(
        recipes=["onnxruntime-int8"],
        num_threads=1,
        limits=ANY_SPEED,
        policy=QUICK,
        precision=["int8"],
        accuracy=Accuracy(samples=file, cosine_min=0.5),
    )
    result = freeze(model, rows[0], out=tmp_path / "out", options=options)
    assert result.verdict == "published", result.reason


@needs_gain
@pytest.mark.slow
@pytest.mark.parametrize("name", ["inductor-bf16", "inductor-int8"])
def test_inductor_computes_in_lower_precision(name: str, samples: Path, tmp_path: Path) -> None:
    """With fixed sizes: AOTInductor of torch 2.13 gives wrong answers in int8 with others."""
    budget = {"samples": samples, "top1_agreement_min": 0.9}
    precision = [name.partition("-")[2]]
    result = frozen(tmp_path / "out", budget, [name], precision=precision, fixed=True)
    (report, *_) = artifact_of(result).manifest.freezing.reports.values()
    assert report.precisions[precision[0]] >= 2
    model = freezer.load(artifact_of(result).folder, canary=True)
    assert model(image=images(8, 1)[0]).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "answer", "precision", "passes"),
    [
        ("masks of ones", [1.0, 1.05], "bf16", True),
        ("masks of ones", [1.0, 1.4], "bf16", False),
        ("masks of ones", [1.0, 1.4], "int8", True),
        ("masks of ones", [1.0, 2.2], "int8+bf16", False),
        ("masks of ones", [1.0, float("nan")], "int8", False),
        ("values 100 times as large", [1.0, 9.0], "int8", True),
        ("values 100 times as large", [1.0, float("inf")], "int8", False),
    ],
)
def test_extremes_hold_for_lower_precision(
    name: str, answer: list[float], precision: str, passes: bool
) -> None:
    subject = mock.Mock(outputs=[mock.Mock()])
    extreme = Extreme(name, subject, [torch.ones(2)], stateful=False, usual=[0.0])
    problem = extreme.problem([torch.tensor(answer)], precision)
    assert (problem is None) == passes
    of_silence = Extreme(name, subject, [torch.zeros(2)], stateful=False, usual=[1.0])
    problem = of_silence.problem([torch.tensor(answer) - 1], precision)
    assert (problem is None) == passes, "where normal answers are as large"


def test_classes_without_the_hardware_get_float32() -> None:
    assert DEVICE_CLASSES["cuda-sm75"].precisions == ("fp16",)
    assert DEVICE_CLASSES["cuda-sm90"].precisions == ("bf16", "fp16", "tf32")
    for name in ("portable", "cpu-x86-64-v3", "cpu-x86-64-v4", "cpu-aarch64"):
        assert DEVICE_CLASSES[name].precisions == ()
    assert DEVICE_CLASSES["cpu-cascadelake"].precisions == ("int8",)
    for name in ("cpu-zen4", "cpu-sapphirerapids", "cpu-neoverse-v1", "cpu-neoverse-v2"):
        assert DEVICE_CLASSES[name].precisions == ("bf16", "int8")
