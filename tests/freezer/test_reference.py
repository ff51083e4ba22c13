"""The reference: float64 where it runs, state and chance found out, sequences that show state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import JudgeError
from freezer.reference import Runner, run_calls, run_reference, sequence_of
from tests.models import AttributeCounter, Calling, Counter, Random, mlp, seeded
from tests.steps import BATCH, random_inputs, subject_of

X = random_inputs(2, 4)


def test_the_reference_is_the_model_in_float64() -> None:
    subject = subject_of(mlp(), {"x": X}, {"x": {0: BATCH}})
    found = run_reference(subject)
    assert (found.float64, found.why_not, found.stateful, found.deterministic) == (True, None, False, True)
    wide = mlp().double()
    for call in found.calls:
        x = subject.sets[call.set_index].tensors["x"]
        assert torch.equal(call.reference[0], wide(x.double()).detach())
        assert torch.equal(call.eager[0], mlp()(x).detach())
        assert call.noise_rmse == [0.0]
    assert [call.set_index for call in found.singles] == list(range(len(subject.sets)))


def test_a_sequence_has_four_calls_and_comes_back_to_its_first_input() -> None:
    assert sequence_of(8) == [0, 1, 0, 2]
    assert sequence_of(2) == [0, 1, 0, 1]
    assert sequence_of(1) == [0, 0, 0, 0]


@pytest.mark.parametrize("model", [Counter, AttributeCounter])
def test_state_is_found_in_buffers_and_in_python(model: type[nn.Module]) -> None:
    found = run_reference(subject_of(seeded(model), {"x": X}))
    assert found.stateful
    assert found.deterministic
    sequence = [call for call in found.calls if call.kind == "sequence"]
    assert not torch.equal(sequence[0].eager[0], sequence[2].eager[0]), "one input, another answer"
    first_again = run_reference(subject_of(seeded(model), {"x": X})).singles
    assert all(torch.equal(a.eager[0], b.eager[0]) for a, b in zip(found.singles, first_again, strict=True))


def test_single_calls_of_a_stateful_model_start_from_its_initial_state() -> None:
    subject = subject_of(seeded(Counter), {"x": X})
    for call in run_reference(subject).singles:
        assert torch.equal(call.eager[0], subject.sets[call.set_index].tensors["x"] + 1)


def test_state_of_a_runner_that_is_said_to_have_none_goes_on() -> None:
    subject = subject_of(mlp(), {"x": X})
    made: list[int] = []

    def fresh() -> Any:
        made.append(0)
        return Runner(call=lambda tensors: [tensors["x"]])

    run_calls(fresh, subject, stateful=False)
    assert len(made) == 1
    run_calls(fresh, subject, stateful=True)
    assert len(made) == 1 + len(subject.sets) + 1


def test_chance_is_measured() -> None:
    found = run_reference(subject_of(Random(), {"x": random_inputs(100, 100)}))
    assert not found.deterministic
    assert not found.stateful
    assert found.calls[0].noise_rmse[0] == pytest.approx(0.1 * 2**0.5, rel=0.05)


def hard_coded(x: Tensor) -> Tensor:
    return x.float() * 2


def mixed(x: Tensor) -> Tensor:
    return x @ torch.ones(4, 2)


@pytest.mark.parametrize(
    ("function", "why"), [(hard_coded, "forward casts to torch.float32"), (mixed, "float64 does not run: RuntimeError")]
)
def test_where_float64_cannot_run_the_reference_is_eager_and_says_why(function: Any, why: str) -> None:
    found = run_reference(subject_of(Calling(function), {"x": X}))
    assert not found.float64
    assert why in str(found.why_not)
    assert all(torch.equal(call.reference[0], call.eager[0]) for call in found.calls)


def add_in_batches_of_four(x: Tensor) -> Tensor:
    return x.add_(1) if len(x) == BATCH.max else x + 1


def test_inputs_that_a_model_writes_into_now_and_then_stay_what_they_are() -> None:
    subject = subject_of(Calling(add_in_batches_of_four), {"x": X}, {"x": {0: BATCH}})
    before = [item.cloned() for item in subject.sets]
    run_reference(subject)
    assert all(torch.equal(one["x"], item.tensors["x"]) for one, item in zip(before, subject.sets, strict=True))
    assert torch.equal(X, random_inputs(2, 4))


def test_a_constant_that_changes_with_the_inputs_is_refused() -> None:
    subject = subject_of(Calling(lambda x: {"y": x * 2, "rows": x.shape[0]}), {"x": X}, {"x": {0: BATCH}})
    with pytest.raises(JudgeError, match="a constant in it, changes from call to call") as caught:
        run_reference(subject)
    assert caught.value.code == "CP-OUTPUTS"
    fixed = subject_of(Calling(lambda x: {"y": x * 2, "rows": x.shape[0]}), {"x": X})
    assert len(run_reference(fixed).calls) > 8


def test_a_dtype_s_least_value_is_the_reference_s_too() -> None:
    def fills(x: Tensor) -> Tensor:
        return x.masked_fill(x < 0, torch.finfo(x.dtype).min)

    call = run_reference(subject_of(Calling(fills), {"x": X})).calls[0]
    assert call.reference[0].dtype == torch.float64
    assert (call.reference[0] == torch.finfo(torch.float32).min).any()
    assert call.reference[0].abs().max() <= torch.finfo(torch.float32).max
