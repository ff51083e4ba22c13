"""Models: load a source model, check it, and make its samples; state and randomness; the model
before it is frozen.

May import: freezer.freezing.diagnostics, freezer.timing and below.
Read first: subject.py.
"""

from freezer.freezing.models.calls import (
    NamedTensors,
    Outputs,
    baked_in,
    call_source,
    device_of_model,
    generators_kept,
    positions,
    reloaded,
    same_each_time,
)
from freezer.freezing.models.checks import (
    PRESERVE,
    RESET,
    check_mode,
    clear_frames,
    free_tensors,
    is_large,
    tensors_of,
    weights_digest,
)
from freezer.freezing.models.exported_program import ExportedModule, module_of
from freezer.freezing.models.hugging_face import inferred_inputs
from freezer.freezing.models.integer_ranges import Args, Kwargs, arguments_of
from freezer.freezing.models.loaders import (
    flat_forward,
    load_source,
    own_spec,
)
from freezer.freezing.models.samples import Dims, ExampleInputs, example_spec
from freezer.freezing.models.subject import (
    Subject,
    SubjectOptions,
    prepare,
    to_device,
)

__all__ = [
    "PRESERVE",
    "RESET",
    "Args",
    "Dims",
    "ExampleInputs",
    "ExportedModule",
    "Kwargs",
    "NamedTensors",
    "Outputs",
    "Subject",
    "SubjectOptions",
    "arguments_of",
    "baked_in",
    "call_source",
    "check_mode",
    "clear_frames",
    "device_of_model",
    "example_spec",
    "flat_forward",
    "free_tensors",
    "generators_kept",
    "inferred_inputs",
    "is_large",
    "load_source",
    "module_of",
    "own_spec",
    "positions",
    "prepare",
    "reloaded",
    "same_each_time",
    "tensors_of",
    "to_device",
    "weights_digest",
]
