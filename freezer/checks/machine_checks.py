"""Checks of this machine: torch, compiler, device classes, GPUs, temporary folder, and of a store;
and all checks of `coldpress doctor` in order.

What freezing needs is imported when a check runs, as an import of torch may fail.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Literal
from urllib.parse import urlparse

from freezer.codec import frozen
from freezer.errors import (
    ColdpressError,
    MissingDependencyError,
    UsageError,
    first_line,
    install_command,
)
from freezer.files import OCI, SCHEMES, VARIABLE, scratch_place
from freezer.hardware import (
    PORTABLE,
    Host,
    best_level,
    describe_host,
    detect,
    device_class,
    this_host,
)
from freezer.store import Store, newest_versions

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a check.

    Attributes:
        check: the checked thing, in one or two words.
        text: result of the check.
        level: `error` if Coldpress cannot work here as requested, `warning` if it works, but slowly
            or only in part.
        remedy: unless the level is `ok`, a command that fixes it or shows its cause, with a comment
            on what to do with the result.
    """

    check: str
    text: str
    level: Level = "ok"
    remedy: str = ""


@frozen
class CheckRequest:
    """What to check beside the machine.

    Attributes:
        store: URI of a store; None for no check.
        tracking_uri: URI of MLflow; None for no check.
        address: address of a Ray cluster; None for RAY_ADDRESS, or no check.
    """

    store: str | None = None
    tracking_uri: str | None = None
    address: str | None = None


Check = Callable[[CheckRequest], Iterable[Finding]]


LEAST_FREE_BYTES = 1e9
"""Free disk space below which a build may fail."""

_NEEDED = "; freezing with Inductor needs it, and serving does not"

_INSTALL = "apt-get install g++ binutils   # or: dnf install gcc-c++ binutils"

_OTHER = "apt-get install clang libomp-dev; CXX=clang++ coldpress doctor   # or another one"


def check_torch(_: CheckRequest) -> Iterator[Finding]:
    """Whether torch can be imported, and its build."""
    from freezer.freezing.environment import torch_versions

    if find_spec("torch") is None:
        text = "not installed; artifacts of ONNX Runtime and OpenVINO serve without it"
        yield Finding("torch", text, "warning", install_command("torch"))
        return

    try:
        versions = torch_versions()
    except Exception as error:  # a missing library, another ABI of numpy, a broken installation
        text = f"cannot be imported: {type(error).__name__}: {first_line(error)}"
        yield Finding("torch", text, "error", "python -m pip install --force-reinstall torch")
        return
    device = f"CUDA {versions['cuda']}" if versions["cuda"] else "CPUs"
    python = platform.python_version()
    yield Finding("torch", f"{versions['torch']}, built for {device}; Python {python}")


def check_compiler(_: CheckRequest) -> Iterator[Finding]:
    """Whether the C++ compiler builds Inductor's code for this machine, and objdump is there to
    check its instructions. Requires torch.
    """
    from freezer.freezing.environment import compiler
    from freezer.freezing.lowering import compiler_problem

    command, classes = compiler(), detect().classes
    missing = [tool for tool in (command, "objdump") if shutil.which(tool) is None]
    level = best_level(classes)
    if missing:
        text = f"{missing[0]!r} is not in PATH{_NEEDED}"
        yield Finding("compiler", text, "warning", _INSTALL)
    elif level is None:
        yield Finding("compiler", f"{command!r}, not tried: this machine serves no class")
    elif problem := compiler_problem(device_class(level)):
        text = f"{command!r} cannot build for {level}: {problem}{_NEEDED}"
        yield Finding("compiler", text, "warning", _OTHER)
    else:
        yield Finding("compiler", f"{command!r} builds for {level}")


def check_classes(_: CheckRequest) -> Iterator[Finding]:
    """The device classes that this process serves, and why not better ones."""
    yield classes_finding(this_host(), os.environ)


def classes_finding(
    host: Host,
    environ: Mapping[str, str],
) -> Finding:
    """Report the device classes of a host to a process with this environment."""
    machine = describe_host(host, environ)
    text = ", ".join(machine.classes)
    for name, why in machine.next_better.items():
        text += f"; not {name}: {why}"
    if machine.hardware is not None and machine.hardware not in machine.classes:
        names = [limit.partition("=")[0] for limit in machine.limits.split()]
        return Finding("device classes", text, "warning", f"unset {' '.join(names)}")
    if machine.classes == (PORTABLE,):
        remedy = "lscpu   # a virtual machine may hide features: qemu -cpu host"
        text += "; only portable artifacts serve here"
        return Finding("device classes", text, "warning", remedy)
    if machine.emulated:
        text += "; the CPU is emulated, so speeds are not measured here"
        remedy = "coldpress worker-labels   # on hardware of the class: it times what was made here"
        return Finding("device classes", text, "warning", remedy)
    return Finding("device classes", text)


