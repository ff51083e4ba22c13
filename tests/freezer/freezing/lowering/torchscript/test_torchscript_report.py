"""TorchScript reports: counts and names on models where the right ones are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freezer.artifact.sections import FreezingReport, KeptTensor, PreservedName
from freezer.freezing.lowering.torchscript.graph_analysis import operators
from freezer.freezing.lowering.torchscript.pass_replay import (
    APPENDED,
    BRANCHES,
    CASTS,
    COMPUTED,
    DROPOUT,
    MERGED,
    MKLDNN,
    NO_OPS,
    NUMERIC_PASSES,
    TRANSPOSED,
    UNROLLED,
)
from freezer.freezing.lowering.torchscript.torchscript_report import Freezing, report_freezing, report_unfrozen
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from tests.freezer.models_reports import (
    Adding,
    Arithmetic,
    ConvNet,
    Forking,
    Heads,
    Looping,
    Mixed,
    Recurrent,
    Repeating,
    Stateful,
    Tied,
    Viewing,
)
from tests.lines import place_of
from tests.steps import candidate_of, random_inputs, subject_of

CONV_BN, CONV_ADD, CONV_MUL, LINEAR_BN = NUMERIC_PASSES.values()
IMAGE, ROW = random_inputs(2, 3, 8, 8), random_inputs(2, 4)


def trained(model: nn.Module) -> nn.Module:
    """Give batch norms random statistics, so that no two tensors of the model are equal."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                    assert tensor is not None
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.eval()


def frozen(
    model: nn.Module, x: Tensor | None = None, *, preserved: Sequence[str] = (), numerics: bool = True, **kwargs: Any
) -> tuple[FreezingReport, Any]:
    """The report of a model that is traced with x, or scripted without, and the frozen module."""
    with torchscript_deprecations_silenced(), torch.no_grad():
        trained(model)
        before = torch.jit.script(model) if x is None else torch.jit.trace(model, (x,), check_trace=False)
        after = torch.jit.freeze(before, preserved_attrs=list(preserved), optimize_numerics=numerics)
        given = Freezing(before=before, after=after, preserved=preserved, optimize_numerics=numerics, **kwargs)
        return report_freezing(given), after


def counts(report: FreezingReport) -> dict[str, int]:
    assert report.notes == (), "all changes are counted"
    return {change.name: change.count for change in report.changes}


@pytest.mark.parametrize("x", [IMAGE, None], ids=["traced", "scripted"])
def test_batch_norms_and_dropouts(x: Tensor | None) -> None:
    report, after = frozen(ConvNet(), x, at_load=True)
    found = counts(report)
    assert (found[CONV_BN], found[DROPOUT]) == (3, 2)
    assert (report.ops_before["aten::batch_norm"], report.ops_before["aten::relu"]) == (3, 3)
    conv = "aten::conv2d" if x is None else "aten::_convolution"
    assert dict(report.ops_after) == {conv: 3, "aten::relu": 3}
    assert report.ops_after == operators(after.graph)
    assert report.num_constants == 3 * 6, "weight and bias of each convolution; weight, bias, mean and variance of each batch norm"
    assert report.constants_bytes == 3 * 4 * (81 + 3 + 4 * 3)
    assert report.folded_bytes == 3 * 4 * (81 + 3), "a new weight and a new bias for each convolution"
    assert report.unused == tuple(f"features.{3 * i + 1}.num_batches_tracked" for i in range(3))
    assert (report.kept, report.preserved) == ((), ())
    assert {change.name: change.count for change in report.changes_at_load} == {MKLDNN: 3}


def test_without_numerics_nothing_is_folded() -> None:
    report, _ = frozen(ConvNet(), IMAGE, numerics=False, prefix="features.")
    assert counts(report) == {DROPOUT: 2}
    assert (report.ops_after["aten::batch_norm"], report.folded_bytes) == (3, 0)
    assert report.constants[0] == "0.weight", "names lack the prefix"


def test_arithmetic_folded_into_a_convolution() -> None:
    report, _ = frozen(Arithmetic(), IMAGE)
    assert counts(report) == {CONV_ADD: 2, CONV_MUL: 2}
    assert dict(report.ops_after) == {"aten::_convolution": 1}
    assert report.folded_bytes == 4 * (4 * 3 * 9 + 4)


def test_linear_batch_norms_and_changes_at_load() -> None:
    report, after = frozen(Heads(), ROW, at_load=True)
    assert counts(report) == {LINEAR_BN: 1}
    assert report.ops_after["aten::linear"] == 4, "torch concatenates those over one input on a GPU alone"
    assert {change.name: change.count for change in report.changes_at_load} == {TRANSPOSED: 4}
    with torchscript_deprecations_silenced(), torch.no_grad():
        optimized = torch.jit.optimize_for_inference(after)
    assert operators(optimized.graph)["aten::matmul"] == 4, "torch does what the report predicts"


@pytest.mark.parametrize("x", [ROW, None], ids=["traced", "scripted"])
def test_common_subexpressions_and_computed_constants(x: Tensor | None) -> None:
    report, _ = frozen(Repeating(), x)
    assert counts(report) == {MERGED: 2, COMPUTED: 1, NO_OPS: 1}
    assert dict(report.ops_after) == {"aten::sin": 1, "aten::add": 1, "aten::mul": 2}
    assert (report.num_constants, report.constants_bytes, report.folded_bytes) == (1, 16, 16)


def test_loops_and_branches() -> None:
    found = counts(frozen(Looping())[0])
    assert (found[UNROLLED], found[BRANCHES], found[APPENDED]) == (1, 1, 3)


