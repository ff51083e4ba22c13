"""Lineage of a registry's models: tags on the source version with what campaigns made of it.

The sources' own tag names do not include `coldpress.artifact`, which marks frozen versions. No key
depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.records import SOURCE_MODEL, SOURCE_VERSION, Outcome, iso
from pipeline.tracking.connection import MISSING, MODELS, one_transaction, reaching
from pipeline.tracking.run_records import ARTIFACT, CAMPAIGN

if TYPE_CHECKING:
    from mlflow import MlflowClient

STATUS = "coldpress.status"
"""Tag of a source with the verdict for each device class."""

JUDGED = "coldpress.judged"
"""Tag of a source with the time of its outcomes, in UTC; older outcomes never replace newer ones.
"""


def tag_source(
    client: MlflowClient, campaign: str, outcomes: Sequence[Outcome], reached: float
) -> None:
    """Tag the registry version that outcomes were made from; do nothing for other sources.
    Repeating it changes nothing.

    Args:
        client: of the registry.
        campaign: name.
        outcomes: of one model.
        reached: seconds since the epoch.

    Raises:
        InfrastructureError: MLflow cannot be reached or rejects a request.
    """
    tags = outcomes[0].tags
    if not {SOURCE_MODEL, SOURCE_VERSION} <= tags.keys() or all(
        outcome.cached for outcome in outcomes
    ):
        return
    from mlflow.exceptions import MlflowException

    name, version = tags[SOURCE_MODEL], tags[SOURCE_VERSION]
    with reaching(client.tracking_uri):
        try:
            existing = client.get_model_version(name, version).tags
        except MlflowException as error:
            if error.error_code not in MISSING:  # the source was deleted since
                raise
            return
        judged = iso(reached)
        found = {CAMPAIGN: campaign, **_results(outcomes)}
        if found.items() <= existing.items() or existing.get(JUDGED, "") > judged:
            return
        with one_transaction(client):
            for key, text in {**found, JUDGED: judged}.items():
                client.set_model_version_tag(name, version, key, text)


def _results(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return the tags with verdicts, and with the registered model and alias of each device
    class.
    """
    status = "; ".join(f"{outcome.device_class}: {outcome.verdict}" for outcome in outcomes)
    made = [outcome for outcome in outcomes if outcome.artifact]
    return {STATUS: status} | {
        f"{ARTIFACT}.{one.device_class}": f"{MODELS}{one.registered_as}@{one.device_class}"
        for one in made
    }
