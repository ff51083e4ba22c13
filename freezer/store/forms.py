"""Versions in the forms that other tools read, over the same blobs or files. Imports no torch.

- ModelPack (modctl, oras, CRI-O, Podman): a manifest with the files of one artifact, manifest.json
  among them, so that what is pulled is an artifact folder.
- Images (image volumes of Kubernetes, KServe's `oci+native://`): each file in /models, in layers
  that are equal for equal files.
- Bundles of sigstore (cosign 3), found by the tag that the OCI distribution protocol reserves for
  what refers to a manifest.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from freezer.artifact import (
    MANIFEST,
    MEDIA_BUNDLE,
    MEDIA_MANIFEST,
    MEDIA_PAYLOAD,
    MEDIA_SAFETENSORS,
    MEDIA_WEIGHTS,
    PREDICATE,
    Artifact,
    Manifest,
    files_of,
)
from freezer.codec import encode
from freezer.files import digest_bytes, digest_file
from freezer.hardware import device_class as class_named
from freezer.store.oci_layout import (
    DEVICE_CLASS,
    MEDIA_CONFIG,
    MEDIA_IMAGE,
    TITLE,
    Descriptor,
    Layout,
    OciImage,
    OciIndex,
    platforms_of,
)

MODELPACK = "application/vnd.cncf.model.manifest.v1+json"
MODELPACK_CONFIG = "application/vnd.cncf.model.config.v1+json"
FILE_PATH = "org.cncf.model.filepath"
_KINDS = {
    MEDIA_PAYLOAD: "application/vnd.cncf.model.weight.v1.raw",
    MEDIA_WEIGHTS: "application/vnd.cncf.model.weight.v1.raw",
    MEDIA_MANIFEST: "application/vnd.cncf.model.weight.config.v1.raw",
    MEDIA_SAFETENSORS: "application/vnd.cncf.model.dataset.v1.raw",
}
"""ModelPack's media types of our files; the others are documentation."""

_DOCUMENT = "application/vnd.cncf.model.doc.v1.raw"
_FORMATS = {"onnxruntime": "onnx", "exported": "torch.export"}
"""ModelPack's names of formats, where they differ from the payload's kind."""

MEDIA_LAYER = "application/vnd.oci.image.layer.v1.tar"
MEDIA_EMPTY = "application/vnd.oci.empty.v1+json"
IMAGE = "-image"
"""Suffix of the tags of images: `3-image`, `latest-image`, `3-portable-image`."""

MOUNT = "models"
MAX_LAYERS = 50
"""Payloads that have a layer of their own; overlay file systems take about 120."""


def class_tags(number: str, index: OciIndex) -> dict[str, Descriptor]:
    """The images of a version by tag: `3-portable`, and `3-CLASS-torch` for the one that needs
    torch alone where the best one needs an engine.
    """
    tags: dict[str, Descriptor] = {}
    for image in index.manifests:
        tag = f"{number}-{image.device_class}"
        tags[f"{tag}-torch" if tag in tags else tag] = image
    return tags


def modelpack(
    layout: Layout,
    image: Descriptor,
    number: str,
) -> Descriptor:
    """Write a ModelPack manifest over the blobs of an image, and return its descriptor."""
    content = layout.image(image)
    manifest = Manifest.from_bytes(layout.blob(content.config), origin=image.digest)
    layers = []
    for file in (replace(content.config, annotations={TITLE: MANIFEST}), *content.layers):
        path = file.annotations.get(TITLE, file.digest)
        layers.append(
            replace(
                file,
                media_type=_KINDS.get(file.media_type, _DOCUMENT),
                annotations={TITLE: path, FILE_PATH: path},
            )
        )
    config = {
        "descriptor": {"name": manifest.model, "version": number, "title": image.device_class},
        "config": _settings(manifest),
        "modelfs": {"type": "layers", "diffIds": [layer.digest for layer in layers]},
    }
    return layout.write_manifest(
        OciImage(config=layout.write_json(config, MODELPACK_CONFIG), layers=tuple(layers)),
        {"artifactType": MODELPACK, "annotations": {DEVICE_CLASS: image.device_class}},
    )


def _settings(manifest: Manifest) -> dict[str, str]:
    """ModelPack's `config` of an artifact."""
    settings = {}
    for payload in manifest.payloads:
        settings["format"] = _FORMATS.get(payload.kind, payload.kind)
    for spec in manifest.outputs:
        if "float" in spec.dtype:
            settings["precision"] = spec.dtype
    return settings


