"""Traces: refused ones, those kept with a note, and their evidence."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import CaptureError
from freezer.freezing.candidates.build import build
from freezer.freezing.capture.trace_graph import Line, difference, lines_of_graph, shortened
from freezer.freezing.models.subject import Subject, prepare
from freezer.freezing.recipes.recipes import RECIPES
from freezer.freezing.target.target import target_here
from freezer.spec.parse import declared_spec
from tests.freezer.freezing.capture.test_value_reads import Stateful
from tests.lines import place_of
from tests.models import Branching, Calling, Halving, seeded
from tests.steps import BATCH, HERE, captured_by, random_inputs, subject_of

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
        rf"`-aten::add\(x, 0, 1\)`, `\+aten::mul\(x, 1\)` at {place}"
    )
    with pytest.raises(CaptureError, match=message) as caught:
        captured_by(prepare("model", Calling(behind_the_back), spec, samples), "trace")
    assert caught.value.code == "CP-TRACE-DIFFERS"
    whole = "".join(traceback.format_exception(caught.value))
    diff = rf"^--- input set 0\n\+\+\+ input set 1\n@@ -1,2 \+1,2 @@\n-aten::add\(x, 0, 1\)  # {place}$"
    assert re.search(diff, whole, re.MULTILINE)


class BySize(nn.Module):
    """Computes the same with other operations for large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            out: Tensor = self.last(x.reshape(-1, 4))
        else:
            out = self.last(x)
        return out


def test_different_graph_between_sizes_is_noted(tmp_path: Path) -> None:
    found = captured_by(subject(seeded(BySize), dynamic=True), "trace")
    (note,) = found.notes
    place = place_of(BySize.forward, "reshape(")
    assert re.match(
        r"the graph of input set \d \(batch=4\) differs from that of input set \d \(batch=1\), and both answer like the model", note
    )
    assert "`+aten::reshape(x, [-1, 4])`" in note
    assert f"+aten::reshape(x, [-1, 4])  # {place}\n" in found.texts["trace-diff.txt"]
    only_trace = replace(RECIPES["torchscript-frozen"], ways=(("trace", "torchscript"),))
    candidate = build(subject(seeded(BySize), dynamic=True), only_trace, target_here(HERE, torch.get_num_threads()), tmp_path)
    (report,) = candidate.reports.values()
    assert note in report.notes
    assert (tmp_path / "evidence" / "all-trace-diff.txt").read_text() == found.texts["trace-diff.txt"]
    assert [re.sub(r" at .*", "", line.partition(": ")[2])[:40] for line in candidate.warnings] == [
        "Converting a tensor to a Python boolean "
    ]
    assert place_of(BySize.forward, "if x.shape") in candidate.warnings[0]


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


def lines(function: Callable[[Tensor], Any], x: Tensor = X) -> list[Line]:
    from freezer.runtime.jit_warnings import torchscript_deprecations_silenced

    with torchscript_deprecations_silenced(), torch.no_grad():
        return lines_of_graph(torch.jit.trace(Calling(function), (x,), check_trace=False), ["x"])


def test_constants_are_compared_by_bytes() -> None:
    def plus(values: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: x + values

    one, other = torch.zeros(4), torch.zeros(4)
    assert difference(lines(plus(one)), lines(plus(other)), "one", "other") == ""
    other[3] = -0.0
    diff = difference(lines(plus(one)), lines(plus(other)), "one", "other")
    assert re.search(r"^-aten::add\(x, tensor<float32\[4\] [0-9a-f]{12}>, 1\)", diff, re.MULTILINE)
    assert shortened(diff).startswith("`-aten::add(x, tensor<")


def test_swapped_operands_are_a_difference() -> None:
    def crossed(x: Tensor, swap: bool) -> Tensor:
        a, b = x.relu(), x.abs().relu()
        return b - a if swap else a - b

    diff = difference(lines(lambda x: crossed(x, False)), lines(lambda x: crossed(x, True)), "one", "other")
    assert re.search(r"^-%\d+ = aten::sub\(%\d+, %\d+, 1\)", diff, re.MULTILINE)
