"""Disks that fill up, fail or lie: in the store, in the temporary folder; and clocks that jump."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import V4
from tests.faults.sites import Site, failing_disk, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]
on_the_standing_cluster = pytest.mark.usefixtures("standing")

MB = 1024 * 1024


def mounted(folder: Path, size_mb: int) -> Path:
    """A file system of its own in memory; skips where that takes rights that this process has not."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
    return folder


@pytest.fixture
def store_of_its_own(site: Site) -> Iterator[Path]:
    """The site's store on a file system of 64 MB."""
    yield mounted(site.store, 64)
    subprocess.run(["umount", "--lazy", str(site.store)], check=True)


def fill(folder: Path) -> Path:
    """Leave not a byte free."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (MB, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return ballast


@on_the_standing_cluster
def test_the_stores_disk_is_full_for_a_while(site: Site, store_of_its_own: Path) -> None:
    site.head()
    site.node()
    driver = site.drive()
    driver.until(f"built a {V4}")
    site.strikes()
    ballast = fill(store_of_its_own)
    assert driver.end() in (1, 3), driver.said
    assert "No space left on device" in driver.said
    assert "Traceback" not in driver.said
    ballast.unlink()
    site.recovered(driver, again=site.drive())


def test_the_temporary_folder_of_a_node_is_full(site: Site) -> None:
    """Items work, and their compilers too, in folders of the store; what else a worker writes goes where there is room."""
    folder = mounted(site.folder / "scratch", 16)
    try:
        site.head()
        site.node(environ={"TMPDIR": str(folder)})
        driver = site.drive()
        driver.until("Ray has 2 node(s)")
        site.strikes()
        fill(folder)
        site.recovered(driver)
        assert shutil.disk_usage(folder).free == 0, "it was so to the end"
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def failing(site: Site) -> dict[str, str]:
    """The environment of a failing disk, see failing_disk.c; it fails while the file `failing` exists."""
    return failing_disk(site.folder, site.store)


def test_the_store_fails_one_write_in_three(site: Site, failing: dict[str, str]) -> None:
    """A third of what changes anything in the store, in every process; not the builds' own temporary files."""
    site.names = "ab"
    environ = {**failing, "FAILING_EXCEPT": str(site.store / ".coldpress" / "staging")}
    site.head(environ=environ)
    site.node(environ=environ)
    site.strikes()
    (site.folder / "failing").touch()
    site.recovered(site.drive(environ=environ))


def test_the_store_and_the_builds_own_files_fail_one_write_in_three(site: Site, failing: dict[str, str]) -> None:
    """A build whose own files cannot be written fails, with a word about the disk; once that is mended the same command goes on."""
    site.head(environ=failing)
    site.node(environ=failing)
    site.strikes()
    (site.folder / "failing").touch()
    driver = site.drive(environ=failing)
    assert driver.end() in (0, 1, 3), driver.said
    assert "Traceback" not in driver.said
    if driver.process.returncode:
        assert "Input/output error" in driver.said or "torch could not write a file" in driver.said, driver.said
    (site.folder / "failing").unlink()
    site.num_versions = (1, 2)  # one for the classes that went well, if any did and others not
    site.recovered(driver, again=site.drive(environ=failing))


@on_the_standing_cluster
def test_a_candidate_is_damaged_between_its_build_and_its_judge(site: Site) -> None:
    """A byte changes in the payload that the judge is about to open: that is the disk's failure, and no verdict on the model."""
    site.head()
    site.node()
    driver = site.drive()
    candidates = site.store / ".coldpress" / "candidates"
    driver.until(f"build a {V4}")
    wait_until(lambda: list(site.store.glob(".coldpress/staging/*/candidate")), "a build is under way")
    driver.process.send_signal(signal.SIGSTOP)  # so that no judge is started before the damage is done
    site.strikes()
    wait_until(lambda: list(candidates.glob("*/payloads/*")), "a candidate lies there")
    damaged = sorted(candidates.glob("*/payloads/*"))[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    driver.process.send_signal(signal.SIGCONT)
    site.recovered(driver)
    assert f"{damaged} is not what was built" in driver.said
    assert sorted(driver.built.values())[-2:] == [1, 2], "what was damaged is built again, and nothing else"


@on_the_standing_cluster
def test_the_last_part_of_the_ledger_is_cut_short(site: Site) -> None:
    """As after a power cut on a disk that lied about its sync."""
    site.names = "ab"
    site.head()
    site.node()
    driver = site.drive()
    driver.until(f"judge b {V4}")
    driver.kill()
    site.strikes()
    ledger = site.store / ".coldpress" / "ledger"
    parts = sorted((path for path in ledger.iterdir() if "@" in path.name), key=lambda path: path.stat().st_mtime_ns)
    newest = parts[-1]
    os.truncate(newest, newest.stat().st_size // 2)
    again = site.drive()
    assert again.end() == 3, again.said
    assert f"{newest} cannot be read" in again.said
    assert "move it away" in again.said
    newest.rename(site.folder / newest.name)
    site.drivers.remove(again)
    last = site.drive()
    assert last.end() == 0, last.said
    site.recovery_s = time.monotonic() - site.struck_at
    site.check_whole()


@on_the_standing_cluster
@pytest.mark.parametrize("jump_s", [7 * 86_400, -7 * 86_400], ids=["forward", "back"])
def test_the_drivers_clock_jumps(site: Site, jump_s: int) -> None:
    """By a week, between one task and the next; monotonic clocks go on, as they do when NTP sets the time."""
    found = subprocess.run(["sh", "-c", "ls /usr/lib/*/faketime/libfaketimeMT.so.1"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("needs libfaketime (Debian: apt-get install faketime)")
    clock, sleeps = site.folder / "clock", site.folder / "sleeps.so"
    clock.write_text("+0\n")
    compiler = ["g++", "-x", "c", "-shared", "-fPIC", "-o", str(sleeps), str(Path(__file__).with_name("sleeps.c"))]
    subprocess.run(compiler, check=True)
    environ = {
        "LD_PRELOAD": f"{sleeps} {found.stdout.strip()}",
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    site.head()
    site.node()
    driver = site.drive(environ=environ)
    driver.until(f"built a {V4}")
    site.strikes()
    clock.write_text(f"{jump_s:+d}\n")
    site.recovered(driver)
