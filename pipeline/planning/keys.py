"""Keys: digests of everything that a result depends on. Work under a finished key is never
repeated, in any campaign.

The parts of a key are recorded, so that `--explain` can name those that differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from freezer.artifact import FORMAT_VERSION
from freezer.codec import encode
from freezer.files import digest_file, is_url, make_folder, move, write_whole
from freezer.freezing.recipes import Recipe, own_toolchain
from freezer.freezing.sources import FILE_KINDS, Source, module_file
from freezer.spec import SamplingPolicy
from pipeline.catalog import SOURCE_RUN, Entry
from pipeline.workspace import own_path

INPUTS_VERSION = 3
"""Incremented when the same spec or samples give other golden inputs."""

JUDGED_LIMITS = ("speedup_min", "error_ratio_max", "latency_ms_max", "size_mb_max")
"""Limits that a judgement depends on, besides `memory_mb_max`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A digest and the parts that it was made of."""

    digest: str
    parts: Mapping[str, Any]


def make_key(parts: Mapping[str, Any]) -> Key:
    """Return the key of parts that JSON can hold."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return Key(digest=hashlib.sha256(text.encode()).hexdigest(), parts=json.loads(text))


class FileDigests:
    """Digests of files, cached by path, size and modification time in a JSON file beside the
    staging folders.

    Attributes:
        known: the cache, in which others may keep digests under names of their own.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        try:
            self.known: dict[str, str] = json.loads(cache.read_text())
        except (OSError, ValueError):
            self.known = {}

    def of(self, path: Path) -> str:
        """Return `sha256:` and the digest of a file."""
        stat = path.stat()
        key = f"{path}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in self.known:
            self.known[key] = digest_file(path)
        return self.known[key]

    def save(self) -> None:
        """Write the cache atomically. Failure is ignored: the digests are then computed again."""
        with contextlib.suppress(OSError):
            partial = own_path(
                self._cache.parent, self._cache.name
            )  # cleaned up if the driver is killed
            make_folder(partial.parent)
            write_whole(partial, json.dumps(self.known).encode(), synced=False)
            move(partial, self._cache)


def source_key(entry: Entry, digests: FileDigests) -> Key:
    """Return the key of a source, without loading the model.

    It depends on the version of a registry model, the bytes of a file, or the module, arguments and
    listed files of a python source.

    Raises:
        OSError: a file, or a folder of a transformers source, is missing or unreadable.
    """
    source = entry.source
    parts: dict[str, Any] = {"kind": source.kind, "args": dict(source.args), "seed": source.seed}
    parts["files"] = {str(index): digests.of(path) for index, path in enumerate(entry.files)}
    parts |= {"method": source.method} if source.method is not None else {}
    parts |= {"trust": True} if source.trust else {}
    if source.kind == "python":
        module = module_file(source.location.partition(":")[0], source.search_path)
        parts |= {"function": source.location, "module": digests.of(module) if module else None}
    elif source.kind == "mlflow":
        parts |= {"version": source.location, "run": entry.tags.get(SOURCE_RUN)}
    elif source.kind in FILE_KINDS:
        pinned = f"sha256:{source.sha256}" if source.sha256 else None
        parts["file"] = (
            pinned if is_url(source.location) and pinned else digests.of(Path(source.location))
        )
    else:
        folder = Path(source.location)
        parts |= {"weights": source.weights, "transformers": metadata.version("transformers")}
        if folder.is_dir():
            parts["folder"] = {
                str(path.relative_to(folder)): digests.of(path) for path in _files_in(folder)
            }
        else:
            parts["name"] = source.location
    return make_key(parts)


def pinned(source: Source, key: Key) -> Source:
    """Return a source that fails to load if its file has changed since its key was made."""
    digest = key.parts.get("file")
    return (
        source
        if digest is None or source.sha256 is not None
        else replace(source, sha256=digest.removeprefix("sha256:"))
    )


def _files_in(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted.

    Raises:
        OSError: a folder is unreadable; `rglob` would skip its files.
    """

    def refuse(error: OSError) -> None:
        raise error

    found = (
        Path(root, name) for root, _, names in os.walk(folder, onerror=refuse) for name in names
    )
    return sorted(path for path in found if path.is_file())


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildTarget:
    """What builds and judges of an item run on, and with.

    Attributes:
        num_threads: the deciding thread count; `further_threads` are the others.
        toolchain: of the workers of the class.
        samples: digest of the samples file, which gives example inputs and, without a spec, shapes.
    """

    device_class: str
    num_threads: int
    further_threads: tuple[int, ...] = ()
    toolchain: Mapping[str, Any]
    samples: str | None


