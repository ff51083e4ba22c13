"""Registries of the OCI distribution protocol, over requests, which is imported when one is opened.

    oci://HOST[:PORT][/PREFIX][?scheme=http&tls_ca_file_path=FILE]

URIs are printed and stored, so credentials come from the files of docker and podman: `auths`,
`credsStore` and `credHelpers`. They are sent to the registry and to the token server that it names,
never to where a request is redirected. Certificate authorities are requests' (REQUESTS_CA_BUNDLE),
or the one that docker keeps for the host, or `tls_ca_file_path`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

from freezer.codec import frozen
from freezer.errors import IntegrityError, UsageError, first_line
from freezer.files.buckets import RemoteError
from freezer.files.digest import CHANGED
from freezer.files.download import TOKEN, http_session, login_of
from freezer.progress import transferred

if TYPE_CHECKING:
    from requests import Response

OCI = "oci"
OPTIONS = ("scheme", "tls_ca_file_path")

CONNECT_S, READ_S = 5, 20
"""Timeouts of a connection, and between two pieces of an answer."""

RETRIES = 4
"""Further attempts at a transfer that breaks without a further byte."""

BACKOFF_S = 0.2
UPLOAD_BYTES = 16 << 20
"""Size of the parts of an upload."""

READ_BYTES = 1 << 18
ANSWER_BYTES = 4 << 20
"""Largest answer of a token server, or page of a list."""

_AUTHORITIES = ("/etc/docker/certs.d/{}/ca.crt", "/etc/containers/certs.d/{}/ca.crt")
_HOST = r"[A-Za-z0-9.-]+(:[0-9]+)?|\[[0-9a-f:]+\](:[0-9]+)?"
_PREFIX = r"([a-z0-9]+([._/-]+[a-z0-9]+)*)?"
_LOOPBACK = r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?"
_OCTETS = {"Content-Type": "application/octet-stream"}


@frozen
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
    if not re.fullmatch(_HOST, parts.netloc) or not re.fullmatch(_PREFIX, prefix):
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
        MissingDependencyError: requests is not installed.
    """

    def __init__(self, address: RegistryAddress) -> None:
        self.address = address
        self._base = f"{address.scheme}://{address.host}/v2/"
        self._authorization: dict[tuple[str, bool], str] = {}
        self._session = http_session(RETRIES, BACKOFF_S)
        self._session.headers["Accept-Encoding"] = "identity"
        known = [Path(name.format(address.host)) for name in _AUTHORITIES]
        files = [address.ca_file, *(str(path) for path in known if path.is_file())]
        self._authority = next(filter(None, files), None)

    def send(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a request, and return the answer, whose body is not read yet. Only reads are
        redirected.

        Args:
            path: below /v2/, or a URL that an answer named.
        """
        url = urljoin(self._base, path)
        is_write = method not in ("GET", "HEAD")
        scope = (re.split("/(?:blobs|manifests|tags)/", urlsplit(url).path)[0], is_write)
        for is_last in (False, True):
            answer = self._answer(method, url, scope, data=body, headers=headers)
            is_own = url.startswith(self._base) and not answer.history
            if answer.status_code != 401 or not is_own or is_last:
                break
            challenge = answer.headers.get("WWW-Authenticate", "")
            answer.close()
            self._authorization[scope] = self._authorize(challenge, url)
        for hop in (*answer.history, answer):
            if urlsplit(hop.url).scheme not in ("https", self.address.scheme):
                raise RemoteError(f"{_shown(url)} redirects to {_shown(hop.url)}; expected https")
        if answer.status_code >= 300:
            raise self._refused(answer, f"{method} {_shown(url)}")
        return answer

    def _answer(
        self,
        method: str,
        url: str,
        scope: tuple[str, bool] | None,
        **content: Any,
    ) -> Response:
        """One answer, asked for with the rights for a scope if it comes from the registry."""
        is_own = url.startswith(self._base)
        known = self._authorization.get(scope) if scope and is_own else None

        def authorize(request: Any) -> Any:  # also keeps requests from reading ~/.netrc
            if known:
                request.headers["Authorization"] = known
            return request

        try:
            answer: Response = self._session.request(
                method,
                url,
                **{"auth": authorize, **content},
                allow_redirects=method in ("GET", "HEAD"),
                stream=method == "GET",
                timeout=(CONNECT_S, READ_S),
                verify=self._authority,
            )
        except OSError as error:  # of requests
            raise self._unreachable(url, error) from error
        return answer

    def _refused(self, answer: Response, where: str) -> OSError:
        """The error of an answer."""
        text = " ".join(next(answer.iter_content(1000), b"").decode(errors="replace").split())
        answer.close()
        if answer.status_code == 404:
            return FileNotFoundError(where)
        remedy = "try again, or ask whoever runs the registry"
        if answer.status_code in (401, 403):
            remedy = f"check the rights of this login, or `docker login {self.address.host}` first"
        return RemoteError(f"{where} answers {answer.status_code} {text[:300]}; {remedy}")

    def read(self, path: str, limit_bytes: int, accept: str = "*/*") -> tuple[bytes, str]:
        """A document of limited size, and its media type.

        Raises:
            IntegrityError: it is larger.
        """
        answer = self.send("GET", path, headers={"Accept": accept})
        return self._body(answer, limit_bytes), answer.headers.get("Content-Type", "")

    def _body(self, answer: Response, limit_bytes: int) -> bytes:
        data = b""
        try:
            for chunk in answer.iter_content(READ_BYTES):
                data += chunk
                if len(data) > limit_bytes:
                    answer.close()
                    raise IntegrityError(f"{_shown(answer.url)} is too large; {CHANGED}")
        except OSError as error:
            raise self._unreachable(answer.url, error) from error
        return data

    def stream(self, path: str, start: int) -> Iterator[bytes]:
        """The bytes of a blob from an offset on; a broken transfer goes on where it ended."""
        num_failed = 0
        while num_failed <= RETRIES:
            before = start
            headers = {"Range": f"bytes={start}-"} if start else {}
            answer = self.send("GET", path, headers=headers)
            skip = 0 if answer.status_code == 206 else start  # some servers know no ranges
            try:
                for chunk in answer.iter_content(READ_BYTES):
                    wanted = chunk[skip:]
                    skip = max(0, skip - len(chunk))
                    start += len(wanted)
                    yield wanted
                return
            except OSError as error:
                failure = self._unreachable(path, error)
            finally:
                answer.close()
            num_failed = 0 if start > before else num_failed + 1
            time.sleep(BACKOFF_S * 2**num_failed)
        raise failure

    def mount(self, repository: str, digest: str, other: str) -> bool:
        """Whether a blob of another repository now is in this one, too."""
        query = urlencode({"mount": digest, "from": other})
        return self.send("POST", f"{repository}/blobs/uploads/?{query}").status_code == 201

    def upload(self, repository: str, digest: str, source: BinaryIO) -> None:
        """Upload a blob in parts."""
        answer = self.send("POST", f"{repository}/blobs/uploads/")
        size_bytes, offset = source.seek(0, os.SEEK_END), 0
        source.seek(0)
        while size_bytes - offset > UPLOAD_BYTES:
            part = source.read(UPLOAD_BYTES)
            headers = {"Content-Range": f"{offset}-{offset + len(part) - 1}", **_OCTETS}
            answer = self.send("PATCH", answer.headers["Location"], body=part, headers=headers)
            offset += len(part)
            transferred(len(part))
        place = answer.headers["Location"]
        place += f"{'&' if '?' in place else '?'}{urlencode({'digest': digest})}"
        self.send("PUT", place, body=source.read(), headers=_OCTETS)
        transferred(size_bytes - offset)

    def pages(self, path: str, key: str) -> Iterator[str]:
        """The texts of a list that may have several pages."""
        while path:
            answer = self.send("GET", path)
            try:
                yield from map(str, json.loads(self._body(answer, ANSWER_BYTES))[key] or ())
            except (ValueError, TypeError, KeyError) as error:
                raise RemoteError(f"{_shown(answer.url)} is not a list of {key}") from error
            link = answer.links.get("next", {}).get("url", "")
            path = urljoin(answer.url, link) if link else ""

    def _authorize(self, challenge: str, url: str) -> str:
        """The header that answers a challenge of the registry; empty without a login."""
        kind, _, rest = challenge.partition(" ")
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        user, secret = self._login or ("", "")
        if kind.lower() == "basic":
            packed = base64.b64encode(f"{user}:{secret}".encode()).decode()
            return f"Basic {packed}" if user else ""
        realm = fields.get("realm", "")
        if kind.lower() != "bearer" or urlsplit(realm).scheme not in ("https", self.address.scheme):
            raise RemoteError(
                f"{self.address.where} asks for {kind or 'unknown'} authentication at {realm!r};"
                " expected Basic or Bearer, at https"
            )
        mounted = dict(parse_qsl(urlsplit(url).query)).get("from")
        further = f" repository:{mounted}:pull" if mounted else ""
        asked = {
            "service": fields.get("service", ""),
            "scope": fields.get("scope", "") + further,
        }
        if user == TOKEN:
            login = {
                "grant_type": "refresh_token",
                "refresh_token": secret,
                "client_id": "coldpress",
            }
            answer = self._answer("POST", realm, None, data={**asked, **login})
        else:
            basic = {"auth": (user, secret)} if user else {}
            answer = self._answer("GET", realm, None, params=asked, **basic)
        if answer.status_code != 200:
            raise self._refused(answer, f"the token server {_shown(realm)}")
        try:
            found = json.loads(self._body(answer, ANSWER_BYTES))
            return f"Bearer {found.get('token') or found['access_token']}"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RemoteError(f"{_shown(realm)} answers without a token") from error

    @cached_property
    def _login(self) -> tuple[str, str] | None:
        """User and secret for the registry; None without a login, or if others could read it."""
        is_private = self.address.scheme == "https" or re.fullmatch(_LOOPBACK, self.address.host)
        return login_of(self.address.host, self.address.prefix) if is_private else None

    def _unreachable(self, place: str, error: Exception) -> RemoteError:
        return RemoteError(
            f"{_shown(place)}: {first_line(error)}; check the network, the registry's name and, for"
            " an authority of your own, tls_ca_file_path"
        )


def _shown(url: str) -> str:
    """A URL for messages: queries may contain signed rights."""
    return url.partition("?")[0]
