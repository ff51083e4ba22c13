"""Signatures of artifacts, in the form of cosign. Imports no torch.

The signed payload is cosign's "simple signing" JSON, which contains the digest of the artifact's
OCI image manifest. That contains the digest of manifest.json, which lists every other file. Keys
are EC keys on P-256, with SHA-256. A store keeps the signatures of the image `sha256:HEX` as an
image with the tag `sha256-HEX.sig`; a pulled folder has them in signature.json, with the image.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freezer.codec import encode, read_json, read_record
from freezer.errors import (
    IntegrityError,
    MissingDependencyError,
    UsageError,
    first_line,
    install_command,
)
from freezer.files import artifact_errors, digest_bytes, read_document

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )

SIGNATURE = "signature.json"
"""The file with the signatures of an artifact folder."""

MEDIA_SIGNATURE = "application/vnd.dev.cosign.simplesigning.v1+json"
ANNOTATION = "dev.cosignproject.cosign/signature"
MEDIA_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PREDICATE = "https://sigstore.dev/cosign/sign/v1"
_IN_TOTO = b"application/vnd.in-toto+json"
_TYPE = "cosign container image signature"
_CURVE = "secp256r1"
_VERSION = "dev.coldpress.version"
_CLASS = "dev.coldpress.device-class"


@dataclass(frozen=True, slots=True)
class Signed:
    """The signed JSON, byte for byte, and its DER-encoded ECDSA signature."""

    payload: bytes
    signature: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Signatures:
    """All signatures of one artifact.

    Attributes:
        image: its OCI image manifest, byte for byte.
    """

    image: bytes
    signed: tuple[Signed, ...]

    def to_bytes(self) -> bytes:
        """The content of signature.json."""
        return (json.dumps(encode(self), indent=1) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> Signatures | None:
        """Read the signatures of an artifact folder; None without signature.json.

        Raises:
            IntegrityError: signature.json cannot be read.
        """
        path = folder / SIGNATURE
        with artifact_errors(path):
            if not path.exists():
                return None
            return read_record(cls, read_document(path), origin=str(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """What a signature vouches for besides the image: that it is the artifact of a class in a
    version of a model.
    """

    model: str
    version: int
    device_class: str

    def __str__(self) -> str:
        return f"{self.model}:{self.version} for {self.device_class}"


def signed_with(
    key: Path,
    *,
    image_digest: str,
    claims: Claims,
) -> Signed:
    """Sign an image.

    Args:
        key: file of a private EC key on P-256, PEM without a password.
        image_digest: `sha256:` and hex, of the image manifest.
        claims: where it is published.

    Raises:
        UsageError: the key cannot be read, or is of another kind.
        MissingDependencyError: `cryptography` is not installed.
    """
    private: EllipticCurvePrivateKey = _key(key, private=True)
    critical = {
        "identity": {"docker-reference": claims.model},
        "image": {"docker-manifest-digest": image_digest},
        "type": _TYPE,
    }
    optional = {_VERSION: str(claims.version), _CLASS: claims.device_class}
    payload = json.dumps(
        {"critical": critical, "optional": optional},
        separators=(",", ":"),
        sort_keys=True,
    ).encode()
    return Signed(payload, _sign(private, payload))


def _sign(key: EllipticCurvePrivateKey, data: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    return key.sign(data, ec.ECDSA(SHA256()))


def bundle_with(
    key: Path,
    *,
    image_digest: str,
    claims: Claims,
) -> bytes:
    """Sign an image in the form of cosign 3: a bundle of sigstore with a DSSE envelope, in which an
    in-toto statement names the image. Arguments and errors are those of `signed_with`.
    """
    private: EllipticCurvePrivateKey = _key(key, private=True)
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    subject = {
        "name": claims.model,
        "digest": {"sha256": image_digest.removeprefix("sha256:")},
        "annotations": {_VERSION: str(claims.version), _CLASS: claims.device_class},
    }
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [subject],
        "predicateType": PREDICATE,
        "predicate": {},
    }
    payload = json.dumps(statement, separators=(",", ":"), sort_keys=True).encode()
    signed = b"DSSEv1 %d %b %d %b" % (len(_IN_TOTO), _IN_TOTO, len(payload), payload)
    signature = _sign(private, signed)
    public = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    hint = b64encode(sha256(public).digest()).decode()
    bundle = {
        "mediaType": MEDIA_BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hint}},
        "dsseEnvelope": {
            "payload": b64encode(payload).decode(),
            "payloadType": _IN_TOTO.decode(),
            "signatures": [{"sig": b64encode(signature).decode()}],
        },
    }
    return json.dumps(bundle, sort_keys=True).encode()


def problem_of(
    signatures: Signatures | None,
    manifest_bytes: bytes,
    trusted: Sequence[EllipticCurvePublicKey],
    asked: Claims | None,
) -> str | None:
    """Why no signature by a trusted key covers manifest.json, in a few words; None if one does.

    Args:
        asked: what it must vouch for; None for a folder, which is not asked for by model or
            version.
    """
    if signatures is None or not signatures.signed:
        return "no signature"
    vouching = []
    for signed in signatures.signed:
        if any(_made(key, signed) for key in trusted):
            vouching.append(read_json(signed.payload, origin="a signature"))
    if not vouching:
        return "signatures by other keys"
    image = digest_bytes(signatures.image)
    try:
        places = [
            _place(part["critical"]["identity"]["docker-reference"], part["optional"] or {})
            for part in vouching
            if part["critical"]["image"]["docker-manifest-digest"] == image
            and part["critical"]["type"] == _TYPE
        ]
        config = read_json(signatures.image, origin="the image")["config"]["digest"]
    except (IntegrityError, KeyError, TypeError, AttributeError):
        return "a signature of something else"
    if not places:
        return "a signature of another artifact"
    if asked is not None and str(asked) not in places:
        return f"a signature of {' and '.join(places)}"
    if config != digest_bytes(manifest_bytes):
        return "a signature of another manifest.json"
    return None


def _place(
    model: str,
    optional: Mapping[str, str],
) -> str:
    """The claims of a signed payload, as text."""
    return f"{model}:{optional.get(_VERSION, 'no version')} for {optional.get(_CLASS, 'no class')}"


def read_keys(paths: Iterable[str | Path]) -> list[EllipticCurvePublicKey]:
    """Read public EC keys on P-256 from PEM files.

    Raises:
        UsageError: a key cannot be read, or is of another kind.
        MissingDependencyError: `cryptography` is not installed.
    """
    return [_key(Path(path), private=False) for path in paths]


def is_by(signed: Signed, key: Path) -> bool:
    """Whether a signature was made with a private key."""
    return _made(_key(key, private=True).public_key(), signed)


def _key(path: Path, *, private: bool) -> Any:
    try:
        from cryptography.hazmat.primitives.serialization import (
            load_pem_private_key,
            load_pem_public_key,
        )
    except ImportError:
        raise MissingDependencyError(
            f"signatures need the package cryptography; {install_command('cryptography')}"
        ) from None
    what = "private" if private else "public"
    remedy = f"expected a {what} EC key on P-256, PEM" + (" without a password" if private else "")
    try:
        data = path.read_bytes()
        key = load_pem_private_key(data, password=None) if private else load_pem_public_key(data)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"key {path}: {first_line(error)}; {remedy}") from None
    if getattr(getattr(key, "curve", None), "name", None) != _CURVE:
        raise UsageError(f"key {path}: got a {type(key).__name__}; {remedy}")
    return key


def _made(key: EllipticCurvePublicKey, signed: Signed) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        key.verify(signed.signature, signed.payload, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True
