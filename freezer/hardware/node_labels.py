"""Kubernetes nodes of a device class, by the labels that nodes have from others: Kubernetes itself,
Node Feature Discovery and NVIDIA's GPU feature discovery.
"""

from __future__ import annotations

from collections.abc import Mapping

from freezer.hardware.device_classes import PORTABLE, DeviceClass, device_class

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}
_FLAGS: Mapping[str, str] = {
    "avx2": "AVX2",
    "fma": "FMA3",
    "avx512f": "AVX512F",
    "avx512bw": "AVX512BW",
    "avx512cd": "AVX512CD",
    "avx512dq": "AVX512DQ",
    "avx512vl": "AVX512VL",
    "avx512_vnni": "AVX512VNNI",
    "avx512_bf16": "AVX512BF16",
    "avx512_fp16": "AVX512FP16",
    "amx_tile": "AMXTILE",
    "amx_int8": "AMXINT8",
    "amx_bf16": "AMXBF16",
    "asimd": "ASIMD",
}
"""Node Feature Discovery's names of features by archspec's, of those that classes differ by; by
default it has no labels for others, such as BMI2.
"""

Expression = dict[str, str | list[str]]
"""A requirement on a label of a node, as in Kubernetes' NodeSelectorRequirement."""


def node_expressions(name: str) -> list[Expression]:
    """The requirements on the labels of a node that has a device class.

    Raises:
        UsageError: the class is unknown.
    """
    wanted = device_class(name)
    if name == PORTABLE:
        return [_one_of("kubernetes.io/arch", *_ARCHITECTURES.values())]
    if wanted.capability is None:
        return _of_cpu(wanted)
    return [
        *_of_cpu(device_class(wanted.host or PORTABLE)),
        _one_of("nvidia.com/gpu.compute.major", str(wanted.capability // 10)),
        _one_of("nvidia.com/gpu.compute.minor", str(wanted.capability % 10)),
    ]


def _of_cpu(wanted: DeviceClass) -> list[Expression]:
    expressions = [_one_of("kubernetes.io/arch", _ARCHITECTURES[wanted.machine])]
    if wanted.sve_bits is not None:  # no label has the length of vectors
        return [*expressions, _one_of(f"coldpress.dev/{wanted.name}", "true")]
    prefix = "feature.node.kubernetes.io/cpu-"
    for feature, flag in _FLAGS.items():
        if feature in wanted.features:
            expressions.append({"key": f"{prefix}cpuid.{flag}", "operator": "Exists"})
    if wanted.vendor is not None:
        expressions.append(_one_of(f"{prefix}model.vendor_id", _VENDORS[wanted.vendor]))
    return expressions


def _one_of(key: str, *values: str) -> Expression:
    return {"key": key, "operator": "In", "values": list(values)}
