"""Write artifacts, signatures and versions as OCI images and indexes. Imports no torch."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from freezer.artifact.folder import MEDIA_MANIFEST, MEDIA_PAYLOAD, Artifact
from freezer.artifact.manifest import FileRef
from freezer.artifact.signatures import ANNOTATION, MEDIA_SIGNATURE, Signed
from freezer.store.oci_layout import MEDIA_INDEX, Layout, json_bytes

ARTIFACT_TYPE = "application/vnd.coldpress.frozen.v1"
MEDIA_IMAGE = "application/vnd.oci.image.manifest.v1+json"
MEDIA_CONFIG = "application/vnd.oci.image.config.v1+json"
DEVICE_CLASS = "dev.coldpress.device-class"
MODEL = "dev.coldpress.model"
VERSION = "dev.coldpress.version"
SOURCE_KEY = "dev.coldpress.source-key"
TITLE = "org.opencontainers.image.title"


def write_image(layout: Layout, model: str, artifact: Artifact, *, version: int) -> dict[str, Any]:
    """Write an artifact as an image, first published in `version`, and return the descriptor of its image manifest.

    Raises:
        IntegrityError: a file differs from the artifact's manifest.
    """
    manifest = artifact.manifest
    layers = []
    for item in manifest.contents:
        media_type = item.media_type if isinstance(item, FileRef) else MEDIA_PAYLOAD
        layout.keep_file(artifact.folder / item.path, item)
        layers.append({"mediaType": media_type, "digest": item.digest, "size": item.size_bytes, "annotations": {TITLE: item.path}})
    config = layout.write_blob(replace(manifest, version=version).to_bytes(), MEDIA_MANIFEST)
    image = {
        "schemaVersion": 2,
        "mediaType": MEDIA_IMAGE,
        "artifactType": ARTIFACT_TYPE,
        "config": config,
        "layers": layers,
        "annotations": {DEVICE_CLASS: manifest.device_class, MODEL: model},
    }
    descriptor = layout.write_blob(json_bytes(image), MEDIA_IMAGE)
    descriptor |= {"artifactType": ARTIFACT_TYPE, "annotations": {DEVICE_CLASS: manifest.device_class}}
    if manifest.device_class.startswith("cpu-x86-64"):
        descriptor["platform"] = {"architecture": "amd64", "os": "linux"}
    return descriptor


def write_index(
    layout: Layout, model: str, images: Mapping[str, Mapping[str, Any]], *, version: int, source_key: str
) -> dict[str, Any]:
    """Write the index of a version, whose image descriptors are given by device class, and return its descriptor."""
    index = {
        "schemaVersion": 2,
        "mediaType": MEDIA_INDEX,
        "artifactType": ARTIFACT_TYPE,
        "manifests": [images[name] for name in sorted(images)],
        "annotations": {MODEL: model, VERSION: str(version), SOURCE_KEY: source_key},
    }
    return layout.write_blob(json_bytes(index), MEDIA_INDEX)


def write_signatures(layout: Layout, signed: Sequence[Signed]) -> dict[str, Any]:
    """Write signatures as an image in cosign's form, and return its descriptor."""
    layers = [
        {**layout.write_blob(one.payload, MEDIA_SIGNATURE), "annotations": {ANNOTATION: b64encode(one.signature).decode()}}
        for one in signed
    ]
    diffs = [layer["digest"] for layer in layers]
    config = {"architecture": "", "os": "", "config": {}, "rootfs": {"type": "layers", "diff_ids": diffs}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MEDIA_IMAGE,
        "config": layout.write_blob(json_bytes(config), MEDIA_CONFIG),
        "layers": layers,
    }
    return layout.write_blob(json_bytes(manifest), MEDIA_IMAGE)
