"""Instruction families: which instructions belong to a CPU feature that not every CPU has. Imports no torch.

Families are named by archspec where it knows them, so that a device class allows exactly what the CPUs of its archspec name have.
An x86 mnemonic is ambiguous without its encoding: `vpdpbusd` is AVX512-VNNI in one and AVX-VNNI in another. Instructions that every
x86-64 or aarch64 CPU runs belong to no family. Neither do hints, which older CPUs ignore (endbr64, prefetches, bti), and system
instructions, which no compiler emits from C++ (TSX, SGX, protection keys).

Sources: instruction set references of Intel and AMD, the `-m` options that gcc's `-march=native` may set, and Arm's A64 reference.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

UNKNOWN = "unknown"
"""Instructions that the disassembler or this table does not know; no class allows them."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "sse3": ("sse3", "pni", "ssse3"),
    "lzcnt": ("lzcnt", "abm"),
    "popcnt": ("popcnt", "abm"),
    "rdm": ("asimdrdm",),
    "dotprod": ("asimddp",),
    "fp16": ("asimdhp", "fphp"),
    "fp16fml": ("asimdfhm",),
    "lse": ("atomics",),
    UNKNOWN: (),
}
"""Archspec features of which any one allows the family; other families have the name of their feature."""

_OPS = "and|andn|not|or|xnor|xor|mov|ortest|shiftl|shiftr"
_CONDITIONS = "(?:eq|lt|le|neq|nlt|nle|ge|gt|false|true)?"
_FMA = r"vfn?m(?:add|sub|addsub|subadd)"

_LEGACY: Mapping[str, str] = {
    "sse3": "addsubp[sd]|haddp[sd]|hsubp[sd]|lddqu|movddup|movs[hl]dup|fisttp|monitor|mwait",
    "ssse3": "pabs[bwd]|palignr|ph(?:add|sub)(?:s?w|d)|pmaddubsw|pmulhrsw|pshufb|psign[bwd]",
    "sse4_1": r"blendv?p[sd]|dpp[sd]|extractps|insertps|movntdqa|mpsadbw|packusdw|pblendvb|pblendw|pcmpeqq|pextr[bdq]|phminposuw|"
    r"pinsr[bdq]|pmax(?:sb|sd|ud|uw)|pmin(?:sb|sd|ud|uw)|pmov[sz]x\w+|pmuldq|pmulld|ptest|rounds?[ps][sd]",
    "sse4_2": r"pcmp[ei]str[im]\w*|pcmpgtq|crc32\w?",
    "sse4a": r"extrq|insertq|movnts[sd]",
    "popcnt": "popcnt",
    "lzcnt": "lzcnt",
    "bmi1": "tzcnt",
    "movbe": "movbe",
    "cx16": "cmpxchg16b",
    "lahf_lm": "lahf|sahf",
    "aes": "aes(?:enc|dec)(?:last)?|aesimc|aeskeygenassist",
    "pclmulqdq": r"pclmul\w+",
    "sha_ni": r"sha1\w+|sha256\w+",
    "gfni": "gf2p8.*",
    "adx": "ad[co]x",
    "rdrand": "rdrand",
    "rdseed": "rdseed",
    "rdpid": "rdpid",
    "fsgsbase": "(?:rd|wr)[fg]sbase",
    "xsave": r"xsave(?:64)?|xrstor(?:64)?|xgetbv",
    "xsaveopt": r"xsaveopt(?:64)?",
    "xsavec": r"xsavec(?:64)?",
    "xsaves": r"x(?:save|rstor)s(?:64)?",
    "clflushopt": "clflushopt",
    "clwb": "clwb",
}

_XOP: Mapping[str, str] = {
    "tbm": "bextr|blc(?:fill|ic?|msk|s)|bls(?:fill|ic)|t1mskc|tzmsk",
    "xop": "v.*",
}

