"""Ship files and code of an entry through the store, for workers that do not see this machine's
disk.

Files are stored in a tree under their common digest, each at its absolute path, so a module finds
its neighbours and the files beside `__file__`.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from freezer.errors import SourceError
from freezer.files import copy_whole, digest_file, is_url, make_folder
from freezer.freezing.sources import FILE_KINDS, module_file
from freezer.store import WORK
from pipeline.catalog import Entry, read_file
from pipeline.workspace import Workplace, move_whole, staging_folder

SHIPPED = Path("/coldpress-sources")
"""Placeholder for the folder of shipped files, in entries sent between machines that share no
folder.
"""

INSTALLED = {"site-packages", "dist-packages"}


def ship(entry: Entry, folder: Path) -> Entry:
    """Return the entry with every path in `folder`. Files that are already there are not copied."""
    source = entry.source
    if source.kind in FILE_KINDS:
        source = replace(
            source,
            location=str(_ship_file(Path(source.location), folder)),
            origin=str(source),
        )
    elif source.kind == "transformers" and Path(source.location).is_dir():
        root = Path(source.location)
        tree = _ship_tree([path for path in root.rglob("*") if path.is_file()], folder)
        source = replace(source, location=str(_within(tree, root)), origin=str(source))
    entry = _with_samples(entry, lambda path: _ship_file(path, folder))
    search_path = tuple(dict.fromkeys((*source.search_path, *entry.search_path)))
    metric = entry.accuracy.metric if entry.accuracy else None
    named = [name for name in (entry.task_metric, metric) if name]
    if source.kind == "python":
        named.append(source.location)
    files = set(entry.files)
    for name in named:
        files |= module_closure(name.partition(":")[0], search_path)
    if source.kind == "pickle":  # a pickle may name classes of any module in its code
        for folder_of_code in source.search_path:
            if folder_of_code not in entry.search_path:
                files.update(Path(folder_of_code).rglob("*.py"))
    if files:
        tree = _ship_tree(sorted(files), folder)
        search_path = tuple(str(_within(tree, Path(root))) for root in search_path)
    return replace(
        entry,
        source=replace(source, search_path=search_path),
        search_path=search_path,
        files=(),
    )


def upload_sources(entry: Entry, folder: Path, place: Workplace) -> Entry:
    """Upload the files of a shipped entry to the bucket, and return the entry with paths below
    SHIPPED.

    Args:
        entry: returned by `ship`.
        folder: that it was shipped to.
        place: of the store.

    Raises:
        StoreUnreachableError: the bucket cannot be written.
    """
    for unit in _units(entry, folder):
        place.keep(folder / unit, "sources", unit)
    return _moved(entry, folder, SHIPPED)


def download_sources(entry: Entry, place: Workplace) -> Entry:
    """Download the files that `upload_sources` uploaded, once; return the entry with local paths.

    Raises:
        SourceError: a file is missing from the bucket.
        IntegrityError: a file was changed.
        StoreUnreachableError: the bucket cannot be read.
    """
    units = _units(entry, SHIPPED)
    for unit in units:
        if not place.bring("sources", unit, place.folder("sources", unit)):
            raise SourceError(
                f"source {entry.source}: {unit} is not in the store; run the campaign again",
                code="CP-FETCH",
            )
    return _moved(entry, SHIPPED, place.root / WORK / "sources") if units else entry


def _units(entry: Entry, folder: Path) -> list[str]:
    """Return the names in a folder that contain the paths of an entry."""
    held_out = entry.accuracy.samples if entry.accuracy else None
    files = (entry.source.location, entry.samples, held_out)
    named = (*files, *entry.source.search_path, *entry.search_path)
    inside = [Path(path) for path in named if path and Path(path).is_relative_to(folder)]
    return list(dict.fromkeys(path.relative_to(folder).parts[0] for path in inside))


def _moved(entry: Entry, old: Path, new: Path) -> Entry:
    def of(path: str) -> str:
        return str(new / Path(path).relative_to(old)) if Path(path).is_relative_to(old) else path

    source = entry.source
    own_path = tuple(map(of, source.search_path))
    source = replace(source, location=of(source.location), search_path=own_path)
    moved = _with_samples(entry, lambda path: Path(of(str(path))))
    return replace(moved, source=source, search_path=tuple(map(of, entry.search_path)))


def _with_samples(entry: Entry, move: Callable[[Path], Path]) -> Entry:
    """The entry with its files of samples at other paths."""
    accuracy = entry.accuracy
    if accuracy is not None and isinstance(accuracy.samples, Path):
        accuracy = replace(accuracy, samples=move(accuracy.samples))
    samples = move(entry.samples) if isinstance(entry.samples, Path) else entry.samples
    return replace(entry, samples=samples, accuracy=accuracy)


def module_closure(name: str, search_path: Sequence[str]) -> set[Path]:
    """Return the files of a module and of all modules under `search_path` that it imports, without
    running them.

    Imports through importlib are not found; an entry lists such files under `files:`.
    """
    found = {}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        file = module_file(current, search_path)
        if file is None or _is_installed(file):
            continue
        if not any(file.is_relative_to(root) for root in search_path):
            continue
        found[current] = file
        parents = current.split(".")
        waiting += [".".join(parents[:length]) for length in range(1, len(parents))]
        if file.suffix == ".py":
            package = current if file.name == "__init__.py" else current.rpartition(".")[0]
            waiting += _imports(file, package)
    return set(found.values())


def _is_installed(file: Path) -> bool:
    """Whether a module belongs to an installed package; an environment may be inside the
    project.
    """
    if INSTALLED & set(file.parts):
        return True
    paths = sysconfig.get_paths()
    return any(file.is_relative_to(paths[name]) for name in ("stdlib", "platstdlib"))


def _imports(file: Path, package: str) -> Iterator[str]:
    """Yield the names of imported modules; for `from a import b` both `a` and `a.b`."""
    for node in ast.walk(ast.parse(file.read_bytes(), filename=str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = parts[: len(parts) - node.level + 1]
                base = ".".join((*above, base) if base else above)
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _ship_file(path: Path, folder: Path) -> Path:
    return path if path.is_relative_to(folder) else _within(_ship_tree([path], folder), path)


def _ship_tree(files: Iterable[Path], folder: Path) -> Path:
    """Return a folder that contains the files at their absolute paths. It is made once.

    Raises:
        SourceError: a file changed while it was copied.
    """
    digests = {str(file): digest_file(file) for file in files}
    tree = folder / hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
    if tree.is_dir():
        return tree
    with staging_folder(folder.parents[1]) as made:
        for name, digest in digests.items():
            dest = _within(made, Path(name))
            make_folder(dest.parent)
            copy_whole(Path(name), dest)
            if digest_file(dest) != digest:
                raise SourceError(
                    f"{name} changed while it was copied; run again when it is complete",
                    code="CP-FETCH-DIGEST",
                )
        made.chmod(0o755)
        move_whole(made, tree)
    return tree


def _within(tree: Path, path: Path) -> Path:
    return tree / path.absolute().relative_to(path.anchor or "/")


def named_files(catalog: Path) -> set[Path]:
    """Return the existing sources, samples and listed files of all entries, and the modules of
    their functions with all imports.

    Absolute paths and URLs are left out: they mean the same on every machine.

    Raises:
        CatalogError: the file is not a catalog.
    """
    folder = catalog.resolve().parent
    search_path = list(dict.fromkeys((str(folder), str(Path.cwd()))))
    found = set()
    for record in read_file(catalog):
        entry = record.value if isinstance(record.value, dict) else {}
        files = entry.get("files")
        names = [str(name) for name in files] if isinstance(files, list) else []
        accuracy = entry.get("accuracy")
        accuracy = accuracy if isinstance(accuracy, dict) else {}
        for fields in (entry, accuracy):
            names.append(glob.escape(str(fields.get("samples") or "")))
        metric = str(accuracy.get("metric", "")).removeprefix("python:")
        for function in (entry.get("source"), entry.get("task_metric"), f"python:{metric}"):
            kind, _, location = str(function).partition(":")
            if kind == "python":
                # The campaign reports it as a failure of the entry.
                with suppress(OSError, SyntaxError, ValueError):
                    found |= module_closure(location.partition(":")[0], search_path)
            elif kind == "transformers":
                found.update(_existing(folder, glob.escape(location)))
            else:
                names.append(glob.escape(location))
        for name in names:  # of files, not of folders
            found.update(path for path in _existing(folder, name) if path.is_file())
    return found


def _existing(folder: Path, pattern: str) -> list[Path]:
    """Return what a relative pattern matches; absolute paths and URLs match nothing."""
    if Path(pattern).is_absolute() or is_url(pattern):
        return []
    paths = glob.glob(str(folder / pattern), recursive=True)
    return [Path(os.path.normpath(path)) for path in paths]
