"""Which operators of a converted graph compute a node of the exported program."""

from __future__ import annotations

import pytest

from freezer.freezing.lowering.exported_programs import operators_computing

OPERATORS = [
    ("MatMul", ["value_1"], ["x", "weight"]),
    ("Add", ["linear"], ["value_1", "bias"]),
    ("Relu", ["relu"], ["linear"]),
    ("Quantize", ["value_2"], ["relu"]),
    ("MatMul_1", ["value_3"], ["value_2", "weight_1"]),
    ("Add_1", ["add_1"], ["value_3", "bias_1"]),
    ("Unused", ["value_4"], ["relu"]),
]
NAMES = {"linear": "linear", "relu": "relu", "add_1": "linear_1"}


@pytest.mark.parametrize(
    ("nodes", "operators"),
    [
        (["linear"], {"MatMul", "Add"}),
        (["linear_1"], {"Quantize", "MatMul_1", "Add_1"}),
        (["relu", "missing"], {"Relu"}),
        ([], set()),
    ],
)
def test_unnamed_operators_are_part_of_the_next(nodes: list[str], operators: set[str]) -> None:
    assert set(operators_computing(nodes, OPERATORS, NAMES)) == operators
