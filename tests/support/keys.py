"""Keys that sign artifacts."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Files of a new private key and its public key."""
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    key = ec.generate_private_key(ec.SECP256R1())
    private.write_bytes(private_pem(key))
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public
