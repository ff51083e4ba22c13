"""Check a package's machine code against the instruction sets of its device class.

Executable sections are disassembled by binutils' objdump, which g++ requires anyway. Weights are in
other sections. Only the differences between device classes matter: x86-64-v3 is the least on x86,
armv8-a on Arm, and instructions of these belong to no family. All others belong to a feature that
some classes have, or to no class. Hints, which older CPUs ignore (endbr64, prefetches, bti), and
system instructions, which no compiler emits from C++, are not checked.

Sources: instruction set references of Intel and AMD, the `-m` options that gcc's `-march=native`
may set, and Arm's A64 reference.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from freezer.errors import BuildError, LeakError
from freezer.files import scratch_folder
from freezer.hardware import DEVICE_CLASSES, DeviceClass

NO_CLASS = "of no device class"
"""The family of instructions that no class allows, and of those that objdump does not know. Other
families are named by a feature of classes; `avx512f`, `sve`, `sve2` and `amx_tile` stand for all
features that come with them.
"""

Rule = tuple[str, str, str | None]
"""A pattern of the whole mnemonic, a pattern of its context, and the family; None for the least
class."""

_X86_OF_NO_CLASS = (
    # In legacy encoding: AES, PCLMULQDQ, SHA, GFNI, ADX, random numbers, SSE4a and others.
    r"aes.*|pclmul.*|sha\d.*|gf2p8.*|ad[co]x|rdrand|rdseed|rdpid|(?:rd|wr)[fg]sbase|extrq|insertq|movnts[sd]|"
    r"xsave(?:opt|c|s)(?:64)?|xrstors(?:64)?|clflushopt|clwb|"
    # In VEX or EVEX encoding: the same, FMA4, IFMA, VBMI, VBMI2, BITALG, VPOPCNTDQ, VP2INTERSECT,
    # AVX-VNNI, AVX10.2 and others.
    r"vaes.*|vpclmul.*|vgf2p8.*|vsha512.*|vsm[34].*|vfn?m(?:add|sub|addsub|subadd)[ps][sd]|vpmadd52.*|vperm(?:[it]2)?b|"
    r"vpmultishiftqb|vp(?:compress|expand)[bw]|vpsh[lr]dv?[wdq]|vpopcnt.*|vpshufbitqmb|vp2intersect.*|vpdp.*|vbcstne.*|"
    r"vcvtne.*|v.*bf16"
)
_VEX, _EVEX = "^c[45]", "^62"
_X86_RULES: Sequence[Rule] = (
    # context: the first byte after the prefixes
    (r"vpdp(?:bus|wss)ds?", _EVEX, "avx512_vnni"),  # in VEX encoding they are newer features
    (r"vdpbf16ps|vcvtne2?ps2bf16", _EVEX, "avx512_bf16"),
    (rf"\(bad\)|\.byte|{_X86_OF_NO_CLASS}", "", NO_CLASS),
    (r"vmovw|(?!vcvtph2ps$|vcvtps2ph$)v.*[ps]h(?:2.*|x)?", _EVEX, "avx512_fp16"),
    (r"v.*", _EVEX, "avx512f"),
    (r".*", _EVEX, NO_CLASS),  # on general registers: APX
    (r"v.*|andn|bextr|bls(?:i|r|msk)|bzhi|mulx|pdep|pext|rorx|s(?:ar|hl|hr)x", _VEX, None),
    (r"k.*", _VEX, "avx512f"),
    (
        r"tdpb(?:[su][su]d|f16ps)|ldtilecfg|sttilecfg|tile(?:zero|release|stored|loaddt?1?)",
        _VEX,
        "amx_tile",
    ),
    (r".*", _VEX, NO_CLASS),
)
_X86_PREFIXES = re.compile(
    r"^(?:(?:[cdefgs]s|lock|rep\w*|data16|addr32|notrack|bnd|xacquire|xrelease|rex\S*|\{\w+\})(?:"
    r" +|$))*"
)
_PREFIX_BYTES = ("26", "2e", "36", "3e", "64", "65", "66", "67", "f0", "f2", "f3")

_CHANGE = "(?:add|clr|eor|set|[su]max|[su]min)"
_A64_OF_NO_CLASS = (
    r"aes(?:e|d|mc|imc)|sha\d\w+|eor3|rax1|xar|bcax|sm3\w+|sm4e(?:key)?|(?:bra|blra|reta|ereta|ldra)[ab]z?|retaa|retab|eretaa|eretab|"
    r"cpyf?[pme]\w*|setg?[pme]\w*|smstart|smstop|[su]mop[as]|b?fmop[as]"
)
_A64_V1 = (
    # Atomics, CRC, and arithmetic of int8, bfloat16, float16 and complex numbers.
    rf"(?:cas|swp|ld{_CHANGE})(?:al?|l)?[bh]?|casp(?:al?|l)?|st{_CHANGE}l?[bh]?|crc32c?[bhwx]|sqrdml[as]h|[su]dot|fml[as]l2?|"
    r"us?mmla|smmla|usdot|sudot|bf(?:dot|mmla|cvt|cvtn2?|mlal[bt])|fcmla|fcadd|fjcvtzs|ldapr[bh]?|ldapurs?[bhw]?|stlur[bh]?|cfinv|"
    r"rmif|setf(?:8|16)"
)
_SVE2 = (
    r"(?:[su]|sq|uq|sqd)?(?:abal|abdl|addl|addw|subl|subw|mull|mlal|mlsl|dmull|dmlal|dmlsl|shll)[bt]|r?(?:add|sub)hn[bt]|"
    r"sqdml[as]lbt|(?:sq|uq|sqr|uqr)?shrun?n[bt]|(?:sq|uq|r)?shrn[bt]|[su](?:aba|adalp|hadd|hsub|rhadd|rsra|rshl|rshr|sra)r?|"
    r"sq(?:abs|neg|rdml[as]h|dmulh|rdmulh|rshlr?|xtn[bt]|xtun[bt])|uqxtn[bt]|uqrshlr?|n?match|histcnt|histseg|while(?:rw|wr|g[et]|h[is])|"
    r"tbx|bsl[12]?n?|nbsl|bcax|eor3|eor[bt][bt]|xar|s[lr]i|c(?:add|dot|mla)|sqcadd|sqrdcmlah|pmul|pmull[bt]|fcvtlt|fcvtx?nt|fcvtx|flogb|"
    r"f(?:add|max|min|maxnm|minnm)p|fml[as]l[bt]|u?rsqrte|urecpe|addp|[su]maxp|[su]minp|suqadd|usqadd|bdep|bext|bgrp"
)
_SVE_REGISTER = r"\b[zp]\d+\b"
_A64_RULES: Sequence[Rule] = (
    # context: the operands
    (r"(?:aes|sm4|rax1).*", _SVE_REGISTER, NO_CLASS),
    (_SVE2, _SVE_REGISTER, "sve2"),
    (r".*", _SVE_REGISTER, "sve"),
    (r"pmull2?", r"\.1q", NO_CLASS),
    (rf"\.inst|{_A64_OF_NO_CLASS}", "", NO_CLASS),
    (r"frint(?:32|64)[xz]|axflag|xaflag|sb", "", "sve2"),
    (r"(?!fcvt(?:l2?|n2?|xn)?$)f.*|[su]cvtf", r"\bv\d+\.[48]h\b|\bh\d+\b", "sve"),
    (r"(?:cnt|u?s?q?inc|u?s?q?dec)[bhwd]|rdvl|addvl|addpl", r"^[xw]", "sve"),
    (_A64_V1, "", "sve"),
)
_CHECKED_AT_RUN_TIME = re.compile(r"__aarch64_(?:cas|swp|ld(?:add|clr|eor|set))\w*")
"""Functions of libgcc that check the CPU before they use an atomic instruction."""

_X86_MACHINE, _A64_MACHINE, _GPU_MACHINES = 62, 183, (190, 224)
"""Machines of ELF headers."""


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
            with scratch_folder(place=folder) as unpacked:
                counts, examples = families_of(Path(archive.extract(item, unpacked)))
            leaks = sorted(set(counts) - host_class(device_class).features)
            if leaks:
                found = "; ".join(f"{leak}: {examples[leak]} ({counts[leak]})" for leak in leaks)
                raise LeakError(
                    f"{item.filename} holds instructions outside of {device_class.name},"
                    f" which would stop the process with SIGILL: {found}. Check your own compiler"
                    " flags, compiler (CXX) and custom headers that switch the target, or build"
                    " for a class that has them"
                )
            total += counts
    return dict(sorted(total.items()))


def host_class(device_class: DeviceClass) -> DeviceClass:
    """The class of the CPUs that run a payload's code: for a CUDA class that of its host code, else
    the class itself.
    """
    return DEVICE_CLASSES[device_class.host] if device_class.host else device_class


def families_of(library: Path) -> tuple[Counter[str], dict[str, str]]:
    """The instruction families in the executable sections of a library or object; none for GPU
    code.

    Returns:
        The number of instructions of each family, and the first one with its function.

    Raises:
        BuildError: objdump is missing or cannot read the file, or the file is for an unknown CPU.
    """
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    with library.open("rb") as file:
        machine = int.from_bytes(file.read(20)[18:], "little")
    if machine in _GPU_MACHINES:
        return counts, examples
    family_of = {_X86_MACHINE: x86_family, _A64_MACHINE: a64_family}.get(machine)
    if family_of is None:
        raise BuildError(f"{library.name} is for the unknown ELF machine {machine}")
    syntax = ("-M", "intel") if machine == _X86_MACHINE else ()
    for symbol, code, text in _disassembled(library, *syntax):
        family = family_of(code, text)
        if family is None or _CHECKED_AT_RUN_TIME.match(symbol):
            continue
        counts[family] += 1
        if family not in examples:
            instruction = " ".join(text.split())
            examples[family] = f"{instruction} in {symbol}"
    return counts, examples


def _disassembled(library: Path, *options: str) -> Iterator[tuple[str, str, str]]:
    """Symbol, bytes and text of each instruction in the executable sections, as objdump prints
    them.
    """
    objdump = shutil.which("objdump")
    if objdump is None:
        raise BuildError(
            "no objdump to check the library's instructions; install binutils, which g++"
            " needs too (Debian: apt-get install binutils)",
            code="CP-OBJDUMP",
        )
    with subprocess.Popen(
        [objdump, "-d", "-C", "--insn-width=16", *options, str(library)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    ) as process:
        assert process.stdout is not None
        symbol, last = "", ""
        for line in process.stdout:
            parts = line.rstrip("\n").split("\t", 2)
            if len(parts) == 3:
                yield symbol, parts[1], parts[2]
            elif line.endswith(">:\n"):
                symbol = line[line.index("<") + 1 : -3]
            elif line.strip():
                last = line.strip()
    if process.returncode:
        raise BuildError(f"objdump cannot disassemble {library.name}: {last}")


def x86_family(code: str, text: str) -> str | None:
    """The family of an x86-64 instruction; None for those of x86-64-v3.

    Args:
        code: its bytes in hexadecimal, separated by spaces.
        text: as disassembled, in Intel's syntax.
    """
    mnemonic = _X86_PREFIXES.sub("", text, count=1).partition(" ")[0]
    encoding = itertools.dropwhile(_PREFIX_BYTES.__contains__, code.split())
    return _family(_X86_RULES, mnemonic, next(encoding, ""))


def a64_family(code: str, text: str) -> str | None:
    """The family of an aarch64 instruction; None for those of armv8-a.

    Args:
        code: its bytes, which are not needed.
        text: as disassembled; a conditional branch includes its condition.
    """
    mnemonic, _, operands = text.partition("\t")
    return _family(_A64_RULES, mnemonic, operands)


@functools.lru_cache(1 << 16)
def _family(rules: Sequence[Rule], mnemonic: str, context: str) -> str | None:
    """The family of the first rule that an instruction matches; None if it matches none."""
    for pattern, of_context, family in rules:
        if re.search(of_context, context) and re.fullmatch(pattern, mnemonic):
            return family
    return None
