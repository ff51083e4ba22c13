"""RECIPES: selection and consistency."""

from __future__ import annotations

from typing import get_args

import pytest

from freezer.artifact import PayloadKind
from freezer.errors import UsageError, install_command
from freezer.freezing.choices import check_consented, check_used, left_out, select
from freezer.freezing.lowering import LOWERINGS
from freezer.freezing.recipes import RECIPES, is_exact, own_toolchain
from freezer.runtime.loaders import LOADERS


def names(*wanted: str, portable: bool = False) -> list[str]:
    return [recipe.name for recipe in select(wanted, portable=portable)]


def test_select_auto_and_all() -> None:
    assert names("auto") == [
        "torchscript-frozen",
        "torchscript-optimized",
        "openvino",
        "onnxruntime",
        "inductor-frozen",
    ]
    assert names("all") == [name for name in RECIPES if name != "portable" and is_exact(name)]
    assert names("all", portable=True) == ["portable"]
    assert names("auto", portable=True) == ["portable"]


def test_lower_precision_needs_consent() -> None:
    def lower(*precision: str) -> set[str]:
        chosen = select(["auto"], portable=False, precision=precision)
        return {recipe.name for recipe in chosen if not is_exact(recipe.name)}

    assert lower() == set()
    assert lower("bf16") == {"openvino-bf16", "inductor-bf16"}
    assert lower("int8") == {"openvino-int8", "onnxruntime-int8", "inductor-int8"}
    assert lower("bf16", "int8") == {*lower("bf16"), *lower("int8"), "openvino-int8-bf16"}
    with pytest.raises(UsageError) as refused:
        check_consented(["openvino-int8-bf16"], ["int8"])
    assert refused.value.code == "CP-ACCURACY"
    with pytest.raises(UsageError):
        check_used(["openvino"], ["int8"])


def test_select_by_name() -> None:
    assert names("inductor-frozen") == ["inductor-frozen"]
    assert set(names("inductor-unpacked", "auto")) == {*names("auto"), "inductor-unpacked"}
    assert names("inductor-frozen", portable=True) == ["portable"]
    assert names("eager") == []


def test_auto_leaves_out_engines_that_are_not_installed() -> None:
    def with_packages(*wanted: str) -> list[str]:
        return [
            recipe.name
            for recipe in select(
                wanted, portable=False, installed=("torch", "onnxruntime", "openvino")
            )
        ]

    assert with_packages("auto") == [name for name in names("auto") if name != "onnxruntime"]
    assert with_packages("auto", "onnxruntime") == names("auto"), (
        "a named recipe is tried, and fails with the command to install"
    )
    lacking = left_out(["auto"], installed=["onnxruntime", "openvino"])
    assert install_command("onnx", "onnxscript") in lacking
    assert not left_out(["auto"], installed=["onnxruntime", "onnx", "onnxscript", "openvino"])


def test_toolchain_omits_packages_of_other_engines() -> None:
    toolchain = {"torch": "2.13.0", "onnxruntime": "1.32.0", "onnx": "1.23.2"}
    assert own_toolchain(RECIPES["inductor-frozen"], toolchain) == {"torch": "2.13.0"}
    assert own_toolchain(RECIPES["onnxruntime"], toolchain) == toolchain


def test_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="unknown recipe 'tensorrt'; expected auto, all, eager, torchscript-frozen"
    ):
        names("tensorrt")


def test_every_kind_of_payload_has_a_loader() -> None:
    assert set(LOWERINGS) == set(LOADERS) == set(get_args(PayloadKind))
