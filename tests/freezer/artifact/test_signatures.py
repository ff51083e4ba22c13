"""Signatures: signed artifacts are served; missing, foreign, moved and damaged signatures are
rejected.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key

import freezer
from freezer.artifact import ANNOTATION, SIGNATURE, Claims, read_keys, signed_with
from freezer.cli.app import app
from freezer.errors import IncompatibleError, IntegrityError, UsageError, install_command
from freezer.store import Store
from tests.conftest import Frozen
from tests.support.commands import invoked, output
from tests.support.keys import make_pair, private_pem
from tests.support.models import mlp
from tests.support.steps import HERE, blob_of, copy_of, random_inputs

X = random_inputs(2, 4)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Files of a private and a public key."""
    return make_pair(tmp_path, "own")


def sign_all(store: Store, key: Path) -> list[bool]:
    version = store.version("mlp")
    return [store.sign(version, name, key) for name in sorted(version.images)]


def test_load_requires_a_trusted_signature(
    store: Store, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    private, public = pair
    where = str(store.root)
    with pytest.raises(
        IncompatibleError,
        match="unsigned: got no signature, expected a signature of mlp:1 for ",
    ) as refused:
        freezer.load("mlp", store=where, trusted_keys=[public])
    assert {item.reason for item in refused.value.ladder} == {"unsigned"}
    before = store.version("mlp")
    assert sign_all(store, private) == [True] * len(before.images)
    assert sign_all(store, private) == [False] * len(before.images), "this key has signed them"
    assert store.version("mlp") == before, "a signature changes no artifact"
    assert store.versions("mlp") == [1]
    model = freezer.load("mlp", store=where, trusted_keys=[public])
    assert model.ladder == ()
    torch.testing.assert_close(model(X), mlp()(X))
    _, foreign = make_pair(tmp_path, "foreign")
    with pytest.raises(
        IncompatibleError,
        match="got signatures by other keys, expected a signature of mlp:1 for ",
    ):
        freezer.load("mlp", store=where, trusted_keys=[foreign])
    freezer.load("mlp", store=where, trusted_keys=[foreign, public], canary=False)


def test_a_signature_binds_model_version_and_class(store: Store, pair: tuple[Path, Path]) -> None:
    """A signed model under another name, and a signed artifact in another version or class, are
    refused.
    """
    private, public = pair
    sign_all(store, private)
    where, version = str(store.root), store.version("mlp")
    shutil.copytree(store.root / "mlp", store.root / "digits")
    with pytest.raises(
        IncompatibleError,
        match=f"got a signature of mlp:1 for {HERE}, expected a signature of digits:1 for {HERE}",
    ):
        freezer.load("digits", store=where, trusted_keys=[public])
    swapped = [replace(version.images["portable"], annotations=version.images[HERE].annotations)]
    swapped.append(version.images["portable"])
    store.publish("mlp", source_key="other", carried=swapped)
    with pytest.raises(
        IncompatibleError,
        match=f"got a signature of mlp:1 for portable, expected a signature of mlp:2 for {HERE}",
    ):
        freezer.load("mlp", store=where, device_class=HERE, trusted_keys=[public])


def test_rollback_is_refused(store: Store, pair: tuple[Path, Path]) -> None:
    private, public = pair
    version = store.version("mlp")
    second = store.publish("mlp", source_key="other", carried=version.index)
    signed = [store.sign(item, HERE, private) for item in (version, second, second)]
    assert signed == [True, True, False]
    given: dict[str, Any] = {"store": str(store.root), "device_class": HERE}
    given |= {"trusted_keys": [public], "canary": False}
    freezer.load("mlp", min_version=2, **given)
    path = store.root / "mlp" / "index.json"  # with version 1 as `2` and `latest`
    newer, older = second.descriptor.digest, version.descriptor.digest
    path.write_text(path.read_text().replace(newer, older))
    with pytest.raises(
        IncompatibleError, match="rolled_back: got version 1, expected version 2 or later"
    ):
        freezer.load("mlp", min_version=2, **given)
    with pytest.raises(IntegrityError):
        freezer.load("mlp:2", **given)


def test_load_skips_unsigned_artifacts(store: Store, pair: tuple[Path, Path]) -> None:
    private, public = pair
    store.sign(store.version("mlp"), "portable", private)
    model = freezer.load("mlp", store=str(store.root), trusted_keys=[public])
    assert model.manifest is not None
    assert model.manifest.device_class == "portable"
    assert [(item.rung, item.reason) for item in model.ladder] == [(HERE, "unsigned")]


def test_pulled_folders_have_all_signatures(
    store: Store, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    private, public = pair
    second, second_public = make_pair(tmp_path, "second")
    version = store.version("mlp")
    folder = tmp_path / "pulled"
    store.pull(version, HERE, folder)
    with pytest.raises(IncompatibleError, match="got no signature"):
        freezer.load(folder, trusted_keys=[public])
    sign_all(store, private)
    sign_all(store, second)
    store.pull(version, HERE, folder)  # keeps the folder and adds the signatures
    for key in (public, second_public):
        freezer.load(folder, trusted_keys=[key], canary=False)
    assert len(json.loads((folder / SIGNATURE).read_text())["signed"]) == 2


def other_artifact(folder: Path) -> None:
    """The signature of another artifact by the same key."""
    shutil.copy(folder.with_name("portable") / SIGNATURE, folder / SIGNATURE)


def edited(field: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change one field of signature.json."""

    def edit(folder: Path) -> None:
        found = json.loads((folder / SIGNATURE).read_text())
        holder = found if field == "image" else found["signed"][0]
        holder[field] = base64.b64encode(change(base64.b64decode(holder[field]))).decode()
        (folder / SIGNATURE).write_text(json.dumps(found))

    return edit


def other_manifest(folder: Path) -> None:
    """A changed manifest."""
    found = json.loads((folder / "manifest.json").read_text())
    found["model"] = "another"
    (folder / "manifest.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (other_manifest, "a signature of another manifest.json"),
        (other_artifact, "a signature of another manifest.json"),
        (
            edited("image", lambda data: data.replace(b"mlp", b"mlq")),
            "a signature of another artifact",
        ),
        (
            edited("payload", lambda data: data.replace(b"sha256:", b"sha256:0")),
            "signatures by other keys",
        ),
        (edited("signature", lambda data: data[:-1]), "signatures by other keys"),
        (
            lambda folder: (folder / SIGNATURE).write_text('{"image": "", "signed": []}'),
            "no signature",
        ),
        (lambda folder: (folder / SIGNATURE).write_text("{"), "is not JSON"),
    ],
)
def test_load_rejects_changed_folders(
    store: Store,
    pair: tuple[Path, Path],
    tmp_path: Path,
    attack: Callable[[Path], None],
    reason: str,
) -> None:
    private, public = pair
    sign_all(store, private)
    folder = tmp_path / "pulled"
    store.pull(store.version("mlp"), HERE, folder)
    store.pull(store.version("mlp"), "portable", tmp_path / "portable")
    attack(folder)
    with pytest.raises(IncompatibleError, match=reason):
        freezer.load(folder, trusted_keys=[public])


def test_both_images_of_a_class_are_signed(
    store: Store, scripted: Frozen, portable: Frozen, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    private, public = pair
    second = copy_of(portable.artifact, tmp_path / "second", device_class=HERE)
    payloads = tuple(
        replace(item, kind="onnxruntime") for item in scripted.artifact.manifest.payloads
    )
    best = copy_of(scripted.artifact, tmp_path / "best", payloads=payloads)
    version = store.publish("pair", source_key="key", artifacts=[best, second])
    assert [store.sign(version, HERE, private) for _ in range(2)] == [True, False]
    model = freezer.load("pair", store=str(store.root), trusted_keys=[public])
    assert [item.reason for item in model.ladder] == ["does_not_open"]


def test_sign_rejects_a_damaged_artifact(store: Store, pair: tuple[Path, Path]) -> None:
    version = store.version("mlp")
    path = blob_of(store.root / "mlp", store.manifest(version, HERE).payloads[0].digest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError):
        store.sign(version, HERE, pair[0])
    assert store.signatures(version, HERE) is None


def test_the_signature_image_follows_cosign(store: Store, pair: tuple[Path, Path]) -> None:
    private, public = pair
    version = store.version("mlp")
    store.sign(version, HERE, private)
    digest, layout = version.images[HERE].digest, store.layout("mlp")
    bundles = digest.replace(":", "-")  # where registries without referrers have cosign 3 look
    assert set(layout.tags()) == {"1", "latest", f"{bundles}.sig", bundles}
    (layer,) = layout.image(layout.tags()[f"{bundles}.sig"]).layers
    assert layer.media_type == "application/vnd.dev.cosign.simplesigning.v1+json"
    payload = layout.blob(layer)
    assert json.loads(payload)["critical"]["image"] == {"docker-manifest-digest": digest}
    key = load_pem_public_key(public.read_bytes())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    from cryptography.hazmat.primitives.hashes import SHA256

    signature = base64.b64decode(layer.annotations[ANNOTATION])
    key.verify(signature, payload, ec.ECDSA(SHA256()))


def test_bad_keys_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_keys([tmp_path / "absent"])
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UsageError):
        read_keys([tmp_path / "text"])
    other = tmp_path / "p384"
    other.write_bytes(private_pem(ec.generate_private_key(ec.SECP384R1())))
    with pytest.raises(UsageError):
        signed_with(
            other, image_digest="sha256:", claims=Claims(model="mlp", version=1, device_class=HERE)
        )


def test_commands_sign_and_verify(store: Store, pair: tuple[Path, Path]) -> None:
    private, public = map(str, pair)
    where = str(store.root)
    refused = invoked(app, "verify", "mlp", "--store", where, "--key", public)
    assert isinstance(refused.exception, IntegrityError)
    assert "unsigned: got no signature" in str(refused.exception)
    signed = invoked(app, "sign", "mlp", "--store", where, "--key", private)
    assert signed.exit_code == 0, signed.output
    assert f"mlp:1 for {HERE}: signed" in signed.output
    again = invoked(app, "sign", "mlp:1", "--store", where, "--key", private)
    assert f"mlp:1 for {HERE}: signed by this key before\n" in again.output
    verified = invoked(app, "verify", "mlp", "--store", where, "--key", public)
    assert verified.exit_code == 0, verified.output


def test_load_without_keys_needs_no_cryptography(store: Store) -> None:
    script = (
        "import sys; sys.modules['cryptography'] = None\n"
        f"import freezer; freezer.load('mlp', store={str(store.root)!r}, canary=False)\n"
        "try: freezer.load('mlp', store='.', trusted_keys=['x'])\n"
        "except freezer.UsageError as error: print(error)\n"
    )
    assert install_command("cryptography") in output(sys.executable, "-c", script, cwd=store.root)
