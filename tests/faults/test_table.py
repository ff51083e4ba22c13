"""The table of faults, made from JUnit reports."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults import cases, table

RECOVERED = """<testcase classname="tests.faults.test_disks" name="test_the_stores_disk_is_full_for_a_while"><properties>
<property name="went_on" value="started again"/><property name="recovery_s" value="{seconds}"/>
<property name="published" value="3"/></properties></testcase>"""
CUT = """<testcase classname="tests.faults.test_network" name="test_it_is_cut[for-longer-than-ray-waits]"><{}/></testcase>"""
FAILED, SKIPPED = CUT.format('failure message="assert 3 == 0&#10;and more"'), CUT.format('skipped message="needs root"')
NO_SCENARIO = '<testcase classname="tests.faults.test_table" name="test_the_table"></testcase>'


def test_each_scenario_has_a_row_with_every_recovery(tmp_path: Path) -> None:
    runs = []
    for seconds, other in ((41, FAILED), (44, SKIPPED)):
        report = tmp_path / f"{seconds}.xml"
        scenarios = RECOVERED.format(seconds=seconds) + other + NO_SCENARIO
        report.write_text(f"<testsuites><testsuite>{scenarios}</testsuite></testsuites>")
        runs.append(list(cases(report)))
    assert [case.result for run in runs for case in run] == ["passed", "failed", "passed", "skipped"]
    assert table(runs)[2:] == [
        "| disks | the store's disk is full for a while | 3 artifacts | started again | 41, 44 |",
        "| network | it is cut (for longer than Ray waits) |  | failed: assert 3 == 0 |  |",
    ]
