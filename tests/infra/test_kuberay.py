"""The Kubernetes manifests, as kustomize renders them: their schemas, and what a campaign needs of
the pods.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from moto.ec2.models.instance_types import INSTANCE_TYPES

from freezer.hardware import DEVICE_CLASSES
from jobs.worker_labels import MEMORY_SHARE
from tests.infra.test_images import PINNED, PROJECT
from tests.infra.test_ray import FLEET, labels_of

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, which contains kustomize"
)

FOLDER = Path(__file__).parents[2] / "infra" / "kuberay"
FILES = [
    path for path in FOLDER.rglob("kustomization.yaml") if "kind: Component" not in path.read_text()
]
KUSTOMIZATIONS = [
    "../mlflow",
    "../serving",
    *sorted(str(path.parent.relative_to(FOLDER)) for path in FILES),
]
CLUSTERS = ["base", "example", "overlays/autoscaling", "overlays/gpu", "overlays/shared-store"]
KUBERNETES = "1.33"

CRDS = os.environ.get("COLDPRESS_KUBERAY_CRDS")
"""A folder with KubeRay's own CRDs, which are too large to keep here:
helm-chart/kuberay-operator/crds of its repository.
"""

AUTOSCALER_OF_CONTAINER = ("resources", "securityContext", "env", "envFrom", "volumeMounts")


@lru_cache
def rendered(name: str) -> tuple[dict[str, Any], ...]:
    """The documents of a kustomization; leave them as they are."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def only(kind: str, name: str) -> list[dict[str, Any]]:
    return [document for document in rendered(name) if document["kind"] == kind]


def cluster(name: str) -> dict[str, Any]:
    (found,) = only("RayCluster", name)
    spec: dict[str, Any] = found["spec"]
    return spec


def pods(name: str) -> dict[str, dict[str, Any]]:
    """The pod specifications of head and workers, by group."""
    spec = cluster(name)
    groups = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"]["spec"], **groups}


def all_pods(name: str) -> dict[str, dict[str, Any]]:
    """The pod specifications of all documents, by their own names and groups."""
    found = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in rendered(name)
        if one["apiVersion"] == "apps/v1"
    }
    found |= {
        one["metadata"]["name"]: one["spec"]["submitterPodTemplate"]["spec"]
        for one in only("RayJob", name)
    }
    return found | (pods(name) if only("RayCluster", name) else {})


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
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_manifests_match_their_schemas(name: str) -> None:
    assert rendered(name)
    for document in rendered(name):
        check(document)
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "coldpress"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda spec: spec["workerGroupSpecs"][0].update(replica=1),
        lambda spec: spec["workerGroupSpecs"][0].update(minReplicas=-1),
        lambda spec: spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0].update(
            imag="coldpress-worker"
        ),
        lambda spec: spec["headGroupSpec"]["headService"].update(spec={"type": 1}),
        lambda spec: spec["autoscalerOptions"].update(
            securityContext={"capabilities": {"drop": "ALL"}}
        ),
    ],
)
def test_wrong_fields_are_rejected(wrong: Any) -> None:
    (document,) = copy.deepcopy(only("RayCluster", "overlays/autoscaling"))
    wrong(document["spec"])
    with pytest.raises(ValidationError):
        check(document)


def strict(schema: Any) -> Any:
    """A schema of a CRD that also rejects unknown fields, as `kubectl apply --validate=strict`
    does.
    """
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    open_ended = "additionalProperties" in schema or schema.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    closed = {"additionalProperties": False} if "properties" in schema and not open_ended else {}
    return {key: strict(value) for key, value in schema.items()} | closed


@lru_cache
def crd(kind: str) -> Draft202012Validator:
    """A validator of KubeRay's own CRD of a kind."""
    text = (Path(CRDS or "") / f"ray.io_{kind.lower()}s.yaml").read_text()
    (version,) = (
        one
        for one in yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
        if one["name"] == "v1"
    )
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(schema)


@pytest.mark.skipif(
    CRDS is None,
    reason=(
        "needs KubeRay's CRDs: set COLDPRESS_KUBERAY_CRDS to their folder (infra/kuberay/README.md)"
    ),
)
@pytest.mark.parametrize("name", [*CLUSTERS, "job", "example/job"])
def test_manifests_match_the_crds_of_kuberay(name: str) -> None:
    documents = [*only("RayCluster", name), *only("RayJob", name)]
    assert documents
    for document in documents:
        crd(document["kind"]).validate(document)
        wrong = copy.deepcopy(document)
        wrong["spec"]["unknown"] = 1
        assert not crd(document["kind"]).is_valid(wrong)


def test_ray_is_the_version_of_the_images() -> None:
    assert cluster("base")["rayVersion"] == PINNED["ray"]


