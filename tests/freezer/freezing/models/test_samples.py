"""Input sets: generated from seeds, or samples that are matched with a spec."""

from __future__ import annotations

import pytest
import torch

from freezer.errors import SpecError
from freezer.freezing.models import example_spec
from freezer.freezing.models.samples import input_sets
from freezer.runtime.input_sets import generate, match_samples
from freezer.spec import declared_spec, interior_points

SPEC = declared_spec(
    {"x": {"shape": ["batch", 4]}, "ids": {"shape": ["batch"], "dtype": "int64", "range": [3, 5]}},
    {"batch": {"max": 9}},
)


@pytest.mark.parametrize("dtype", ["bool", "int64", "bfloat16"])
@pytest.mark.parametrize("name", ["attention_mask", "key_padding_mask"])
def test_generated_masks_are_ones_then_zeros(name: str, dtype: str) -> None:
    """Padded on the other side in every fourth set; only some are without padding."""
    shape = (2, 1, 5, 5)
    sets = generate(declared_spec({name: {"shape": [*shape], "dtype": dtype}}, {}))
    masks = [item.tensors[name] for item in sets]
    for index, mask in enumerate(masks):
        assert (mask.dtype, mask.shape) == (getattr(torch, dtype), shape)
        lengths = mask.to(torch.int64).sum(-1, keepdim=True)
        ones = torch.arange(shape[-1]) < lengths
        assert torch.equal(mask != 0, ones.flip(-1) if index % 4 == 2 else ones)
        assert lengths.min() >= 1
    either = dtype == "bool" or name == "key_padding_mask"
    whole = [bool((mask != 0).all()) for mask in masks]
    assert whole == [not either and index % 4 == 3 for index in range(8)]


@pytest.mark.parametrize("order", [("batch", "seq"), ("seq", "batch")])
def test_largest_corner_is_padded_on_both_sides(order: tuple[str, str]) -> None:
    """A candidate that uses row 0's mask for all rows differs there, whatever the order of the
    dims.
    """
    sizes = {"batch": 6, "seq": 9}
    inputs = {
        "x": {"shape": ["batch", "seq"]},
        "attention_mask": {"shape": ["batch", "seq"], "dtype": "int64"},
        "lengths": {"shape": ["batch"], "dtype": "int64", "range": [1, 9]},
    }
    sets = generate(declared_spec(inputs, {name: {"max": sizes[name]} for name in order}))
    padded = [
        item.tensors["attention_mask"]
        for item in sets
        if item.point == sizes and not item.tensors["attention_mask"].all()
    ]
    assert all((mask != mask[0]).any() for mask in padded), "rows differ"
    assert {bool(mask[:, 0].all()) for mask in padded} == {True, False}, "right and left"
    assert all(int(item.tensors["lengths"].max()) <= item.point["seq"] for item in sets)


def test_mask_example_gets_no_range() -> None:
    spec, _ = example_spec(
        {"attention_mask": torch.ones(2, 6, dtype=torch.int64), "mask_ids": torch.tensor([0, 7])},
        {},
    )
    assert [item.range for item in spec.tensors] == [None, (0, 7)]
    assert (generate(spec)[0].tensors["attention_mask"] == 0).any()


def test_sets_respect_multiples() -> None:
    spec = declared_spec({"x": {"shape": ["n"]}}, {"n": {"min": 4, "max": 44, "multiple_of": 4}})
    between = {point["n"] for point in interior_points(spec, 2)}
    assert {item.tensors["x"].shape[0] for item in generate(spec)} == {4, 12, 44, *between}
    sets = input_sets(match_samples([{"x": torch.zeros(8)}], spec), spec, (), fill_up=False)
    assert {item.point["n"] for item in sets} == {8, 4, 12, 44, *between}
    with pytest.raises(SpecError, match="dim 'n' is 6"):
        match_samples([{"x": torch.zeros(6)}], spec)


def test_missing_points_repeat_rows() -> None:
    sets = match_samples(
        [{"x": torch.arange(8.0).reshape(2, 4), "ids": torch.tensor([3, 4])}], SPEC
    )
    covered = input_sets(sets, SPEC, (), fill_up=False)
    assert [item.point["batch"] for item in covered] == [2, 1, 9, 3, 5, 8]
    assert covered[2].tensors["ids"].tolist() == [3, 4, 3, 4, 3, 4, 3, 4, 3]
    assert torch.equal(covered[3].tensors["x"][2], covered[0].tensors["x"][0])
