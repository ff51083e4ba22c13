"""Runtime settings: variables of a process's environment that may make calls faster, and where
their libraries are. No torch.

A judge tries them (freezing/validation/settings_gain.py) and an artifact names those that gained;
`coldpress env` prints them and `coldpress run` applies them. All must be set before the process
starts. Manifests name libraries by file name, and only names and libraries of SETTINGS are applied:
a manifest cannot make a process load anything else.

Not among them, because a server that shares its machine would suffer: waiting threads that spin for
long (OMP_WAIT_POLICY=active), and threads bound to CPUs (OMP_PROC_BIND), which two processes would
bind to the same ones.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_PRELOAD = "LD_PRELOAD"

LISTS = (_PRELOAD, "GLIBC_TUNABLES")
"""Variables with a list of parts separated by colons; new parts precede those that a process has.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSetting:
    """A setting that a judge may try.

    Attributes:
        kind: what it replaces; at most one setting of a kind is used.
        variables: values by name.
        install: how to get the library of LD_PRELOAD; empty for settings without one.
    """

    kind: Literal["allocator", "pages", "openmp"]
    variables: Mapping[str, str]
    install: str = ""


SETTINGS = (
    # Its threads would spin for 200 ms after each call, on CPUs that others need.
    RuntimeSetting(
        kind="openmp",
        variables={_PRELOAD: "libiomp5.so", "KMP_BLOCKTIME": "1"},
        install="pip install intel-openmp",
    ),
    RuntimeSetting(
        kind="allocator",
        variables={_PRELOAD: "libtcmalloc_minimal.so.4"},
        install="apt-get install libtcmalloc-minimal4",
    ),
    RuntimeSetting(
        kind="allocator",
        variables={_PRELOAD: "libjemalloc.so.2"},
        install="apt-get install libjemalloc2",
    ),
    # glibc keeps freed memory instead of returning it to the kernel: no more page faults, and the
    # process stays at its peak.
    RuntimeSetting(
        kind="allocator",
        variables={
            "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736"
        },
    ),
    RuntimeSetting(
        kind="pages", variables={"THP_MEM_ALLOC_ENABLE": "1"}
    ),  # torch's own: 2 MB pages for large tensors
)
"""In the order in which a judge tries them."""

_NAMES = {name for setting in SETTINGS for name in setting.variables}
INSTALL = {setting.variables[_PRELOAD]: setting.install for setting in SETTINGS if setting.install}
"""How to install each library that may be preloaded, by file name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exports:
    """What a process lacks of an artifact's settings.

    Attributes:
        values: new values of variables, with the parts that the environment has already.
        missing: file names of libraries that are not installed here.
        kept: variables that the environment sets to another value, which stays.
    """

    values: Mapping[str, str]
    missing: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def exports(variables: Mapping[str, str], environ: Mapping[str, str] | None = None) -> Exports:
    """Compare settings with an environment, by default this process's; names and libraries beside
    SETTINGS are ignored.
    """
    environ = os.environ if environ is None else environ
    values, missing, kept = dict[str, str](), list[str](), list[str]()
    for name, value in variables.items():
        before = environ.get(name, "")
        if name not in _NAMES or value == before:
            continue
        if name not in LISTS:
            if before:
                kept.append(name)
            else:
                values[name] = value
            continue
        parts, present = value.split(":"), before.replace(" ", ":").split(":") if before else []
        if name == _PRELOAD:
            parts = [
                part
                for part in parts
                if part in INSTALL and part not in {Path(item).name for item in present}
            ]
            found = {part: library(part, environ) for part in parts}
            missing += [part for part, path in found.items() if path is None]
            parts = [str(path) for path in found.values() if path is not None]
        new = [part for part in parts if part not in present]
        if new:
            values[name] = ":".join([*new, *present])
    return Exports(values=values, missing=tuple(missing), kept=tuple(kept))


def library(name: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """Path of an installed library by its file name; None if it is in no folder of the loader or of
    this Python.
    """
    environ = os.environ if environ is None else environ
    own = [Path(item) for item in environ.get("LD_LIBRARY_PATH", "").split(":") if item]
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    system = [
        Path(f"{top}/{sub}")
        for top in ("/usr/local", "/usr")
        for sub in (f"lib/{multiarch}", "lib64", "lib")
    ]
    for folder in (*own, Path(sys.prefix) / "lib", *system):
        if (folder / name).is_file():
            return folder.absolute() / name
    return None


def merged(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """Two settings together."""
    both = {
        name: f"{first[name]}:{second[name]}" for name in LISTS if name in first and name in second
    }
    return {**first, **second, **both}


def assignments(variables: Mapping[str, str]) -> str:
    """Variables as a shell assigns them, for people."""
    return " ".join(f"{name}={value}" for name, value in variables.items())
