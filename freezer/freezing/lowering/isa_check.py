"""Check a package's machine code against the instruction sets of its device class.

Executable sections are disassembled by binutils' objdump, which g++ requires anyway. Weights are in other sections.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from freezer.errors import BuildError, LeakError
from freezer.freezing.lowering.isa_tables import UNKNOWN, a64_families, features_of, x86_families
from freezer.hardware.device_classes import DEVICE_CLASSES, DeviceClass

_ELF = b"\x7fELF"
_MACHINES = {62: "x86-64", 183: "aarch64"}
"""e_machine of the ELF header."""
_GPUS = (190, 224)

_PREFIX_BYTES = frozenset(("26", "2e", "36", "3e", "64", "65", "66", "67", "f0", "f2", "f3"))
_SEGMENTS = ("cs", "ds", "es", "fs", "gs", "ss")
_PREFIX_WORDS = frozenset(
    (*_SEGMENTS, "lock", "rep", "repz", "repnz", "repe", "repne", "data16", "addr32", "notrack", "bnd", "xacquire", "xrelease")
)
_NO_INSTRUCTION = ("(bad)", ".byte")
_CHECKED_AT_RUN_TIME = re.compile(r"__aarch64_(?:cas|swp|ld(?:add|clr|eor|set))\w*")
"""Functions of libgcc that check the CPU before they use an atomic instruction."""

REMEDY = "Check your own compiler flags, compiler (CXX) and custom headers that switch the target"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """An instruction family in some code.

    Attributes:
        family: its name.
        count: number of its instructions.
        instruction: the first of them, as disassembled.
        symbol: the demangled function that contains it.
    """

    family: str
    count: int
    instruction: str
    symbol: str

    def __str__(self) -> str:
        more = f", and {self.count - 1} more" if self.count > 1 else ""
        return f"{self.family}: {self.instruction} in {self.symbol}{more}"


def check_package(package: Path, folder: Path, device_class: DeviceClass) -> dict[str, int]:
    """Count the instructions of each family in the libraries and objects of a package.

    Args:
        package: a zip file.
        folder: where to unpack the libraries temporarily, one at a time.
        device_class: the class of the package; for a CUDA class that of its host code applies.

    Raises:
        LeakError: there is an instruction outside the class.
        BuildError: a library cannot be disassembled.
    """
    allowed = allowed_features(device_class)
    total: dict[str, int] = {}
    with zipfile.ZipFile(package) as archive:
        for item in _libraries(archive):
            with _unpacked(archive, item, folder) as library:
                found = families_of(library)
            leaks = outside(found.values(), allowed) if allowed is not None else ()
            if leaks:
                raise LeakError(leak_message(item.filename, leaks, device_class.name))
            for family, one in found.items():
                total[family] = total.get(family, 0) + one.count
    return dict(sorted(total.items()))


def allowed_features(device_class: DeviceClass) -> frozenset[str] | None:
    """Features that every CPU of the class has, by archspec's names; None for a class without a CPU."""
    cpu = host_class(device_class)
    return cpu.features if cpu.kind == "cpu" else None


def host_class(device_class: DeviceClass) -> DeviceClass:
    """The class of the CPUs that run a payload's code: for a CUDA class that of its host code, else the class itself."""
    return DEVICE_CLASSES[device_class.host] if device_class.host else device_class


def outside(found: Iterable[Found], allowed: frozenset[str]) -> tuple[Found, ...]:
    """The families that CPUs with these features may lack, the most frequent first."""
    leaks = [one for one in found if allowed.isdisjoint(features_of(one.family))]
    return tuple(sorted(leaks, key=lambda one: (-one.count, one.family)))


def leak_message(library: str, leaks: Sequence[Found], name: str) -> str:
    """The message of a LeakError."""
    features = [features_of(leak.family) for leak in leaks]
    able = [
        other.name
        for other in DEVICE_CLASSES.values()
        if (has := allowed_features(other)) is not None and not any(has.isdisjoint(wanted) for wanted in features)
    ]
    instead = f"; or build for a class that has it: {', '.join(able)}" if able else ""
    return (
        f"inductor: {library} holds instructions outside of {name}, which would stop the process with SIGILL: "
        f"{'; '.join(str(leak) for leak in leaks)}. {REMEDY}{instead}"
    )


def families_of(library: Path) -> dict[str, Found]:
    """The instruction families in the executable sections of a library or object.

    Raises:
        BuildError: objdump is missing or cannot read the file, or the file is for an unknown CPU.
    """
    first: dict[str, tuple[str, str]] = {}
    counts: Counter[str] = Counter()
    for symbol, text, families in classified(library):
        for family in families:
            counts[family] += 1
            if family not in first:
                first[family] = (" ".join(text.split()), symbol)
    return {
        family: Found(family=family, count=counts[family], instruction=text, symbol=symbol)
        for family, (text, symbol) in first.items()
    }