def test_an_overlay_names_all_images_of_ours() -> None:
    """One list of registry and tag in a copy of `example` reaches every pod."""
    named = set()
    for name in ("example", "example/job"):
        for pod in all_pods(name).values():
            named |= {one["image"] for one in containers(pod)}
    ours = {image for image in named if "coldpress" in image}
    assert named - ours == {"docker.io/library/postgres:15.17"}
    assert len(ours) == 5
    for image in ours:
        assert image.startswith("registry.example/coldpress-")
        assert image.endswith(f":{PROJECT['project']['version']}")
    shown = {
        (one["kind"], one["metadata"]["name"])
        for name in ("overlays/gpu", "../mlflow", "../serving")
        for one in rendered(name)
    }
    assert {(one["kind"], one["metadata"]["name"]) for one in rendered("example")} == shown


def test_images_run_on_their_architecture() -> None:
    """Workers alone run on both, from one tag; serving selects nodes by class."""
    found = {**all_pods("../mlflow"), **all_pods("job"), "head": pods("base")["head"]}
    selected = {
        name
        for name, pod in found.items()
        if pod.get("nodeSelector") == {"kubernetes.io/arch": "amd64"}
    }
    assert selected == {"head", "mlflow", "freeze-champions"}
    assert found.keys() - selected == {"postgres"}
    for group, pod in pods("base").items():
        if group != "head":
            (term,) = pod["affinity"]["nodeAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]["nodeSelectorTerms"]
            (types,) = (one["values"] for one in term["matchExpressions"])
            expected = "arm64" if "coldpress.dev/cpu-aarch64" in labels_of(group) else "x86_64"
            for name in types:
                assert (
                    expected in INSTANCE_TYPES[name]["ProcessorInfo"]["SupportedArchitectures"]
                ), (group, name)


def test_workers_alone_tolerate_the_taint_of_their_nodes() -> None:
    """Which keeps the head, MLflow and others off them."""
    taint = {"key": "coldpress.dev/worker", "operator": "Exists", "effect": "NoSchedule"}
    found = {**all_pods("example"), **all_pods("example/job")}
    assert {name for name, pod in found.items() if taint in pod.get("tolerations", ())} == set(
        FLEET
    )


def test_deployments_only_read_the_store() -> None:
    def secrets(pod: Mapping[str, Any]) -> set[str]:
        return {
            one["secretRef"]["name"]
            for container in containers(pod)
            for one in container.get("envFrom", ())
        }

    writers = {name for pod in pods("overlays/gpu").values() for name in secrets(pod)}
    readers = {name for pod in all_pods("../serving").values() for name in secrets(pod)}
    assert "coldpress-store" in writers
    assert readers == {"coldpress-store-read"}


def test_groups_are_the_device_classes() -> None:
    groups = {group["groupName"]: group for group in cluster("overlays/gpu")["workerGroupSpecs"]}
    assert set(groups) == set(FLEET)
    for name, group in groups.items():
        pod = group["template"]["spec"]
        (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        nodes = {one["key"]: one["values"] for one in term["matchExpressions"]}
        if DEVICE_CLASSES[name].kind == "cpu":
            assert pod["initContainers"][0]["args"] == [name]
            assert set(nodes["node.kubernetes.io/instance-type"]) <= set(INSTANCE_TYPES)
        else:
            capability = DEVICE_CLASSES[name].capability or 0
            assert nodes == {
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
        assert all(
            one["resources"]["requests"] == one["resources"]["limits"] for one in containers(pod)
        ), name
    for group in cluster("overlays/gpu")["workerGroupSpecs"]:
        (worker,) = group["template"]["spec"]["containers"]
        limits, environ = (
            worker["resources"]["limits"],
            {one["name"]: one["value"] for one in worker["env"]},
        )
        cpus, memory = int(limits["cpu"]), int(limits["memory"].removesuffix("Gi")) * 2**30
        assert (
            environ.items()
            >= {
                "RAY_worker_niceness": "0",
                "RAY_num_workers_soft_limit": str(2 * cpus),
            }.items()
        )
        assert int(group["rayStartParams"]["memory"]) == pytest.approx(
            MEMORY_SHARE * memory, rel=0.01
        )
        (apart,) = group["template"]["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert cluster("base")["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize("name", CLUSTERS)
def test_only_the_autoscaler_has_a_kubernetes_token(name: str) -> None:
    tokens = set()
    for pod in all_pods(name).values():
        assert pod["automountServiceAccountToken"] is False
        assert not {
            mount["name"] for one in containers(pod) for mount in one.get("volumeMounts", ())
        } & {"api-token"}
        tokens |= {volume["name"] for volume in pod.get("volumes", ()) if "projected" in volume}
    mounted = {
        mount["name"]
        for mount in cluster(name).get("autoscalerOptions", {}).get("volumeMounts", ())
    }
    assert tokens == mounted == ({"api-token"} if name == "overlays/autoscaling" else set())
    assert not [
        document
        for document in rendered(name)
        if document["kind"].endswith(("Role", "RoleBinding"))
    ]


def test_ray_is_reached_only_as_documented() -> None:
    own = {"ray.io/cluster": "coldpress"}
    opened: dict[int, list[dict[str, Any]]] = {}
    for policy in only("NetworkPolicy", "base"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() >= own.items()
        for rule in policy["spec"]["ingress"]:
            if rule["from"] != [{"podSelector": {"matchLabels": own}}]:
                for port in rule["ports"]:
                    opened |= dict.fromkeys(
                        range(port["port"], port.get("endPort", port["port"]) + 1), rule["from"]
                    )
    drivers = set(range(9105, 9110))
    assert set(opened) == {8080, 8265, *drivers}
    ports = pods("base")["head"]["containers"][0]["ports"]
    assert {
        port["containerPort"] for port in ports if port["name"] == f"driver-{port['containerPort']}"
    } == drivers
    submitter = {"podSelector": {"matchLabels": {"coldpress.dev/submits": "true"}}}
    assert submitter in opened[8265]
    (job,) = only("RayJob", "job")
    labels = job["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    assert labels.items() >= submitter["podSelector"]["matchLabels"].items()
    assert job["spec"]["clusterSelector"] == own
    words = shlex.split(job["spec"]["entrypoint"])
    groups = [group["groupName"] for group in cluster("base")["workerGroupSpecs"]]
    assert [
        after for word, after in itertools.pairwise(words) if word == "--device-class"
    ] == groups
    (budget,) = only("PodDisruptionBudget", "base")
    assert budget["spec"]["selector"]["matchLabels"] == {**own, "ray.io/node-type": "head"}
    assert only("RayCluster", "base")[0]["metadata"]["name"] == own["ray.io/cluster"]


def test_prometheus_finds_the_pods() -> None:
    """KubeRay adds labels and the port `metrics` to Ray's pods."""
    configuration = yaml.safe_load(
        (FOLDER.parent / "observability" / "prometheus-kubernetes.yml").read_text()
    )
    ray = {"ray.io/cluster": "coldpress"}
    found = [({**ray, "ray.io/node-type": "head"}, pods("base")["head"], "head")]
    found += [
        ({**ray, "ray.io/node-type": "worker"}, pod, name)
        for name, pod in pods("base").items()
        if name != "head"
    ]
    for one in only("Deployment", "../serving"):
        template = one["spec"]["template"]
        found.append((template["metadata"]["labels"], template["spec"], one["metadata"]["name"]))
    targets: dict[str, set[tuple[str, int]]] = {}
    for scrape in configuration["scrape_configs"]:
        (discovery,) = scrape["kubernetes_sd_configs"]
        assert (discovery["role"], discovery["namespaces"]["names"]) == ("pod", ["coldpress"])
        (selector,) = discovery["selectors"]
        name, value = selector["label"].split("=")
        (kept,) = [one["regex"] for one in scrape["relabel_configs"] if one.get("action") == "keep"]
        targets[scrape["job_name"]] = {
            (pod_name, port["containerPort"])
            for labels, pod, pod_name in found
            if labels.get(name) == value
            for port in [
                *pod["containers"][0].get("ports", ()),
                {"name": "metrics", "containerPort": 8080},
            ]
            if re.fullmatch(kept, port["name"])
        }
    assert targets.pop("coldpress-driver") == {("head", port) for port in range(9105, 9110)}
    assert targets.pop("coldpress-serving") == {
        (one["metadata"]["name"], 8000) for one in only("Deployment", "../serving")
    }
    assert targets.pop("ray") == {(name, 8080) for name in pods("base")}
    assert targets == {}


def test_mlflow_is_reached_by_drivers_and_users_alone() -> None:
    (policy,) = [
        one["spec"]
        for one in only("NetworkPolicy", "../mlflow")
        if one["metadata"]["name"] == "mlflow"
    ]
    (rule,) = policy["ingress"]
    admitted = [one["podSelector"]["matchLabels"] for one in rule["from"]]
    head = {"ray.io/cluster": "coldpress", "ray.io/node-type": "head"}
    assert admitted == [head, {"coldpress.dev/uses-mlflow": "true"}]


def test_a_shared_store_is_mounted_everywhere() -> None:
    (claim,) = only("PersistentVolumeClaim", "overlays/shared-store")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods("overlays/shared-store").values():
        (volume,) = [one["name"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
        assert {"name": volume, "mountPath": "/store"} in pod["containers"][0]["volumeMounts"]


def test_autoscaling_covers_every_group() -> None:
    """What Ray's autoscaler reads of the groups: it starts pods by labels and memory."""
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr,
    )

    (document,) = only("RayCluster", "overlays/autoscaling")
    spec = document["spec"]
    assert (spec["enableInTreeAutoscaling"], spec["autoscalerOptions"]["version"]) == (True, "v2")
    types = _derive_autoscaling_config_from_ray_cr(copy.deepcopy(document))["available_node_types"]
    assert types.pop("headgroup")["resources"]["CPU"] == 0
    assert {name: found["labels"] for name, found in types.items()} == {
        name: labels_of(name) for name in FLEET if name.startswith("cpu-")
    }
    for found in types.values():
        assert (found["min_workers"], found["resources"]["CPU"]) == (0, 6)
        assert found["resources"]["memory"] > 2 * 10**10
    assert not any("replicas" in group for group in spec["workerGroupSpecs"]), (
        "an apply would end the autoscaler's workers"
    )
