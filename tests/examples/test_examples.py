"""The example catalog: its files can be prepared, and its models match their descriptions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import examples.models
from examples.models import (
    digits,
    digits_accuracy,
)
from examples.prepare import SAMPLE_SIZES, prepare
from freezer.freezing.models import Subject, call_source
from freezer.freezing.sources import find_function
from freezer.runtime.tensors import leaves_of
from pipeline.catalog import Catalog, read_catalog
from pipeline.worker.task_child import load_subject

CATALOG = Path(examples.models.__file__).with_name("catalog.yaml")


@pytest.fixture(scope="module")
def files() -> list[Path]:
    return prepare()


@pytest.fixture(scope="module")
def catalog(files: list[Path]) -> Catalog:
    return read_catalog(CATALOG)


@pytest.fixture(scope="module")
def subjects(catalog: Catalog) -> dict[str, Subject]:
    return {entry.name: load_subject(entry) for entry in catalog.entries}


def test_the_trained_digits_are_accurate(files: list[Path]) -> None:
    with torch.no_grad():
        assert digits_accuracy(digits()) > 0.97


def test_every_entry_answers_as_its_comments_say(
    subjects: dict[str, Subject], catalog: Catalog
) -> None:
    assert catalog.problems == ()
    assert list(subjects) == ["digits", "resnet18", "bert-small", "vad"]
    for subject in subjects.values():
        for leaf in leaves_of(call_source(subject.fresh(), subject.spec, subject.sets[0].tensors)):
            assert torch.isfinite(leaf).all()
    assert (
        tuple(item.point["batch"] for item in subjects["digits"].sets)[: len(SAMPLE_SIZES)]
        == SAMPLE_SIZES
    )
    assert [output.name for output in subjects["vad"].outputs] == ["0", "1", "2"]
    assert subjects["vad"].scripted
    assert subjects["vad"].spec.constants == {"sr": 16000}
    metric = next(entry.task_metric for entry in catalog.entries if entry.name == "digits")
    assert find_function(str(metric), ()) is digits_accuracy
