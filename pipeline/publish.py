"""Publish: when all device classes of a model have their verdicts, one version is written, and its outcomes become final."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from freezer.artifact import Artifact
from freezer.device_class import PORTABLE, device_class
from freezer.store import Store, Version
from pipeline.ledger import Ledger
from pipeline.outcome import Outcome
from pipeline.plan import Item, Plan
from pipeline.tasks import judged_folder


class Publisher:
    """Gathers the outcomes of a campaign, and publishes each model once all of its outcomes are in.

    Args:
        plan: which says what classes each model has.
        store, ledger: where versions are written, and outcomes kept.
    """

    def __init__(self, plan: Plan, store: Store, ledger: Ledger) -> None:
        self._store, self._ledger = store, ledger
        self._expected: dict[str, set[str]] = {}
        self._gathered: dict[str, list[tuple[Item, Outcome]]] = {}
        for item in plan.items:
            self._expected.setdefault(item.entry.name, set()).add(item.device_class)

    def add(self, item: Item, outcome: Outcome) -> list[Outcome]:
        """Take an outcome in.

        Returns:
            The final outcomes of the model, when this was its last; else none. They are in the ledger by then.

        Raises:
            StoreUnreachableError: the version or the ledger cannot be written; nothing of it is visible, and the next start
                publishes it from what was judged.
        """
        gathered = self._gathered.setdefault(outcome.model, [])
        gathered.append((item, outcome))
        if {done.device_class for _, done in gathered} != self._expected[outcome.model]:
            return []
        version = self._publish(gathered)
        final = [(of, _final(reached, version)) for of, reached in gathered]
        for of, reached in final:
            self._finish(of, reached)
        return [reached for _, reached in final]

    def _publish(self, gathered: Sequence[tuple[Item, Outcome]]) -> Version | None:
        model, source_key = gathered[0][1].model, gathered[0][1].source_key
        artifacts: dict[str, Artifact] = {}
        carried: dict[str, Mapping[str, Any]] = {}
        numbers = self._store.versions(model)
        if numbers:
            latest = self._store.version(model)
            if latest.source_key == source_key:
                judged_now = {outcome.device_class for _, outcome in gathered}
                carried = {name: image for name, image in latest.images.items() if name not in judged_now}
        for _, outcome in gathered:
            if outcome.verdict != "published":
                continue
            if outcome.cached:
                before = self._store.version(f"{model}:{outcome.version}")
                carried[outcome.device_class] = before.images[outcome.device_class]
            else:
                folder = judged_folder(str(self._store.root), outcome.judge_key) / "artifact"
                artifacts[outcome.device_class] = Artifact.read(folder)
        if not artifacts and all(outcome.cached for _, outcome in gathered):
            return None
        if not artifacts and not carried:
            return None
        return self._store.publish(model, source_key=source_key, artifacts=artifacts, carried=carried)

    def _finish(self, item: Item, outcome: Outcome) -> None:
        """Keep a new or changed outcome in the ledger; then its judged folder, whose files are in the store by now, may go."""
        if outcome.cached and self._is_kept(item, outcome):
            return
        parts = {"judge": item.judge.parts, "builds": {name: key.parts for name, key in item.builds.items()}}
        self._ledger.append(
            "outcome",
            item.judge.digest,
            model=outcome.model,
            device_class=outcome.device_class,
            data={"outcome": outcome.to_json(), "parts": parts},
        )
        shutil.rmtree(judged_folder(str(self._store.root), outcome.judge_key), ignore_errors=True)

    def _is_kept(self, item: Item, outcome: Outcome) -> bool:
        """Whether the ledger says the same already: what was taken over may have come into another version."""
        row = self._ledger.find("outcome", item.judge.digest, model=outcome.model)
        return row is not None and Outcome.from_json(row.data["outcome"]).as_cached() == outcome


def _final(outcome: Outcome, version: Version | None) -> Outcome:
    """The outcome with the artifact that serves its class: its own, or with kept-eager on a CPU the portable one."""
    if version is None:
        return outcome
    serving = outcome.device_class
    if outcome.verdict == "kept-eager" and device_class(serving).kind == "cpu":
        serving = PORTABLE
    elif outcome.verdict != "published":
        return outcome
    image = version.images.get(serving)
    return outcome if image is None else replace(outcome, artifact=image["digest"], version=version.number)
