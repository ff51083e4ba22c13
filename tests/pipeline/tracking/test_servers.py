"""Campaigns against real MLflow servers: on sqlite and PostgreSQL, with artifacts in a folder and
in S3.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch

from freezer.artifact import Artifact
from freezer.store import Store
from pipeline.tracking import registry_events
from tests.conftest import Frozen
from tests.support.buckets import ENVIRONMENT, make_bucket
from tests.support.campaigns import run_judged
from tests.support.mlflow_servers import SETTINGS, MlflowServer, Postgres, server_options
from tests.support.raylets import LOOPBACK, free_port
from tests.support.shown import logged, shown, stored_files
from tests.support.steps import HERE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_CAMPAIGNS = 4

MakeServer = Callable[..., MlflowServer]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as started:
        yield started


@pytest.fixture
def make_server(
    s3_address: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[MakeServer]:
    """Start a server on an empty database, `sqlite` or `postgresql`, and an empty `folder` or `s3`
    for artifacts.
    """
    with ExitStack() as held:

        def start(backend: str, artifacts: str, *, num_workers: int = 1) -> MlflowServer:
            name, environment = f"test-{uuid.uuid4().hex[:12]}", SETTINGS
            if backend == "postgresql":
                database = request.getfixturevalue("postgres").database(name)
            else:
                database = f"sqlite:///{tmp_path}/server.db"
            place = str(tmp_path / "destination")
            if artifacts == "s3":
                environment = {**SETTINGS, **ENVIRONMENT, "MLFLOW_S3_ENDPOINT_URL": s3_address}
                with (
                    pytest.MonkeyPatch.context() as patched
                ):  # clients of the server have no credentials
                    for variable, value in ENVIRONMENT.items():
                        patched.setenv(variable, value)
                    make_bucket(s3_address, name)
                place = f"s3://{name}/mlflow"
            options = server_options(database, place, num_workers=num_workers)
            return held.enter_context(MlflowServer(options, tmp_path, environment=environment))

        yield start


@pytest.fixture
def run_again(tmp_path: Path, artifacts: dict[str, Artifact]) -> Callable[..., Any]:
    """Run a campaign on an empty store, always at the same path: tags name it."""

    def run(uri: str, *, store: str = "store", campaign: str = "served", **options: Any) -> Any:
        (tmp_path / store).mkdir()
        return run_judged(
            Store.open(str(tmp_path / store / "store"), create=True),
            uri,
            campaign,
            artifacts,
            apart=True,
            **options,
        )

    return run


@pytest.mark.parametrize("place", ["folder", "s3"])
@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_a_server_shows_the_same_as_a_database(
    backend: str,
    place: str,
    make_server: MakeServer,
    run_again: Callable[..., Any],
    uri: str,
    tmp_path: Path,
    scripted: Frozen,
) -> None:
    """And its clients load what it stores, without credentials for the storage."""
    assert run_again(uri).exit_code == 1
    (tmp_path / "store").rename(tmp_path / "earlier")
    server = make_server(backend, place)
    report = run_again(server.uri)
    assert (report.exit_code, report.infrastructure) == (1, ())
    assert logged(server.uri) == logged(uri)
    assert stored_files(server.uri, tmp_path / "served") == stored_files(uri, tmp_path / "direct")
    if place == "folder":
        assert any((tmp_path / "destination").rglob("MLmodel"))
    mlflow.set_tracking_uri(server.uri)
    loaded = mlflow.pyfunc.load_model(f"models:/first@{HERE}")
    given = torch.randn(2, 4)
    torch.testing.assert_close(
        torch.as_tensor(loaded.predict({"x": given.numpy()})), scripted.model(given)
    )


@pytest.mark.parametrize(("backend", "place"), [("sqlite", "folder"), ("postgresql", "s3")])
def test_campaigns_at_once_share_a_server(
    backend: str, place: str, make_server: MakeServer, run_again: Callable[..., Any], uri: str
) -> None:
    """They make the same models at other sites: each logs its runs, and the first version of an
    artifact stays.
    """
    names = [f"site-{index}" for index in range(NUM_CAMPAIGNS)]
    run_again(uri, store="alone", campaign="alone")
    server = make_server(backend, place, num_workers=4)
    with ThreadPoolExecutor(NUM_CAMPAIGNS) as pool:
        reports = list(
            pool.map(lambda name: run_again(server.uri, store=name, campaign=name), names)
        )
    assert [(report.exit_code, report.infrastructure) for report in reports] == [
        (1, ())
    ] * NUM_CAMPAIGNS
    alone, found = shown(uri), shown(server.uri)
    assert found["aliases"].keys() == alone["aliases"].keys()
    assert len(found["versions"]) == len(found["uploads"]) == len(alone["versions"])
    assert len(found["runs"]) == NUM_CAMPAIGNS * len(alone["runs"])
    assert {run["info"]["status"] for run in found["runs"].values()} == {"FINISHED", "FAILED"}


def test_webhooks_of_a_server_arrive(tmp_path: Path) -> None:
    """At an address of the loopback, which a server calls only if its environment allows that."""
    allowed = {"MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http", "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true"}
    options = server_options(f"sqlite:///{tmp_path}/server.db", str(tmp_path / "destination"))
    address = f"{LOOPBACK}:{free_port()}"
    with (
        MlflowServer(options, tmp_path, environment={**SETTINGS, **allowed}) as server,
        registry_events(address) as event,
    ):
        client = mlflow.MlflowClient(server.uri, server.uri)
        events: Any = ["model_version.created", "model_version_alias.created"]
        client.create_webhook("coldpress", f"http://{address}/", events)
        client.create_registered_model("model")
        assert not event.wait(1)
        version = client.create_model_version("model", "s3://bucket/model")
        assert event.wait(30)
        event.clear()
        client.set_registered_model_alias("model", "champion", version.version)
        assert event.wait(30)
