"""Watch a registry: run a campaign, and run it again over the models whose source changes. Read
run.py first.

One driver holds the campaign's lease and stays connected to Ray. A pass plans, builds, judges and
logs the changed models alone. The record of the campaign and its summary in MLflow cover all
models. What failed is retried when its source changes, or at the next start of the command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from freezer.errors import CatalogError, InfrastructureError
from pipeline.campaign import Before
from pipeline.catalog import Entry
from pipeline.config import Config
from pipeline.records import Outcome
from pipeline.reporting import CampaignReport, Display
from pipeline.run import Driver, Work, notes, open_driver, prepare

EMPTY, UNREACHABLE = "CP-CATALOG-EMPTY", "CP-TRACKING"
"""Codes of a registry without models, and of an MLflow that cannot be reached."""

_NUM_NAMED = 10
"""Removed models that a note names."""

Passed = Callable[[CampaignReport, Collection[str]], None]
"""Takes the report of a pass, with all outcomes of the campaign, and the names of the models that
the pass was about.
"""


def watch(config: Config, display: Display, interval_s: float, passed: Passed) -> CampaignReport:
    """Run a campaign over a registry, and again over what changes there, until it is interrupted.

    While MLflow cannot be reached, the watch goes on. The first pass afterwards logs what MLflow
    lacks.

    Args:
        config: of the campaign; its catalog is a registry.
        display: takes the events.
        interval_s: between two looks at the registry.
        passed: called after each pass.

    Returns:
        The report of the pass that was interrupted, or in which Ray or the store failed.

    Raises:
        CatalogError, UsageError, InfrastructureError, StoreUnreachableError: as `run`.
        LeaseLostError: another driver runs the campaign now.
        KeyboardInterrupt: interrupted between two passes, when nothing is lost.
    """
    started = time.time()
    work = prepare(config)
    with open_driver(config, work, display, started) as driver:
        report = driver.run(work, started)
        passed(report, {outcome.model for outcome in report.outcomes})
        watched = _Watched(driver, work, report)
        while not report.ends_watching:
            notes(display)(f"watching {config.catalog} every {interval_s:g} s")
            changes = None
            while changes is None:
                time.sleep(interval_s)
                driver.ledger.check()
                changes = watched.changes(interval_s)
            report, models = watched.run(*changes)
            passed(report, models)
        return report


class _Watched:
    """The models of a registry as the last pass found them.

    Args:
        driver: of the campaign.
        work, report: of the first pass.
    """

    def __init__(self, driver: Driver, work: Work, report: CampaignReport) -> None:
        self._driver = driver
        self._config = replace(driver.config, keep_going=True)  # a bad entry must not end the watch
        self._note = notes(driver.display)
        self._reachable = True
        self._entries: dict[str, Entry] = {}
        self._bad: set[str] = set()
        self._outcomes: tuple[Outcome, ...] = ()
        self._untracked: tuple[str, ...] = ()
        self._fails_again = False
        self._take_in(work, work.entries, report)

    def changes(self, interval_s: float) -> tuple[Work, list[Entry]] | None:
        """Read the registry; return it with the changed entries, or None if nothing changed or
        MLflow cannot be reached.
        """
        try:
            work = prepare(self._config)
        except InfrastructureError as error:
            if self._reachable:
                self._note(f"{error}; trying again every {interval_s:g} s")
            self._reachable = False
            return None
        except CatalogError as error:
            if error.code != EMPTY:
                raise
            self._drop(self._entries.keys())
            return None
        if not self._reachable:
            self._note("MLflow answers again")
        self._reachable = True
        self._drop(self._entries.keys() - {entry.name for entry in work.entries})
        changed = [entry for entry in work.entries if self._entries.get(entry.name) != entry]
        new = {str(problem.entry) for problem in work.problems} - self._bad
        behind = self._untracked and not self._fails_again
        return (work, changed) if changed or new or behind else None

    def run(self, work: Work, changed: Sequence[Entry]) -> tuple[CampaignReport, set[str]]:
        """Run a pass over the changed entries; return its report, and the models that it is
        about.
        """
        models = {entry.name for entry in changed}
        bad = {str(problem.entry) for problem in work.problems}
        shown = models | (bad - self._bad)
        kept = tuple(outcome for outcome in self._outcomes if outcome.model not in models)
        self._driver.ledger.refresh()
        untracked, skipped = bool(self._untracked), frozenset(self._bad)
        before = Before(outcomes=kept, untracked=untracked, skipped=skipped)
        driver = replace(self._driver, config=self._config)
        report = driver.run(replace(work, entries=changed), time.time(), before=before)
        self._take_in(work, changed, report)
        return report, shown

    def _take_in(self, work: Work, changed: Sequence[Entry], report: CampaignReport) -> None:
        """Remember what a pass found and reached.

        A model whose source MLflow did not deliver counts as not seen yet.
        """
        self._outcomes = tuple(outcome for outcome in report.outcomes if outcome.judge_key)
        # The same failures again mean a damaged artifact; the next change tries again.
        self._fails_again = report.untracked == self._untracked
        self._untracked = report.untracked
        self._bad = {str(problem.entry) for problem in work.problems}
        undelivered = {outcome.model for outcome in report.outcomes if outcome.code == UNREACHABLE}
        self._entries |= {entry.name: entry for entry in changed}
        self._forget(undelivered)

    def _drop(self, names: Collection[str]) -> None:
        """Forget models that are not in the registry any more."""
        gone = sorted(names)
        if not gone:
            return
        more = f" and {len(gone) - _NUM_NAMED} more" if len(gone) > _NUM_NAMED else ""
        self._note(
            f"no longer in the registry: {', '.join(gone[:_NUM_NAMED])}{more}; their artifacts stay"
        )
        self._forget(names)
        self._outcomes = tuple(outcome for outcome in self._outcomes if outcome.model not in names)

    def _forget(self, names: Collection[str]) -> None:
        for name in list(names):
            self._entries.pop(name, None)