def image_form(
    layout: Layout,
    artifact: Artifact,
    tar: Path,
) -> tuple[Descriptor, ...]:
    """Write an artifact as images that can be mounted, one for each CPU architecture that it runs
    on, and return their descriptors.

    Args:
        artifact: its folder; signature.json is included.
        tar: a new file for one layer at a time.
    """
    layers = []
    for group in _layers(artifact):
        write_tar(tar, artifact.folder, group)
        layer = Descriptor(
            media_type=MEDIA_LAYER,
            digest=digest_file(tar),
            size_bytes=tar.stat().st_size,
        )
        layout.write_file(tar, layer)
        layers.append(layer)
    written = []
    annotations = {DEVICE_CLASS: artifact.manifest.device_class}
    is_arm = class_named(artifact.manifest.device_class).machine == "aarch64"
    for platform in platforms_of(artifact.manifest.device_class):
        architecture = platform.get("architecture", "arm64" if is_arm else "amd64")
        rootfs = {"type": "layers", "diff_ids": [layer.digest for layer in layers]}
        config = {"architecture": architecture, "os": "linux", "config": {}, "rootfs": rootfs}
        image = OciImage(
            config=layout.write_json(config, MEDIA_CONFIG),
            layers=tuple(layers),
        )
        descriptor = layout.write_manifest(image, {"annotations": annotations})
        written.append(replace(descriptor, annotations=annotations, platform=platform))
    return tuple(written)


def _layers(artifact: Artifact) -> list[list[str]]:
    """Paths of an artifact's files by layer."""
    files = files_of(artifact.manifest.payloads)
    largest = sorted(files, key=lambda item: (-item.size_bytes, item.path))[:MAX_LAYERS]
    alone = sorted(item.path for item in largest)
    found = [path for path in artifact.folder.rglob("*") if path.is_file()]
    paths = sorted(str(path.relative_to(artifact.folder)) for path in found)
    return [*([path] for path in alone), [path for path in paths if path not in alone]]


def write_tar(tar: Path, folder: Path, paths: Iterable[str]) -> None:
    """Write files below /models into an archive that depends on nothing else: neither on times,
    users nor permissions.
    """
    names = {path: PurePosixPath(MOUNT, path) for path in sorted(paths)}
    folders = {parent for name in names.values() for parent in name.parents} - {PurePosixPath(".")}
    with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
        for parent in sorted(folders):
            entry = tarfile.TarInfo(f"{parent}/")
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for path, name in names.items():
            entry = tarfile.TarInfo(str(name))
            entry.size, entry.mode = (folder / path).stat().st_size, 0o444
            with (folder / path).open("rb") as file:
                archive.addfile(entry, file)


def referrers_tag(image: Descriptor) -> str:
    """The tag of the index of what refers to an image."""
    return image.digest.replace(":", "-")


def write_bundle(
    layout: Layout,
    image: Descriptor,
    bundle: bytes,
) -> Descriptor:
    """Write a bundle of sigstore that refers to an image, and return the descriptor of the index of
    all that do.
    """
    blob = layout.write_blob(bundle, MEDIA_BUNDLE)
    title = f"{digest_bytes(bundle).replace(':', '-')}.sigstore.json"
    content = OciImage(
        config=layout.write_blob(b"{}", MEDIA_EMPTY),
        layers=(replace(blob, annotations={TITLE: title}),),
    )
    annotations = {
        "dev.sigstore.bundle.content": "dsse-envelope",
        "dev.sigstore.bundle.predicateType": PREDICATE,
    }
    subject = Descriptor(
        media_type=MEDIA_IMAGE,
        digest=image.digest,
        size_bytes=image.size_bytes,
    )
    manifest = layout.write_manifest(
        content,
        {
            "artifactType": MEDIA_BUNDLE,
            "annotations": annotations,
            "subject": encode(subject),
        },
    )
    new = replace(manifest, artifact_type=MEDIA_BUNDLE, annotations=annotations)
    return write_referrers(layout, image, (new,))


def write_referrers(
    layout: Layout,
    image: Descriptor,
    new: Iterable[Descriptor],
) -> Descriptor:
    """Add to what refers to an image, and return the descriptor of the index."""
    tag = referrers_tag(image)
    stored = layout.tags(tag).get(tag)
    known = layout.index(stored).manifests if stored else ()
    each_once = {each.digest: each for each in (*known, *new)}
    return layout.write_manifest(OciIndex(manifests=tuple(each_once.values())), {})
