"""Reference: float64 where it runs, detection of state and randomness, sequences of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.errors import JudgeError
from freezer.freezing.drift import run_reference
from tests.support.models import AttributeCounter, Calling, Counter, Random, mlp, seeded
from tests.support.steps import BATCH, candidate_of, judgement_of, random_inputs, subject_of

X = random_inputs(2, 4)


def test_reference_is_the_model_in_float64() -> None:
    subject = subject_of(mlp(), {"x": X}, {"x": {0: BATCH}})
    found = run_reference(subject)
    assert found.float64
    assert (found.note, found.stateful, found.deterministic) == (None, False, True)
    wide = mlp().double()
    for call in found.calls:
        x = subject.sets[call.set_index].tensors["x"]
        assert torch.equal(call.reference[0], wide(x.double()).detach())
        assert torch.equal(call.eager[0], mlp()(x).detach())
        assert call.noise_rmse == [0.0]
    assert [call.set_index for call in found.singles] == list(range(len(subject.sets)))


@pytest.mark.parametrize("model", [Counter, AttributeCounter])
def test_state_in_buffers_and_attributes_is_detected(model: type[nn.Module]) -> None:
    found = run_reference(subject_of(seeded(model), {"x": X}))
    assert found.stateful
    assert found.deterministic
    sequence = [call for call in found.calls if call.kind == "sequence"]
    assert not torch.equal(sequence[0].eager[0], sequence[2].eager[0]), "one input, another answer"
    first = seeded(model)(X)
    assert torch.equal(found.singles[0].eager[0], first), (
        "single calls start from the initial state"
    )


def test_noise_of_random_models_is_measured() -> None:
    found = run_reference(subject_of(Random(), {"x": random_inputs(100, 100)}))
    assert not found.deterministic
    assert not found.stateful
    assert found.calls[0].noise_rmse[0] == pytest.approx(0.1 * 2**0.5, rel=0.05)


def squares_in_float32(x: Tensor) -> Tensor:
    """Like Llama's norms: computes in float32 in models of any dtype."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype)


def asks_for_dtypes(x: Tensor) -> Tensor:
    scores = torch.softmax(x, dim=-1, dtype=torch.float32) + x.sum(
        -1, keepdim=True, dtype=torch.float32
    )
    places = torch.arange(4, dtype=torch.float32) @ torch.tensor([[0.5], [1.0], [2.0], [3.0]])
    return (scores @ torch.ones(4, 2) + places).float() / torch.arange(1, 3)


class Loose(nn.Module):
    """Writes into a tensor that is a plain attribute, which `.double()` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.table = torch.zeros(4), torch.eye(4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x[0])
        return (x + self.seen) @ self.table


@pytest.mark.parametrize("model", [lambda: Calling(asks_for_dtypes), Loose])
def test_casts_within_forward_are_widened(model: Any) -> None:
    assert run_reference(subject_of(model(), {"x": X})).float64


def squares(x: Tensor) -> Tensor:
    """What `squares_in_float32` computes, without its casts."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def either(x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 0, squares_in_float32, lambda x: x.float() * 2, (x,))
    return out


def rounds(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype) * 2


@pytest.mark.parametrize(
    ("function", "dtype", "exact"),
    [
        (squares_in_float32, torch.float32, squares),
        (squares_in_float32, torch.bfloat16, squares),
        (either, torch.float32, lambda x: squares(x) if x.sum() > 0 else x * 2),
        (rounds, torch.float32, rounds),
    ],
    ids=["cast", "cast up", "torch.cond", "below own precision"],
)
def test_widened_values_equal_float64(function: Any, dtype: torch.dtype, exact: Any) -> None:
    subject = subject_of(Calling(function), {"x": X.to(dtype)})
    reference = run_reference(subject)
    assert reference.float64
    for call in reference.singles:
        x = subject.sets[call.set_index].tensors["x"].double()
        torch.testing.assert_close(call.reference[0], exact(x), rtol=1e-14, atol=0)
    assert function(X).shape == X.shape, "also after a run in float64"


def lower(x: Tensor) -> Tensor:
    return x.bfloat16() * 2


def of_its_dtype(x: Tensor) -> Tensor:
    return x.view(torch.int32).float()


def checked(x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    assert wide.dtype == torch.float32
    return wide


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lower, "forward casts to torch.bfloat16"),
        (of_its_dtype, r"float64 gives shape [2, 8], eager [2, 4]"),
        (checked, "float64 does not run: AssertionError"),
    ],
)
def test_without_float64_the_reference_is_eager(function: Any, why: str) -> None:
    found = run_reference(subject_of(Calling(function), {"x": X}))
    assert not found.float64
    assert why in str(found.note)
    for call in found.calls:
        assert torch.equal(call.reference[0], call.eager[0])


class Narrow(nn.Module):
    """Keeps what it has seen in a list, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.zeros(4)]

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0].copy_(x.sum(0))
        return x + self.seen[0]


def test_writes_into_narrow_tensors_prevent_float64() -> None:
    found = run_reference(subject_of(Narrow(), {"x": X}))
    assert not found.float64
    assert "copy_ gives torch.float32" in str(found.note)


def test_constants_that_vary_are_rejected() -> None:
    subject = subject_of(
        Calling(lambda x: {"y": x * 2, "rows": x.shape[0]}), {"x": X}, {"x": {0: BATCH}}
    )
    with pytest.raises(JudgeError, match="changes from call to call") as caught:
        run_reference(subject)
    assert caught.value.code == "CP-OUTPUTS"
    fixed = subject_of(Calling(lambda x: {"y": x * 2, "rows": x.shape[0]}), {"x": X})
    assert len(run_reference(fixed).calls) > 8


def test_finfo_min_is_eagers() -> None:
    def fills(x: Tensor) -> Tensor:
        return x.masked_fill(x < 0, torch.finfo(x.dtype).min)

    call = run_reference(subject_of(Calling(fills), {"x": X})).calls[0]
    assert call.reference[0].dtype == torch.float64
    assert (call.reference[0] == torch.finfo(torch.float32).min).any()
    assert call.reference[0].abs().max() <= torch.finfo(torch.float32).max


def test_eager_is_reference_where_float64_is_nan() -> None:
    def rounded(x: Tensor) -> Tensor:
        return torch.sqrt(x * 0 - 1e-50) + x  # 1e-50 is 0 in float32

    call = run_reference(subject_of(Calling(rounded), {"x": X})).calls[0]
    assert torch.equal(call.reference[0], call.eager[0].double())


def test_outputs_that_compare_nothing_are_warned_of(tmp_path: Path) -> None:
    """Empty, constant and saturated outputs, each once; not one that varies, nor a mask."""

    class Blind(nn.Module):
        def forward(self, x: Tensor) -> Any:
            saturated = (1e9 * x).sigmoid()
            steps = torch.arange(8.0) + x[:1, :1] * 0
            return x[:, :0], torch.zeros_like(x), steps, saturated, x, x > 0

    subject = subject_of(Blind(), {"x": torch.randn(4, 8).sign() * (1 + torch.rand(4, 8))})
    made = candidate_of(subject, "torchscript-frozen", tmp_path / "made")
    winner = judgement_of(subject, [made]).winner
    assert winner is not None
    for index, output in enumerate(subject.outputs):
        warnings = [text for text in winner.candidate.warnings if repr(output.name) in text]
        assert len(warnings) == (index < 4), output.name
