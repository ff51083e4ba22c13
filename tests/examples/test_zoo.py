"""The zoo: its files can be made, every kind of source is in it, and every model loads and answers to generated inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import examples.zoo
from examples.models import DATA, digits, digits_accuracy
from examples.prepare import prepare
from examples.zoo import audio_codec
from examples.zoo_files import ALIAS, BERT, MAX_RECORDINGS, REGISTERED, ZOO_FILES
from freezer.freezing.models.calls import call_source
from freezer.freezing.models.loaders import load_source
from freezer.freezing.models.sources import KINDS
from freezer.freezing.models.subject import Subject
from freezer.freezing.models.weights import weights_digest
from freezer.runtime.pytree import leaves_of
from freezer.runtime.threads import threads
from pipeline.catalog.catalog import read_catalog
from pipeline.catalog.entry import Entry
from pipeline.planning.file_digests import FileDigests
from pipeline.sources.materials import Materials
from pipeline.worker.tasks import load_subject

ZOO = Path(examples.zoo.__file__).with_name("zoo.yaml")
NAMES = (
    *("resnet", "mobilenet", "efficientnet", "convnext", "unet", "vit", "swin", "bert", "gpt", "llama", "whisper-encoder"),
    *("lstm-decoder", "recommender", "ranker", "speaker-embedder", "codec-encoder", "codec-decoder", "digits-champion"),
)
"""In the order of the catalog."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Nothing is timed here, and threads that wait for each other on a busy machine take many times as long."""
    with threads(1):
        yield


@pytest.fixture(scope="session")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An MLflow of this session's own in which the digits are registered; the files lie where the catalog looks for them."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"
    prepare(catalogs=("zoo",), tracking_uri=uri)
    return uri


@pytest.fixture(scope="session")
def entries(tracking_uri: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entry]:
    """The entries as workers load them."""
    catalog = read_catalog(ZOO)
    assert catalog.problems == ()
    store = tmp_path_factory.mktemp("zoo-store")
    materials = Materials(store, tracking_uri, FileDigests(store / "digests.json"))
    resolved, problems = materials.resolve(catalog.entries)
    assert problems == []
    return {entry.name: materials.ready(entry) for entry in resolved}


@pytest.fixture(scope="session")
def subject_of(entries: dict[str, Entry]) -> Callable[[str], Subject]:
    return cache(lambda name: load_subject(entries[name]))


