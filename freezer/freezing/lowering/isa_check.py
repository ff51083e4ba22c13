"""Check a package's machine code against the instruction sets of its device class.

Executable sections are disassembled by binutils' objdump, which g++ requires anyway. Weights are in
other sections. Only the
differences between device classes matter: x86-64-v3 is the least on x86, armv8-a on Arm, and
instructions of these belong to no family. All others belong to a level or a feature that some
classes have, or to no class. Hints, which older CPUs ignore (endbr64, prefetches, bti), and system
instructions, which no compiler emits from C++, are not checked.

Sources: instruction set references of Intel and AMD, the `-m` options that gcc's `-march=native`
may set, and Arm's A64 reference.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from freezer.errors import BuildError, LeakError
from freezer.hardware import DEVICE_CLASSES, DeviceClass

X86_V4, NEOVERSE_V1, NEOVERSE_V2 = "x86-64-v4", "armv8.4-a+sve", "armv9-a"
LEVELS: Mapping[str, str] = {X86_V4: "avx512f", NEOVERSE_V1: "sve", NEOVERSE_V2: "sve2"}
"""Families that have several features, with one of them: a device class has all of them or none.

Other families are features.
"""

NO_CLASS = "of no device class"
"""The family of instructions that no class allows, and of those that objdump does not know."""

_VNNI, _BF16 = re.compile(r"vpdp(?:bus|wss)ds?"), re.compile(r"vdpbf16ps|vcvtne2?ps2bf16")
"""In EVEX encoding; in VEX encoding they are newer features."""

_AMX: Mapping[str, re.Pattern[str]] = {
    "amx_int8": re.compile(r"tdpb[su][su]d"),
    "amx_bf16": re.compile(r"tdpbf16ps"),
    "amx_tile": re.compile(r"ldtilecfg|sttilecfg|tile(?:zero|release|stored|loaddt?1?)"),
}
_BMI = re.compile(r"andn|bextr|bls(?:i|r|msk)|bzhi|mulx|pdep|pext|rorx|s(?:ar|hl|hr)x")
_X86_OF_NO_CLASS = re.compile(
    # In legacy encoding: AES, PCLMULQDQ, SHA, GFNI, ADX, random numbers, SSE4a and others.
    r"aes.*|pclmul.*|sha\d.*|gf2p8.*|ad[co]x|rdrand|rdseed|rdpid|(?:rd|wr)[fg]sbase|extrq|insertq|movnts[sd]|"
    r"xsave(?:opt|c|s)(?:64)?|xrstors(?:64)?|clflushopt|clwb|"
    # In VEX or EVEX encoding: the same, FMA4, IFMA, VBMI, VBMI2, BITALG, VPOPCNTDQ, VP2INTERSECT,
    # AVX-VNNI, AVX10.2 and others.
    r"vaes.*|vpclmul.*|vgf2p8.*|vsha512.*|vsm[34].*|vfn?m(?:add|sub|addsub|subadd)[ps][sd]|vpmadd52.*|vperm(?:[it]2)?b|"
    r"vpmultishiftqb|vp(?:compress|expand)[bw]|vpsh[lr]dv?[wdq]|vpopcnt.*|vpshufbitqmb|vp2intersect.*|vpdp.*|vbcstne.*|"
    r"vcvtne.*|v.*bf16"
)
_X86_PREFIXES = re.compile(
    r"^(?:(?:[cdefgs]s|lock|rep\w*|data16|addr32|notrack|bnd|xacquire|xrelease|rex\S*|\{\w+\})(?:"
    r" +|$))*"
)
_PREFIX_BYTES = ("26", "2e", "36", "3e", "64", "65", "66", "67", "f0", "f2", "f3")

_CHANGE = "(?:add|clr|eor|set|[su]max|[su]min)"
_A64_OF_NO_CLASS = re.compile(
    r"aes(?:e|d|mc|imc)|sha\d\w+|eor3|rax1|xar|bcax|sm3\w+|sm4e(?:key)?|(?:bra|blra|reta|ereta|ldra)[ab]z?|retaa|retab|eretaa|eretab|"
    r"cpyf?[pme]\w*|setg?[pme]\w*|smstart|smstop|[su]mop[as]|b?fmop[as]"
)
_A64_V1 = re.compile(
    # Atomics, CRC, and arithmetic of int8, bfloat16, float16 and complex numbers.
    rf"(?:cas|swp|ld{_CHANGE})(?:al?|l)?[bh]?|casp(?:al?|l)?|st{_CHANGE}l?[bh]?|crc32c?[bhwx]|sqrdml[as]h|[su]dot|fml[as]l2?|"
    r"us?mmla|smmla|usdot|sudot|bf(?:dot|mmla|cvt|cvtn2?|mlal[bt])|fcmla|fcadd|fjcvtzs|ldapr[bh]?|ldapurs?[bhw]?|stlur[bh]?|cfinv|"
    r"rmif|setf(?:8|16)"
)
_A64_V2 = re.compile(r"frint(?:32|64)[xz]|axflag|xaflag|sb")
_SVE2 = re.compile(
    r"(?:[su]|sq|uq|sqd)?(?:abal|abdl|addl|addw|subl|subw|mull|mlal|mlsl|dmull|dmlal|dmlsl|shll)[bt]|r?(?:add|sub)hn[bt]|"
    r"sqdml[as]lbt|(?:sq|uq|sqr|uqr)?shrun?n[bt]|(?:sq|uq|r)?shrn[bt]|[su](?:aba|adalp|hadd|hsub|rhadd|rsra|rshl|rshr|sra)r?|"
    r"sq(?:abs|neg|rdml[as]h|dmulh|rdmulh|rshlr?|xtn[bt]|xtun[bt])|uqxtn[bt]|uqrshlr?|n?match|histcnt|histseg|while(?:rw|wr|g[et]|h[is])|"
    r"tbx|bsl[12]?n?|nbsl|bcax|eor3|eor[bt][bt]|xar|s[lr]i|c(?:add|dot|mla)|sqcadd|sqrdcmlah|pmul|pmull[bt]|fcvtlt|fcvtx?nt|fcvtx|flogb|"
    r"f(?:add|max|min|maxnm|minnm)p|fml[as]l[bt]|u?rsqrte|urecpe|addp|[su]maxp|[su]minp|suqadd|usqadd|bdep|bext|bgrp"
)
_SVE_REGISTER = re.compile(r"\b[zp]\d+\b")
_SVE_COUNT = re.compile(r"(?:cnt|u?s?q?inc|u?s?q?dec)[bhwd]|rdvl|addvl|addpl")
_HALF_REGISTER = re.compile(r"\bv\d+\.[48]h\b|\bh\d+\b")
_HALF_ARITHMETIC = re.compile(r"(?!fcvt(?:l2?|n2?|xn)?$)f.*|[su]cvtf")
_CHECKED_AT_RUN_TIME = re.compile(r"__aarch64_(?:cas|swp|ld(?:add|clr|eor|set))\w*")
"""Functions of libgcc that check the CPU before they use an atomic instruction."""


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
    total: Counter[str] = Counter()
    with zipfile.ZipFile(package) as archive:
        for item in archive.infolist():
            with archive.open(item) as file:
                if file.read(4) != b"\x7fELF":
                    continue
            with tempfile.TemporaryDirectory(dir=folder) as unpacked:
                found = families_of(Path(archive.extract(item, unpacked)))
            leaks = outside(found, device_class)
            if leaks:
                raise LeakError(leak_message(item.filename, leaks, device_class.name))
            for family in found:
                total[family.family] += family.count
    return dict(sorted(total.items()))


def host_class(device_class: DeviceClass) -> DeviceClass:
    """The class of the CPUs that run a payload's code: for a CUDA class that of its host code, else
    the class itself.
    """
    return DEVICE_CLASSES[device_class.host] if device_class.host else device_class


def outside(found: Iterable[Found], device_class: DeviceClass) -> list[Found]:
    """The families that CPUs of the class may lack, the most frequent first."""
    allowed = host_class(device_class).features
    leaks = [leak for leak in found if LEVELS.get(leak.family, leak.family) not in allowed]
    return sorted(leaks, key=lambda leak: (-leak.count, leak.family))


def leak_message(library: str, leaks: Sequence[Found], name: str) -> str:
    """The message of a LeakError."""
    return (
        f"inductor: {library} holds instructions outside of {name}, which would stop the process"
        f" with SIGILL: {'; '.join(map(str, leaks))}. Check your own compiler flags, compiler (CXX)"
        " and custom headers that switch the target, or build for a class that has them"
    )


def families_of(library: Path) -> list[Found]:
    """The instruction families in the executable sections of a library or object; none for GPU
    code.

    Raises:
        BuildError: objdump is missing or cannot read the file, or the file is for an unknown CPU.
    """
    with library.open("rb") as file:
        machine = int.from_bytes(file.read(20)[18:], "little")  # e_machine of the ELF header
    if machine in (190, 224):  # GPUs
        return []
    if machine not in _CPUS:
        raise BuildError(f"inductor: {library.name} is for the unknown ELF machine {machine}")
    family_of, syntax = _CPUS[machine]
    found: dict[str, Found] = {}
    for symbol, code, text in _disassembled(library, syntax):
        family = family_of(
            symbol,
            code,
            text,
        )
        if family is None:
            continue
        if family in found:
            first = found[family]
            found[family] = replace(first, count=first.count + 1)
        else:
            instruction = " ".join(text.split())
            found[family] = Found(
                family=family,
                count=1,
                instruction=instruction,
                symbol=symbol,
            )
    return list(found.values())


def _disassembled(library: Path, syntax: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Symbol, bytes and text of each instruction in the executable sections, as objdump prints
    them.
    """
    objdump = shutil.which("objdump")
    if objdump is None:
        raise BuildError(
            "inductor: no objdump to check the library's instructions; install binutils, which g++"
            " needs too (Debian: apt-get install binutils)",
            code="CP-OBJDUMP",
        )
    command = [objdump, "-d", "-C", "--insn-width=16", *syntax, str(library)]
    environ = {**os.environ, "LC_ALL": "C"}
    symbol, last, any_section = "", "", False
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environ,
    ) as process:
        assert process.stdout is not None
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
        raise BuildError(
            f"inductor: objdump cannot disassemble {library.name}:"
            f" {last or 'it has no executable section'}"
        )


