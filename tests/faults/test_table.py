"""The table of faults, made of JUnit reports."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults import cases, table

RECOVERED = """<testcase classname="tests.faults.test_disks" name="test_the_stores_disk_is_full_for_a_while"><properties>
<property name="went_on" value="started again"/><property name="recovery_s" value="{seconds}"/>
<property name="lost" value="0 of 3 outcomes"/><property name="published" value="3"/></properties></testcase>"""
CUT = """<testcase classname="tests.faults.test_network" name="test_it_is_cut[for-longer-than-ray-waits]"><{}/></testcase>"""
FAILED, SKIPPED = CUT.format('failure message="assert 3 == 0&#10;and more"'), CUT.format('skipped message="needs root"')


def report(path: Path, *found: str) -> Path:
    path.write_text(f"<testsuites><testsuite>{''.join(found)}</testsuite></testsuites>")
    return path


def test_every_scenario_has_a_line_with_the_recovery_of_each_run(tmp_path: Path) -> None:
    first = list(cases(report(tmp_path / "1.xml", RECOVERED.format(seconds=41), FAILED)))
    second = list(cases(report(tmp_path / "2.xml", RECOVERED.format(seconds=44), SKIPPED)))
    assert [case.result for case in (*first, *second)] == ["passed", "failed", "passed", "skipped"]
    assert table([first, second])[2:] == [
        "| disks | the store's disk is full for a while | nothing | 3 artifacts | started again | 41, 44 |",
        "| network | it is cut (for longer than Ray waits) | | | failed: assert 3 == 0 | |",
    ]


def test_what_was_lost_is_said(tmp_path: Path) -> None:
    lost = RECOVERED.replace("0 of 3", "1 of 3").format(seconds=41)
    assert "| 1 of 3 outcomes |" in table([list(cases(report(tmp_path / "1.xml", lost)))])[2]


def test_tests_that_inject_nothing_are_no_scenarios(tmp_path: Path) -> None:
    of_this_file = '<testcase classname="tests.faults.test_table" name="test_the_table"></testcase>'
    (case,) = cases(report(tmp_path / "1.xml", of_this_file, RECOVERED.format(seconds=41)))
    assert case.group == "disks"