def check_gpus(_: CheckRequest) -> Iterator[Finding]:
    """Whether torch can use the GPUs of the machine, if it has any."""
    from freezer.runtime.devices import no_cuda

    problem = no_cuda() if this_host().gpus else None
    if problem is not None:
        remedy = "nvidia-smi   # its CUDA version must be torch's or later, for a torch with CUDA"
        yield Finding("GPU", f"torch cannot use it: {problem}", "warning", remedy)


def check_temporary(_: CheckRequest) -> Iterator[Finding]:
    """Whether files that contain code can be written and opened in the temporary folder, and its
    free space.
    """
    remedy = f"export {VARIABLE}=/var/tmp   # or another folder that allows it"
    try:
        folder = scratch_place(executable=True)
    except UsageError as error:
        yield Finding("temporary folder", error.coded, "error", remedy)
        return
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {free / 1e9:.1f} GB free"
    if free >= LEAST_FREE_BYTES:
        yield Finding("temporary folder", text)
    else:
        text += f"; expected {LEAST_FREE_BYTES / 1e9:.0f} GB or more"
        yield Finding("temporary folder", text, "warning", remedy)


def check_store(request: CheckRequest) -> Iterator[Finding]:
    """Whether the requested store can be read and written."""
    uri = request.store
    if uri is None:
        return
    try:
        store = Store.open(uri)
        if store.files.exact:
            next(store.root.iterdir(), None)  # `models` finds none in a forbidden folder
        models = store.models()
    except ColdpressError as error:
        yield Finding("store", error.coded, "error", _remedy(uri, error))
        return
    except OSError as error:
        yield Finding("store", f"{uri} cannot be read: {error}", "error", _remedy(uri, error))
        return
    text = f"{store.uri}: {len(models)} model{'' if len(models) == 1 else 's'}"
    try:
        if store.registry is None:
            _probe(store)
    except OSError as error:
        text += f", but it cannot be written: {error}; deployments only read, campaigns write"
        remedy = f"df -h {shlex.quote(store.uri)}   # free space, or grant write access"
        yield Finding("store", text, "warning", remedy)
    else:
        written = " and written" if store.registry is None else ""
        yield Finding("store", f"{text}, can be read{written}")
    yield from _missing_engines(store)


def _missing_engines(store: Store) -> Iterator[Finding]:
    """The latest artifacts of a store that need an engine which is not installed here."""
    for version in newest_versions(store)[0]:
        for artifact in version.artifacts:
            missing = [name for name in artifact.engines if find_spec(name) is None]
            if missing:
                names = " and ".join(missing)
                place = f"{version.model} for {artifact.device_class}"
                text = f"{names} is not installed, so a slower artifact serves here than {place}"
                yield Finding("engines", text, "warning", f"pip install {' '.join(missing)}")


def _probe(store: Store) -> None:
    """Write and remove a file."""
    name = f".doctor-{uuid.uuid4().hex}"
    try:
        store.files.write(name, b"coldpress doctor")
    finally:
        with suppress(OSError):
            store.files.remove(name)


def _remedy(uri: str, error: Exception) -> str:
    """A command for a store that cannot be opened or read."""
    scheme, place = urlparse(uri).scheme, shlex.quote(uri.partition("?")[0])
    if isinstance(error, MissingDependencyError):
        return install_command("requests" if scheme == OCI else "pyarrow")
    if scheme == OCI:
        return f"docker login {urlparse(uri).netloc}   # or podman login, skopeo login"
    if scheme in SCHEMES:
        tool = "aws s3" if scheme == "s3" else "gcloud storage"
        return f"{tool} ls {place}   # checks network and credentials without Coldpress"
    return f"ls -ld {place}   # mount it, or let the first campaign make it"


GROUP = "coldpress.checks"
"""Entry points of further checks. The wheel names them too, but contains no code for them."""


def run_checks(request: CheckRequest) -> Iterator[Finding]:
    """Run all checks."""
    of_torch = list(check_torch(request))
    yield from of_torch
    yield from check_classes(request)
    yield from check_temporary(request)
    if of_torch[0].level == "ok":
        yield from check_compiler(request)
        yield from check_gpus(request)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name, reverse=True):
        try:
            check: Check = entry.load()
        except ImportError as error:
            text = f"not installed, and only campaigns need it: {first_line(error)}"
            yield Finding(entry.name, text)
        else:
            yield from check(request)
    yield from check_store(request)
