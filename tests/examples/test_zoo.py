"""The zoo: its files can be prepared, it has every kind of source, and every model answers
generated inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import examples.zoo
from examples.prepare import prepare
from freezer.freezing.models import Subject, call_source
from freezer.freezing.sources import KINDS
from freezer.runtime.tensors import leaves_of
from pipeline.catalog import read_catalog
from pipeline.planning import FileDigests
from pipeline.sources import Materials
from pipeline.worker.task_child import load_subject

ZOO = Path(examples.zoo.__file__).with_name("zoo.yaml")
NAMES = (
    *(
        "resnet",
        "mobilenet",
        "efficientnet",
        "convnext",
        "unet",
        "vit",
        "swin",
        "bert",
        "gpt",
        "llama",
        "whisper-encoder",
    ),
    *(
        "lstm-decoder",
        "recommender",
        "ranker",
        "speaker-embedder",
        "codec-encoder",
        "codec-decoder",
        "digits-champion",
    ),
)
"""In the order of the catalog."""

SubjectOf = Callable[[str], Subject]


@pytest.fixture(scope="module")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An MLflow in which the digits are registered; the files are where the catalog expects
    them.
    """
    uri = f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"
    prepare(catalogs=("zoo",), tracking_uri=uri)
    return uri


@pytest.fixture(scope="module")
def subject_of(tracking_uri: str, tmp_path_factory: pytest.TempPathFactory) -> SubjectOf:
    """Loads an entry as a worker does."""
    store = tmp_path_factory.mktemp("zoo-store")
    materials = Materials(store, tracking_uri, FileDigests(store / "digests.json"))
    resolved, problems = materials.resolve(read_catalog(ZOO).entries)
    assert problems == []
    entries = {entry.name: materials.ready(entry) for entry in resolved}
    return cache(lambda name: load_subject(entries[name]))


@pytest.mark.usefixtures("tracking_uri")  # which prepares the files
def test_the_zoo_has_every_kind_of_source() -> None:
    catalog = read_catalog(ZOO)
    assert catalog.problems == ()
    assert tuple(entry.name for entry in catalog.entries) == NAMES
    assert {entry.source.kind for entry in catalog.entries} == {*KINDS, "mlflow"}


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_answers_generated_inputs(subject_of: SubjectOf, name: str) -> None:
    subject = subject_of(name)
    assert len(subject.sets) >= 8
    assert {tuple(item.point.items()) for item in subject.sets} >= {
        tuple(point.items()) for point in subject.spec.points()
    }
    model = subject.fresh()
    first, last = (
        leaves_of(call_source(model, subject.spec, subject.sets[index].cloned()))
        for index in (0, -1)
    )
    for leaves in (first, last):
        assert [str(leaf.dtype) for leaf in leaves] == [
            f"torch.{output.dtype}" for output in subject.outputs
        ]
        assert all(torch.isfinite(leaf).all() for leaf in leaves)
    assert not all(torch.equal(one, other) for one, other in zip(first, last, strict=True)), (
        "the inputs change nothing"
    )
