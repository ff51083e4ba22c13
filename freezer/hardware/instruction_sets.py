"""CPU features that oneDNN and ATen use under the limits of the environment, and oneDNN's layouts of packed weights.

Imports no torch. oneDNN and ATen read their limits once, before their first operation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

V4_FEATURES = frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))

_STEPS: tuple[tuple[str, frozenset[str]], ...] = (
    ("AVX2", frozenset(("avx2", "fma"))),
    ("AVX512_CORE", V4_FEATURES),
    ("AVX512_CORE_VNNI", frozenset(("avx512_vnni",))),
    ("AVX512_CORE_BF16", frozenset(("avx512_bf16",))),
    ("AVX512_CORE_FP16", frozenset(("avx512_fp16", "avx_vnni"))),
    ("AVX512_CORE_AMX", frozenset(("amx_tile", "amx_int8", "amx_bf16"))),
    ("AVX512_CORE_AMX_FP16", frozenset(("amx_fp16",))),
)
"""oneDNN's instruction sets from AVX2 on, each with the features that it adds (oneDNN's guide "CPU Dispatcher Control")."""

_SAME = {
    "AVX10_1_512": "AVX512_CORE_FP16",
    "AVX10_2_512": "AVX512_CORE_FP16",
    "AVX10_1_512_AMX": "AVX512_CORE_AMX",
    "AVX10_1_512_AMX_FP16": "AVX512_CORE_AMX_FP16",
    "AVX10_2_512_AMX_2": "AVX512_CORE_AMX_FP16",
}
_BESIDE = {"AVX2_VNNI": frozenset(("avx_vnni",)), "AVX2_VNNI_2": frozenset(("avx_vnni",))}
"""AVX2 with features that AVX512_CORE lacks."""

_BELOW = ("SSE41", "AVX")
_ALL = frozenset[str]().union(*(adds for _, adds in _STEPS))

_ATEN: Mapping[str, frozenset[str]] = {
    "avx512": frozenset(),
    "avx2": _ALL - {"avx2", "fma"},
    "default": _ALL,
}
"""ATen's capabilities, each with the features that it does not use."""

_KINDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "float32": (("avx512f", "avx512"), ("avx2", "avx2"), ("sve", "sve"), ("asimd", "neon")),
    "bfloat16": (
        ("amx_bf16", "amx"),
        ("avx512_bf16", "avx512_bf16"),
        ("avx512f", "avx512"),
        ("avx2", "avx2"),
        ("svebf16", "sve_bf16"),
        ("sve", "sve"),
        ("asimd", "neon"),
    ),
    "float16": (
        ("amx_fp16", "amx"),
        ("avx512_fp16", "avx512_fp16"),
        ("avx512f", "avx512"),
        ("avx2", "avx2"),
        ("sve", "sve"),
        ("asimd", "neon"),
    ),
    "int8": (
        ("amx_int8", "amx"),
        ("avx512_vnni", "avx512_vnni"),
        ("avx512f", "avx512"),
        ("avx_vnni", "avx2_vnni"),
        ("avx2", "avx2"),
        ("svei8mm", "sve_i8mm"),
        ("sve", "sve"),
        ("asimd", "neon"),
    ),
}
"""Features that determine the layout of packed weights of each dtype, best first."""

_PACKED_AS = {"uint8": "int8", "qint8": "int8", "quint8": "int8", "float64": "float32", "complex64": "float32"}

VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""The variables that limit a process."""


def onednn_features(features: Collection[str], environ: Mapping[str, str]) -> frozenset[str]:
    """The features that oneDNN uses under this environment."""
    limit = onednn_limit(environ)
    if limit is None:
        return frozenset(features)
    if limit in _BELOW:
        return frozenset(features) - _ALL
    last = "AVX2" if limit in _BESIDE else _SAME.get(limit, limit)
    allowed = _BESIDE.get(limit, frozenset())
    for name, adds in _STEPS:
        allowed |= adds
        if name == last:
            break
    return frozenset(features) - (_ALL - allowed)


def usable_features(features: Collection[str], environ: Mapping[str, str]) -> frozenset[str]:
    """The features that both oneDNN and ATen use under this environment."""
    return onednn_features(features, environ) - _ATEN.get(environ.get("ATEN_CPU_CAPABILITY", "").lower(), frozenset())


def layouts(features: Collection[str], sve_bits: int | None = None) -> dict[str, str]:
    """OneDNN's layouts of packed weights by dtype, `{"float32": "avx512", ...}`, for the features and SVE length that it uses."""
    found: dict[str, str] = {}
    for dtype, kinds in _KINDS.items():
        layout = next((name for feature, name in kinds if feature in features), "plain")
        found[dtype] = f"{layout}-{sve_bits}" if layout.startswith("sve") else layout
    return found


def packed_dtype(dtype: str) -> str | None:
    """The dtype whose layout applies to weights of a dtype; None if they are never packed."""
    found = _PACKED_AS.get(dtype, dtype)
    return found if found in _KINDS else None


def onednn_limit(environ: Mapping[str, str]) -> str | None:
    """The limit that oneDNN reads, in capitals; None without one, or if oneDNN does not know it."""
    limit = (environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or "").upper()
    known = limit in _BELOW or limit in _SAME or limit in _BESIDE or limit in dict(_STEPS)
    return limit if known else None


def limited_by(environ: Mapping[str, str]) -> str:
    """The variables that limit a process, for messages: `ONEDNN_MAX_CPU_ISA=AVX2`."""
    return " ".join(f"{name}={environ[name]}" for name in VARIABLES if environ.get(name))