def _num(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def _ranges(subject: Subject) -> dict[str, Any]:
    return {item.name: item.range for item in subject.spec.tensors if item.dtype == "int64"}


def test_the_zoo_has_an_entry_of_every_kind_of_source(tracking_uri: str) -> None:
    catalog = read_catalog(ZOO)
    assert catalog.problems == ()
    assert tuple(entry.name for entry in catalog.entries) == NAMES
    assert {entry.source.kind for entry in catalog.entries} == {*KINDS, "mlflow"}


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_loads_and_answers_to_all_its_inputs(
    entries: dict[str, Entry], subject_of: Callable[[str], Subject], name: str
) -> None:
    subject = subject_of(name)
    assert len(subject.sets) >= 8
    assert {tuple(item.point.items()) for item in subject.sets} >= {tuple(point.items()) for point in subject.spec.points()}
    model = subject.fresh()
    answers = [leaves_of(call_source(model, subject.spec, item.cloned())) for item in subject.sets]
    for leaves in answers:
        assert [str(leaf.dtype) for leaf in leaves] == [f"torch.{output.dtype}" for output in subject.outputs]
        assert all(torch.isfinite(leaf).all() for leaf in leaves)
    assert not all(torch.equal(one, other) for one, other in zip(answers[0], answers[-1], strict=True)), "inputs change nothing"
    assert weights_digest(load_source(entries[name].source)) == weights_digest(subject.model)


def test_prepare_makes_each_file_once_and_registers_one_version(tracking_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow import MlflowClient

    before = {path: path.stat().st_mtime_ns for path in DATA.iterdir()}
    paths = prepare(catalogs=("zoo",), tracking_uri=tracking_uri)
    assert {DATA / name for name in ZOO_FILES} <= set(paths)
    assert {path: path.stat().st_mtime_ns for path in DATA.iterdir()} == before
    assert all(line.endswith(": up to date") for line in capsys.readouterr().out.splitlines())
    client = MlflowClient(tracking_uri, tracking_uri)
    (version,) = client.search_model_versions(f"name = '{REGISTERED}'")
    assert client.get_model_version_by_alias(REGISTERED, ALIAS).version == version.version


def test_only_what_is_missing_of_the_zoo_is_made(tracking_uri: str, tmp_path: Path) -> None:
    for name in ("digits.safetensors", "digits_samples.safetensors", "digits_test.safetensors", "vad.jit", "speaker.pt2"):
        (tmp_path / name).write_bytes(b"kept")
    paths = prepare(tmp_path, catalogs=("zoo",), tracking_uri=tracking_uri)
    assert sorted(tmp_path.iterdir()) == sorted(paths), "an unfinished file was left"
    assert [path.name for path in paths if path.is_file() and path.read_bytes() == b"kept"] == [path.name for path in paths[:5]]
    assert (tmp_path / "bert" / "config.json").is_file()


def test_ids_are_within_the_tables_that_look_them_up(subject_of: Callable[[str], Subject]) -> None:
    sizes = (1000, 5000, 200, 20000, 300, 8000)
    assert _ranges(subject_of("recommender")) == {f"ids.{index}": (0, size - 1) for index, size in enumerate(sizes)}
    assert _ranges(subject_of("ranker")) == {"features.history": (0, 4999), "features.candidates": (0, 4999)}
    assert _ranges(subject_of("llama"))["input_ids"] == (0, 7999)
    assert _ranges(subject_of("codec-decoder")) == {"codes": (0, 1023)}


def test_inputs_share_their_dims(subject_of: Callable[[str], Subject]) -> None:
    assert {item.shape[-1] for item in subject_of("bert").spec.tensors} == {"length"}
    assert {item.shape[0] for item in subject_of("recommender").spec.tensors} == {"batch"}
    (batch,) = subject_of("speaker-embedder").spec.dims
    assert (batch.min, batch.max) == (1, MAX_RECORDINGS)


def test_the_entries_are_what_their_comments_say(subject_of: Callable[[str], Subject]) -> None:
    assert [output.name for output in subject_of("lstm-decoder").outputs] == ["0", "1.0", "1.1"]
    assert [output.name for output in subject_of("ranker").outputs] == ["scores", "user"]
    assert [output.name for output in subject_of("whisper-encoder").outputs] == ["last_hidden_state"]
    assert _num(subject_of("resnet").model, nn.Conv2d) == 1 + 8 * 3 + 4, "a stem, 8 blocks of three, and 4 shortcuts"
    assert type(subject_of("bert").model).__name__ == "BertForSequenceClassification"
    bert: Any = subject_of("bert").model
    assert bert.config.num_hidden_layers == BERT["num_hidden_layers"]
    assert subject_of("codec-encoder").scripted
    assert type(subject_of("ranker").model).__name__ == "Ranker"


def test_the_two_methods_of_the_codec_are_those_of_its_source(subject_of: Callable[[str], Subject]) -> None:
    source = audio_codec()
    encoder, decoder = subject_of("codec-encoder"), subject_of("codec-decoder")
    audio: Tensor = encoder.sets[0].tensors["audio"]
    with torch.no_grad():
        codes = encoder.fresh()(audio)
        assert torch.equal(codes, source.encode(audio))  # type: ignore[operator]
        torch.testing.assert_close(decoder.fresh()(codes), source(audio))


def test_the_champion_is_the_trained_model(subject_of: Callable[[str], Subject]) -> None:
    subject = subject_of("digits-champion")
    images = torch.rand(5, 1, 8, 8)
    champion = subject.fresh()
    with torch.no_grad():
        torch.testing.assert_close(champion(images), digits()(images))
        assert digits_accuracy(lambda image: champion(image)) > 0.97
