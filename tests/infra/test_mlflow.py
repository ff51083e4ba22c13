"""infra/mlflow: its files agree, and a server that runs as compose.yaml says is lost and restored
from a backup.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest
import requests
import torch
import yaml
from mlflow.models import infer_signature

from freezer.errors import InfrastructureError
from freezer.hardware import PORTABLE
from freezer.store import Store
from jobs.results import replay_app as app
from pipeline.tracking.connection import connect
from tests.support.buckets import ENVIRONMENT, empty_bucket, make_bucket
from tests.support.campaign_runs import outcomes, run
from tests.support.commands import invoked, output
from tests.support.manifests import manifests
from tests.support.mlflow_servers import ALLOWED_HOSTS, MlflowServer, Postgres
from tests.support.raylets import LOOPBACK, ROOT
from tests.support.shown import logged, shown, stored_files

FOLDER = ROOT / "infra" / "mlflow"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICE = COMPOSE["services"]["mlflow"]
ADMIN, TRAINER, CAMPAIGN = (
    ("admin", "password-of-admin"),
    ("trainer", "password-of-trainer"),
    ("campaign", "password-of-campaign"),
)
BUCKET = "coldpress"


def env_example() -> dict[str, str]:
    """The variables of env.example, with those that are optional."""
    text = (FOLDER / "env.example").read_text()
    return dict(re.findall(r"^#?([A-Z0-9_]+)=(.*)$", text, re.MULTILINE))


def test_compose_and_kubernetes_start_the_same_server() -> None:
    documents = {
        (item["kind"], item["metadata"]["name"]): item
        for item in manifests(FOLDER / "kubernetes.yaml")
    }
    (container,) = documents["Deployment", "mlflow"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == SERVICE["command"]
    assert {item["name"]: item["value"] for item in container["env"]} == SERVICE["environment"]
    assert container["image"] == SERVICE["image"]
    settings = documents["ConfigMap", "mlflow-auth"]["data"]["basic_auth.ini"]
    assert settings == (FOLDER / "basic_auth.ini").read_text()
    (database,) = documents["StatefulSet", "postgres"]["spec"]["template"]["spec"]["containers"]
    assert database["image"] == COMPOSE["services"]["postgres"]["image"]


def test_mlflow_reads_every_variable() -> None:
    """It would ignore a misspelt or renamed one, and send telemetry, say."""
    package = Path(mlflow.__file__).parent
    sources = [
        "environment_variables.py",
        "cli/__init__.py",
        "utils/cli_args.py",
        "telemetry/utils.py",
    ]
    text = "".join((package / name).read_text() for name in sources)
    named = [*env_example(), *SERVICE["environment"]]
    names = [name for name in named if name.startswith(("MLFLOW_", "DO_NOT"))]
    assert len(names) > 5
    assert [name for name in names if f'"{name}"' not in text] == []


@contextmanager
def credentials() -> Iterator[None]:
    """The bucket's credentials for a moment; clients of the server have none."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        yield


@dataclass(frozen=True, kw_only=True)
class Site:
    """The server of compose.yaml, its database and its bucket.

    Attributes:
        variables: those of .env.
    """

    server: MlflowServer
    postgres: Postgres
    s3_address: str
    variables: Mapping[str, str]

    def backup(self, *arguments: str) -> str:
        """Run backup.sh, and return its output."""
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return output("env", *variables, FOLDER / "backup.sh", *arguments)

    def lose(self) -> None:
        """Kill the server, and remove its database and all files of its bucket."""
        self.server.kill()
        self.postgres.drop(self.variables["PGDATABASE"])
        with credentials():
            empty_bucket(self.s3_address, BUCKET)


@pytest.fixture(scope="module")
def site(s3_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with the options and variables of compose.yaml; only addresses differ."""
    if shutil.which("rclone") is None:
        pytest.skip("rclone is missing (Debian: apt-get install rclone)")
    folder = tmp_path_factory.mktemp("site")
    mounted = dict(volume.split(":")[1::-1] for volume in SERVICE["volumes"])
    settings = {
        name: str(FOLDER / mounted[value]) if value in mounted else value
        for name, value in SERVICE["environment"].items()
    }
    with credentials():
        make_bucket(s3_address, BUCKET)
    with ExitStack() as held:
        postgres = held.enter_context(Postgres())
        own = {
            "PGHOST": LOOPBACK,
            "PGPORT": str(postgres.port),
            "PGUSER": "coldpress",
            "PGPASSWORD": "any",
            "AWS_ACCESS_KEY_ID": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            "AWS_SECRET_ACCESS_KEY": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
            "MLFLOW_S3_ENDPOINT_URL": s3_address,
            "MLFLOW_SERVER_ALLOWED_HOSTS": ALLOWED_HOSTS,
            "MLFLOW_AUTH_ADMIN_PASSWORD": ADMIN[1],
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "any",
        }
        variables = {**env_example(), **own}
        postgres.database(variables["PGDATABASE"])
        words = SERVICE["command"][2:]
        options = [word for word in words if not word.startswith(("--host", "--port"))]
        environment = {**variables, **settings}
        server = held.enter_context(MlflowServer(options, folder, environment=environment))
        for name, password in (TRAINER, CAMPAIGN):
            post(server.uri, "users/create", ADMIN, username=name, password=password)
        yield Site(server=server, postgres=postgres, s3_address=s3_address, variables=variables)


def post(uri: str, path: str, user: tuple[str, str], **fields: str) -> int:
    """Send a request as a user; return the status of the answer."""
    url = f"{uri}/api/2.0/mlflow/{path}"
    return requests.post(url, json=fields, auth=user, timeout=30).status_code


@pytest.fixture
def log_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that makes this process, and those that it starts, a user of the server."""

    def as_user(user: tuple[str, str]) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user[0])
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", user[1])

    before = os.environ.get("MLFLOW_TRACKING_URI")
    yield as_user
    mlflow.set_tracking_uri(before)


