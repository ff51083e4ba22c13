"""Traces: refused ones, those kept with a note, and their evidence."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import CaptureError
from freezer.freezing.models.subject import Subject, prepare
from freezer.spec.parse import declared_spec
from tests.freezer.freezing.capture.test_value_reads import Stateful
from tests.lines import place_of
from tests.models import Branching, Calling, Halving, seeded
from tests.steps import BATCH, captured_by, random_inputs, subject_of

X = random_inputs(2, 4)


def subject(model: nn.Module, *, dynamic: bool = False) -> Subject:
    return subject_of(model, {"x": X}, {"x": {0: BATCH}} if dynamic else {})


@pytest.mark.parametrize(("model", "part"), [(Branching, "x.sum()"), (Halving, "while")])
@pytest.mark.parametrize("dynamic", [False, True])
def test_trace_refuses_models_that_read_values(model: type[nn.Module], part: str, dynamic: bool) -> None:
    place = re.escape(place_of(model.forward, part))
    with pytest.raises(
        CaptureError, match=f"^the trace would keep for all calls what Python reads of its inputs at {place}; use"
    ) as caught:
        captured_by(subject(model(), dynamic=dynamic), "trace")
    assert caught.value.code == "CP-TRACE-VALUES"


def test_reading_changing_state_is_refused() -> None:
    with pytest.raises(CaptureError, match="what Python reads of state that a call changes at test_") as caught:
        captured_by(subject(seeded(Stateful)), "trace")
    assert caught.value.code == "CP-TRACE-VALUES"


def behind_the_back(x: Tensor) -> Tensor:
    """Reads the bytes of its input unseen by any mode; the answers are the same."""
    return x + 0 if sum(x.untyped_storage().tolist()) % 2 else x * 1


def test_different_graph_at_equal_sizes_is_refused() -> None:
    place = re.escape(place_of(behind_the_back, "return"))
    samples = [{"x": torch.tensor([number])} for number in (1, 2)]
    spec = declared_spec({"x": {"shape": [1], "dtype": "int64"}}, {})
    message = (
        "the trace of input set 1 differs from the trace of input set 0, which has the same sizes: "
        rf"`.*`, expected `.*` at {place}"
    )
    with pytest.raises(CaptureError, match=message) as caught:
        captured_by(prepare("model", Calling(behind_the_back), spec, samples), "trace")
    assert caught.value.code == "CP-TRACE-DIFFERS"


def test_values_read_only_at_other_sizes_are_found() -> None:
    def large(x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            x = x * 1
            if bool(x.abs().max() > 1000):
                x = x * 0
        return x

    with pytest.raises(CaptureError, match=re.escape(place_of(large, "max() > 1000"))) as caught:
        captured_by(subject(Calling(large), dynamic=True), "trace")
    assert caught.value.code == "CP-TRACE-VALUES"
