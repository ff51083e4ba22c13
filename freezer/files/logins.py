"""Logins to registries, as docker and podman keep them. Imports no torch."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path

from freezer.errors import UsageError, first_line
from freezer.files.buckets import RemoteError

TOKEN = "<token>"
"""The user of logins whose secret is a token; docker's helpers use it too."""

_HELPER_S = 30


def login_of(host: str, prefix: str = "") -> tuple[str, str] | None:
    """User and secret that docker or podman keep for a registry; None if they keep none.

    Raises:
        RemoteError: the helper that keeps them is missing or fails.
        UsageError: a file is damaged.
    """
    parts = f"{host}/{prefix}".rstrip("/").split("/")
    names = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    names += [f"https://{host}{path}" for path in ("", "/v1/", "/v2/")]
    environ, home = os.environ, Path.home()
    docker = Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json")
    podman = Path(environ.get("XDG_RUNTIME_DIR") or home / ".config", "containers/auth.json")
    given = environ.get("REGISTRY_AUTH_FILE")
    for path in [Path(given)] if given else [docker, podman]:
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text())
            helper = config.get("credHelpers", {}).get(host) or config.get("credsStore")
            entries = config.get("auths", {})
            entry: dict[str, str] = next((entries[name] for name in names if entries.get(name)), {})
            if "identitytoken" in entry:
                return TOKEN, entry["identitytoken"]
            if "auth" in entry:
                user, _, secret = base64.b64decode(entry["auth"]).decode().partition(":")
                return user, secret
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: {first_line(error)}; write it by `docker login`") from None
        login = _from_helper(f"docker-credential-{helper}", host) if helper else None
        if login:
            return login
    return None


def _from_helper(command: str, host: str) -> tuple[str, str] | None:
    """What a credential helper of docker keeps for a registry."""
    try:
        done = subprocess.run(
            [command, "get"],
            input=host,
            capture_output=True,
            text=True,
            timeout=_HELPER_S,
            check=False,
        )
        if done.returncode != 0 and "not found" in done.stdout:
            return None
        found = json.loads(done.stdout)
        return found["Username"], found["Secret"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise RemoteError(
            f"{command} gives no login for {host}: {first_line(error)}; install it, or remove it"
            " from docker's config.json"
        ) from None
