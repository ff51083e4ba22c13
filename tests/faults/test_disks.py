"""Disks that fill up, fail or damage files, in the store and in the temporary folder; and clocks
that jump.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.conftest import V4
from tests.support.commands import finished
from tests.support.fault_sites import Site, failing_disk
from tests.support.raylets import wait_until
from tests.support.steps import flip_a_byte

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]


@contextmanager
def mounted(folder: Path, size_mb: int) -> Iterator[Path]:
    """Mount a file system in memory; skip the test without the right to do so."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    done = finished(*mount)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write a file that leaves no byte free."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1024 * 1024, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return ballast


def test_the_stores_disk_is_full_for_a_while(shared_site: Site) -> None:
    site = shared_site
    with mounted(site.store, 64):
        driver = site.campaign_at(f"built a {V4}")
        ballast = fill(site.store)
        assert driver.end() in (1, 3), driver.output
        assert "No space left on device" in driver.output
        assert "Traceback" not in driver.output
        ballast.unlink()
        site.check_recovery(driver, again=site.drive())


def test_the_temporary_folder_of_a_node_is_full(site: Site) -> None:
    """Builds and compilers use folders of the store; workers fall back to other folders for the
    rest.
    """
    with mounted(site.folder / "scratch", 16) as folder:
        site.start_nodes(node={"TMPDIR": str(folder)})
        driver = site.campaign_at("Ray has 2 node(s)")
        fill(folder)
        site.check_recovery(driver)
        assert shutil.disk_usage(folder).free == 0


@pytest.fixture
def failing(site: Site) -> dict[str, str]:
    """The environment of a failing disk, see failing_disk.c; it fails while the file `failing`
    exists.
    """
    return failing_disk(site.folder, site.store)


def test_the_store_fails_one_write_in_three(site: Site, failing: dict[str, str]) -> None:
    """A third of all changes in the store fail, in every process; the temporary files of builds do
    not.
    """
    site.names = "ab"
    environ = {**failing, "FAILING_EXCEPT": str(site.store / ".coldpress" / "staging")}
    site.start_nodes(head=environ, node=environ)
    site.strike()
    (site.folder / "failing").touch()
    site.check_recovery(site.drive(environ=environ))


def test_one_write_in_three_fails_also_in_builds(site: Site, failing: dict[str, str]) -> None:
    """A build that cannot write its files fails and names the disk; once the disk is fixed, the
    same command continues.
    """
    site.start_nodes(head=failing, node=failing)
    site.strike()
    (site.folder / "failing").touch()
    driver = site.drive(environ=failing)
    assert driver.end() in (0, 1, 3), driver.output
    assert "Traceback" not in driver.output
    if driver.process.returncode:
        assert (
            "Input/output error" in driver.output or "torch could not write a file" in driver.output
        ), driver.output
    (site.folder / "failing").unlink()
    site.num_versions = (1, 2)  # the first driver may have published some classes
    site.check_recovery(driver, again=site.drive(environ=failing))


def test_a_candidate_is_damaged_before_its_judge(shared_site: Site) -> None:
    """A byte changes in the payload that the judge is about to open: a failure of the disk, not a
    verdict on the model. The next start builds the candidate again.
    """
    site = shared_site
    driver = site.campaign_at(f"build a {V4}")
    work = site.store / ".coldpress"
    wait_until(lambda: list(work.glob("staging/*/torchscript-frozen")), "a build runs")
    driver.process.send_signal(signal.SIGSTOP)  # no judge starts before the damage is done
    wait_until(lambda: list(work.glob("candidates/*/payloads/*")), "a candidate exists")
    damaged = sorted(work.glob("candidates/*/payloads/*"))[0]
    flip_a_byte(damaged)
    driver.process.send_signal(signal.SIGCONT)
    assert driver.end() in (1, 3), driver.output
    assert str(damaged) in (site.folder / "store.json").read_text()
    site.num_versions = (1, 2)
    site.strike()
    again = site.drive()
    assert again.end() == 0, again.output
    assert sum(again.built.values()) == 1, "only the damaged candidate is built again"
    site.check_all()


def test_the_last_part_of_the_ledger_is_truncated(shared_site: Site) -> None:
    """As after a power cut, on a disk that reported an unfinished sync as done."""
    site = shared_site
    site.names = "ab"
    driver = site.campaign_at(f"judge b {V4}")
    driver.kill()
    site.strike()
    parts = [path for path in (site.store / ".coldpress" / "ledger").iterdir() if "@" in path.name]
    newest = max(parts, key=lambda path: path.stat().st_mtime_ns)
    os.truncate(newest, newest.stat().st_size // 2)
    again = site.drive()
    assert again.end() == 3, again.output
    assert str(newest) in again.output
    newest.rename(site.folder / newest.name)
    site.check_recovery(site.drive())


@pytest.mark.parametrize("jump_s", [7 * 86_400, -7 * 86_400], ids=["forward", "back"])
def test_the_drivers_clock_jumps(shared_site: Site, jump_s: int) -> None:
    """By a week, between two tasks; monotonic clocks are not affected, as when NTP sets the
    time.
    """
    site = shared_site
    found = finished("sh", "-c", "ls /usr/lib/*/faketime/libfaketimeMT.so.1")
    if found.returncode:
        pytest.skip("needs libfaketime (Debian: apt-get install faketime)")
    clock, sleeps = site.folder / "clock", site.folder / "sleeps.so"
    clock.write_text("+0\n")
    compiler = [
        "g++",
        "-x",
        "c",
        "-shared",
        "-fPIC",
        "-o",
        str(sleeps),
        str(Path(__file__).with_name("sleeps.c")),
    ]
    subprocess.run(compiler, check=True)
    environ = {
        "LD_PRELOAD": f"{sleeps} {found.stdout.strip()}",
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    driver = site.drive(environ=environ)
    driver.wait_for(f"built a {V4}")
    site.strike()
    clock.write_text(f"{jump_s:+d}\n")
    site.check_recovery(driver)
