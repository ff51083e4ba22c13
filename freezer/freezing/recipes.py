"""RECIPES: how artifacts are built. A recipe names captures, lowerings and settings. Imports no
torch.

A recipe's name and settings are part of a build's key: whoever changes what a recipe does must
change a setting. Every setting of Inductor that a recipe does not name has the default of the
installed torch during a build (environment.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Literal

from freezer.artifact import ENGINES, PayloadKind
from freezer.codec import OMIT_DEFAULT, Json, JsonView, frozen
from freezer.spec import FLOAT32

CaptureName = Literal[
    "export", "export-strict", "convert", "trace", "script", "trace-sizes", "as-is"
]

Ways = tuple[tuple[CaptureName, PayloadKind], ...]
"""Pairs of a capture and the lowering of its graph, in the order to try them."""

Settings = JsonView
"""Settings of a recipe, as JSON has them."""


@frozen
class Recipe:
    """How an artifact is built.

    Attributes:
        ways: pairs of a capture and the lowering of its graph, in the order to try them.
        settings: settings of the lowerings.
        portable: only for the device class `portable`.
        by_thread: whether a payload is laid out for one thread count, so that each count needs its
            own. Others run with any count; `torchscript-optimized` packs at load, for the serving
            count.
        by_shape: whether a payload for one point is faster there than the one for all sizes, so
            that each named point gets its own.
        auto: whether `auto` includes it; the others are slower to build or seldom win.
        precision: `float32`, or what its kernels compute in: `bf16`, `fp16`, `tf32`, `int8`, or
            `int8+bf16`. Lower ones are only built with consent, for classes whose hardware gains.
        tools: packages that a build needs besides those of its engine.
    """

    name: str
    ways: Ways
    settings: Settings = field(default_factory=dict)
    portable: bool = False
    by_thread: bool = False
    by_shape: bool = False
    auto: bool = True
    precision: str = field(default=FLOAT32, metadata=OMIT_DEFAULT)
    tools: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that a build needs besides torch."""
        return (*ENGINE_PACKAGES.get(self.ways[0][1], ()), *self.tools)


ENGINE_PACKAGES: Mapping[PayloadKind, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
    "openvino": ("openvino",),
}
"""The packages that build a kind of payload, besides torch.

ENGINES of freezer.artifact names those that serve it.
"""

QUANTIZERS = ("nncf", "torchao")
"""The packages that quantize, which no payload needs to serve."""

EAGER = "eager"
"""The baseline: the source model itself, always an entrant and never an artifact."""

INDUCTOR_SETTINGS: Settings = {
    # All CPUs of the device class have its vector instructions: torch need not test them, which
    # takes seconds.
    "cpp.vec_isa_ok": True,
    # For `inductor-max-autotune`; without tuning nothing is timed, so two builds of one key agree.
    "max_autotune_gemm_backends": "ATEN,CPP",
    "max_autotune_conv_backends": "ATEN",
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
    "compile_threads": 1,
    # A header of 130 MB takes longer than the few files of a model without it, some compilers die
    # of it (g++ 12 with 256-bit SVE), and torch leaves it in the user's temporary folder.
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
    # Otherwise vectors of up to 8 numbers become part of the code, which retrained models share.
    "always_keep_tensor_constants": True,
    # For profilers: the first costs a register, the second bytes.
    "aot_inductor.enable_frame_pointer": False,
    "aot_inductor.enable_line_tables": False,
}
"""Settings of Inductor that differ from torch's defaults."""

INDUCTOR_CUDA_SETTINGS: Settings = {
    # No weights are packed for a CPU, which only launches kernels.
    "cpp.weight_prepack": False,
    # Tuned matrix products of Triton besides torch's own; CUTLASS needs a toolkit with nvcc.
    "max_autotune_gemm_backends": "ATEN,TRITON",
    # Kernels for one kind of GPU, compiled ahead: opening the package compiles nothing.
    "aot_inductor.emit_multi_arch_kernel": False,
}
"""Settings that differ for a GPU."""

