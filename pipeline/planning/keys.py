"""Keys: digests of everything that a result depends on. Work under a finished key is never
repeated, in any campaign.

The parts of a key are recorded, so that `--explain` can name those that differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from freezer.artifact import FORMAT_VERSION
from freezer.codec import Json, JsonView, encode, frozen
from freezer.errors import IntegrityError
from freezer.files import digest_file, is_url, make_folder, move, read_document, write_whole
from freezer.freezing.recipes import Recipe, needs_torch_alone, own_toolchain
from freezer.freezing.sources import CODE_KINDS, FILE_KINDS, Source, module_file
from freezer.hardware import device_class
from freezer.spec import FLOAT32, SamplingPolicy
from pipeline.catalog import SOURCE_RUN, Entry
from pipeline.workspace import own_path

OWN_INPUTS = ("export", "mlflow"), 2
"""Kinds of sources that may declare their inputs, and a number that is incremented when the same
program gives other ones: 2 takes batches of 1.
"""

INPUTS_VERSION = 5
"""Incremented when a judge tries other inputs for the same spec or samples: 5 draws them
alike on every platform."""

BETTER_CPU = "better_cpu"
"""Part of the key of a build for an engine that uses all of its CPU, if every worker of the class
has a better one: it is refused. Once a worker of that class alone joins, the key differs."""

JUDGED_LIMITS = ("speedup_min", "error_ratio_max", "latency_ms_max", "size_mb_max")
"""Limits that a judgement depends on, besides `memory_mb_max` and `nan`."""


@frozen
class Key:
    """A digest and the parts that it was made of, as JSON, which takes less memory."""

    digest: str
    text: str

    @property
    def parts(self) -> JsonView:
        """The parts, decoded at each access."""
        parts: JsonView = json.loads(self.text)
        return parts


def make_key(parts: JsonView) -> Key:
    """Return the key of parts that JSON can hold."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return Key(digest=hashlib.sha256(text.encode()).hexdigest(), text=text)


