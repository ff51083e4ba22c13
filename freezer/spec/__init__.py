"""Input and output contracts: tensors, dims, ranges, nested structure, and how declarations are
parsed.

May import: freezer.files and below. Imports no torch.
Read first: inputs.py.
"""

from freezer.spec.inputs import (
    Dim,
    InputSpec,
    bind,
)
from freezer.spec.items import (
    COMPLEX,
    DTYPES,
    FLOATING,
    INTEGRAL,
    ConstantSpec,
    InputItem,
    NestedSpec,
    OutputSpec,
    OutputStructure,
    Relation,
    TensorSpec,
    put_together,
    take_apart,
)
from freezer.spec.limits import (
    CLOCKS,
    MARKS,
    Clock,
    Limits,
    Objective,
    SamplingPolicy,
    Timing,
    limit_problem,
    timing_of,
)
from freezer.spec.parse import (
    declared_dim,
    declared_item,
    declared_spec,
)
from freezer.spec.sample_headers import (
    BAD_SAMPLES,
    COMPLEX128,
    Header,
    Headers,
    as_sets,
    header_of,
    match_headers,
    pairs_in,
    read_header,
    unreadable,
)
from freezer.spec.sizes import (
    all_sizes,
    combinations,
    distinct,
    interior_points,
)

__all__ = [
    "BAD_SAMPLES",
    "CLOCKS",
    "COMPLEX",
    "COMPLEX128",
    "DTYPES",
    "FLOATING",
    "INTEGRAL",
    "MARKS",
    "Clock",
    "ConstantSpec",
    "Dim",
    "Header",
    "Headers",
    "InputItem",
    "InputSpec",
    "Limits",
    "NestedSpec",
    "Objective",
    "OutputSpec",
    "OutputStructure",
    "Relation",
    "SamplingPolicy",
    "TensorSpec",
    "Timing",
    "all_sizes",
    "as_sets",
    "bind",
    "combinations",
    "declared_dim",
    "declared_item",
    "declared_spec",
    "distinct",
    "header_of",
    "interior_points",
    "limit_problem",
    "match_headers",
    "pairs_in",
    "put_together",
    "read_header",
    "take_apart",
    "timing_of",
    "unreadable",
]
