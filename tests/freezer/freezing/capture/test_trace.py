"""Traces: what is refused with which difference, what is kept with a note, and the evidence of both."""

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
from tests.freezer.freezing.capture.test_value_reads import Encoding, Stateful
from tests.lines import place_of
from tests.models import Branching, Calling, Halving, Mlp, seeded
from tests.steps import BATCH, HERE, captured_by, random_inputs, subject_of

X = random_inputs(2, 4)


def subject(model: nn.Module, *, dynamic: bool = False) -> Subject:
    return subject_of(model, {"x": X}, {"x": {0: BATCH}} if dynamic else {})


@pytest.mark.parametrize(("model", "part"), [(Branching, "x.sum()"), (Halving, "while")])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_whose_python_reads_values_is_never_traced(model: type[nn.Module], part: str, dynamic: bool) -> None:
    place = re.escape(place_of(model.forward, part))
    with pytest.raises(
        CaptureError, match=f"^the trace would keep for all calls what Python reads of its inputs at {place}; use"
    ) as caught:
        captured_by(subject(model(), dynamic=dynamic), "trace")
    assert caught.value.code == "CP-TRACE-VALUES"


def test_a_branch_that_all_samples_take_alike_is_refused_too() -> None:
    positive = prepare("model", Branching().eval(), declared_spec({"x": {"shape": [2, 4], "range": [1, 2]}}, {}))
    with pytest.raises(CaptureError, match=r"what Python reads of its inputs at models\.py") as caught:
        captured_by(positive, "trace")
    assert caught.value.code == "CP-TRACE-VALUES"


class Routed(nn.Module):
    """The input chooses one of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Any:
        return self.experts[x.sum().long().abs() % 2](x)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("model", "of"),
    [(Stateful, "state that a call changes"), (Routed, "its inputs")],
)
def test_state_and_routes_are_values_too(model: type[nn.Module], of: str) -> None:
    with pytest.raises(CaptureError, match=f"what Python reads of {of} at test_") as caught:
        captured_by(subject(seeded(model)), "trace")
    assert caught.value.code == "CP-TRACE-VALUES"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_looks_at_its_mask_is_not_traced() -> None:
    inputs: Any = {"x": {"shape": [2, 5, 8]}, "padding": {"shape": [2, 5], "dtype": "bool"}}
    with pytest.raises(CaptureError, match=r"at test_value_reads\.py:\d+: out: Tensor = self\.encoder\(") as caught:
        captured_by(prepare("model", seeded(Encoding), declared_spec(inputs, {})), "trace")
    assert caught.value.code == "CP-TRACE-VALUES"


def behind_the_back(x: Tensor) -> Tensor:
    """Reads the bytes of its input in a way that no mode sees; the answers are the same."""
    return x + 0 if sum(x.untyped_storage().tolist()) % 2 else x * 1


def test_another_graph_for_inputs_of_the_same_sizes_is_refused_with_the_difference() -> None:
    place = re.escape(place_of(behind_the_back, "return"))
    samples = [{"x": torch.tensor([number])} for number in (1, 2)]
    spec = declared_spec({"x": {"shape": [1], "dtype": "int64"}}, {})
    message = (
        "the trace is another for input set 1 than for input set 0, which is as large: "
        rf"`-aten::add\(x, 0, 1\)`, `\+aten::mul\(x, 1\)` at {place}"
    )
    with pytest.raises(CaptureError, match=message) as caught:
        captured_by(prepare("model", Calling(behind_the_back), spec, samples), "trace")
    assert caught.value.code == "CP-TRACE-DIFFERS"
    whole = "".join(traceback.format_exception(caught.value))
    diff = rf"^--- input set 0\n\+\+\+ input set 1\n@@ -1,2 \+1,2 @@\n-aten::add\(x, 0, 1\)  # {place}$"
    assert re.search(diff, whole, re.MULTILINE)


class BySize(nn.Module):
    """Computes the same in another way where the batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            out: Tensor = self.last(x.reshape(-1, 4))
        else:
            out = self.last(x)
        return out


