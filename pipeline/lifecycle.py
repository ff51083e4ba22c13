"""The life of versions: promote one in the store and in MLflow together, and remove what nothing
needs, in the store and in its work folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Literal

from freezer.codec import frozen
from freezer.errors import ColdpressError, IntegrityError, NotPublishedError
from freezer.store import (
    MARKS,
    WORK,
    Cleaning,
    Garbage,
    Move,
    Store,
    Version,
    collect,
    marks_in,
    write_marks,
)
from pipeline.ledger import LEDGER, History, read_holder, read_rows
from pipeline.records import Note
from pipeline.reporting import driver_of
from pipeline.tracking import move_aliases
from pipeline.workspace import remove_abandoned, workplace

KINDS: tuple[Literal["candidates", "judged", "sources", "logs"], ...] = (
    "candidates",
    "judged",
    "sources",
    "logs",
)
"""What is removed of the work folder."""

_MARKS = f"{MARKS}/_work/marks.json"


def promote(
    store: Store,
    reference: str,
    name: str,
    *,
    share: float | None,
    remove: bool,
    tracking_uri: str | None,
) -> tuple[Version, Move]:
    """Make a name point at a version, in the store and in MLflow, or in neither.

    Args:
        store, reference, name, share, remove: see `Store.promote`.
        tracking_uri: URI of MLflow; None leaves it alone.

    Raises:
        InfrastructureError: MLflow cannot be reached, or refuses; the store is as it was.
        NotPublishedError: the store, or MLflow, lacks an artifact of the version.
    """
    version = store.version(f"{reference}:{name}" if remove else reference)
    with ExitStack() as undo:
        move = store.promote(reference, name, share=share, remove=remove)
        undo.callback(store.take_back, version.model, move)
        if tracking_uri is not None:
            move_aliases(tracking_uri, name, version, remove=remove)
        undo.pop_all()
    return version, move


@frozen
class CampaignNeeds:
    """What campaigns need that run, or whose drivers died.

    Attributes:
        leases: token of each campaign's lease.
        running: names of campaigns with a living driver.
        models: models of these, and what the others have not reached; None where a running one has
            not recorded its models yet.
        builds: keys of the builds of these models.
        logs: keys of the judges and builds of each campaign's last outcomes.
    """

    leases: Mapping[str, str]
    running: Collection[str]
    models: Collection[str] | None
    builds: Collection[str]
    logs: Collection[str]

    def need(self, kind: str, key: str) -> bool:
        """Whether a folder of work, or a log, is needed."""
        if kind == "judged":
            return key.partition("-")[2].partition("~")[0] in (self.models or ())
        return key in self.builds or (kind == "logs" and key in self.logs)


def needs_of(store: Store, note: Note) -> CampaignNeeds:
    """What the campaigns of a store need; a store in a registry has none.

    Args:
        store: of the campaigns.
        note: receives a line if this waits for a heartbeat of a driver on another machine.
    """
    if store.registry is not None:
        return CampaignNeeds(leases={}, running=(), models=(), builds=(), logs=())
    leases = _leases(store)
    started = {}
    for campaign in leases:
        holder, lives = driver_of(store, campaign, note)
        if holder is not None and lives:
            started[campaign] = holder.started
    history, models, logs = History(store), set[str](), set[str]()
    for campaign in history.campaigns():
        record = history.record(campaign)
        reached = history.members(campaign, record)
        for each in reached:
            logs.update(report.build_key for report in each.outcome.candidates)
        places = {each.outcome.place for each in reached}
        for member in (*record.members, *record.unreached):
            logs.add(member.judge_key)
            if campaign in started or member.place not in places:
                models.add(member.model)
    is_recorded = [history.recorded(campaign) >= since for campaign, since in started.items()]
    return CampaignNeeds(
        leases=leases,
        running=tuple(started),
        models=models if all(is_recorded) else None,
        builds={row.key for row in read_rows(history.folder, "build") if row.model in models},
        logs=logs,
    )


def _leases(store: Store) -> dict[str, str]:
    """The token of each lease, by campaign."""
    leases = {}
    for name in store.files.sizes(LEDGER):
        if name.startswith("lease-"):
            campaign = name.removeprefix("lease-").removesuffix(".json")
            holder = read_holder(store, campaign)
            leases[campaign] = holder.token if holder else ""
    return leases


def _has_started(store: Store, needs: CampaignNeeds) -> bool:
    """Whether a campaign started since its needs were read."""
    return store.registry is None and not _leases(store).items() <= needs.leases.items()


def clean(
    store: Store, cleaning: Cleaning, needs: CampaignNeeds
) -> tuple[list[Garbage], list[ColdpressError]]:
    """Mark and remove what nothing needs.

    While a campaign runs, its models and the whole work folder stay; when one starts, the rest is
    left to the next run.

    Returns:
        What is garbage, and the errors of models that are damaged, which stay as they are.
    """
    found: list[Garbage] = []
    errors: list[ColdpressError] = []
    for model in store.models():
        if needs.models is None or _has_started(store, needs):
            return found, errors
        if model in needs.models:
            continue
        try:
            found += collect(store, model, cleaning)
        except (IntegrityError, NotPublishedError) as error:
            errors.append(error)
    if store.registry is None and not needs.running:
        found += _clean_work(store, cleaning, needs)
    return found, errors


def _clean_work(store: Store, cleaning: Cleaning, needs: CampaignNeeds) -> list[Garbage]:
    """Mark and remove folders of work and logs."""
    marks, found = marks_in(store, _MARKS), []
    place = workplace(store.uri)
    if not cleaning.dry_run:
        remove_abandoned(store.root)
    for kind in KINDS:
        if _has_started(store, needs):
            break
        for key, sizes in _by_key(store.files.sizes(f"{WORK}/{kind}")).items():
            if needs.need(kind, key):
                continue
            name = f"{kind}/{key}"
            item = cleaning.found(kind, name, sum(sizes.values()), marks.get(name))
            found.append(item)
            if cleaning.dry_run or not item.removed:
                continue
            if kind != "logs":
                place.drop(kind, key)
            for path in sizes:  # files without a marker, and logs
                store.files.remove(f"{WORK}/{kind}/{path}")
    if not cleaning.dry_run:
        with store.files.locked("garbage"):
            write_marks(store, _MARKS, found)
    return found


def _by_key(sizes: Mapping[str, int]) -> Mapping[str, dict[str, int]]:
    """Sizes of files by the key of their folder, marker or log."""
    items: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for path, size in sizes.items():
        parts = path.split("/")
        key = "/".join(parts[: 2 if parts[0] == "mlflow" else 1])
        items[key.removesuffix(".json").removesuffix(".log")][path] = size
    return items