def build_key(entry: Entry, source: Key, recipe: Recipe, target: BuildTarget) -> Key:
    """Return the key of one build.

    The further thread counts and default points are not part of it.
    """
    kept: dict[str, Any] = {"preserve": list(entry.preserve)} if entry.preserve else {}
    kept |= {"reset": entry.reset} if entry.reset else {}
    kept |= _points(entry) if recipe.by_shape else {}
    return make_key(
        {
            **kept,
            "source": source.digest,
            "inputs": encode(entry.spec) if entry.spec else None,
            "samples": target.samples,
            "recipe": {"name": recipe.name, "ways": recipe.ways, "settings": dict(recipe.settings)},
            "device_class": target.device_class,
            "num_threads": target.num_threads if recipe.by_thread else None,
            "toolchain": own_toolchain(recipe, target.toolchain),
            "format_version": FORMAT_VERSION,
        }
    )


def judge_key(
    entry: Entry, source: Key, builds: Sequence[Key], target: BuildTarget, policy: SamplingPolicy
) -> Key:
    """Return the key of one judge.

    Default points, the default objective and an unset `memory_mb_max` are not part of it. Source
    and class are part of it only if there are no builds. `sizes` are the further sizes at which the
    winner is timed; earlier releases did not time any.
    """
    limits = {name: getattr(entry.limits, name) for name in JUDGED_LIMITS}
    limits |= (
        {} if entry.limits.memory_mb_max is None else {"memory_mb_max": entry.limits.memory_mb_max}
    )
    alone = {} if builds else {"source": source.digest, "device_class": target.device_class}
    return make_key(
        {
            **_points(entry),
            **_sizes(entry),
            **alone,
            "builds": sorted(build.digest for build in builds),
            "limits": limits | _build_s(entry),
            **({} if entry.objective == "p50" else {"objective": entry.objective}),
            "policy": encode(
                replace(policy, accept_noise=False)
            ),  # what it publishes is judged again without it
            "num_threads": [target.num_threads, *target.further_threads]
            if target.further_threads
            else target.num_threads,
            "inputs": {"version": INPUTS_VERSION, "samples": target.samples},
            "task_metric": entry.task_metric,
        }
    )


def _points(entry: Entry) -> dict[str, Any]:
    """The points of an entry, unless they are the default.

    Dims that the source itself declares are not known yet.
    """
    if entry.spec is None:
        return {"points": [dict(point) for point in entry.points]} if entry.points else {}
    named = entry.spec.named_points(entry.points)
    return (
        {} if named == (entry.spec.first_point(),) else {"points": [dict(point) for point in named]}
    )


def _build_s(entry: Entry) -> dict[str, Any]:
    """The limit on the time of all builds, if there is one: with another one, other recipes may be
    skipped.
    """
    return {} if entry.limits.build_s is None else {"build_s": entry.limits.build_s}


def _sizes(entry: Entry) -> dict[str, Any]:
    """The sizes that a judge times besides the points, if dims vary or are not known yet."""
    if entry.spec is None:
        return {"sizes": "middle, largest"}
    sizes = entry.spec.further_sizes(entry.spec.named_points(entry.points))
    return {"sizes": list(sizes)} if sizes else {}


def differing(parts: Mapping[str, Any], finished: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the parts that differ, for `--explain`."""
    names: list[str] = []
    for name in sorted(set(parts) | set(finished)):
        one, other = parts.get(name), finished.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            names += [f"{name}.{inner}" for inner in differing(one, other)]
        elif one != other:
            names.append(name)
    return names