def classified(library: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Symbol, text and families of each instruction of a library or object; nothing for GPU code."""
    machine = _machine(library)
    if machine is None:
        return
    for symbol, code, text in _disassembled(library, machine):
        yield symbol, text, _x86(code, text) if machine == "x86-64" else _a64(symbol, text)


def _disassembled(library: Path, machine: str) -> Iterator[tuple[str, str, str]]:
    """Symbol, bytes and text of each instruction in the executable sections, as objdump prints them."""
    objdump = shutil.which("objdump")
    if objdump is None:
        raise BuildError(
            "inductor: no objdump to check the library's instructions; install binutils, which g++ needs too "
            "(Debian: apt-get install binutils)",
            code="CP-OBJDUMP",
        )
    syntax = ("-M", "intel") if machine == "x86-64" else ()
    command = [objdump, "-d", "-C", "--insn-width=16", *syntax, str(library)]
    environ = {**os.environ, "LC_ALL": "C"}
    symbol, any_section = "", False
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environ
    ) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            parts = line.rstrip("\n").split("\t", 2)
            if len(parts) == 3:
                yield symbol, parts[1], parts[2]
            elif line.endswith(">:\n"):
                symbol = line[line.index("<") + 1 : -3]
            elif line.startswith("Disassembly of section "):
                any_section = True
            elif line.strip():
                last = line.strip()
    if process.returncode or not any_section:
        raise BuildError(f"inductor: objdump cannot disassemble {library.name}: {last or 'it has no executable section'}")


def _x86(code: str, text: str) -> tuple[str, ...]:
    """The families of an x86-64 instruction, from its bytes and text."""
    words = text.split(None, 1)
    while words and (words[0] in _PREFIX_WORDS or words[0][0] == "{" or words[0].startswith("rex")):
        words = words[1].split(None, 1) if len(words) > 1 else []
    if not words:
        return ()  # a prefix on its own line
    if words[0] in _NO_INSTRUCTION:
        return (UNKNOWN,)
    encoding, operands = _encoding(code), words[1] if len(words) > 1 else ""
    width = ""
    if encoding != "legacy":
        operands = operands.partition("<")[0]
        width = next((letter for letter in "zyx" if f"{letter}mm" in operands), "")
    return x86_families(encoding, words[0], width)


def _a64(symbol: str, text: str) -> tuple[str, ...]:
    """The families of an aarch64 instruction, from its function and text."""
    mnemonic, _, operands = text.partition("\t")
    families = a64_families(mnemonic, operands)
    return () if families and _CHECKED_AT_RUN_TIME.match(symbol) else families


def _encoding(code: str) -> str:
    """The encoding of a 64-bit instruction, from its bytes in hexadecimal, separated by spaces."""
    position = 0
    while (first := code[position : position + 2]) in _PREFIX_BYTES:
        position += 3
    if first == "62":
        return f"evex{int(code[position + 3 : position + 5], 16) & 7}"
    if first in ("c4", "c5"):
        return "vex"
    if first == "8f" and int(code[position + 3 : position + 5], 16) & 0x1F >= 8:
        return "xop"
    return "rex2" if first == "d5" else "legacy"


def _machine(library: Path) -> str | None:
    """The CPU that an ELF file is for; None for a GPU.

    Raises:
        BuildError: it is for an unknown CPU.
    """
    with library.open("rb") as file:
        header = file.read(20)
    number = int.from_bytes(header[18:20], "little")
    if number in _GPUS:
        return None
    if number not in _MACHINES:
        raise BuildError(f"inductor: {library.name} is for the unknown ELF machine {number}")
    return _MACHINES[number]


def _libraries(archive: zipfile.ZipFile) -> Iterator[zipfile.ZipInfo]:
    """The ELF files in a package."""
    for item in archive.infolist():
        with archive.open(item) as file:
            if file.read(len(_ELF)) == _ELF:
                yield item


@contextlib.contextmanager
def _unpacked(archive: zipfile.ZipFile, item: zipfile.ZipInfo, folder: Path) -> Iterator[Path]:
    """A temporary copy of an item in a folder."""
    copy = folder / f"unpacked-{Path(item.filename).name}"
    try:
        with archive.open(item) as file, copy.open("wb") as target:
            shutil.copyfileobj(file, target)
        yield copy
    finally:
        copy.unlink(missing_ok=True)