def test_a_graph_that_differs_between_sizes_alone_is_kept_with_a_note_and_the_difference(tmp_path: Path) -> None:
    found = captured_by(subject(seeded(BySize), dynamic=True), "trace")
    (note,) = found.notes
    place = place_of(BySize.forward, "reshape(")
    assert re.match(
        r"the graph of input set \d \(batch=4\) is not that of input set \d \(batch=1\), and both answer as the model", note
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
    assert place_of(BySize.forward, "if x.shape") in candidate.warnings[0], "the tracer's warning, with the user's line"


def test_a_note_does_not_say_that_answers_agree_which_could_not_be_compared() -> None:
    class Noisy(BySize):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand_like(x[:, :3])

    found = captured_by(subject(seeded(Noisy), dynamic=True), "trace")
    assert found.warnings[-1] == "the trace is not held against the model, which answers the same inputs differently"
    (note,) = found.notes
    assert re.match(r"the graph of input set \d \(batch=4\) is not that of input set \d \(batch=1\): `", note)


def test_values_that_python_reads_at_other_sizes_alone_are_found() -> None:
    def large(x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            x = x * 1
            if bool(x.abs().max() > 1000):
                x = x * 0
        return x

    with pytest.raises(CaptureError, match=re.escape(place_of(large, "max() > 1000"))) as caught:
        captured_by(subject(Calling(large), dynamic=True), "trace")
    assert caught.value.code == "CP-TRACE-VALUES"


def test_a_plain_model_has_no_note() -> None:
    found = captured_by(subject(seeded(Mlp), dynamic=True), "trace")
    assert (found.notes, dict(found.texts), found.warnings) == ((), {}, ())


def lines(function: Callable[[Tensor], Any], x: Tensor = X) -> list[Line]:
    from freezer.runtime.jit_warnings import torchscript_deprecations_silenced

    with torchscript_deprecations_silenced(), torch.no_grad():
        return lines_of_graph(torch.jit.trace(Calling(function), (x,), check_trace=False), ["x"])


def test_the_lines_of_a_graph_read_like_calls() -> None:
    found = lines(lambda x: (torch.cat([x, x * 2.5], 1), x + torch.arange(4.0).view(1, 4)))
    assert [line.readable for line in found] == [
        "aten::mul(x, 2.5)",
        "aten::cat([x, mul], 1)",
        "aten::arange(4.0, None, None, device(type='cpu'), False)",
        "aten::view(arange, [1, 4])",
        "aten::add(x, view, 1)",
        "return((cat, add))",
    ]
    assert all(line.where.startswith("test_trace.py:") for line in found[:-1])


def test_constants_are_compared_with_all_their_bytes() -> None:
    def plus(values: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: x + values

    one, other = torch.zeros(4), torch.zeros(4)
    assert difference(lines(plus(one)), lines(plus(other)), "one", "other") == ""
    other[3] = -0.0
    diff = difference(lines(plus(one)), lines(plus(other)), "one", "other")
    assert re.search(r"^-aten::add\(x, tensor<float32\[4\] [0-9a-f]{12}>, 1\)", diff, re.MULTILINE)
    assert shortened(diff).startswith("`-aten::add(x, tensor<")


def test_shapes_that_the_tracer_noted_are_no_difference() -> None:
    assert difference(lines(lambda x: x.relu() * 2), lines(lambda x: x.relu() * 2, random_inputs(3, 4)), "one", "other") == ""


def test_other_wires_between_the_same_operations_are_a_difference() -> None:
    def crossed(x: Tensor, swap: bool) -> Tensor:
        a, b = x.relu(), x.abs().relu()
        return b - a if swap else a - b

    diff = difference(lines(lambda x: crossed(x, False)), lines(lambda x: crossed(x, True)), "one", "other")
    assert re.search(r"^-%\d+ = aten::sub\(%\d+, %\d+, 1\)", diff, re.MULTILINE)


def test_a_long_difference_is_cut_in_the_message_alone() -> None:
    def many(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x + 1
        return x

    diff = difference(lines(many), lines(lambda x: x), "one", "other")
    assert diff.count("\n-aten::add(") == 10
    assert shortened(diff).count("aten::add") == 6
    assert " and 4 more at test_trace.py:" in shortened(diff)