@pytest.mark.slow
def test_server_refuses_strangers_and_other_hosts(site: Site, log_in: Any) -> None:
    """Unknown users, unknown host names, and users who delete what others made."""
    uri = site.server.uri
    with pytest.raises(InfrastructureError, match="MLFLOW_TRACKING_PASSWORD"):
        connect(uri)
    log_in((TRAINER[0], "password-of-nobody"))
    with pytest.raises(InfrastructureError, match="MLFLOW_TRACKING_PASSWORD"):
        connect(uri)
    log_in(TRAINER)
    made = connect(uri).create_experiment("of the trainer")
    named = {"experiment_id": made, "new_name": "renamed"}
    assert post(uri, "experiments/update", CAMPAIGN, **named) == 200
    assert post(uri, "experiments/delete", CAMPAIGN, experiment_id=made) == 403
    url = f"{uri}/api/2.0/mlflow/experiments/get?experiment_id={made}"
    other = requests.get(url, auth=CAMPAIGN, headers={"Host": "evil.example"}, timeout=30)
    assert other.status_code == 403


def register(uri: str, *, seed: int) -> None:
    """Register a version of `tiny`, with files in the server's bucket."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()).eval()
    x = torch.randn(2, 16)
    with torch.no_grad():
        signature = infer_signature(x.numpy(), model(x).numpy())
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("sources")
    with mlflow.start_run():
        mlflow.pytorch.log_model(
            model,
            name="model",
            signature=signature,
            input_example=x.numpy(),
            registered_model_name="tiny",
        )


def run_campaign(folder: Path, uri: str, name: str) -> dict[str, Any]:
    """Freeze the registry for the portable class, on a local Ray; return the only outcome."""
    command = [sys.executable, "-m", "jobs.optimize", "mlflow:", "--device-class", PORTABLE]
    command += ["--store", "store", "--tracking-uri", uri, "--campaign", name, "--json", "out.json"]
    done = run(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (outcome,) = outcomes(folder).values()
    return outcome


def campaigns(contents: Mapping[str, Any]) -> set[str]:
    """The campaigns that have runs."""
    return {run["data"]["tags"]["coldpress.campaign"] for run in contents["runs"].values()}


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_lost_server_is_restored_from_its_backup(site: Site, log_in: Any, tmp_path: Path) -> None:
    """What was logged before the backup comes back with its ids; what a campaign logged later, by a
    replay of the ledger.
    """
    log_in(TRAINER)
    register(site.server.uri, seed=0)
    log_in(CAMPAIGN)
    first = run_campaign(tmp_path, site.server.uri, "nightly")
    assert (first["verdict"], first["version"]) == ("published", 1)
    saved = shown(site.server.uri)
    assert "saved" in site.backup("save", str(tmp_path / "backup"))
    run_campaign(tmp_path, site.server.uri, "later")
    before, files = logged(site.server.uri), stored_files(site.server.uri, tmp_path / "before")
    assert campaigns(saved) < campaigns(shown(site.server.uri)) == {"nightly", "later"}

    site.lose()
    site.postgres.database(site.variables["PGDATABASE"])
    assert "restored" in site.backup("restore", str(tmp_path / "backup"))
    site.server.start()
    assert shown(site.server.uri) == saved

    replayed = invoked(
        app, "--all", "--store", tmp_path / "store", "--tracking-uri", site.server.uri
    )
    assert replayed.exit_code == 0, replayed.output
    assert logged(site.server.uri) == before
    assert stored_files(site.server.uri, tmp_path / "after") == files

    log_in(TRAINER)
    register(site.server.uri, seed=1)
    log_in(CAMPAIGN)
    second = run_campaign(tmp_path, site.server.uri, "nightly")
    assert (second["verdict"], second["version"]) == ("published", 2)
    assert Store.open(str(tmp_path / "store")).versions("tiny") == [1, 2]
    assert shown(site.server.uri)["aliases"]["tiny-frozen"][PORTABLE] == 2
