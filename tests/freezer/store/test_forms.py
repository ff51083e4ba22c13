"""Versions as other tools read them: skopeo, ModelPack, mounted images, bundles of cosign."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

import freezer
from freezer.artifact import Artifact
from freezer.cli.app import app
from freezer.files import digest_bytes
from freezer.store import Store, copy_version
from freezer.store.forms import write_tar
from tests.support.commands import invoked, output
from tests.support.keys import make_pair
from tests.support.registries import RunningRegistry
from tests.support.steps import HERE, write_plain_artifact

FINER = "cpu-cascadelake"


class Skopeo:
    """Debian's skopeo, as a reader that knows nothing of Coldpress."""

    def __init__(self, server: RunningRegistry, uri: str, folder: Path) -> None:
        if shutil.which("skopeo") is None:
            pytest.skip("skopeo is not installed: apt-get install skopeo")
        certificates = folder / "certificates"
        certificates.mkdir()
        shutil.copy(server.authority, certificates / "ca.crt")
        self._options = ["--authfile", str(server.docker_config / "config.json")]
        self._certificates, self._folder = str(certificates), folder
        self._place = f"docker://{uri.removeprefix('oci://').partition('?')[0]}"

    def raw(self, reference: str, *more: str) -> Any:
        """A manifest, after skopeo has copied it with all that it names."""
        name, dest = f"{self._place}/{reference}", f"oci:{self._folder / 'layout'}:it"
        options = ["--src-cert-dir", self._certificates, "--all", *more]
        self._run("copy", *options, name, dest)
        return json.loads(self._run("inspect", "--cert-dir", self._certificates, "--raw", name))

    def _run(self, command: str, *arguments: str) -> str:
        return output("skopeo", command, *self._options, *arguments)


@pytest.fixture
def skopeo(registry_server: RunningRegistry, registry: str, tmp_path: Path) -> Skopeo:
    return Skopeo(registry_server, registry, tmp_path)


@pytest.fixture
def there(registry: str, one: Artifact, two: Artifact, tmp_path: Path) -> Store:
    """A registry with a version of three classes, signed."""
    folder = Store.open(str(tmp_path / "store"), create=True)
    finer = write_plain_artifact(tmp_path / "finer", b"finer", device_class=FINER)
    folder.publish("tiny", source_key="key", artifacts=[one, two, finer])
    private, _ = make_pair(tmp_path, "own")
    folder.sign(folder.version("tiny"), "portable", private)
    store = Store.open(registry)
    copy_version(folder, store, "tiny")
    return store


def test_generic_clients_take_the_portable_image(there: Store, skopeo: Skopeo) -> None:
    version = there.version("tiny")
    index = skopeo.raw("tiny:1")
    assert digest_bytes(there.layout("tiny").blob(version.descriptor)) == (
        version.descriptor.digest
    )
    platforms = [item.get("platform") for item in index["manifests"]]
    assert platforms == [
        {"architecture": "amd64", "os": "linux"},
        {"architecture": "arm64", "os": "linux"},
        None,
        {"architecture": "amd64", "os": "linux", "variant": "v4"},
    ]
    portable = version.images["portable"].digest
    assert [item["digest"] for item in index["manifests"][:2]] == [portable, portable]


@pytest.mark.parametrize("device_class", ["portable", FINER])
def test_modelpack_manifests_name_the_same_blobs(
    there: Store, skopeo: Skopeo, device_class: str, tmp_path: Path
) -> None:
    manifest = skopeo.raw(f"tiny:1-{device_class}", "--preserve-digests")
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    version = there.version("tiny")
    own = there.manifest(version, device_class)
    layers = {}
    for layer in manifest["layers"]:
        path = layer["annotations"]["org.cncf.model.filepath"]
        assert layer["annotations"]["org.opencontainers.image.title"] == path
        assert re.fullmatch(r"application/vnd\.cncf\.model\..*\.v1\.raw", layer["mediaType"])
        layers[path] = layer["digest"]
    digest = digest_bytes(there.manifest_bytes(version, device_class))
    expected = {item.path: item.digest for item in own.contents}
    assert layers == {"manifest.json": digest, **expected}
    blobs = tmp_path / "layout" / "blobs" / "sha256"
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_bytes())
    assert config["descriptor"]["name"] == own.model
    assert config["config"] == {"format": "torch.export", "precision": "float32"}
    assert config["modelfs"] == {"type": "layers", "diffIds": [*layers.values()]}


def test_a_mounted_image_loads(store: Store, registry: str, skopeo: Skopeo, tmp_path: Path) -> None:
    private, public = make_pair(tmp_path, "own")
    for name in store.version("mlp").images:
        store.sign(store.version("mlp"), name, private)
    done = invoked(app, "copy", "--as", "image", store.uri, registry, "mlp")
    assert done.exit_code == 0, done.output
    assert "mlp:1-image" in done.output
    images = skopeo.raw("mlp:1-image", "--preserve-digests")["manifests"]
    assert [item["platform"]["architecture"] for item in images[:2]] == ["amd64", "arm64"]
    blobs = tmp_path / "layout" / "blobs" / "sha256"
    by_class = {item["annotations"]["dev.coldpress.device-class"]: item for item in images}
    manifest = json.loads((blobs / by_class[HERE]["digest"][7:]).read_bytes())
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_bytes())
    digests = [layer["digest"] for layer in manifest["layers"]]
    assert config["rootfs"]["diff_ids"] == digests, "layers are not compressed"
    for digest in digests:
        with tarfile.open(blobs / digest[7:]) as tar:
            tar.extractall(tmp_path / "root", filter="data")
    x = torch.randn(2, 4)
    mounted = freezer.load(tmp_path / "root" / "models", trusted_keys=[public])
    assert torch.equal(mounted(x), freezer.load("mlp", store=store.uri)(x))


def test_layers_depend_on_contents_alone(tmp_path: Path, one: Artifact) -> None:
    paths = [item.path for item in one.manifest.contents]
    first, second = tmp_path / "first.tar", tmp_path / "second.tar"
    write_tar(first, one.folder, paths)
    copied = tmp_path / "copied"
    shutil.copytree(one.folder, copied)
    for path in paths:
        (copied / path).chmod(0o600)
        time.sleep(0.01)
        (copied / path).touch()
    write_tar(second, copied, reversed(paths))
    assert first.read_bytes() == second.read_bytes()


def test_bundles_verify_by_their_specification(there: Store, tmp_path: Path) -> None:
    layout = there.layout("tiny")
    (image,) = there.version("tiny").images_of("portable")
    (referrer,) = layout.index(layout.tags()[image.digest.replace(":", "-")]).manifests
    assert referrer.artifact_type == "application/vnd.dev.sigstore.bundle.v0.3+json"
    manifest = json.loads(layout.blob(referrer))
    assert manifest["subject"]["digest"] == image.digest
    assert manifest["subject"]["size"] == image.size_bytes
    bundle = json.loads(layout.blob(layout.image(referrer).layers[0]))
    assert bundle["mediaType"] == referrer.artifact_type
    envelope = bundle["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    kind = envelope["payloadType"].encode()
    signed = b" ".join([b"DSSEv1", b"%d" % len(kind), kind, b"%d" % len(payload), payload])
    key = load_pem_public_key((tmp_path / "own.pub").read_bytes())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed, ec.ECDSA(SHA256()))
    statement = json.loads(payload)
    assert statement["predicateType"] == "https://sigstore.dev/cosign/sign/v1"
    assert statement["subject"][0]["digest"] == {"sha256": image.digest.removeprefix("sha256:")}
    assert there.signatures(there.version("tiny"), "portable") is not None
