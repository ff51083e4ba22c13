"""One running campaign: publish, record, track and report each outcome."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import chain
from pathlib import Path

from freezer.errors import InfrastructureError, IntegrityError, StoreError
from freezer.store import Store
from pipeline.config import Config
from pipeline.ledger import (
    CampaignRecord,
    Continued,
    LeaseLostError,
    Ledger,
    Member,
    RowKind,
    members_of,
)
from pipeline.planning import Plan
from pipeline.publish import Publisher
from pipeline.records import Event, Outcome, Outcomes, Place, verdict_text
from pipeline.reporting import CampaignReport, Display, report_page
from pipeline.scheduling import Executor, ItemState
from pipeline.tracking import (
    Tracker,
    TrackerProcess,
    outcomes_digest,
)


@dataclass(kw_only=True)
class Campaign:
    """A running campaign: publishes outcomes, and reports final ones to MLflow and the display.

    Attributes:
        executor: of the plan; None if all of it is finished.
    """

    config: Config
    plan: Plan
    executor: Executor | None
    store: Store
    ledger: Ledger
    tracker: Tracker | TrackerProcess
    display: Display
    _final: dict[Place, Outcome] = field(default_factory=dict, init=False)
    _failures: list[str] = field(default_factory=list, init=False)
    _interrupted: bool = field(default=False, init=False)

    def run(self, skipped: Outcomes, continued: Continued, started: float) -> CampaignReport:
        """Execute the plan, then write the record of the campaign and the summary in MLflow.

        Args:
            skipped: outcomes of bad entries, and of classes without a node.
            continued: the campaign as an earlier start left it.
            started: of this start, in seconds since the epoch.
        """
        planned = self._planned(skipped, continued)
        self._record(planned)
        try:
            self._execute(skipped, continued, planned)
        except KeyboardInterrupt:
            self._interrupted = True
        except (StoreError, InfrastructureError, IntegrityError) as error:
            self._failures.append(str(error))
        final = self._final
        reached = [final[one.place] for one in planned.members if one.place in final]
        ended = self._report((*reached, *skipped), started, time.time())
        # The recorded exit code is that without MLflow, which can be replayed.
        record = replace(
            planned,
            finished=ended.finished,
            exit_code=replace(ended, infrastructure=tuple(self._failures)).exit_code,
            interrupted=self._interrupted,
            members=members_of(reached),
            unreached=tuple(one for one in planned.members if one.place not in final),
        )
        try:
            self._record(record)
        except LeaseLostError as error:  # MLflow belongs to the other driver, too
            if str(error) not in self._failures:
                self._failures.append(str(error))
            return self._report(ended.outcomes, started, ended.finished)
        except StoreError as error:
            self._failures.append(str(error))
        self.tracker.finish(ended.outcomes, record, report_page(self.store, self.config.campaign))
        return self._report(ended.outcomes, started, ended.finished)

    def _planned(self, skipped: Outcomes, continued: Continued) -> CampaignRecord:
        members = []
        for item in self.plan.items:
            finished = item.finished
            cached = finished is not None and continued.reached(finished).cached
            members.append(Member(item.judge.digest, item.entry.name, item.device_class, cached))
        return CampaignRecord(
            catalog=self.config.catalog_name,
            started=continued.started,
            members=tuple(members),
            problems=tuple(skipped),
            facts=self.plan.facts,
            driver=driver_facts(self.config.files),
        )

    def _execute(
        self,
        skipped: Outcomes,
        continued: Continued,
        planned: CampaignRecord,
    ) -> None:
        """Show what is skipped; publish, log and show the outcomes of earlier campaigns, then those
        of the executor.
        """
        publisher = Publisher(self.plan, self.store, self.ledger)
        items = self.plan.items
        finished = [(item, item.finished) for item in items if item.finished is not None]
        work = {}
        for what, state in self._begun().items():
            work[what] = [name for name in state.item.builds if name not in state.results]
        self.display.plan(len(items) + len(skipped), work)
        self._show(skipped)
        expected = None
        if self.plan.is_finished:
            expected = outcomes_digest(outcome for _, outcome in finished)
        self.tracker.start(planned, expected)
        for item, outcome in chain(finished, self.executor.outcomes() if self.executor else ()):
            final = [continued.reached(done) for done in publisher.add(item, outcome)]
            for done in final:
                self._final[done.place] = done
            if final:
                self.tracker.log(final)
            elif self._awaits_classes(outcome):
                self.display.note(
                    f"judged {' '.join(outcome.place)}: {verdict_text(outcome)}; waits for the"
                    " model's other classes"
                )
            self._show(final)

    def _show(self, final: Iterable[Outcome]) -> None:
        for outcome in final:
            self.display.show(Event(kind="outcome", what=" ".join(outcome.place), outcome=outcome))

    def _awaits_classes(self, judged: Outcome) -> bool:
        """Whether other classes of a model that was just judged have no outcome yet."""
        states = () if judged.cached else self._begun().values()
        return any(
            state.outcome is None and state.item.entry.name == judged.model for state in states
        )

    def _begun(self) -> dict[str, ItemState]:
        """The states of the items that had to be done, by label."""
        if self.executor is None:
            return {}
        return {what: progress.state for what, progress in self.executor.begun.items()}

    def _record(self, record: CampaignRecord) -> None:
        kinds: tuple[RowKind, ...] = ("campaign", "pass") if record.is_pass else ("campaign",)
        for kind in kinds:
            self.ledger.append(
                kind,
                self.config.campaign,
                model="",
                device_class="",
                data=record.to_json(),
            )

    def _report(
        self,
        outcomes: Outcomes,
        started: float,
        finished: float,
    ) -> CampaignReport:
        return CampaignReport(
            campaign=self.config.campaign,
            started=started,
            finished=finished,
            outcomes=tuple(outcomes),
            infrastructure=(*self._failures, *self.tracker.failures),
            interrupted=self._interrupted,
            num_builds=sum(len(state.built) for state in self._begun().values()),
            experiment_id=self.tracker.experiment_id,
        )


def driver_facts(files: Path) -> dict[str, str]:
    """Return the versions of the driver's packages, and the commit of the checkout that contains
    the catalog or working directory, if there is one.
    """
    facts = {}
    for name in ("coldpress", "ray", "mlflow"):
        with suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    folder = files if files.is_dir() else files.parent
    with suppress(OSError):  # git is not installed
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            facts["git_commit"] = done.stdout.strip()
    return facts