_VEX: Mapping[str, str] = {
    "fma": rf"{_FMA}(?:132|213|231)[ps][sd]",
    "fma4": rf"{_FMA}[ps][sd]",
    "f16c": "vcvtph2ps|vcvtps2ph",
    "bmi1": "andn|bextr|bls(?:i|r|msk)",
    "bmi2": "bzhi|mulx|pdep|pext|rorx|s(?:ar|hl|hr)x",
    "avx_vnni": "vpdp(?:bus|wss)ds?",
    "avx_vnni_int8": "vpdpb(?:ss|su|uu)ds?",
    "avx_vnni_int16": "vpdpw(?:us|su|uu)ds?",
    "avx_ifma": "vpmadd52[lh]uq",
    "avx_ne_convert": "vbcstne.*|vcvtne.*",
    "sha512": "vsha512.*",
    "sm3": "vsm3.*",
    "sm4": "vsm4.*",
    "cmpccxadd": r"cmp\w+xadd",
    "gfni": "vgf2p8.*",
    "amx_bf16": "tdpbf16ps",
    "amx_int8": "tdpb[su][su]d",
    "amx_fp16": "tdpfp16ps",
    "amx_complex": "tcmm.*",
    "amx_tile": "ldtilecfg|sttilecfg|tile.*",
    "avx512f": f"k(?:{_OPS})w|kunpckbw",
    "avx512dq": f"k(?:{_OPS}|add|test)b|k(?:add|test)w",
    "avx512bw": f"k(?:{_OPS}|add|test)[dq]|kunpck(?:wd|dq)",
}

_AVX2_OF_ANY_WIDTH = re.compile(
    r"vpbroadcast[bwdq]|vbroadcasts[sd]|vbroadcasti128|vp?gather.*|v(?:insert|extract)i128|vperm2i128|vperm(?:d|q|ps|pd)|vpblendd|vps[lr]lv[dq]|"
    r"vpsravd|vpmaskmov[dq]"
)
_AVX2_OF_256_BITS = re.compile(r"(?!vpermil|vptest)vp.*|vmovntdqa|vmpsadbw")

_EVEX: Mapping[str, str] = {
    "avx512bw": r"vpabs[bw]|vpack[su]s(?:dw|wb)|vpadd(?:[bw]|u?s[bw])|vpalignr|vpavg[bw]|vpblendm[bw]|vpbroadcast[bw]|"
    rf"vpcmp{_CONDITIONS}u?[bw]|vdbpsadbw|vpextr[bw]|vpinsr[bw]|vpmadd(?:ubsw|wd)|vpm(?:ax|in)[su][bw]|vmovdqu(?:8|16)|"
    r"vpmov(?:[bw]2m|m2[bw]|u?s?wb|[sz]xbw)|vpmulhrsw|vpmulhu?w|vpmullw|vpsadbw|vpshufb|vpshuf[hl]w|vps[lr]l(?:dq|v?w)|vpsrav?w|"
    r"vpsub(?:[bw]|u?s[bw])|vptestn?m[bw]|vpunpck[hl](?:bw|wd)|vperm(?:[it]2)?w",
    "avx512dq": r"vandn?p[sd]|vx?orp[sd]|vbroadcast[fi]32x[28]|vbroadcast[fi]64x2|vcvtt?p[sd]2u?qq|vcvtu?qq2p[sd]|"
    r"v(?:extract|insert)[fi](?:64x2|32x8)|vfpclass[ps][sd][xyz]?|vpextr[dq]|vpinsr[dq]|vpmov(?:[dq]2m|m2[dq])|vpmullq|"
    r"vrange[ps][sd]|vreduce[ps][sd]",
    "avx512cd": "vpconflict[dq]|vplzcnt[dq]|vpbroadcastm(?:b2q|w2d)",
    "avx512ifma": "vpmadd52[lh]uq",
    "avx512vbmi": "vperm(?:[it]2)?b|vpmultishiftqb",
    "avx512_vbmi2": "vp(?:compress|expand)[bw]|vpsh[lr]dv?[wdq]",
    "avx512_vnni": "vpdp(?:bus|wss)ds?",
    "avx512_bf16": "vdpbf16ps|vcvtne2?ps2bf16",
    "avx512_bitalg": "vpopcnt[bw]|vpshufbitqmb",
    "avx512_vpopcntdq": "vpopcnt[dq]",
    "avx512_vp2intersect": "vp2intersect[dq]",
    "gfni": "vgf2p8.*",
    "vaes": "vaes.*",
    "vpclmulqdq": "vpclmul.*",
}
_EVEX_SCALAR = re.compile(
    r"v(?!p|broadcast)\w+s[sdh]|vmov[dqw]|vcvt\w*u?si\w*|vpextr.|vpinsr.|vextractps|vinsertps|vmov[hl]p[sd]|vmovhlps|vmovlhps"
)

