"""The HTML report in headless Chromium: no errors, no network; sort, filter, search, links,
keyboard; phone, dark, print.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from freezer.hardware import PORTABLE
from freezer.store import Store
from jobs import results
from pipeline.records import CandidateReport
from tests.support.commands import invoked
from tests.support.past_campaigns import (
    CLASSES,
    failed,
    kept_eager,
    published,
    write_campaign,
)

ROOT = Path(__file__).parents[3]
CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two campaigns.

    In the second `resnet` is slower, `bert` is fixed, `vad` kept eager, and `router` fails.
    """
    opened = Store.open(str(tmp_path_factory.mktemp("report") / "store"), create=True)
    write_campaign(
        opened,
        "monday",
        [published("resnet", name) for name in CLASSES] + [failed("bert"), published("gone")],
    )
    outcomes = [published("resnet", name, speedup=1.5, key="2") for name in CLASSES]
    outcomes += [published("uneven"), published("uneven", PORTABLE, eager_ms=26.0)]
    built = CandidateReport(recipe="portable", build_key="b")
    outcomes += [published("bert", speedup=2.4, key="2"), kept_eager("vad")]
    outcomes.append(replace(failed("router"), candidates=(built,)))
    write_campaign(opened, "friday", outcomes, started=1_790_400_000.0)
    return opened


@pytest.fixture(scope="module")
def report(store: Store) -> Path:
    """The report of the second campaign."""
    folder = store.root.parent
    with contextlib.chdir(folder):
        run = invoked(results.report_app, "friday", "--store", store.uri)
    assert run.exit_code == 0, run.output
    path = folder / "report-friday.html"
    assert str(path) in run.stdout
    check = ["git", "check-ignore", "--no-index", path.name]
    assert subprocess.run(check, cwd=ROOT, check=False).returncode == 0
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        flags = [
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
        ]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    """The report, opened. Any error or request beside the file itself fails the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    problems, requests = list[str](), list[str]()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    yield page
    page.close()
    assert problems == []
    assert {url.partition("#")[0] for url in requests} == {report.as_uri()}


def names(page: Page) -> list[str]:
    """The models that the table shows, in order."""
    return page.locator("#models tbody tr.item th").all_inner_texts()


def details(page: Page) -> str:
    """The text of the details, once they are open."""
    page.wait_for_selector("#details[open] #d-body section")
    return page.locator("#details").inner_text()


def test_summary_answers_without_a_search(page: Page) -> None:
    text = page.locator("main > section").first.inner_text()
    assert "bert on cpu-x86-64-v4: 2.40× eager" in text
    assert 'freezer.load("bert"' in text
    assert (
        "router cpu-x86-64-v4: failed CP-CAPTURE the model branches on the values of a tensor;"
        " <b>use torch.cond</b>" in text
    )
    assert "vad cpu-x86-64-v4: kept-eager" in text
    (unlike,) = page.locator("#unlike li").all_inner_texts()
    for part in ("uneven", "20 ms", "26 ms"):
        assert part in unlike
    fallback = page.locator("a[href='#uneven/portable'] .verdict")
    assert "fallback" in fallback.inner_text()


def test_sort_filter_and_search(page: Page) -> None:
    assert names(page) == ["resnet", "uneven", "bert", "vad", "router"]
    page.select_option("#sort", "speedup")
    assert names(page) == ["bert", "uneven", "resnet", "vad", "router"]
    page.select_option("#verdict", "failed")
    assert names(page) == ["router"]
    page.select_option("#verdict", "")
    page.keyboard.press("/")
    page.keyboard.type("kept")
    assert names(page) == ["vad"]
    assert page.locator("#shown").inner_text() == "1 of 5 models"


def test_details_of_a_model(page: Page) -> None:
    page.locator("#models td a[href='#resnet/cpu-x86-64-v4']").focus()
    page.keyboard.press("Enter")
    text = details(page)
    assert [word in text for word in ("slower", "torchscript-frozen", "Test CPU")] == [True] * 3
    assert page.locator("#d-body svg").count() >= 2  # latencies, trend
    page.keyboard.press("Escape")
    assert not page.locator("#details").is_visible()


def test_details_of_a_failure(page: Page, report: Path) -> None:
    page.goto(f"{report.as_uri()}#router")
    text = details(page)
    assert "line 12: if x.sum() > 0:" in text
    assert "use torch.cond" in text
    assert "not judged" in text
    assert "passes" not in text


CUT = """() => [...document.querySelectorAll("body *")].filter((one) =>
    getComputedStyle(one).overflowX !== "visible"
    && (one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight)
).map((one) => one.outerHTML.slice(0, 80))"""
"""Elements that do not show all of their content."""


def test_nothing_is_cut_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 6000})
    page.reload()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CUT) == []
    page.click("#models td a >> nth=0")
    details(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert page.evaluate(CUT) == []
