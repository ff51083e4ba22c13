"""Registries of the OCI distribution protocol, over urllib3, which is imported when one is opened.

    oci://HOST[:PORT][/PREFIX][?scheme=http&tls_ca_file_path=FILE]

URIs are printed and stored, so credentials come from the files of docker and podman: `auths`,
`credsStore` and `credHelpers`. They are sent to the registry and to the token server that it names,
never to where a request is redirected. Certificate authorities are the system's, those that docker
and podman keep for the host, and `tls_ca_file_path`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from freezer.errors import MissingDependencyError, UsageError, first_line
from freezer.files.buckets import RemoteError
from freezer.packages import install_command
from freezer.progress import transferred

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

OCI = "oci"
OPTIONS = ("scheme", "tls_ca_file_path")

CONNECT_S, READ_S = 5, 20
"""Timeouts of a connection, and between two pieces of an answer."""

RETRIES = 4
"""Further attempts at a request, and at a transfer that breaks without a further byte."""

BACKOFF_S = 0.2
MAX_REDIRECTS = 5
NUM_CONNECTIONS = 8
UPLOAD_BYTES = 16 << 20
"""Size of the parts of an upload."""

READ_BYTES = 1 << 20
ANSWER_BYTES = 1 << 20
"""Largest answer of a token server, or text of an error."""

_TRANSIENT = (429, 500, 502, 503, 504)
_REDIRECTS = (301, 302, 303, 307, 308)
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?|\[[0-9a-f:]+\](:[0-9]+)?")
_PREFIX = re.compile(r"[a-z0-9]+([._/-]+[a-z0-9]+)*|")
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1")
_HELPER_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryAddress:
    """A place in a registry.

    Attributes:
        uri: the URI that opened it.
        prefix: what names of its repositories begin with; empty or without a `/` at its ends.
    """

    uri: str
    host: str
    prefix: str
    scheme: str
    ca_file: str | None

    @property
    def where(self) -> str:
        """Its URI without options."""
        return f"{OCI}://{self.host}/{self.prefix}".rstrip("/")


def registry_address(uri: str) -> RegistryAddress:
    """Parse a URI.

    Raises:
        UsageError: it names no registry, has an unknown option, or contains credentials.
    """
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        raise UsageError(
            f"{OCI}://…{parts.netloc.rpartition('@')[2]}{parts.path} contains credentials, but URIs"
            " are printed and stored; use `docker login`, `podman login` or `skopeo login`"
        )
    prefix = parts.path.strip("/")
    if not _HOST.fullmatch(parts.netloc) or not _PREFIX.fullmatch(prefix):
        raise UsageError(f"{uri!r} names no registry; expected {OCI}://HOST/REPOSITORY, lowercase")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(OPTIONS))
    scheme = options.get("scheme", "https")
    if unknown or scheme not in ("https", "http"):
        raise UsageError(
            f"{uri!r}: unknown option {', '.join(unknown) or scheme}; expected"
            f" {', '.join(OPTIONS)}, the scheme https or http"
        )
    return RegistryAddress(
        uri=uri,
        host=parts.netloc,
        prefix=prefix,
        scheme=scheme,
        ca_file=options.get("tls_ca_file_path"),
    )


class Registry:
    """A connection to a registry, for several threads.

    Methods raise FileNotFoundError where the registry lacks something, and RemoteError where it
    cannot be reached, refuses, or breaks the protocol. Bytes are not verified here.

    Raises:
        MissingDependencyError: urllib3 is not installed.
        UsageError: a file of a certificate authority cannot be read.
    """

    def __init__(self, address: RegistryAddress) -> None:
        self.address = address
        self._base = f"{address.scheme}://{address.host}/v2/"
        self._pool = _pool(address)
        self._authorization: dict[tuple[str, bool], str] = {}

    def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> BaseHTTPResponse:
        """Send a request, and return the answer, whose body is not read yet.

        Args:
            path: below /v2/, or a URL that an answer named.
        """
        url = urljoin(self._base, path)
        for _ in range(MAX_REDIRECTS):
            answer = self._authorized(method, url, body, headers or {})
            if answer.status not in _REDIRECTS:
                return self._checked(answer, method, url)
            _finish(answer)
            url = self._next_url(method, url, answer.headers.get("Location", ""))
        raise RemoteError(f"{_shown(url)}: more than {MAX_REDIRECTS} redirects; report it")

    def read(self, path: str, limit_bytes: int, accept: str = "*/*") -> tuple[bytes, str]:
        """A document of limited size, and its media type.

        Raises:
            ValueError: it is larger.
        """
        answer = self.send("GET", path, headers={"Accept": accept})
        media_type = answer.headers.get("Content-Type", "")
        return self._body(answer, limit_bytes), media_type

    def stream(self, path: str, start: int) -> Iterator[bytes]:
        """The bytes of a blob from an offset on; a broken transfer goes on where it ended."""
        from urllib3.exceptions import HTTPError

        num_failed = 0
        while True:
            before = start
            headers = {"Range": f"bytes={start}-"} if start else {}
            answer = self.send("GET", path, headers=headers)
            skip = 0 if answer.status == 206 else start  # some servers know no ranges
            try:
                for chunk in answer.stream(READ_BYTES):
                    wanted = chunk[skip:]
                    skip = max(0, skip - len(chunk))
                    start += len(wanted)
                    yield wanted
            except HTTPError as error:
                num_failed = 0 if start > before else num_failed + 1
                if num_failed > RETRIES:
                    raise self._unreachable(path, error) from error
                time.sleep(BACKOFF_S * 2**num_failed)
            else:
                return
            finally:
                answer.close()

    def mount(self, repository: str, digest: str, other: str) -> bool:
        """Whether a blob of another repository now is in this one, too."""
        query = urlencode({"mount": digest, "from": other})
        answer = self.send("POST", f"{repository}/blobs/uploads/?{query}")
        _finish(answer)
        return answer.status == 201

    def upload(self, repository: str, digest: str, source: BinaryIO) -> None:
        """Upload a blob in parts; a part that fails is sent again from where the registry is."""
        place = self._place(self.send("POST", f"{repository}/blobs/uploads/"))
        size_bytes, offset, num_failed = source.seek(0, os.SEEK_END), 0, 0
        while size_bytes - offset > UPLOAD_BYTES:
            source.seek(offset)
            part = source.read(UPLOAD_BYTES)
            headers = {"Content-Range": f"{offset}-{offset + len(part) - 1}", **_OCTETS}
            try:
                answer = self.send("PATCH", place, body=part, headers=headers)
                offset += len(part)
                transferred(len(part))
            except RemoteError:
                num_failed += 1
                if num_failed > RETRIES:
                    raise
                time.sleep(BACKOFF_S * 2**num_failed)
                answer = self.send("GET", place)
                offset = int(answer.headers.get("Range", "0--1").rpartition("-")[2] or -1) + 1
            place = self._place(answer)
        source.seek(offset)
        place += f"{'&' if '?' in place else '?'}{urlencode({'digest': digest})}"
        _finish(self.send("PUT", place, body=source.read(), headers=_OCTETS))
        transferred(size_bytes - offset)

    def _place(self, answer: BaseHTTPResponse) -> str:
        """Where an upload goes on."""
        _finish(answer)
        return urljoin(self._base, answer.headers.get("Location", ""))

    def pages(self, path: str, key: str) -> Iterator[str]:
        """The texts of a list that may have several pages."""
        while path:
            answer = self.send("GET", path)
            link = re.match(r'\s*<([^>]*)>;\s*rel="?next', answer.headers.get("Link", ""))
            try:
                listed = json.loads(self._body(answer, ANSWER_BYTES))[key] or ()
                yield from map(str, listed)
            except (ValueError, TypeError, KeyError) as error:
                raise RemoteError(f"{self.address.where}: {path} is not a list of {key}") from error
            path = urljoin(f"{self._base}{path}", link[1]) if link else ""

    def _authorized(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> BaseHTTPResponse:
        """One answer, with credentials if it is the registry that asks for them."""
        is_own = _origin(url) == _origin(self._base)
        repository = re.split("/(?:blobs|manifests|tags)/", urlsplit(url).path)[0]
        scope = (repository, method not in ("GET", "HEAD"))
        for is_last in (False, True):
            known = self._authorization.get(scope) if is_own else None
            authorization = {"Authorization": known} if known else {}
            answer = self._once(method, url, body, {**headers, **authorization})
            if answer.status != 401 or not is_own or is_last:
                break
            _finish(answer)
            extra = re.findall(r"[?&]from=([^&]+)", url)
            self._authorization[scope] = self._authorize(answer.headers, extra)
        return answer

    def _once(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        fields: Mapping[str, str] | None = None,
    ) -> BaseHTTPResponse:
        from urllib3 import Retry
        from urllib3.exceptions import HTTPError

        retry = Retry(
            total=RETRIES,
            allowed_methods=("GET", "HEAD", "PUT", "POST", "DELETE"),
            status_forcelist=_TRANSIENT,
            backoff_factor=BACKOFF_S,
            raise_on_status=False,
            respect_retry_after_header=False,
        )
        content = {"fields": fields, "encode_multipart": False} if fields else {"body": body}
        try:
            return self._pool.request(
                method,
                url,
                headers={"Accept-Encoding": "identity", **headers},
                retries=retry,
                redirect=False,
                preload_content=False,
                decode_content=False,
                **content,
            )
        except HTTPError as error:
            raise self._unreachable(url, error) from error

    def _checked(self, answer: BaseHTTPResponse, method: str, url: str) -> BaseHTTPResponse:
        """The answer, if it is no error."""
        if answer.status < 300:
            return answer
        where = f"{method} {_shown(url)}"
        if answer.status == 404:
            _finish(answer)
            raise FileNotFoundError(where)
        text = _finish(answer)
        remedy = "try again, or ask whoever runs the registry"
        if answer.status in (401, 403):
            remedy = f"check the rights of this login, or `docker login {self.address.host}` first"
        raise RemoteError(f"{where} answers {answer.status} {text}; {remedy}")

    def _body(self, answer: BaseHTTPResponse, limit_bytes: int) -> bytes:
        from urllib3.exceptions import HTTPError

        try:
            data = answer.read(limit_bytes + 1)
        except HTTPError as error:
            raise self._unreachable("an answer", error) from error
        if len(data) > limit_bytes:
            answer.close()
            raise ValueError(f"an answer is larger than {limit_bytes} bytes")
        answer.release_conn()
        return data

    def _next_url(self, method: str, url: str, location: str) -> str:
        target = urljoin(url, location)
        is_safe = urlsplit(target).scheme in ("https", self.address.scheme)
        if method not in ("GET", "HEAD") or not location or not is_safe:
            raise RemoteError(
                f"{method} {_shown(url)} redirects to {_shown(target)}; expected https, and only"
                " reads to be redirected: ask whoever runs the registry"
            )
        return target

    def _authorize(self, headers: Mapping[str, str], extra: list[str]) -> str:
        """The header that answers a challenge of the registry."""
        kind, _, rest = headers.get("WWW-Authenticate", "").partition(" ")
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        user, secret = self._login or ("", "")
        basic = base64.b64encode(f"{user}:{secret}".encode()).decode() if user else ""
        if kind.lower() == "basic":
            return f"Basic {basic}" if basic else ""
        realm = fields.get("realm", "")
        if kind.lower() != "bearer" or urlsplit(realm).scheme not in ("https", self.address.scheme):
            raise RemoteError(
                f"{self.address.where} asks for {kind or 'unknown'} authentication at {realm!r};"
                " expected Basic or Bearer, at https"
            )
        scopes = [fields.get("scope", ""), *(f"repository:{name}:pull" for name in extra)]
        asked = {"service": fields.get("service", ""), "scope": " ".join(filter(None, scopes))}
        if user == "<token>":
            login = {
                "grant_type": "refresh_token",
                "refresh_token": secret,
                "client_id": "coldpress",
            }
            answer = self._once("POST", realm, None, {}, {**asked, **login})
        else:
            url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(asked)}"
            answer = self._once(
                "GET", url, None, {"Authorization": f"Basic {basic}"} if basic else {}
            )
        try:
            found = json.loads(self._body(self._checked(answer, "GET", realm), ANSWER_BYTES))
            return f"Bearer {found.get('token') or found['access_token']}"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RemoteError(f"{realm} answers without a token; check the registry") from error

    @cached_property
    def _login(self) -> tuple[str, str] | None:
        """User and secret for the registry; None without a login, or if others could read it."""
        host, _, _ = self.address.host.rpartition(":")
        is_local = _LOOPBACK.fullmatch((host or self.address.host).strip("[]"))
        if self.address.scheme != "https" and not is_local:
            return None
        return login_of(self.address.host, self.address.prefix)

    def _unreachable(self, place: str, error: Exception) -> RemoteError:
        return RemoteError(
            f"{_shown(place)}: {first_line(error)}; check the network, the registry's name and, for"
            " an authority of your own, tls_ca_file_path"
        )


_OCTETS = {"Content-Type": "application/octet-stream"}


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port of a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _finish(answer: BaseHTTPResponse) -> str:
    """Read the rest of a short answer, so that its connection serves the next request; return the
    begin of its text.
    """
    data = answer.read(ANSWER_BYTES)
    if len(data) == ANSWER_BYTES:
        answer.close()
    answer.release_conn()
    return " ".join(data.decode(errors="replace").split())[:300]


def _shown(url: str) -> str:
    """A URL for messages: queries may contain signed rights."""
    return url.partition("?")[0]


def login_of(host: str, prefix: str = "") -> tuple[str, str] | None:
    """User and secret that docker or podman keep for a registry; None if they keep none.

    Raises:
        RemoteError: the helper that keeps them is missing or fails.
    """
    names = [host]
    for part in filter(None, prefix.split("/")):
        names.insert(0, f"{names[0]}/{part}")
    names += [f"https://{host}", f"https://{host}/v1/", f"https://{host}/v2/"]
    for config in _configurations():
        helper = _mapping(config, "credHelpers").get(host) or config.get("credsStore")
        known = _mapping(config, "auths")
        entry = next((_mapping(known, name) for name in names if _mapping(known, name)), {})
        token, packed = entry.get("identitytoken"), entry.get("auth")
        if token:
            return "<token>", str(token)
        if packed:
            user, _, secret = base64.b64decode(str(packed)).decode().partition(":")
            return user, secret
        if helper:
            login = _from_helper(str(helper), host)
            if login:
                return login
    return None


def _mapping(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = holder.get(key)
    return found if isinstance(found, dict) else {}


def _configurations() -> Iterator[Mapping[str, Any]]:
    environ, home = os.environ, Path.home()
    docker = Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json")
    podman = Path(environ.get("XDG_RUNTIME_DIR") or "/nonexistent", "containers/auth.json")
    given = environ.get("REGISTRY_AUTH_FILE")
    kept = home / ".config/containers/auth.json"
    for path in [Path(given)] if given else [docker, podman, kept]:
        if path.is_file():
            try:
                config = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"{path}: {first_line(error)}; write it by `docker login`"
                ) from None
            if isinstance(config, dict):
                yield config


def _from_helper(helper: str, host: str) -> tuple[str, str] | None:
    """What a credential helper of docker keeps for a registry."""
    command = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [command, "get"],
            input=host,
            capture_output=True,
            text=True,
            timeout=_HELPER_S,
            check=False,
        )
        if done.returncode != 0 and "not found" in done.stdout + done.stderr:
            return None
        found = json.loads(done.stdout)
        return str(found["Username"]), str(found["Secret"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise RemoteError(
            f"{command} gives no login for {host}: {first_line(error)}; install it, or remove it"
            " from docker's config.json"
        ) from None


def _pool(address: RegistryAddress) -> PoolManager:
    try:
        import urllib3
    except ImportError:
        raise MissingDependencyError(
            f"{address.uri!r}: {OCI}:// needs urllib3; {install_command('urllib3')}"
        ) from None
    context = ssl.create_default_context()
    files = [Path(address.ca_file)] if address.ca_file else []
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    for root in (Path("/etc/docker"), Path("/etc/containers"), config / "containers"):
        files += sorted((root / "certs.d" / address.host).glob("*.crt"))
    for file in files:
        try:
            context.load_verify_locations(file)
        except OSError as error:
            raise UsageError(f"{file} is no certificate (PEM): {first_line(error)}") from None
    options: dict[str, Any] = {
        "maxsize": NUM_CONNECTIONS,
        "timeout": urllib3.Timeout(connect=CONNECT_S, read=READ_S),
        "ssl_context": context,
    }
    proxy = getproxies().get(address.scheme)
    if proxy and not proxy_bypass(address.host):
        return urllib3.ProxyManager(proxy, **options)
    return urllib3.PoolManager(**options)