def x86_family(symbol: str, code: str, text: str) -> str | None:
    """The family of an x86-64 instruction; None for those of x86-64-v3.

    Args:
        symbol: the function that contains it.
        code: its bytes in hexadecimal, separated by spaces.
        text: as disassembled, in Intel's syntax.
    """
    mnemonic = _X86_PREFIXES.sub("", text, count=1).partition(" ")[0]
    encoding = itertools.dropwhile(_PREFIX_BYTES.__contains__, code.split())
    first, second = next(encoding, ""), next(encoding, "")  # of a prefix alone nothing is left
    if first == "62":
        return _evex_family(mnemonic, opcode_map=int(second, 16) & 7)
    unknown = mnemonic in ("(bad)", ".byte") or first == "d5"  # APX
    unknown |= first == "8f" and int(second, 16) & 0x1F >= 8  # XOP
    if unknown or _X86_OF_NO_CLASS.fullmatch(mnemonic):
        return NO_CLASS
    if first not in ("c4", "c5") or mnemonic.startswith("v") or _BMI.fullmatch(mnemonic):
        return None
    if mnemonic.startswith("k"):
        return X86_V4
    for family, pattern in _AMX.items():
        if pattern.fullmatch(mnemonic):
            return family
    return NO_CLASS


def _evex_family(mnemonic: str, opcode_map: int) -> str:
    if _VNNI.fullmatch(mnemonic):
        return "avx512_vnni"
    if _BF16.fullmatch(mnemonic):
        return "avx512_bf16"
    if not mnemonic.startswith("v") or _X86_OF_NO_CLASS.fullmatch(
        mnemonic
    ):  # without v: general registers, APX
        return NO_CLASS
    half = opcode_map in (5, 6) or (mnemonic.endswith(("ph", "sh")) and mnemonic != "vcvtps2ph")
    return "avx512_fp16" if half else X86_V4


