"""Contents of an MLflow, in a form that can be compared."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from freezer.files import digest_file


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
        "runs": {
            run.info.run_id: run.to_dictionary()
            for run in client.search_runs([experiment.experiment_id])
        },
        "versions": {(item.name, int(item.version)): dict(item.tags) for item in versions},
        "aliases": {
            model.name: {
                alias: int(version) for alias, version in model.aliases.items()
            }  # text from a server
            for model in models
        },
        "descriptions": {
            (item.name, str(getattr(item, "version", ""))): item.description
            for item in (*versions, *models)
        },
        "uploads": sorted(
            model.model_id for model in client.search_logged_models([experiment.experiment_id])
        ),
    }


def without_ids(found: Mapping[str, Any]) -> dict[str, Any]:
    """Remove ids and times, which differ between databases."""
    runs = []
    for run in found["runs"].values():
        tags = {
            name: text for name, text in run["data"]["tags"].items() if name != "mlflow.parentRunId"
        }
        info = {
            name: value for name, value in run["info"].items() if name in ("run_name", "status")
        }
        runs.append(
            {
                "info": info,
                "tags": tags,
                "metrics": run["data"]["metrics"],
                "params": run["data"]["params"],
            }
        )
    order = ("coldpress.device_class", "coldpress.campaign")
    by_name = sorted(
        runs,
        key=lambda run: (run["info"]["run_name"], *(run["tags"].get(tag, "") for tag in order)),
    )
    named = {name: found[name] for name in ("versions", "aliases", "descriptions")}
    return {"runs": by_name, **named, "uploads": len(found["uploads"])}


def logged(uri: str) -> dict[str, Any]:
    """What MLflow shows, without ids and times."""
    return without_ids(shown(uri))


def stored_files(uri: str, folder: Path) -> dict[str, dict[str, str]]:
    """Download the files of all runs and versions to a folder; return their digests, without ids
    and times.
    """
    client, logs = MlflowClient(uri, uri), shown(uri)
    places = {
        f"{name}/{number}": client.get_model_version_download_uri(name, number)
        for name, number in logs["versions"]
    }
    for run in logs["runs"].values():
        tags = run["data"]["tags"]
        names = (
            run["info"]["run_name"],
            tags.get("coldpress.device_class", ""),
            tags.get("coldpress.campaign", ""),
        )
        if client.list_artifacts(run["info"]["run_id"]):
            places["/".join(names)] = run["info"]["artifact_uri"]
    for place, location in places.items():
        (folder / place).mkdir(parents=True)
        get_artifact_repository(location, tracking_uri=uri).download_artifacts(
            "", str(folder / place)
        )
    found = {}
    for place in places:
        files = [path for path in (folder / place).rglob("*") if path.is_file()]
        found[place] = {str(path.relative_to(folder / place)): _digest(path) for path in files}
    return found


def _digest(path: Path) -> str:
    with_ids = path.name in ("MLmodel", "report.html")
    return "" if with_ids else digest_file(path)