_CHANGE = "(?:add|clr|eor|set|[su]max|[su]min)"
_ATOMIC = rf"(?:cas|swp|ld{_CHANGE})(?:al?|l)?[bh]?|casp(?:al?|l)?|st{_CHANGE}l?[bh]?"

_A64: Mapping[str, str] = {
    "lse": _ATOMIC,
    "rdm": "sqrdml[as]h",
    "crc32": "crc32c?[bhwx]",
    "aes": "aes(?:e|d|mc|imc)",
    "sha1": r"sha1\w+",
    "sha2": r"sha256\w+",
    "sha512": r"sha512\w+",
    "sha3": "eor3|rax1|xar|bcax",
    "sm3": r"sm3\w+",
    "sm4": "sm4e(?:key)?",
    "dotprod": "[su]dot",
    "fp16fml": "fml[as]l2?",
    "i8mm": "us?mmla|smmla|usdot|sudot",
    "bf16": r"bf(?:dot|mmla|cvt|cvtn2?|mlal[bt])",
    "fcma": "fcmla|fcadd",
    "jscvt": "fjcvtzs",
    "lrcpc": "ldapr[bh]?",
    "ilrcpc": "ldapurs?[bhw]?|stlur[bh]?",
    "frint": "frint(?:32|64)[xz]",
    "flagm": "cfinv|rmif|setf(?:8|16)",
    "flagm2": "axflag|xaflag",
    "sb": "sb",
    "paca": "(?:bra|blra|reta|ereta|ldra)[ab]z?|retaa|retab|eretaa|eretab",
    "mops": r"cpyf?[pme]\w*|set[pme]\w*|setg[pme]\w*",
    "sme": "smstart|smstop|[su]mop[as]|fmop[as]|bfmop[as]",
}
_A64_SVE: Mapping[str, str] = {
    "svebf16": "bf.*",
    "svei8mm": "us?mmla|smmla|usdot|sudot",
    "sve2": r"(?:[su]|sq|uq|sqd)?(?:abal|abdl|addl|addw|subl|subw|mull|mlal|mlsl|dmull|dmlal|dmlsl|shll)[bt]|r?(?:add|sub)hn[bt]|"
    r"sqdml[as]lbt|(?:sq|uq|sqr|uqr)?shrun?n[bt]|(?:sq|uq|r)?shrn[bt]|[su](?:aba|adalp|hadd|hsub|rhadd|rsra|rshl|rshr|sra)r?|"
    r"sq(?:abs|neg|rdml[as]h|dmulh|rdmulh|rshlr?|xtn[bt]|xtun[bt])|uqxtn[bt]|uqrshlr?|n?match|histcnt|histseg|while(?:rw|wr|g[et]|h[is])|"
    r"tbx|bsl[12]?n?|nbsl|bcax|eor3|eor[bt][bt]|xar|s[lr]i|c(?:add|dot|mla)|sqcadd|sqrdcmlah|pmul|pmull[bt]|fcvtlt|fcvtx?nt|fcvtx|flogb|"
    r"f(?:add|max|min|maxnm|minnm)p|fml[as]l[bt]|u?rsqrte|urecpe|addp|[su]maxp|[su]minp|suqadd|usqadd|bdep|bext|bgrp|aes.*|sm4.*|rax1",
}
_SVE_REGISTER = re.compile(r"\b[zp]\d+\b")
_SVE_COUNT = re.compile(r"(?:cnt|u?s?q?inc|u?s?q?dec)[bhwd]|rdvl|addvl|addpl")
_HALF_REGISTER = re.compile(r"\bv\d+\.[48]h\b|\bh\d+\b")
_HALF_CONVERSIONS = ("fcvt", "fcvtl", "fcvtl2", "fcvtn", "fcvtn2", "fcvtxn")