BESIDE: Settings = {"aot_inductor.package_constants_on_disk_format": "binary_blob"}
"""Puts the weights beside the shared library, in a file of the package that the loader maps."""

BESIDE_ABOVE_MB = 8
"""Weights above this size, in MB of 1e6 bytes, are stored beside the library. Within it they are
unpacked and copied at each load, which takes 120 ms of CPU time for 100 MB and twice their size in
memory, but need no further file."""

REPAIRS_VERSION = 3
"""Increase when torch_patches.py changes the code of a model, so that its builds are redone: 2
clips windows of pools, 3 multiplies 1x1 convolutions over a single position as matrices by
vectors."""

CONVERSION_VERSION = 2
"""Increase when programs are converted to the formats of engines in another way, so that builds are
redone: 2 uses stable forms (lowering/stable_forms.py)."""

QUANTIZATION_VERSION = 3
"""Increase when programs are brought to a lower precision in another way, so that builds are
redone: 2 keeps nodes in floating point in all engines (candidates/mixed_precision.py), 3 also where
extremes fail."""

_TORCHSCRIPT: Ways = (
    ("as-is", "torchscript"),
    ("trace", "torchscript"),
    ("script", "torchscript"),
    ("trace-sizes", "torchscript"),
)
EXPORTS: tuple[CaptureName, ...] = ("export", "export-strict", "convert")
"""Captures that make an exported program."""


def _torchscript(
    name: str,
    *,
    optimize_numerics: bool = True,
    optimize_for_inference: bool = False,
    auto: bool = True,
) -> Recipe:
    settings = {
        "freeze": True,
        "optimize_numerics": optimize_numerics,
        "optimize_for_inference": optimize_for_inference,
    }
    return Recipe(
        name=name,
        ways=_TORCHSCRIPT,
        settings=settings,
        auto=auto,
    )


def _inductor(
    name: str,
    *,
    freezing: bool = True,
    weight_prepack: bool = True,
    max_autotune: bool = False,
    auto: bool = False,
) -> Recipe:
    """A recipe of Inductor.

    Args:
        name: name of the recipe.
        freezing: make weights constants of the program, and fold what depends on them alone.
        weight_prepack: pack the weights of convolutions and linear layers for oneDNN and MKL.
        max_autotune: time the implementations of each matrix product and use the fastest.
        auto: whether `auto` includes it.
    """
    inductor = {
        **INDUCTOR_SETTINGS,
        "freezing": freezing,
        "cpp.weight_prepack": weight_prepack,
        "max_autotune": max_autotune,
    }
    return Recipe(
        name=name,
        ways=tuple((capture, "inductor") for capture in EXPORTS),
        settings={
            "inductor": inductor,
            "weights_beside_above_mb": BESIDE_ABOVE_MB,
            "repairs": REPAIRS_VERSION,
        },
        by_thread=True,
        by_shape=True,
        auto=auto,
    )


OPENVINO_SETTINGS: Mapping[str, str] = {
    # Its defaults compute in bfloat16 where the CPU has it, and round weights and caches of
    # attention to 8 bits.
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    # One call at a time, on all of its threads.
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": "1",
    # Otherwise all processes of a machine bind their threads to the same first CPUs.
    "ENABLE_CPU_PINNING": "NO",
}
"""OpenVINO's properties, which the loader sets besides the number of threads."""

_CAPTURED_WAYS: Ways = (
    ("export", "exported"),
    ("export-strict", "exported"),
    *_TORCHSCRIPT,
)

_OPENVINO = Recipe(
    name="openvino",
    ways=tuple((capture, "openvino") for capture in EXPORTS),
    settings={"openvino": OPENVINO_SETTINGS, "conversion": CONVERSION_VERSION},
    by_shape=True,
)

_ONNXRUNTIME = Recipe(
    name="onnxruntime",
    ways=tuple((capture, "onnxruntime") for capture in EXPORTS),
    # Threads that sleep between calls cost 20 µs a call; ONNX Runtime's own limit is some tens of
    # milliseconds.
    settings={
        "optimized": "extended",
        "session": {"session.intra_op.spin_duration_us": "1000"},
        "conversion": CONVERSION_VERSION,
    },
)

