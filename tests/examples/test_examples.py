"""The example catalog: its files can be made, and its models are what it says they are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import examples.models
from examples.models import DIGITS_SAMPLES, DIGITS_TEST, DIGITS_WEIGHTS, VAD, VAD_HIDDEN, digits, digits_accuracy, voice_activity
from examples.prepare import SAMPLE_SIZES, digits_split, prepare
from freezer.freezing.models.calls import call_source
from freezer.freezing.models.loaders import load_source
from freezer.freezing.models.samples import match_samples
from freezer.freezing.models.sources import find_function
from freezer.freezing.models.subject import Subject
from freezer.freezing.models.subject import prepare as prepare_subject
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from freezer.runtime.tensor_files import read_samples
from freezer.spec.inputs import InputSpec
from pipeline.catalog.catalog import Catalog, read_catalog
from pipeline.catalog.entry import Entry

CATALOG = Path(examples.models.__file__).parent / "catalog.yaml"
NAMES = ("digits", "resnet18", "bert-small", "vad")


@pytest.fixture(scope="session")
def files() -> list[Path]:
    return prepare()


@pytest.fixture(scope="session")
def catalog(files: list[Path]) -> Catalog:
    return read_catalog(CATALOG)


@pytest.fixture(scope="session")
def subjects(catalog: Catalog) -> dict[str, Subject]:
    return {entry.name: _subject(entry) for entry in catalog.entries}


@pytest.fixture(scope="session")
def scripted(files: list[Path]) -> Any:
    with torchscript_deprecations_silenced():
        return torch.jit.load(str(VAD)).eval()


def _spec(entry: Entry) -> InputSpec:
    assert entry.spec is not None
    return entry.spec


def _subject(entry: Entry) -> Subject:
    samples = read_samples(Path(entry.samples)) if entry.samples else ()
    return prepare_subject(entry.name, load_source(entry.source), _spec(entry), samples)


def _audio(seed: int, sr: int = 16000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    h, c = torch.randn(2, 1, 1, VAD_HIDDEN, generator=generator)
    return {"audio": torch.rand(1, 512, generator=generator) * 2 - 1, "h": h, "c": c, "sr": sr}


def test_preparing_makes_every_file_and_then_keeps_them(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert files == [DIGITS_WEIGHTS, DIGITS_SAMPLES, DIGITS_TEST, VAD]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    assert prepare() == files
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before
    assert capsys.readouterr().out.splitlines() == [f"{path}: up to date" for path in files]


def test_only_a_missing_file_is_made(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / DIGITS_WEIGHTS.name).write_bytes(b"kept")
    made = prepare(tmp_path)
    assert [path.name for path in made] == [path.name for path in files]
    assert made[0].read_bytes() == b"kept"
    assert made[1].read_bytes() == DIGITS_SAMPLES.read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted(made), "an unfinished file was left"


def test_the_trained_digits_are_right_on_digits_they_never_saw(files: list[Path]) -> None:
    model = digits()
    with torch.no_grad():
        assert digits_accuracy(model) > 0.97
    split = digits_split()
    train = {image.numpy().tobytes() for image in split.train_images}
    assert not any(image.numpy().tobytes() in train for image in split.test_images)


def test_the_task_metric_counts_what_is_right_in_batches_of_64(files: list[Path]) -> None:
    labels = safetensors.torch.load_file(DIGITS_TEST)["labels"]
    asked: list[int] = []

    def always_three(image: Tensor) -> Tensor:
        asked.append(len(image))
        return torch.nn.functional.one_hot(torch.full((len(image),), 3), 10)

    assert digits_accuracy(always_three) == int((labels == 3).sum()) / len(labels)
    assert asked == [64, 64, 64, 64, 64, 40]


def test_digits_are_the_same_twice(files: list[Path]) -> None:
    image = read_samples(DIGITS_SAMPLES)[-1]["image"]
    with torch.no_grad():
        assert torch.equal(digits()(image=image), digits()(image=image))


def test_digits_without_weights_say_how_to_make_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(examples.models, "DIGITS_WEIGHTS", tmp_path / "digits.safetensors")
    with pytest.raises(FileNotFoundError, match=r"digits\.safetensors is not there; make it with `python -m examples\.prepare`"):
        digits()


def test_the_samples_are_test_images_and_reach_every_point(catalog: Catalog) -> None:
    entry = next(entry for entry in catalog.entries if entry.name == "digits")
    sets = match_samples(read_samples(DIGITS_SAMPLES), _spec(entry))
    assert tuple(item.point["batch"] for item in sets) == SAMPLE_SIZES
    assert all(point in [item.point for item in sets] for point in _spec(entry).points())
    images = torch.cat([item.tensors["image"] for item in sets])
    assert torch.equal(images, digits_split().test_images[: len(images)])
    assert float(images.min()) == 0
    assert float(images.max()) == 1


@pytest.mark.parametrize("sr", [16000, 8000])
def test_the_torchscript_file_agrees_with_its_source(scripted: Any, sr: int) -> None:
    source, given = voice_activity(), _audio(seed=1, sr=sr)
    with torch.no_grad():
        for got, expected in zip(scripted(**given), source(**given), strict=True):
            torch.testing.assert_close(got, expected)


def test_the_sampling_rate_chooses_the_branch(scripted: Any) -> None:
    with torch.no_grad():
        fast, slow = scripted(**_audio(seed=1, sr=16000))[0], scripted(**_audio(seed=1, sr=8000))[0]
        assert not torch.allclose(fast, slow)
        with pytest.raises(Exception, match="sr is 44100; expected 16000 or 8000"):
            scripted(**_audio(seed=1, sr=44100))


def test_freezing_the_torchscript_file_keeps_the_branch_and_the_state(scripted: Any) -> None:
    with torchscript_deprecations_silenced(), torch.no_grad():
        frozen = torch.jit.freeze(copy.deepcopy(scripted))
        ours, theirs = _audio(seed=2), _audio(seed=2)
        for call in range(4):
            sr = 16000 if call % 2 else 8000
            answers = frozen(**{**ours, "sr": sr}), scripted(**{**theirs, "sr": sr})
            torch.testing.assert_close(answers[0], answers[1])
            ours |= {"h": answers[0][1], "c": answers[0][2]}
            theirs |= {"h": answers[1][1], "c": answers[1][2]}


def test_the_catalog_has_four_good_entries(catalog: Catalog) -> None:
    assert catalog.problems == ()
    assert tuple(entry.name for entry in catalog.entries) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_loads_and_answers_alike_twice(subjects: dict[str, Subject], catalog: Catalog, name: str) -> None:
    entry, subject = next(entry for entry in catalog.entries if entry.name == name), subjects[name]
    given = subject.sets[0].tensors
    again = load_source(entry.source)
    for one, other in zip(
        _tensors(call_source(subject.fresh(), subject.spec, given)), _tensors(call_source(again, subject.spec, given)), strict=True
    ):
        assert torch.equal(one, other)
        assert torch.isfinite(one).all()


def test_the_entries_are_what_their_comments_say(subjects: dict[str, Subject], catalog: Catalog) -> None:
    assert [output.name for output in subjects["vad"].outputs] == ["0", "1", "2"]
    assert subjects["vad"].scripted
    assert subjects["vad"].spec.constants == {"sr": 16000}
    assert [output.name for output in subjects["resnet18"].outputs] == ["logits"]
    assert sum(isinstance(module, torch.nn.Conv2d) for module in subjects["resnet18"].model.modules()) == 17 + 3
    assert {len(item.tensors["input_ids"][0]) for item in subjects["bert-small"].sets} == {128}
    metric = next(entry.task_metric for entry in catalog.entries if entry.name == "digits")
    assert find_function(str(metric), ()) is digits_accuracy


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return list(result.values() if hasattr(result, "values") else result)