class FileDigests:
    """Digests of files, cached by path, size and modification time in a JSON file beside the
    staging folders.

    Attributes:
        known: the cache, in which others may keep digests under names of their own.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        try:
            self.known: dict[str, str] = json.loads(read_document(cache))
        except (OSError, ValueError, IntegrityError):
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
        with suppress(OSError):
            # Later tasks remove it if the driver is killed here.
            partial = own_path(self._cache.parent, self._cache.name)
            make_folder(partial.parent)
            write_whole(partial, json.dumps(self.known).encode(), synced=False)
            move(partial, self._cache)


def source_key(entry: Entry, digests: FileDigests) -> Key:
    """Return the key of a source, without loading the model.

    It depends on the version of a registry model, the bytes of a file, or the module, arguments and
    listed files of a python source.

    Raises:
        OSError: a file is missing or unreadable.
    """
    source = entry.source
    parts: Json = {
        "kind": source.kind,
        "args": dict(source.args),
        "seed": source.seed,
        "files": {str(index): digests.of(path) for index, path in enumerate(entry.files)},
    }
    if source.method is not None:
        parts["method"] = source.method
    if source.trust:
        parts["trust"] = True
    if source.kind == "python":
        module = module_file(source.location.partition(":")[0], source.search_path)
        parts |= {"function": source.location, "module": digests.of(module) if module else None}
    elif source.kind == "mlflow":
        parts |= {"version": source.location, "run": entry.tags.get(SOURCE_RUN)}
    elif source.kind in FILE_KINDS:
        if is_url(source.location) and source.sha256:
            parts["file"] = f"sha256:{source.sha256}"
        else:
            parts["file"] = digests.of(Path(source.location))
    else:
        folder = Path(source.location)
        parts |= {"weights": source.weights, "transformers": metadata.version("transformers")}
        if folder.is_dir():
            parts["folder"] = {}
            for file in folder.rglob("*"):
                if file.is_file():
                    parts["folder"][str(file.relative_to(folder))] = digests.of(file)
        else:
            parts["name"] = source.location
    return make_key(parts)


def pinned(source: Source, key: Key) -> Source:
    """Return a source that fails to load if its file has changed since its key was made."""
    digest = key.parts.get("file")
    if digest is None or source.sha256 is not None:
        return source
    return replace(source, sha256=digest.removeprefix("sha256:"))


@frozen
class BuildTarget:
    """What builds and judges of an item run on, and with.

    Attributes:
        threads: the counts to judge for, the deciding one first.
        toolchain: of the workers of the class.
        samples: digest of the samples file, which gives example inputs and, without a spec, shapes.
        held_out: digest of the samples of a budget.
        is_best: whether the class is the best one of a worker.
    """

    device_class: str
    threads: tuple[int, ...]
    toolchain: JsonView
    samples: str | None
    held_out: str | None = None
    is_best: bool = True


def build_key(
    entry: Entry,
    source: Key,
    recipe: Recipe,
    target: BuildTarget,
) -> Key:
    """Return the key of one build.

    The further thread counts and default points are not part of it.
    """
    parts: Json = {
        "source": source.digest,
        "inputs": encode(entry.spec) if entry.spec else None,
        "samples": target.samples,
        "recipe": {"name": recipe.name, "ways": recipe.ways, "settings": dict(recipe.settings)},
        "device_class": target.device_class,
        "num_threads": target.threads[0] if recipe.by_thread else None,
        "toolchain": own_toolchain(recipe, target.toolchain),
        "format_version": FORMAT_VERSION,
    }
    kinds, version = OWN_INPUTS
    if entry.spec is None and entry.source.kind in kinds:
        parts["own_inputs"] = version
    if entry.preserve:
        parts["preserve"] = list(entry.preserve)
    if entry.reset:
        parts["reset"] = entry.reset
    if entry.source.kind in CODE_KINDS:
        parts["weights"] = "shared"  # by all classes, unlike in earlier releases
    if recipe.by_shape:
        parts |= _points(entry)
    if not needs_torch_alone(recipe.name) and not target.is_best:
        parts[BETTER_CPU] = True
    if recipe.precision != FLOAT32:
        parts["accuracy"] = _accuracy(entry, target)
    return make_key(parts)


def judge_key(
    entry: Entry,
    source: Key,
    builds: Sequence[Key],
    target: BuildTarget,
    policy: SamplingPolicy,
) -> Key:
    """Return the key of one judge.

    Default points, the default objective, an unset `memory_mb_max` and `nan: report` are not part
    of it. Source and class are part of it only if there are no builds. `sizes` are the further
    sizes at which the winner is timed; earlier releases did not time any.
    """
    limits = {name: getattr(entry.limits, name) for name in JUDGED_LIMITS}
    if entry.limits.memory_mb_max is not None:
        limits["memory_mb_max"] = entry.limits.memory_mb_max
    if entry.limits.nan != "report":
        limits["nan"] = entry.limits.nan
    first, *further = target.threads
    parts: Json = {
        "builds": sorted(build.digest for build in builds),
        "limits": limits,
        # What accepted noise publishes is judged again without it.
        "policy": encode(replace(policy, accept_noise=False)),
        "num_threads": [first, *further] if further else first,
        "inputs": {"version": INPUTS_VERSION, "samples": target.samples},
        "task_metric": entry.task_metric,
    }
    if not builds:
        parts |= {"source": source.digest, "device_class": target.device_class}
    if entry.objective != "p50":
        parts["objective"] = entry.objective
    if set(entry.precision) & set(device_class(target.device_class).precisions):
        parts["accuracy"] = _accuracy(entry, target)
    return make_key(parts | _points(entry) | _sizes(entry))


def _accuracy(entry: Entry, target: BuildTarget) -> Json:
    """The budget of a lower precision, with the digest of its samples."""
    assert entry.accuracy is not None, "a lower precision has a budget"
    return {**encode(replace(entry.accuracy, samples=None)), "samples": target.held_out}


def _points(entry: Entry) -> Json:
    """The points of an entry, unless they are the default.

    Dims that the source itself declares are not known yet.
    """
    points = entry.points
    if entry.spec is not None:
        points = entry.spec.named_points(points)
        if points == (entry.spec.first_point(),):
            return {}
    return {"points": [dict(point) for point in points]} if points else {}


def _sizes(entry: Entry) -> Json:
    """The sizes that a judge times besides the points, if dims vary or are not known yet."""
    if entry.spec is None:
        return {"sizes": "middle, largest"}
    sizes = entry.spec.further_sizes(entry.spec.named_points(entry.points))
    return {"sizes": list(sizes)} if sizes else {}


_DIGESTS = re.compile(r"judge\.builds|builds\..*\.source")
"""Parts of keys that are keys themselves, whose parts are compared."""


def differing(parts: JsonView, finished: JsonView) -> list[str]:
    """Return the dotted names of the parts that differ, for `--explain`."""
    return [name for name in _differing(parts, finished) if not _DIGESTS.fullmatch(name)]


def _differing(parts: JsonView, finished: JsonView) -> list[str]:
    names = []
    for name in sorted(set(parts) | set(finished)):
        one = parts.get(name)
        other = finished.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            names += [f"{name}.{inner}" for inner in _differing(one, other)]
        elif one != other:
            names.append(name)
    return names
