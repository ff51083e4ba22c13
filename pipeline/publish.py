"""Publish one version of a model once all its device classes are decided; its outcomes are then
final.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from freezer.artifact import UNMEASURED, Artifact, read_artifacts
from freezer.errors import IntegrityError, NotPublishedError, StoreUnreachableError
from freezer.hardware import PORTABLE
from freezer.store import Descriptor, Store, Version, loss_of
from pipeline.ledger import Draft, Ledger
from pipeline.planning import Item, Plan
from pipeline.records import Failure, Outcome
from pipeline.scheduling import Decided, folder_name
from pipeline.workspace import judged_name, workplace

UNDECIDED = ("unstable", "failed", "rejected", "kept-previous")
"""Verdicts after which a class keeps the artifact that it has of the same source, if it has one."""

_Gathered = list[Decided]


class Publisher:
    """Collects the outcomes of a campaign, and publishes a version of a model once all its classes
    are decided.

    Args:
        plan: of the campaign.
        store, ledger: receive versions and outcomes.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        ledger: Ledger,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._place = workplace(store.uri)
        self._reached: dict[str, dict[str, Decided | None]] = {}
        for item in plan.items:
            self._reached.setdefault(item.entry.name, {})[item.device_class] = None

    def add(self, item: Item, outcome: Outcome) -> list[Outcome]:
        """Add the outcome of an item.

        Returns:
            The final outcomes of the model if this was its last one; else none. They are in the
            ledger, and in plan order, so that versions in MLflow are the same after a restart.

        Raises:
            StoreUnreachableError: the version or the ledger cannot be written. The next start
                publishes what was judged.
        """
        classes = self._reached[outcome.model]
        classes[outcome.device_class] = item, outcome
        gathered = [reached for reached in classes.values() if reached is not None]
        if len(gathered) < len(classes):
            # A failure needs no version, and a crashing judge must not crash in each start.
            if outcome.verdict == "failed" and not outcome.cached:
                self._keep([(item, outcome)])
            return []
        judged = {folder_name(reached) for _, reached in gathered if not reached.cached}
        gathered, version = self._published(self._taken_over(gathered))
        final = []
        for member, reached in gathered:
            final.append((member, self._with_server(_final(reached, version))))
            judged.discard(folder_name(reached))
        self._finish(final)
        for name in judged:  # outcomes of another campaign replaced these
            self._place.drop("judged", name)
        return [reached for _, reached in final]

    def _published(self, gathered: _Gathered) -> tuple[_Gathered, Version | None]:
        """Publish a version; fail the outcomes whose judged artifacts are damaged.

        Raises:
            StoreUnreachableError: an earlier version is damaged.
        """
        try:
            return gathered, self._publish(gathered)
        except IntegrityError as error:
            taken = self._taken_over(gathered)  # another campaign may have published it meanwhile
            if taken != gathered:
                return taken, self._publish(taken)
            if not _new(gathered):
                raise StoreUnreachableError(str(error)) from error
            rest = [(item, self._damaged(item, outcome, error)) for item, outcome in gathered]
            return rest, self._publish(rest)

    def _taken_over(self, gathered: _Gathered) -> _Gathered:
        """Replace outcomes by those that another campaign published meanwhile."""
        if not _new(gathered):
            return gathered
        with suppress(StoreUnreachableError):  # which publishing then reports
            self._ledger.refresh()
        return [(item, self._of_another(item, outcome) or outcome) for item, outcome in gathered]

    def _publish(self, gathered: _Gathered) -> Version | None:
        """Publish a version, if an artifact is new.

        Raises:
            IntegrityError: a judged artifact is damaged or missing.
        """
        if all(outcome.cached for _, outcome in gathered):
            return None
        self._ledger.check()
        self._bring_judged(gathered)
        first, outcomes = gathered[0][0], [outcome for _, outcome in gathered]
        artifacts = []
        carried: list[Descriptor] = []
        decided = {each.device_class for each in outcomes if each.verdict not in UNDECIDED}
        for outcome in outcomes:
            if outcome.verdict == "kept-previous":
                latest = self._store.version(outcome.model)
                if latest.source_key != first.source.digest:
                    # The same weights, which passed the drift gate for this source.
                    carried += latest.images_of(outcome.device_class)
            if not outcome.has_artifact:
                continue
            folder = self._folder(outcome) / "artifact"
            if outcome.cached and outcome.version is not None:
                carried += self._store.version(outcome.reference).images_of(outcome.device_class)
            elif not outcome.cached and (outcome.verdict == "published" or folder.is_dir()):
                artifacts += [_with_host(each, outcome) for each in read_artifacts(folder)]
        if not artifacts and not carried:
            return None
        return self._store.publish(
            first.entry.name,
            source_key=first.source.digest,
            artifacts=artifacts,
            carried=carried,
            decided=decided,
        )

    def _bring_judged(self, gathered: _Gathered) -> None:
        """Bring the artifacts that were judged in this campaign; see `_publish`."""
        for outcome in _new(gathered):
            is_there = self._place.bring("judged", folder_name(outcome), self._folder(outcome))
            if not is_there and outcome.verdict == "published":
                raise IntegrityError(
                    f"the judged artifact of {outcome.model} for {outcome.device_class} is missing"
                    " from the store"
                )

    def _with_server(self, outcome: Outcome) -> Outcome:
        """Add to the reason of an outcome without an artifact what serves its class, if that can be
        read.
        """
        name = outcome.device_class
        if outcome.cached or outcome.verdict not in UNDECIDED or outcome.has_artifact:
            return outcome
        with suppress(IntegrityError, NotPublishedError):
            latest = self._store.version(outcome.model)
            serving = name if name in latest.images else PORTABLE
            number = self._store.manifest(latest, serving).version
            serves = f"version {number} still serves {name}"
            if serving != name:
                serves = f"{PORTABLE} of version {number} serves {name}"
            return replace(outcome, reason=f"{outcome.reason}; {serves}")
        return outcome

    def _damaged(
        self,
        item: Item,
        outcome: Outcome,
        error: IntegrityError,
    ) -> Outcome:
        """Remove a damaged result and its candidates, so that the next start builds them again;
        return the failed outcome.
        """
        if not _is_new(outcome):
            return outcome
        self._place.drop("judged", folder_name(outcome))
        for key in item.builds.values():
            self._place.drop("candidates", key.digest)
        failure = Failure(
            kind="disk",
            code=error.code,
            message=str(error),
        )
        return replace(
            outcome,
            verdict="failed",
            failure=failure,
            reason=failure.message,
            recipe=None,
            figures=UNMEASURED,
        )

    def _of_another(self, item: Item, outcome: Outcome) -> Outcome | None:
        """Return the outcome that another campaign published under the same judge key."""
        if not _is_new(outcome):
            return None
        if item.before is not None and self._folder(outcome).is_dir():
            return None
        row = self._ledger.find("outcome", outcome.judge_key, model=outcome.model)
        if row is None or row.campaign == self._ledger.campaign:
            return None
        known = row.outcome
        is_published = not loss_of(self._store, known.reference, outcome.device_class)
        is_complete = set(known.missing) <= set(outcome.missing)
        if not (known.has_artifact and is_published and is_complete):
            return None
        return replace(
            known,
            tags=outcome.tags,
            registered_name=outcome.registered_name,
            cached=True,
        )

    def _folder(self, outcome: Outcome) -> Path:
        """The folder of the judged artifact."""
        return self._place.folder("judged", folder_name(outcome))

    def _finish(self, final: _Gathered) -> None:
        """Record new and changed outcomes in one step, then remove their judged folders."""
        self._keep([reached for reached in final if not self._is_kept(*reached)])
        for _, outcome in final:
            # Also of cached outcomes, since a driver may be killed before this line.
            name = folder_name(outcome)
            if not outcome.cached or self._place.is_listed("judged", name):
                self._place.drop("judged", name)
            if not _is_new(outcome):
                continue
            # It replaces results with fewer recipes, too.
            name = judged_name(outcome.judge_key, outcome.model)
            for folder in self._folder(outcome).parent.glob(f"{name}~*"):
                self._place.drop("judged", folder.name)

    def _keep(self, final: _Gathered) -> None:
        """Append outcomes to the ledger."""
        self._ledger.append_all(
            [
                Draft(
                    kind="outcome",
                    key=item.judge.digest,
                    model=outcome.model,
                    device_class=outcome.device_class,
                    data={"outcome": outcome.to_json(), "parts": item.parts},
                )
                for item, outcome in final
            ]
        )

    def _is_kept(self, item: Item, outcome: Outcome) -> bool:
        """Whether the ledger has the outcome; a cached one may be in another version now."""
        if outcome is item.finished and not item.renamed:
            return True
        row = self._ledger.find("outcome", item.judge.digest, model=outcome.model)
        if row is None:
            return False
        return replace(row.outcome, cached=outcome.cached) == outcome


def _with_host(artifact: Artifact, outcome: Outcome) -> Artifact:
    """The artifact with the other architectures that checked it."""
    if "others" not in outcome.host:
        return artifact
    provenance = {**artifact.manifest.provenance}
    provenance["host"] = {**provenance["host"], "others": list(outcome.host["others"])}
    return replace(artifact, manifest=replace(artifact.manifest, provenance=provenance))


def _new(gathered: _Gathered) -> list[Outcome]:
    """The outcomes whose artifacts were judged in this campaign."""
    return [outcome for _, outcome in gathered if _is_new(outcome)]


def _is_new(outcome: Outcome) -> bool:
    return outcome.has_artifact and not outcome.cached


def _final(outcome: Outcome, version: Version | None) -> Outcome:
    """Add the artifact that serves the class: its own, or the portable one of a version without."""
    if version is None:
        return outcome
    image = version.images.get(outcome.device_class)
    if not outcome.has_artifact:
        if image is not None:  # of an earlier judge
            return outcome
        image = version.images.get(PORTABLE)
    if image is None:
        return outcome
    return replace(outcome, artifact=image.digest, version=version.number)
