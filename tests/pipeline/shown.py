"""Contents of an MLflow, in a form that can be compared."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient


def empty_database(template: Path, folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(template / "mlflow.db", folder)
    return f"sqlite:///{folder}/mlflow.db"


def shown(uri: str) -> dict[str, Any]:
    """Return runs, versions, aliases, descriptions and uploads, with ids and times."""
    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name("coldpress")
    if experiment is None:
        return {"runs": {}, "versions": {}, "aliases": {}, "descriptions": {}, "uploads": []}
    versions, models = list(client.search_model_versions()), list(client.search_registered_models())
    return {
        "runs": {run.info.run_id: run.to_dictionary() for run in client.search_runs([experiment.experiment_id])},
        "versions": {(item.name, int(item.version)): dict(item.tags) for item in versions},
        "aliases": {model.name: dict(model.aliases) for model in models},
        "descriptions": {(item.name, getattr(item, "version", None)): item.description for item in (*versions, *models)},
        "uploads": sorted(model.model_id for model in client.search_logged_models([experiment.experiment_id])),
    }


def without_ids(found: Mapping[str, Any]) -> dict[str, Any]:
    """Remove ids and times, which differ between databases."""
    runs = []
    for run in found["runs"].values():
        tags = {name: text for name, text in run["data"]["tags"].items() if name != "mlflow.parentRunId"}
        info = {name: value for name, value in run["info"].items() if name in ("run_name", "status")}
        runs.append({"info": info, "tags": tags, "metrics": run["data"]["metrics"], "params": run["data"]["params"]})
    by_name = sorted(runs, key=lambda run: (run["info"]["run_name"], run["tags"].get("coldpress.device_class", "")))
    named = {name: found[name] for name in ("versions", "aliases", "descriptions")}
    return {"runs": by_name, **named, "uploads": len(found["uploads"])}
