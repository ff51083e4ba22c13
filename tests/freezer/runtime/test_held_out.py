"""The split of held-out samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch

from freezer.errors import SpecError
from freezer.freezing.models import example_spec
from freezer.runtime.held_out import HeldOut, read_held_out
from freezer.spec import Accuracy, InputSpec
from tests.support.classifiers import DIMS, images, write_samples


@pytest.fixture
def spec() -> InputSpec:
    return example_spec({"image": images(1, 0)[0]}, DIMS)[0]


def rows(held_out: HeldOut) -> list[bytes]:
    return [inputs.tensors["image"].numpy().tobytes() for inputs, _ in held_out.samples]


def test_parts_are_disjoint_and_fixed(spec: InputSpec, tmp_path: Path) -> None:
    accuracy = Accuracy(samples=write_samples(tmp_path / "a.safetensors", 80), labels="label")
    first, again = (read_held_out(accuracy, spec) for _ in range(2))
    assert first.counts == {"calibration": 10, "search": 10, "judged": 60}
    assert len(set(rows(first))) == 80
    assert rows(first) == rows(again)
    earlier = read_held_out(accuracy, spec, num_apart=4)  # as the manifest of an artifact says
    assert earlier.counts == {"calibration": 4, "search": 4, "judged": 72}
    inputs, labels = images(80, 10_000)
    known = {row.numpy().tobytes(): int(label) for row, label in zip(inputs, labels, strict=True)}
    for row, (_, label) in zip(rows(first), first.samples, strict=True):
        assert label is not None
        assert int(label) == known[row]


def test_repeated_samples_count_once(spec: InputSpec, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    few = images(16, 1)[0].split(8)
    safetensors.torch.save_file({f"{i}/image": few[i % 2].clone() for i in range(40)}, path)
    assert sum(read_held_out(Accuracy(samples=path), spec).counts.values()) == 16


def test_too_few_or_unlabelled_samples_are_refused(spec: InputSpec, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"image": images(4, 1)[0]}, path)
    for accuracy in (Accuracy(samples=path), Accuracy(samples=path, labels="label")):
        with pytest.raises(SpecError) as refused:
            read_held_out(accuracy, spec)
        assert refused.value.code == "CP-ACCURACY"


def test_fixed_sizes_are_samples_as_a_whole(tmp_path: Path) -> None:
    spec = example_spec({"image": images(8, 0)[0]}, {})[0]
    path = write_samples(tmp_path / "a.safetensors", 160)
    held_out = read_held_out(Accuracy(samples=path, labels="label"), spec)
    assert held_out.counts == {"calibration": 2, "search": 2, "judged": 16}
