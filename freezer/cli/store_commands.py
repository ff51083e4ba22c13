"""The commands over stores: `coldpress list`, `pull`, `copy`, `export`, `sign` and `rollback`.

Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from freezer.artifact import MANIFEST, Artifact, folder_of, torch_folder
from freezer.artifact.description import size_text
from freezer.artifact.triton import write_triton
from freezer.cli.arguments import (
    ClassOption,
    JsonOption,
    MaybeModelArgument,
    MinVersionOption,
    ModelArgument,
    ReferenceArgument,
    StoreOption,
    console,
    note,
    say,
    say_error,
    say_json,
    table,
    transfer_bar,
)
from freezer.codec import encode
from freezer.errors import FAILED, ColdpressError, IncompatibleError, UsageError
from freezer.files import check_folder, scratch_folder
from freezer.hardware import detect, device_class
from freezer.serving.compatibility import rungs
from freezer.store import (
    Form,
    ListedVersion,
    Store,
    Version,
    announce,
    copy_version,
    newest_versions,
    references,
    versions_of,
)


def list_models(
    model: MaybeModelArgument = None, store: StoreOption = "./store", as_json: JsonOption = False
) -> None:
    """List the models of a store, or all versions of one, newest first."""
    opened = Store.open(store)
    problems: list[ColdpressError] = []
    if model is None:
        listed, problems = newest_versions(opened)
    else:
        listed = versions_of(opened, model)
    if as_json:
        versions = [{**encode(item), "published": _date(item) or None} for item in listed]
        say_json({"store": opened.uri, "versions": versions})
    else:
        _print_versions(listed)
        if model is None:
            say(f"{len(listed)} model{'' if len(listed) == 1 else 's'} in {opened.uri}")
    for error in problems:
        say_error(error)
    if problems:
        sys.exit(FAILED)


def _date(item: ListedVersion) -> str:
    """When a version was published; empty in a registry, which records no times."""
    if not item.published:
        return ""
    return datetime.fromtimestamp(item.published, UTC).isoformat(timespec="seconds")


def _print_versions(listed: Iterable[ListedVersion]) -> None:
    """Print a table with a row for each artifact; the first of a version names it."""
    rows = table("model", "version", "published", "device class", "size", "signed", "digest")
    rows.columns[0].overflow = "fold"
    rows.columns[4].justify = "right"
    for item in listed:
        number = f"{item.version} latest" if "latest" in item.tags else str(item.version)
        first = (item.model, number, _date(item)[:10])
        for artifact in item.artifacts:
            rows.add_row(
                *first,
                artifact.device_class,
                size_text(artifact.size_bytes),
                "yes" if artifact.signed else "no",
                artifact.digest.removeprefix("sha256:")[:12],
            )
            first = ("", "", "")
    console.print(rows, markup=False, highlight=False)


def pull(
    model: ModelArgument,
    dest: Annotated[Path, Option(help="New or empty folder to write.")],
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
    min_version: MinVersionOption = 0,
    every: Annotated[
        bool, Option("--all", help="Also what needs torch alone, as DEST.torch.")
    ] = False,
) -> None:
    """Copy the artifact for this machine into a folder, and verify every digest: the best one whose
    engine is installed.
    """
    if not (dest / MANIFEST).is_file():  # a folder with this artifact stays
        check_folder(dest, "--dest")
    opened = Store.open(store)
    version = opened.version(model)
    if version.number < min_version:
        raise IncompatibleError(
            f"{model}: rolled_back: got version {version.number}, expected version {min_version} or"
            " later"
        )
    name = pick(version, device_class_)
    images = version.images_of(name)
    served = (rank for rank, image in enumerate(images) if all(map(find_spec, image.engines)))
    rank = 0 if every else next(served, 0)
    if every and len(images) > 1:
        with transfer_bar():
            opened.pull(version, name, torch_folder(dest), rank=1)
        say(f"the artifact that needs torch alone is in {torch_folder(dest)}")
    elif rank:
        missing = " and ".join(images[0].engines)
        say(f"{missing} is not installed: the artifact that needs torch alone serves")
    with transfer_bar():
        artifact = opened.pull(version, name, dest, rank=rank)
    size_bytes = sum(file.size_bytes for file in artifact.manifest.contents)
    say(f"{version.model}:{version.number} for {name} is in {dest} ({size_text(size_bytes)})")
    say(f"pin: {version.pin}", "dim")


def copy(
    source: Annotated[str, Argument(help="URI of the store to copy from.")],
    dest: Annotated[str, Argument(help="URI of the store to copy to.")],
    models: Annotated[
        list[str] | None,
        Argument(help="MODEL, MODEL:VERSION or MODEL@DIGEST. Default: all versions."),
    ] = None,
    as_: Annotated[
        Form,
        Option("--as", help="`image` writes images that containers can mount."),
    ] = "artifacts",
) -> None:
    """Copy versions with their signatures to another store, byte for byte. `latest` of DEST follows
    that of SOURCE.
    """
    opened = Store.open(source)
    target = Store.open(dest, create=True)
    for reference in models or references(opened):
        with transfer_bar():
            copied = copy_version(opened, target, reference, as_)
        say(f"{', '.join(copied.names)} in {target.uri}")
        say(f"pin: {copied.pin}", "dim")


def export(
    reference: ReferenceArgument,
    dest: Annotated[Path, Argument(help="Folder of the model repository.")],
    as_: Annotated[
        Literal["triton"], Option("--as", help="`triton`: for Triton Inference Server.")
    ] = "triton",
    store: StoreOption = "./store",
    device_class_: ClassOption = "auto",
    threads: Annotated[
        int | None, Option("--threads", help="Threads for calls. Default: the judged count.")
    ] = None,
    batch: Annotated[
        bool, Option("--batch", help="Let the server join requests along the first dim.")
    ] = False,
) -> None:
    """Write a model repository with one artifact for another server."""
    with scratch_folder() as scratch, transfer_bar():
        artifact, _ = named_artifact(reference, store, device_class_, scratch)
        artifact.verify()
        config = write_triton(artifact, dest, threads=threads, batch=batch)
    say(f"{artifact.manifest.model} for {artifact.manifest.device_class} is in {config.parent}:")
    say(config.read_text().rstrip(), "dim")


def named_artifact(
    reference: str,
    store: str,
    device_class_: str,
    scratch: Path,
    paths: Collection[str] | None = None,
) -> tuple[Artifact, tuple[str, ...]]:
    """The artifact that a command names, and the classes that its version is published for.

    Args:
        reference: an artifact folder, or a version in the store.
        store, device_class_: of a version; see `pick`.
        scratch: empty folder for links to the files of a version.
        paths: the files to link; None links all.
    """
    folder = folder_of(reference)
    if folder is not None:
        return Artifact.read(folder), ()
    opened = Store.open(store)
    version = opened.version(reference)
    artifact = opened.materialize(version, pick(version, device_class_), scratch, paths=paths)
    return artifact, tuple(version.images)


def pick(version: Version, wanted: str) -> str:
    """The requested device class, or the most specific one that this machine runs."""
    if wanted != "auto":
        return device_class(wanted).name
    machine = detect()
    runnable = rungs(version.images, machine)
    if not runnable:
        raise IncompatibleError(
            f"{version.model}:{version.number} is published for"
            f" {', '.join(sorted(version.images))}; this machine runs {', '.join(machine.classes)}"
        )
    return runnable[0]


def sign(
    model: ModelArgument,
    key: Annotated[Path, Option(help="Private EC key on P-256 (PEM, without a password).")],
    store: StoreOption = "./store",
) -> None:
    """Verify and sign the published artifacts of all classes; pulled folders contain the signatures
    too.
    """
    opened = Store.open(store)
    version = opened.version(model)
    for name in sorted(version.images):
        done = "signed" if opened.sign(version, name, key) else "signed by this key before"
        say(f"{version.model}:{version.number} for {name}: {done}")


def rollback(
    model: ModelArgument,
    store: StoreOption = "./store",
    undo: Annotated[
        bool,
        Option("--undo", help="Make `latest` exactly what it was before the last rollback."),
    ] = False,
) -> None:
    """Make `latest` an earlier version, for deployments that follow it; nothing is deleted."""
    name, _, number = model.partition(":")
    opened = Store.open(store)
    if "@" in model:
        pinned = opened.version(model)
        name, number = pinned.model, str(pinned.number)
    if undo and number:
        raise UsageError(f"--undo undoes the last rollback of {name}; omit :{number}")
    if not undo and not number.isdecimal():
        raise UsageError(
            f"{model!r} names no version; name one that `coldpress list {name} --store {store}`"
            f" shows: {name}:1; --undo undoes the last rollback"
        )
    before = opened.version(name)
    version = opened.roll_back(name, None if undo else int(number))
    problem = announce(opened, name, opened.notes(name).moves[-1])
    if problem:
        note(f"the rollback is done, but {problem}")
    classes = ", ".join(sorted(version.images))
    say(f"latest of {name} is version {version.number} (before: {before.number}), for {classes}")
    missing = before.images.keys() - version.images.keys()
    if missing:
        names = ", ".join(sorted(missing))
        say(f"it has no artifact for {names}; a lesser class or portable serves there", "yellow")