def test_forked_tasks_are_analyzed() -> None:
    report, after = frozen(Forking())
    assert counts(report) == {}
    assert report.constants == ("linear.weight", "linear.bias")
    assert report.ops_after["aten::linear"] == 1
    assert after(ROW).shape == ROW.shape


def test_weights_in_lists_are_constants() -> None:
    report, _ = frozen(Recurrent())
    assert counts(report)[MERGED] > 0
    assert report.constants == tuple(f"lstm.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    assert (report.unused, report.folded_bytes) == ((), 0)


def test_casts_of_autocast() -> None:
    report, after = frozen(Mixed())
    assert counts(report)[CASTS] == 3, "of the input, the weight and the bias"
    assert operators(after.graph)["aten::_autocast_to_reduced_precision"] == 1, "those of the constants are computed"
    assert report.folded_bytes == 2 * (16 + 4)


def test_possible_changes_are_marked() -> None:
    report, _ = frozen(Viewing())
    where = place_of(Viewing.forward, "add_")
    assert report.kept == (
        KeptTensor(
            name="total", reason=f"`forward` may change it in place, according to the alias analysis (aten::add_) at {where}"
        ),
    )


@pytest.mark.parametrize("x", [ROW, None], ids=["traced", "scripted"])
def test_tied_weights_are_counted_once(x: Tensor | None) -> None:
    report, _ = frozen(Tied(), x)
    assert (report.num_constants, report.constants_bytes) == (1, 64)
    assert report.constants == ("one.weight", "two.weight")
    assert report.unused == ("spare",)


def test_changed_attributes_stay_with_their_line() -> None:
    report, after = frozen(Stateful())
    in_place = f"`forward` changes it in place (aten::add_) at {place_of(Stateful.forward, 'add_')}"
    is_set = f"`forward` sets it at {place_of(Stateful.forward, 'self.last')}"
    counted = f"`forward` sets it at {place_of(Stateful.forward, 'self.calls')}"
    assert report.kept == (KeptTensor(name="total", reason=in_place), KeptTensor(name="last", reason=is_set))
    assert {item.name: item for item in report.preserved} == {
        "total": PreservedName(name="total", kind="attribute", why=in_place),
        "last": PreservedName(name="last", kind="attribute", why=is_set),
        "calls": PreservedName(name="calls", kind="attribute", why=counted),
    }
    assert report.constants == ("linear.weight", "linear.bias")
    assert [name for name, _ in after.named_buffers()] == ["total", "last"]


def test_preserved_names_are_reported() -> None:
    report, after = frozen(Stateful(), preserved=("version", "reset", "linear.bias", "calls"))
    preserved = {item.name: (item.kind, item.why) for item in report.preserved}
    assert preserved["version"] == ("attribute", "asked for")
    assert preserved["reset"] == ("method", "asked for")
    assert preserved["linear.bias"] == ("attribute", "asked for")
    assert preserved["calls"] == ("attribute", f"asked for; `forward` sets it at {place_of(Stateful.forward, 'self.calls')}")
    assert preserved["total"][1].startswith("`forward` changes it in place")
    assert KeptTensor(name="linear.bias", reason="asked for") in report.kept
    assert report.constants == ("linear.weight",)
    assert report.ops_after["aten::zero_"] == 1, "the graph of a preserved method is the payload's too"
    after.reset()


def test_report_of_an_unfrozen_module() -> None:
    with torchscript_deprecations_silenced():
        module = torch.jit.script(Stateful().eval())
    report = report_unfrozen(module, ("reset", "version"))
    assert report.ops_before == report.ops_after
    assert [item.name for item in report.kept] == ["total", "last"], "the others just stay what they are"
    assert report.preserved == (
        PreservedName(name="reset", kind="method", why="asked for"),
        PreservedName(name="version", kind="attribute", why="asked for"),
    )
    assert "its 4 parameters and buffers stay what they are" in report.notes[0]


@pytest.mark.parametrize("missing", ["_jit_pass_cse", "_freeze_module"])
def test_missing_torch_functions_only_lose_the_counts(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torchscript_deprecations_silenced(), torch.no_grad():
        before = torch.jit.trace(trained(ConvNet()), (IMAGE,), check_trace=False)
        after = torch.jit.freeze(before)
    monkeypatch.delattr(torch._C, missing)
    report = report_freezing(Freezing(before=before, after=after))
    assert "could not be counted" in report.notes[0]
    assert missing.removeprefix("_jit_pass_") in report.notes[0]
    assert (report.ops_before["aten::batch_norm"], report.ops_after["aten::_convolution"]) == (3, 3)


def test_failed_report_does_not_fail_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subject = subject_of(Adding(), {"x": ROW})  # its in-place operation is looked up in a schema
    monkeypatch.delattr(torch._C, "parse_schema")
    candidate = candidate_of(subject, "torchscript-frozen", tmp_path / "out")
    (report,) = candidate.reports.values()
    assert report.notes == ("No report could be made: AttributeError: module 'torch._C' has no attribute 'parse_schema'.",)
    assert report.size_after_bytes > 0
    assert set(report.phases_s) == {"capture", "freeze", "save", "report"}


def test_replay_that_differs_is_noted() -> None:
    with torchscript_deprecations_silenced(), torch.no_grad():
        before = torch.jit.trace(trained(ConvNet()), (IMAGE,), check_trace=False)
        after = torch.jit.freeze(before, optimize_numerics=False)
    report = report_freezing(Freezing(before=before, after=after, optimize_numerics=True))
    assert "left other operators than torch" in report.notes[0]
    assert report.ops_after["aten::batch_norm"] == 3
