"""The Kubernetes manifests, as kustomize renders them: their schemas, and what a campaign needs of
the pods.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from moto.ec2.models.instance_types import INSTANCE_TYPES

from freezer.hardware import DEVICE_CLASSES
from jobs.worker_labels import MEMORY_SHARE
from tests.support.commands import output
from tests.support.manifests import FLEET, KUBERNETES, check_manifest, labels_of
from tests.support.raylets import ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, which contains kustomize"
)

FOLDER = ROOT / "infra" / "kuberay"
FILES = [
    path for path in FOLDER.rglob("kustomization.yaml") if "kind: Component" not in path.read_text()
]
KUSTOMIZATIONS = [
    "../mlflow",
    "../serving",
    *sorted(str(path.parent.relative_to(FOLDER)) for path in FILES),
]
CLUSTERS = ["base", "example", "overlays/autoscaling", "overlays/gpu", "overlays/shared-store"]

OWN = {"ray.io/cluster": "coldpress"}
DRIVERS = set(range(9105, 9110))
"""Ports of the metrics of drivers on the head."""

AUTOSCALER_OF_CONTAINER = ("resources", "securityContext", "env", "envFrom", "volumeMounts")


@lru_cache
def rendered(name: str) -> tuple[dict[str, Any], ...]:
    """The documents of a kustomization; leave them as they are."""
    return tuple(yaml.safe_load_all(output("kubectl", "kustomize", FOLDER / name)))


def only(kind: str, name: str) -> list[dict[str, Any]]:
    return [document for document in rendered(name) if document["kind"] == kind]


def cluster(name: str) -> dict[str, Any]:
    (found,) = only("RayCluster", name)
    return found["spec"]


def pods(name: str) -> dict[str, dict[str, Any]]:
    """The pod specifications of head and workers, by group."""
    spec = cluster(name)
    groups = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"]["spec"], **groups}


def all_pods(name: str) -> dict[str, dict[str, Any]]:
    """The pod specifications of all documents, by their own names and groups."""
    specs = pods(name) if only("RayCluster", name) else {}
    for document in rendered(name):
        template = "submitterPodTemplate" if document["kind"] == "RayJob" else "template"
        if document["apiVersion"] == "apps/v1" or document["kind"] == "RayJob":
            specs[document["metadata"]["name"]] = document["spec"][template]["spec"]
    return specs


def node_terms(pod: Mapping[str, Any]) -> dict[str, list[str]]:
    """The values of each label that the node affinity of a pod allows."""
    affinity = pod["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    labels = [item for term in terms for item in term["matchExpressions"]]
    return {item["key"]: item.get("values", []) for item in labels}


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def check_kubernetes(
    _validator: object, kind: str, found: dict[str, Any], _schema: object
) -> Iterator[ValidationError]:
    """The keyword `kubernetes` of infra/kuberay/schemas: a part of Kubernetes itself."""
    whole: dict[str, Any] = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "part"}}
    if kind == "PodTemplate":
        whole["template"] = found
    elif kind == "Service":
        whole |= found
    else:
        own = {key: value for key, value in found.items() if key in AUTOSCALER_OF_CONTAINER}
        whole |= {"kind": "Pod", "spec": {"containers": [{"name": "part", "image": "part", **own}]}}
    try:
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    except ValidationError as error:
        yield error


def check(document: dict[str, Any]) -> None:
    if document["apiVersion"] == "ray.io/v1":
        schema = yaml.safe_load((FOLDER / "schemas" / "ray.io_v1.yaml").read_text())
        extend(Draft202012Validator, {"kubernetes": check_kubernetes})(schema).validate(document)
    else:
        check_manifest(document)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_manifests_match_their_schemas(name: str) -> None:
    assert rendered(name)
    for document in rendered(name):
        check(document)
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "coldpress"


def names(name: str) -> set[tuple[str, str]]:
    """The kinds and names of a kustomization's documents."""
    return {(document["kind"], document["metadata"]["name"]) for document in rendered(name)}


