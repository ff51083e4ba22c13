"""The runtime settings of an artifact: what a process lacks of them, and the lines of `coldpress
env`. Imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from freezer.artifact.latency import EnvironmentRecord
from freezer.artifact.manifest import Manifest
from freezer.hardware import INSTALL, Exports, assignments, exports


def lacking(manifest: Manifest, environ: Mapping[str, str] | None = None) -> Exports:
    """What an environment, by default this process's, lacks of the settings that the artifact
    gained from.
    """
    return exports(_record(manifest).variables, environ)


def gain_text(manifest: Manifest) -> str:
    """The gain of the artifact's settings in words; empty if it has none."""
    return _record(manifest).text


def export_lines(manifest: Manifest, environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Lines for a shell: comments, and `export NAME=VALUE` for what the environment lacks."""
    record, name = _record(manifest), f"{manifest.model} for {manifest.device_class}"
    if not record.text:
        if manifest.latency is None or manifest.latency.environment is None:
            yield _comment(f"{name}: no setting was tried where it was judged")
            return
        tried = (
            ", ".join(assignments(item.variables) for item in record.tried)
            or "none that is installed there could gain"
        )
        yield _comment(
            f"{name}: no setting made it faster by more than noise where it was judged (tried:"
            f" {tried})"
        )
        return
    cpu = manifest.provenance.get("host", {}).get("cpu", "the judge's machine")
    yield _comment(f"{name}: {record.text}, measured on {cpu}")
    found = lacking(manifest, environ)
    for library in found.missing:
        yield _comment(f"{library} is not installed here: {INSTALL[library]}")
    for variable in found.kept:
        yield _comment(f"{variable} has another value here, which stays")
    for variable, value in found.values.items():
        yield f"export {variable}={shlex.quote(value)}"
    if not found.values and not found.missing and not found.kept:
        yield _comment("this environment has them")


def _comment(text: str) -> str:
    """A shell comment of one line; text from a manifest may contain line breaks."""
    return f"# {' '.join(text.split())}"


def _record(manifest: Manifest) -> EnvironmentRecord:
    return (manifest.latency.environment if manifest.latency else None) or EnvironmentRecord()
