"""Keys: what settles a result, as digests. A finished key is never done again, whichever campaign did it.

Every key is the digest of its parts, and the parts are kept, so that `--explain` can say which of them differs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from freezer.artifact.manifest import FORMAT_VERSION
from freezer.codec import encode
from freezer.errors import MissingDependencyError
from freezer.files.download import is_url
from freezer.freezing.models.sources import FILE_KINDS, Source, module_file
from freezer.freezing.recipes.recipes import Recipe
from freezer.limits import Limits, SamplingPolicy
from pipeline.catalog.entry import SOURCE_RUN, Entry
from pipeline.planning.file_digests import FileDigests

INPUTS_VERSION = 2
"""Raised when the same spec or samples would give other golden inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A digest, and the parts it was made of."""

    digest: str
    parts: Mapping[str, Any]


def make_key(parts: Mapping[str, Any]) -> Key:
    """The key of some parts; anything JSON can hold."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return Key(digest=hashlib.sha256(text.encode()).hexdigest(), parts=json.loads(text))


def source_key(entry: Entry, digests: FileDigests) -> Key:
    """The key of a source, known without building the model.

    Of a registry's model it is the version, which never changes; of a file its bytes; of a python source its module, arguments and
    listed files.

    Raises:
        OSError: a file, or a folder of a transformers source, is not there or may not be read.
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
        parts["file"] = pinned if is_url(source.location) and pinned else digests.of(Path(source.location))
    else:
        folder = Path(source.location)
        parts |= {"weights": source.weights, "transformers": _transformers_version(source)}
        if folder.is_dir():
            parts["folder"] = {str(path.relative_to(folder)): digests.of(path) for path in _files_in(folder)}
        else:
            parts["name"] = source.location
    return make_key(parts)


def _transformers_version(source: Source) -> str:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise MissingDependencyError(f"source {source} needs transformers; pip install 'coldpress[pipeline]'") from None


def pinned(source: Source, key: Key) -> Source:
    """A source that fails to load unless its file is still what its key was made of; as it is where the key has no file."""
    digest = key.parts.get("file")
    return source if digest is None or source.sha256 is not None else replace(source, sha256=digest.removeprefix("sha256:"))


def _files_in(folder: Path) -> list[Path]:
    """All files below a folder, sorted.

    Raises:
        OSError: a folder among them may not be read; `rglob` would leave its files out.
    """

    def refuse(error: OSError) -> None:
        raise error

    found = (Path(root, name) for root, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted(path for path in found if path.is_file())


def build_key(
    entry: Entry,
    source: Key,
    recipe: Recipe,
    *,
    device_class: str,
    num_threads: int,
    toolchain: Mapping[str, Any],
    samples: str | None,
    further_threads: Sequence[int] = (),
) -> Key:
    """The key of one build. Thread counts and points that are what they would be by default leave no trace in it.

    Args:
        entry: of the catalog.
        source: its source key.
        recipe: with its settings.
        device_class, num_threads: of the target.
        toolchain: of the class's workers.
        samples: digest of the samples file, which gives example inputs and, without a spec, shapes.
        further_threads: of the target.
    """
    kept: dict[str, Any] = {"preserve": list(entry.preserve)} if entry.preserve else {}
    kept |= {"reset": entry.reset} if entry.reset else {}
    kept |= _points(entry) if recipe.by_shape else {}
    return make_key(
        {
            **kept,
            "source": source.digest,
            "inputs": encode(entry.spec) if entry.spec else None,
            "samples": samples,
            "recipe": {"name": recipe.name, "ways": recipe.ways, "settings": dict(recipe.settings)},
            "device_class": device_class,
            "num_threads": _counts(num_threads, further_threads) if recipe.by_thread else None,
            "toolchain": dict(toolchain),
            "format_version": FORMAT_VERSION,
        }
    )


def judge_key(
    builds: Sequence[Key],
    *,
    limits: Limits,
    policy: SamplingPolicy,
    num_threads: int,
    samples: str | None,
    task_metric: str | None,
    further_threads: Sequence[int] = (),
    entry: Entry | None = None,
    source: Key,
    device_class: str,
) -> Key:
    """The key of one judge: its builds, gates, sampling policy and golden inputs, and where it times: thread counts and points.

    The points are those of `entry`. What is as it would be by default leaves no trace, as in a build's key. Source and device class
    are those of the builds; where nothing but eager is asked for there are none, and they stand for themselves.
    """
    alone = {} if builds else {"source": source.digest, "device_class": device_class}
    return make_key(
        {
            **(_points(entry) if entry else {}),
            **alone,
            "builds": sorted(build.digest for build in builds),
            "limits": {
                "speedup_min": limits.speedup_min,
                "error_ratio_max": limits.error_ratio_max,
                "latency_ms_max": limits.latency_ms_max,
                "size_mb_max": limits.size_mb_max,
            },
            "policy": encode(policy),
            "num_threads": _counts(num_threads, further_threads),
            "inputs": {"version": INPUTS_VERSION, "samples": samples},
            "task_metric": task_metric,
        }
    )


def _counts(num_threads: int, further: Sequence[int]) -> int | list[int]:
    return [num_threads, *further] if further else num_threads


def _points(entry: Entry) -> dict[str, Any]:
    """The points of an entry; nothing where they are what they would be without any. A source's own dims are not known yet."""
    if entry.spec is None:
        return {"points": [dict(point) for point in entry.points]} if entry.points else {}
    named = entry.spec.named_points(entry.points)
    return {} if named == (entry.spec.first_point(),) else {"points": [dict(point) for point in named]}


def differing(parts: Mapping[str, Any], finished: Mapping[str, Any]) -> list[str]:
    """The names of the parts that differ, dotted; what `--explain` prints."""
    names: list[str] = []
    for name in sorted(set(parts) | set(finished)):
        one, other = parts.get(name), finished.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            names += [f"{name}.{inner}" for inner in differing(one, other)]
        elif one != other:
            names.append(name)
    return names