def test_groups_are_the_device_classes() -> None:
    groups = {group["groupName"]: group for group in cluster("overlays/gpu")["workerGroupSpecs"]}
    assert set(groups) == set(FLEET)
    for name, group in groups.items():
        pod = group["template"]["spec"]
        nodes = node_terms(pod)
        if DEVICE_CLASSES[name].kind == "cpu":
            assert pod["initContainers"][0]["args"] == [name]
            assert set(nodes["node.kubernetes.io/instance-type"]) <= set(INSTANCE_TYPES)
            architecture = {"x86_64": "amd64", "aarch64": "arm64"}[DEVICE_CLASSES[name].machine]
            assert nodes.get("kubernetes.io/arch", [architecture]) == [architecture]
        else:
            capability = DEVICE_CLASSES[name].capability or 0
            assert nodes == {
                "kubernetes.io/arch": ["amd64"],
                "nvidia.com/gpu.compute.major": [str(capability // 10)],
                "nvidia.com/gpu.compute.minor": [str(capability % 10)],
            }
            assert pod["containers"][0]["image"] == "coldpress-worker-cuda"
            assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert group["labels"] == labels_of(name)
    assert {group["groupName"] for group in cluster("base")["workerGroupSpecs"]} == {
        name for name in groups if name.startswith("cpu-")
    }


def test_workers_are_alone_with_whole_cpus() -> None:
    """Guaranteed pods with whole CPUs get their own from a static CPU manager; Ray schedules what
    the container has.
    """
    for name, pod in pods("overlays/gpu").items():
        for container in containers(pod):
            assert container["resources"]["requests"] == container["resources"]["limits"], name
    for group in cluster("overlays/gpu")["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (worker,) = pod["containers"]
        limits = worker["resources"]["limits"]
        environ = {variable["name"]: variable["value"] for variable in worker["env"]}
        assert environ["RAY_worker_niceness"] == "0"
        assert environ["RAY_num_workers_soft_limit"] == str(2 * int(limits["cpu"]))
        memory = int(limits["memory"].removesuffix("Gi")) * 2**30
        expected = pytest.approx(MEMORY_SHARE * memory, rel=0.01)
        assert int(group["rayStartParams"]["memory"]) == expected
        apart = pod["affinity"]["podAntiAffinity"]
        (term,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
    assert cluster("base")["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize("name", CLUSTERS)
def test_only_the_autoscaler_has_a_kubernetes_token(name: str) -> None:
    tokens = set()
    for pod in all_pods(name).values():
        assert pod["automountServiceAccountToken"] is False
        for container in containers(pod):
            assert "api-token" not in mounts(container)
        tokens |= {volume["name"] for volume in pod.get("volumes", ()) if "projected" in volume}
    assert tokens == mounts(cluster(name).get("autoscalerOptions", {}))
    assert tokens == ({"api-token"} if name == "overlays/autoscaling" else set())
    assert not [kind for kind, _ in names(name) if kind.endswith(("Role", "RoleBinding"))]


def mounts(container: Mapping[str, Any]) -> set[str]:
    """The volumes that a container mounts."""
    return {mount["name"] for mount in container.get("volumeMounts", ())}


def test_ray_is_reached_only_as_documented() -> None:
    opened: dict[int, list[dict[str, Any]]] = {}
    for policy in only("NetworkPolicy", "base"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() >= OWN.items()
        for rule in policy["spec"]["ingress"]:
            if rule["from"] != [{"podSelector": {"matchLabels": OWN}}]:
                for port in rule["ports"]:
                    last = port.get("endPort", port["port"])
                    opened |= dict.fromkeys(range(port["port"], last + 1), rule["from"])
    assert set(opened) == {8080, 8265, *DRIVERS}
    (head,) = pods("base")["head"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert {ports.get(f"driver-{port}") for port in DRIVERS} == DRIVERS
    (job,) = only("RayJob", "job")
    labels = job["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    submits = {"coldpress.dev/submits": "true"}
    assert {"podSelector": {"matchLabels": submits}} in opened[8265]
    assert labels.items() >= submits.items()
    assert job["spec"]["clusterSelector"] == OWN
    words = shlex.split(job["spec"]["entrypoint"])
    classes = [after for word, after in itertools.pairwise(words) if word == "--device-class"]
    assert classes == [group["groupName"] for group in cluster("base")["workerGroupSpecs"]]
    assert only("RayCluster", "base")[0]["metadata"]["name"] == OWN["ray.io/cluster"]