def features_of(family: str) -> tuple[str, ...]:
    """The archspec features of which any one includes the family."""
    return ALIASES.get(family, (family,))


@functools.cache
def x86_families(encoding: str, mnemonic: str, width: str) -> tuple[str, ...]:
    """The families of an x86-64 instruction.

    Args:
        encoding: `legacy`, `vex`, `xop`, `rex2`, or `evex` with the number of its opcode map: `evex5`.
        mnemonic: in Intel's syntax, without prefixes.
        width: of the widest vector register among its operands: `x`, `y`, `z`, or nothing.
    """
    if encoding == "legacy":
        return _matching(_LEGACY, mnemonic)
    if encoding == "xop":
        return _matching(_XOP, mnemonic)[:1] or (UNKNOWN,)
    if encoding == "rex2":
        return ("apx_f",)
    return _vex(mnemonic, width) if encoding == "vex" else tuple(_evex(int(encoding[-1]), mnemonic, width))


def _vex(mnemonic: str, width: str) -> tuple[str, ...]:
    if mnemonic.startswith("vaes"):
        return ("vaes",) if width == "y" else ("aes", "avx")
    if mnemonic.startswith("vpclmul"):
        return ("vpclmulqdq",) if width == "y" else ("pclmulqdq", "avx")
    if found := _matching(_VEX, mnemonic):
        return found
    if not mnemonic.startswith("v"):
        return (UNKNOWN,)
    wide = width == "y" and _AVX2_OF_256_BITS.fullmatch(mnemonic)
    return ("avx2",) if wide or _AVX2_OF_ANY_WIDTH.fullmatch(mnemonic) else ("avx",)


def _evex(opcode_map: int, mnemonic: str, width: str) -> Iterator[str]:
    if not mnemonic.startswith("v"):
        yield "apx_f"  # general-register instructions in EVEX encoding
        return
    if found := _matching(_EVEX, mnemonic):
        yield from found
    elif mnemonic.endswith("bf16"):
        yield "avx10_2"
    elif opcode_map in (5, 6) or (mnemonic.endswith(("ph", "sh")) and mnemonic != "vcvtps2ph"):
        yield "avx512_fp16"
    else:
        yield "avx512f"
    if width in ("x", "y") and not _EVEX_SCALAR.fullmatch(mnemonic):
        yield "avx512vl"


def a64_families(mnemonic: str, operands: str) -> tuple[str, ...]:
    """The families of an aarch64 instruction.

    Args:
        mnemonic: as objdump prints it; a conditional branch includes its condition.
        operands: as objdump prints them.
    """
    if mnemonic == ".inst":
        return (UNKNOWN,)
    if _SVE_REGISTER.search(operands):
        return _matching(_A64_SVE, mnemonic) or ("sve",)
    if mnemonic in ("pmull", "pmull2"):
        return ("pmull",) if ".1q" in operands else ()
    if found := _matching(_A64, mnemonic):
        return found[:1]
    computes = mnemonic.startswith("f") and mnemonic not in _HALF_CONVERSIONS
    if computes or mnemonic in ("scvtf", "ucvtf"):
        return ("fp16",) if _HALF_REGISTER.search(operands) else ()
    return ("sve",) if _SVE_COUNT.fullmatch(mnemonic) and operands.startswith(("x", "w")) else ()


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _matching(table: Mapping[str, str], mnemonic: str) -> tuple[str, ...]:
    return tuple(family for family, pattern in table.items() if _compiled(pattern).fullmatch(mnemonic))
