"""Instruction families in code from real compilers, and packages that keep to their class or do
not.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freezer.errors import BuildError, LeakError
from freezer.freezing.candidates import build
from freezer.freezing.lowering.isa_check import (
    NO_CLASS,
    _disassembled,
    a64_family,
    check_package,
    families_of,
    x86_family,
)
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import Target
from freezer.hardware import DEVICE_CLASSES, detect, device_class
from tests.support.commands import output
from tests.support.models import mlp
from tests.support.steps import random_inputs, subject_of

AVX512, SVE, SVE2, AMX = "avx512f", "sve", "sve2", "amx_tile"
V3, V4 = (device_class(f"cpu-x86-64-{level}") for level in ("v3", "v4"))
X = random_inputs(2, 4)

x86_only = pytest.mark.skipif(os.uname().machine != "x86_64", reason="compiles for x86-64")
wider_than_v3 = pytest.mark.skipif(
    detect({}).hardware in (None, V3.name), reason="this CPU has nothing beyond x86-64-v3"
)

X86: Mapping[str, tuple[str, str, str | None]] = {
    # family: (target, code of a function's body with a, b, c as below, family of it)
    "bmi2": ("bmi2", "return _pdep_u32(a, b);", ""),
    "aes": ("aes", "return _mm_aesenc_si128(a128, b128);", NO_CLASS),
    "avx2": ("avx2", "return _mm256_add_epi32(a256, b256);", ""),
    "fma": (
        "fma",
        "return (__m256i)_mm256_fmadd_ps((__m256)a256, (__m256)b256, (__m256)a256);",
        "",
    ),
    "avx_vnni": ("avxvnni", "return _mm256_dpbusd_avx_epi32(a256, b256, a256);", NO_CLASS),
    "amx_tile": ("amx-tile", "_tile_zero(0); return a;", AMX),
    "avx512f on masks": (
        "avx512f",
        'asm volatile("kandw %%k1, %%k2, %%k3" ::: "k3"); return a;',
        AVX512,
    ),
    "avx512bw": ("avx512bw", "return _mm512_add_epi8(a512, b512);", AVX512),
    "avx512vl": (
        "avx512f,avx512vl",
        "return _mm256_ternarylogic_epi32(a256, b256, a256, 3);",
        AVX512,
    ),
    "avx512_vnni and vl": (
        "avx512vnni,avx512vl",
        "return _mm256_dpbusd_epi32(a256, b256, a256);",
        "avx512_vnni",
    ),
    "avx512_bf16": (
        "avx512bf16",
        "return (__m512i)_mm512_dpbf16_ps((__m512)a512, (__m512bh)b512, (__m512bh)b512);",
        "avx512_bf16",
    ),
    "avx512_fp16 of one": (
        "avx512fp16",
        "return (__m128i)_mm_fmadd_sh((__m128h)a128, (__m128h)b128, (__m128h)a128);",
        "avx512_fp16",
    ),
}
"""Of each family the `target` that the compiler takes it for, the body of a function, and the
family of its code.
"""

_ARGUMENTS = {
    "a128": "__m128i a128, __m128i b128",
    "a256": "__m256i a256, __m256i b256",
    "a512": "__m512i a512, __m512i b512",
}


def function_of(number: int, target: str, body: str) -> str:
    width = next((name for name in _ARGUMENTS if name in body), None)
    cast = re.search(r"return \((__m\w+)\)", body)
    result = cast[1] if cast else f"__m{width[1:]}i" if width else "int"
    arguments = _ARGUMENTS[width] if width else "unsigned a, unsigned b, unsigned* p"
    return (
        f'extern "C" __attribute__((target("{target}"))) {result} f{number}({arguments}) {{ {body}'
        " }\n"
    )


def compiled(folder: Path, code: str, *flags: str) -> Path:
    """A shared library of some C++."""
    (folder / "code.cpp").write_text(code)
    library = folder / "library.so"
    options = ("-O2", "-w", "-shared", "-fPIC", "-fno-tree-vectorize", *flags)
    output("g++", *options, "-o", library, folder / "code.cpp")
    return library


@pytest.fixture(scope="module")
def by_function(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    """The families of each function of X86, all compiled into one library."""
    functions = [
        function_of(number, target, body) for number, (target, body, _) in enumerate(X86.values())
    ]
    library = compiled(
        tmp_path_factory.mktemp("families"), "#include <x86intrin.h>\n" + "".join(functions)
    )
    found: dict[str, set[str]] = {f"f{number}": set() for number in range(len(X86))}
    for symbol, code, text in _disassembled(library, "-M", "intel"):
        found.setdefault(symbol, set()).add(x86_family(code, text) or "")
    return {name: found[f"f{number}"] - {""} for number, name in enumerate(X86)}


@x86_only
@pytest.mark.parametrize("name", X86)
def test_family_of_compiled_code(name: str, by_function: Mapping[str, set[str]]) -> None:
    assert by_function[name] == ({X86[name][2]} if X86[name][2] else set())


@x86_only
def test_data_sections_are_ignored(tmp_path: Path) -> None:
    """Bytes of an AVX-512 instruction in every data section, and a switch with a jump table."""
    sections = ('.rodata,\\"a\\"', '.lrodata,\\"a\\"', '.ldata,\\"aw\\"', ".data")
    data = "".join(
        f".section {name}\\n.rept 64\\n.byte 0x62,0xf1,0x7c,0x48,0x58,0xc1\\n.endr\\n"
        for name in sections
    )
    cases = "".join(f"case {i}: return a * {i * i + 7} + b;" for i in range(40))
    code = (
        f'asm("{data}.text\\n"); int f(int n, int a, int b) {{ switch (n) {{ {cases} }} return'
        " g(a); }"
    )
    library = compiled(tmp_path, f"int g(int); {code}")
    listing = output("objdump", "-d", "-M", "intel", library)
    assert re.search(r"jmp +r", listing), "a table of jumps is used"
    assert families_of(library) == ({}, {})


@x86_only
def test_invalid_bytes_are_in_no_class(tmp_path: Path) -> None:
    library = compiled(tmp_path, 'void f() { asm volatile(".byte 0x06"); }')
    counts, examples = families_of(library)
    assert counts == {NO_CLASS: 1}
    assert examples[NO_CLASS].endswith(" in f()")


def packed(folder: Path, **files: bytes) -> Path:
    path = folder / "package.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"all/data/aotinductor/model/{name}", content)
    return path


@x86_only
def test_every_library_of_a_package_is_checked(tmp_path: Path) -> None:
    clean = compiled(tmp_path, "int f(int a) { return a; }").read_bytes()
    wide = compiled(
        tmp_path, "#include <immintrin.h>\n__m512i f(__m512i a) { return a + a; }", "-mavx512f"
    ).read_bytes()
    package = packed(tmp_path, clean=clean, weights=b"\x62\xf1\x7c\x48" * 99, wide=wide)
    assert check_package(package, tmp_path, V4) == {AVX512: 1}
    with pytest.raises(
        LeakError,
        match=(
            r"aotinductor/model/wide holds instructions outside of cpu-x86-64-v3.*avx512f: vpadd"
        ),
    ):
        check_package(package, tmp_path, V3)
    assert {path.name for path in tmp_path.iterdir()} == {
        "package.pt2",
        "code.cpp",
        "library.so",
    }, "the copies are gone"
    with pytest.raises(LeakError, match="outside of cuda-sm80"):
        check_package(package, tmp_path, DEVICE_CLASSES["cuda-sm80"])


@x86_only
def test_uncheckable_libraries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compiled(tmp_path, "int f(int a) { return a; }")
    content = bytearray(library.read_bytes())
    content[18:20] = (243).to_bytes(2, "little")  # RISC-V
    with pytest.raises(BuildError, match="ELF machine 243"):
        check_package(packed(tmp_path, other=bytes(content)), tmp_path, V3)
    content[18:20] = (190).to_bytes(2, "little")  # a GPU's
    assert check_package(packed(tmp_path, other=bytes(content)), tmp_path, V3) == {}
    with pytest.raises(BuildError, match=r"objdump cannot disassemble short: .*"):
        check_package(packed(tmp_path, short=library.read_bytes()[:100]), tmp_path, V3)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no objdump .* install binutils") as caught:
        families_of(library)
    assert caught.value.code == "CP-OBJDUMP"


A64 = {
    None: (
        "add x0, x1, x2|fmla v0.2d, v1.2d, v2.2d|pmull v0.8h, v1.8b, v2.8b|fcvt s0, h0|ldr h0, [x0]"
    ),
    SVE: (
        "fadd v0.8h, v0.8h, v1.8h|fmul h0, h1, h2|fmlal v0.4s, v1.4h, v2.4h|sdot v0.4s, v1.16b,"
        " v2.16b|usmmla v0.4s, v1.16b, v2.16b|bfmmla v0.4s, v1.8h, v2.8h|ldaddal w0, w1, [x2]|casa"
        " w0, w1, [x2]|sqrdmlah v0.4s, v1.4s, v2.4s|fmla z0.s, p0/m, z1.s, z2.s|cntw x0|bfdot z0.s,"
        " z1.h, z2.h|ummla z0.s, z1.b, z2.b"
    ),
    SVE2: "smlalb z0.s, z1.h, z2.h|eor3 z0.d, z0.d, z1.d, z2.d|frint32x v0.4s, v1.4s",
    NO_CLASS: (
        "pmull v0.1q, v1.1d, v2.1d|aese v0.16b, v1.16b|sha256h q0, q1, v2.4s|eor3 v0.16b, v1.16b,"
        " v2.16b, v3.16b|.inst 0x12345678 ; undefined"
    ),
}


@pytest.mark.parametrize(
    ("family", "text"),
    [(family, text) for family, texts in A64.items() for text in texts.split("|")],
)
def test_aarch64_family_by_mnemonic_and_operands(family: str | None, text: str) -> None:
    assert a64_family("", text.replace(" ", "\t", 1)) == family


# Packages that Inductor makes


def built_for(target: Target, folder: Path) -> Mapping[str, int]:
    folder.mkdir()
    candidate = build(
        subject_of(mlp(16), {"x": X}), RECIPES["inductor-unpacked"], target, folder
    )  # packs nothing: no limits
    (report,) = candidate.reports.values()
    assert report.instructions_of == target.device_class.name
    return report.instructions


@x86_only
@pytest.mark.slow
def test_package_for_v3_has_nothing_wider(tmp_path: Path) -> None:
    found = built_for(Target(device_class=V3, num_threads=torch.get_num_threads()), tmp_path / "v3")
    assert found == {}


@x86_only
@wider_than_v3
@pytest.mark.slow
def test_native_package_is_refused(tmp_path: Path) -> None:
    """What Inductor does by default: the same build with `-march=native`."""
    native = Target(device_class=replace(V3, march="native"), num_threads=torch.get_num_threads())
    with pytest.raises(
        LeakError,
        match=(
            r"^export: inductor: .*\.so holds instructions outside of"
            r" cpu-x86-64-v3.*avx512"
        ),
    ) as caught:
        built_for(native, tmp_path / "native")
    assert (caught.value.kind, caught.value.code) == ("isa_leak", "CP-ISA-LEAK")
