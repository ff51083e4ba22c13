"""Tables of the weights beside a library, and compiled objects that builds share: models of one
architecture have the same C++ whatever their weights, and g++ takes most of a build.

An object is stored under a digest of everything that it is made of: the source, the compiler and
its version, the command, and the versions of torch and libc, which its headers are of. It contains
its own digest: a truncated or changed one is compiled again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from freezer.files import make_folder, move, scratch_folder, write_whole
from freezer.runtime.native import ALIGNMENT, WeightEntry
from freezer.runtime.tensors import dtype_name

MAX_BYTES = 1_000_000_000
"""Size of the stored objects above which those that were not used for longest are removed."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""A function's address in this process, which Inductor prints into messages of assertions."""

_PACKED = re.compile(r"(?<=\.opaque_metadata = {)[^}]*")
"""The layout of a packed weight, a number for each byte."""

_LAYOUT = struct.Struct("@2i12q i12q12qq i12q i12q12q24x Q3i12qq i")
"""oneDNN's descriptor of a packed weight (dnnl_memory_desc, in blocks), and its number of groups;
struct writes zeros between the fields.
"""

_KIND, _BLOCKED = 40, 2
"""Index of the field with the kind of format, and that of blocks."""

_folder: ContextVar[Path | None] = ContextVar("objects", default=None)


@contextmanager
def objects_kept_in(folder: Path) -> Iterator[None]:
    """Let the builds of this context share their objects in a folder, also with other processes."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def reproducible(code: str) -> str:
    """Generated code without what differs between two processes."""

    def cleaned(found: re.Match[str]) -> str:
        values = [int(value.strip(" L")) for value in found[0].split(",")]
        return ", ".join(f"{value}L" for value in clean_layout(bytes(values)))

    return _PACKED.sub(cleaned, _ADDRESS.sub("", code))


def clean_layout(layout: bytes) -> bytes:
    """Serialized layout of a packed weight without what was in memory between its fields; unchanged
    if another oneDNN has other fields.
    """
    if len(layout) != _LAYOUT.size:
        return layout
    fields = _LAYOUT.unpack(layout)
    return _LAYOUT.pack(*fields) if fields[_KIND] == _BLOCKED else layout


def weights_table(graph: Any) -> str:
    """The table that the loader reads: the constants of Inductor's GraphLowering in the order and
    at the positions of its file.
    """
    entries = []
    position = 0
    for name in graph.constants:
        if name in graph.folded_constants:
            continue
        tensor = graph.get_original_value_of_constant(name)
        packed = None
        if tensor.is_mkldnn:
            layout = torch.ops.mkldnn._get_mkldnn_serialized_md(tensor)
            packed = base64.b64encode(clean_layout(bytes(layout.tolist()))).decode()
        entry = WeightEntry(
            name=name,
            position=position,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stride=() if packed else tuple(tensor.stride()),
            offset=0 if packed else tensor.storage_offset(),
            packed=packed,
        )
        size = torch.ops.mkldnn._nbytes(tensor) if packed else tensor.untyped_storage().nbytes()
        entries.append(asdict(entry))
        position += -(-size // ALIGNMENT) * ALIGNMENT
    return json.dumps({"size_bytes": position, "constants": entries})


@contextmanager
def reused_objects(cache: Path) -> Iterator[None]:
    """Take the objects of a build from the folder of `objects_kept_in`, if they are there.

    Args:
        cache: Inductor's cache of the build; its path does not get into the objects.
    """
    from torch._inductor import cpp_builder

    original = cpp_builder.CppBuilder.build

    def build(builder: Any) -> None:
        command = f"{builder.get_command_line()} -ffile-prefix-map={cache}=."
        source, target = Path(builder._sources_args), Path(builder._target_file)
        folder = _folder.get()
        if source.suffix != ".cpp" or target.suffix != ".o":
            original(builder)
            return

        def compile_it() -> None:
            with mock.patch.object(builder, "get_command_line", return_value=command):
                original(builder)

        if folder is None:
            compile_it()
            return
        version = cpp_builder.get_compiler_version_info(builder._compiler)
        made_with = (torch.__version__, *platform.libc_ver(), version)
        parts = "\0".join((*made_with, command, source.read_text()))
        for name in (str(cache), source.stem):  # which is a digest of a text with the path
            parts = parts.replace(name, "")
        stored = folder / hashlib.sha256(parts.encode()).hexdigest()
        content = _read(stored)
        if content is None:
            compile_it()
            _store(stored, target.read_bytes())
        else:
            target.write_bytes(content)

    with mock.patch.object(cpp_builder.CppBuilder, "build", build):
        yield


def _read(stored: Path) -> bytes | None:
    """The content of a stored object; None if it is missing or damaged."""
    with suppress(OSError):
        content = stored.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            os.utime(stored)
            return content[32:]
    return None


def _store(stored: Path, content: bytes) -> None:
    """Store an object atomically; a full disk is ignored, since the build has it."""
    folder = stored.parent
    with suppress(OSError):
        make_folder(folder)
        with scratch_folder(place=folder) as scratch:
            whole = scratch / stored.name
            write_whole(whole, hashlib.sha256(content).digest() + content, synced=False)
            move(whole, stored)
        _remove_old(folder)


def _remove_old(folder: Path) -> None:
    files = [(file.stat().st_mtime, file) for file in folder.iterdir() if file.is_file()]
    total_bytes = sum(file.stat().st_size for _, file in files)
    for _, file in sorted(files):
        if total_bytes <= MAX_BYTES:
            return
        total_bytes -= file.stat().st_size
        file.unlink(missing_ok=True)