def a64_family(symbol: str, code: str, text: str) -> str | None:
    """The family of an aarch64 instruction; None for those of armv8-a.

    Args:
        symbol: the function that contains it.
        code: its bytes, which are not needed.
        text: as disassembled; a conditional branch includes its condition.
    """
    mnemonic, _, operands = text.partition("\t")
    if _CHECKED_AT_RUN_TIME.match(symbol) and _A64_V1.fullmatch(mnemonic):
        return None
    if _SVE_REGISTER.search(operands):
        crypto = mnemonic.startswith(("aes", "sm4", "rax1"))
        if crypto:
            return NO_CLASS
        return NEOVERSE_V2 if _SVE2.fullmatch(mnemonic) else NEOVERSE_V1
    if (
        mnemonic == ".inst"
        or (mnemonic in ("pmull", "pmull2") and ".1q" in operands)
        or _A64_OF_NO_CLASS.fullmatch(mnemonic)
    ):
        return NO_CLASS
    if _A64_V2.fullmatch(mnemonic):
        return NEOVERSE_V2
    half = _HALF_ARITHMETIC.fullmatch(mnemonic) and _HALF_REGISTER.search(operands)
    counts = _SVE_COUNT.fullmatch(mnemonic) and operands.startswith(("x", "w"))
    return NEOVERSE_V1 if half or counts or _A64_V1.fullmatch(mnemonic) else None


_CPUS: Mapping[int, tuple[Callable[[str, str, str], str | None], Sequence[str]]] = {
    62: (x86_family, ("-M", "intel")),
    183: (a64_family, ()),
}
"""The function that finds an instruction's family, and objdump's options, by machine of the ELF
header.
"""
