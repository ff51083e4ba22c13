"""Runtime settings: what an environment lacks of them, and the paths of libraries."""

from __future__ import annotations

from pathlib import Path

from freezer.hardware import exports, merged
from freezer.hardware.runtime_settings import library

TCMALLOC, OPENMP = "libtcmalloc_minimal.so.4", "libiomp5.so"
TUNABLES = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736"


def environ_with(folder: Path, *names: str, **variables: str) -> dict[str, str]:
    for name in names:
        (folder / name).touch()
    return {"LD_LIBRARY_PATH": f"/nowhere:{folder}", **variables}


def test_libraries_are_exported_by_path(tmp_path: Path) -> None:
    environ = environ_with(tmp_path, TCMALLOC)
    found = exports({"LD_PRELOAD": f"{TCMALLOC}:{OPENMP}", "KMP_BLOCKTIME": "1"}, environ)
    assert found.values == {"LD_PRELOAD": str(tmp_path / TCMALLOC), "KMP_BLOCKTIME": "1"}
    assert found.missing == (OPENMP,)


def test_values_of_the_environment_stay(tmp_path: Path) -> None:
    environ = environ_with(
        tmp_path,
        TCMALLOC,
        LD_PRELOAD="/x/own.so",
        GLIBC_TUNABLES="glibc.malloc.check=1",
        KMP_BLOCKTIME="50",
    )
    found = exports(
        {"LD_PRELOAD": TCMALLOC, "GLIBC_TUNABLES": TUNABLES, "KMP_BLOCKTIME": "1"}, environ
    )
    assert found.values == {
        "LD_PRELOAD": f"{tmp_path / TCMALLOC}:/x/own.so",
        "GLIBC_TUNABLES": f"{TUNABLES}:glibc.malloc.check=1",
    }
    assert found.kept == ("KMP_BLOCKTIME",)


def test_an_environment_with_the_settings_lacks_none(tmp_path: Path) -> None:
    wanted = {"LD_PRELOAD": TCMALLOC, "GLIBC_TUNABLES": TUNABLES, "THP_MEM_ALLOC_ENABLE": "1"}
    environ = environ_with(tmp_path, TCMALLOC)
    first = exports(wanted, environ)
    assert set(first.values) == set(wanted)
    again = exports(wanted, {**environ, **first.values})
    assert (again.values, again.missing, again.kept) == ({}, (), ())


def test_a_manifest_cannot_load_other_code(tmp_path: Path) -> None:
    """Neither libraries that are not listed, nor by path, nor through other variables."""
    evil = tmp_path / "evil.so"
    environ = environ_with(tmp_path, "evil.so", TCMALLOC)
    for value in ("evil.so", str(evil), f"../{TCMALLOC}", f"{evil} {TCMALLOC}"):
        assert exports({"LD_PRELOAD": value}, environ).values == {}
    assert (
        exports({"PYTHONPATH": str(tmp_path), "OMP_TOOL_LIBRARIES": str(evil)}, environ).values
        == {}
    )


def test_library_that_is_not_installed() -> None:
    assert library("libnone.so.1", {}) is None


def test_merged_joins_lists() -> None:
    both = merged({"LD_PRELOAD": OPENMP, "KMP_BLOCKTIME": "1"}, {"LD_PRELOAD": TCMALLOC})
    assert both == {"LD_PRELOAD": f"{OPENMP}:{TCMALLOC}", "KMP_BLOCKTIME": "1"}
