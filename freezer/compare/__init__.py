"""Comparison of outputs with a reference: distances, and the gate that judges them. In numpy.

runtime/tensors.py makes torch's tensors comparable; these modules import no torch.
"""

from freezer.compare.gate import (
    DIGITS,
    POOL_BELOW,
    Gate,
    OutputError,
    Sums,
    eager_tolerance,
    finite,
    golden_problem,
    judge_rmse,
    openvino_problem,
    tolerance,
)
from freezer.compare.groups import Magnitudes, Slices
from freezer.compare.outputs import (
    Comparison,
    Values,
    compare,
    distances,
    pooled,
    structure_problem,
)

__all__ = [
    "DIGITS",
    "POOL_BELOW",
    "Comparison",
    "Gate",
    "Magnitudes",
    "OutputError",
    "Slices",
    "Sums",
    "Values",
    "compare",
    "distances",
    "eager_tolerance",
    "finite",
    "golden_problem",
    "judge_rmse",
    "openvino_problem",
    "pooled",
    "structure_problem",
    "tolerance",
]
