"""Kubernetes nodes of a device class: Kubernetes' schema, and which machines have the labels."""

from __future__ import annotations

import json

import kubernetes_validate
import pytest

from freezer.cli.app import app
from freezer.errors import UsageError
from freezer.hardware import DEVICE_CLASSES, node_expressions
from tests.support.commands import invoked
from tests.support.manifests import KUBERNETES

CPUID = "feature.node.kubernetes.io/cpu-cpuid."
VENDOR = "feature.node.kubernetes.io/cpu-model.vendor_id"
ZEN4 = {"AVX2", "FMA3", "AVX512F", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL", "AVX512VNNI"}


def selected(labels: dict[str, str]) -> set[str]:
    """The classes whose requirements a node with these labels meets."""
    found = set()
    for name in DEVICE_CLASSES:
        met = True
        for item in node_expressions(name):
            value = labels.get(str(item["key"]))
            met &= value is not None and value in item.get("values", [value])
        if met:
            found.add(name)
    return found


def node(architecture: str, *flags: str, **labels: str) -> dict[str, str]:
    """The labels of a node."""
    features = {f"{CPUID}{flag}": "true" for flag in flags}
    return {"kubernetes.io/arch": architecture, **features, **labels}


def test_nodes_are_of_the_classes_that_they_can_run() -> None:
    assert selected(node("amd64")) == {"portable"}
    assert selected(node("amd64", "AVX2", "FMA3")) == {"portable", "cpu-x86-64-v3"}
    levels = {"portable", "cpu-x86-64-v3", "cpu-x86-64-v4"}
    amd = node("amd64", *ZEN4, "AVX512BF16", **{VENDOR: "AMD"})
    assert selected(amd) == levels | {"cpu-zen4"}
    intel = node("amd64", *ZEN4, **{VENDOR: "Intel"})
    assert selected(intel) == levels | {"cpu-cascadelake"}
    assert selected(node("arm64", "ASIMD")) == {"portable", "cpu-aarch64"}


def test_gpus_are_told_by_their_capability() -> None:
    labels = {"nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0"}
    host = node("amd64", "AVX2", "FMA3", **labels)
    assert selected(host) == {"portable", "cpu-x86-64-v3", "cuda-sm90"}


def test_vector_lengths_have_labels_of_our_own() -> None:
    """No other label has them; infra/serving/kubernetes.yaml uses the same."""
    own = {"coldpress.dev/cpu-neoverse-v1": "true"}
    found = selected(node("arm64", "ASIMD", "SVE", **own))
    assert found == {"portable", "cpu-aarch64", "cpu-neoverse-v1"}


@pytest.mark.parametrize("name", DEVICE_CLASSES)
def test_affinity_is_of_kubernetes_schema(name: str) -> None:
    affinity = json.loads(invoked(app, "classes", "--affinity", name).output)
    assert list(affinity) == ["nodeAffinity"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "model"},
        "spec": {"affinity": affinity, "containers": [{"name": "serve", "image": "serve"}]},
    }
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_unknown_classes_have_no_nodes() -> None:
    with pytest.raises(UsageError):
        node_expressions("cpu-z80")