_INDUCTOR = _inductor("inductor-frozen", auto=True)


def _lower(base: Recipe, precision: str, *tools: str) -> Recipe:
    """A recipe in a lower precision; what OpenVINO does not quantize has that of its hint."""
    settings = {**base.settings, "computes": precision, "quantization": QUANTIZATION_VERSION}
    if "openvino" in settings and precision.endswith("bf16"):
        settings["openvino"] = {**settings["openvino"], "INFERENCE_PRECISION_HINT": "bf16"}
    return replace(
        base,
        name=f"{base.name.removesuffix('-frozen')}-{precision.replace('+', '-')}",
        settings=settings,
        precision=precision,
        tools=tools,
    )


_IN_BUILD_ORDER = (  # the cheapest first
    _torchscript("torchscript-frozen"),
    _torchscript("torchscript-exact", optimize_numerics=False, auto=False),
    _torchscript("torchscript-optimized", optimize_for_inference=True),
    _OPENVINO,
    _lower(_OPENVINO, "bf16"),
    _lower(_OPENVINO, "int8", "nncf"),
    _lower(_OPENVINO, "int8+bf16", "nncf"),
    _ONNXRUNTIME,
    _lower(_ONNXRUNTIME, "int8"),
    _INDUCTOR,
    _lower(_INDUCTOR, "bf16"),
    _lower(_INDUCTOR, "fp16"),
    _lower(_INDUCTOR, "tf32"),
    _lower(_INDUCTOR, "int8", "torchao"),
    _inductor("inductor-unpacked", weight_prepack=False),
    _inductor("inductor-unfrozen", freezing=False, weight_prepack=False),
    _inductor("inductor-max-autotune", max_autotune=True),
    Recipe(
        name="portable",
        ways=_CAPTURED_WAYS,
        settings={"freeze": False},
        portable=True,
    ),
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _IN_BUILD_ORDER}

KEPT_EAGER = Recipe(
    name="captured",
    ways=_CAPTURED_WAYS,
    settings={"freeze": False},
    auto=False,
)
"""For GPU classes where nothing beats eager: the captured program, not frozen, on that device. Not
an entrant: `freeze` and campaigns build it for the verdict `kept-eager`."""

PRECISION: Mapping[str, bool] = {"tf32": False, "reduced_precision_reductions": False}
"""Faster and less exact arithmetic of GPUs: TF32 products of float32, and half-precision sums of
half precision. Both are off for builds, judges and calls (runtime/torch_settings.py); TF32 is on
for calls of the recipe that is named after it."""


def needs_torch_alone(name: str) -> bool:
    """Whether payloads of a recipe run with torch alone."""
    return name in RECIPES and RECIPES[name].ways[0][1] not in ENGINES


def is_exact(name: str) -> bool:
    """Whether a recipe computes in float32."""
    return name not in RECIPES or RECIPES[name].precision == FLOAT32


def made_for(recipe: Recipe, kind: str) -> Recipe:
    """Adapt a recipe to a kind of device class: for a GPU, its precision is set and payloads fit
    any thread count.

    Args:
        recipe: one of RECIPES, or KEPT_EAGER.
        kind: kind of a DeviceClass.
    """
    if kind != "cuda":
        return recipe
    precision = {**PRECISION, "tf32": recipe.precision == "tf32"}
    settings = {**recipe.settings, "precision": precision}
    if "inductor" in settings:
        settings["inductor"] = {**settings["inductor"], **INDUCTOR_CUDA_SETTINGS}
    return replace(recipe, settings=settings, by_thread=False)


def own_toolchain(recipe: Recipe, toolchain: JsonView) -> Json:
    """The part of a toolchain that shapes payloads of a recipe: the packages of other engines do
    not.
    """
    engines = {name for packages in ENGINE_PACKAGES.values() for name in packages}
    unused = {*engines, *QUANTIZERS} - set(recipe.packages)
    return {name: version for name, version in toolchain.items() if name not in unused}
