"""Fixtures for all tests: buckets, and artifacts that are frozen once per session."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from freezer.artifact import Artifact
from freezer.freezing.candidates import Candidate, build_further
from freezer.freezing.freeze import FreezeResult
from freezer.freezing.judging import Judgement, Session, judge
from freezer.freezing.models import Subject
from freezer.freezing.packaging import assemble
from freezer.freezing.payload_sets import other_payloads
from freezer.freezing.payload_sets.other_payloads import judge_further
from freezer.freezing.payload_sets.slow_sizes import with_captured
from freezer.freezing.target import target_here
from freezer.store import Store
from tests.support.buckets import ENVIRONMENT, make_bucket, s3_server
from tests.support.models import Mlp, TinyConv, seeded
from tests.support.registries import Front, RunningRegistry, front_of, running_registry
from tests.support.steps import (
    BATCH,
    HERE,
    artifact_of,
    candidate_of,
    quickly,
    random_inputs,
    session_of,
    subject_of,
)


def pytest_configure() -> None:
    """Restore the handler of SIGINT: background jobs of a shell ignore it, and so would the
    processes that tests start.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile into a cache of the session, so that no run depends on an earlier one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


LIMITS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
)


@pytest.fixture(autouse=True)
def limits_kept() -> Iterator[None]:
    """Restore the instruction set limits of this process after a test."""
    before = {name: os.environ.get(name) for name in LIMITS}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A model, and the result of its freeze."""

    model: nn.Module
    result: FreezeResult
    artifact: Artifact


def frozen(
    model: nn.Module, x: Tensor, out: Path, *, name: str, recipe: str, device_class: str
) -> Frozen:
    with pytest.MonkeyPatch.context() as patched:
        # The files must not depend on timings: the captured program of such small models may be
        # faster than any recipe's.
        steps = [step for step in other_payloads.STEPS if step is not with_captured]
        patched.setattr(other_payloads, "STEPS", steps)
        named = {"name": name, "device_class": device_class}
        result = quickly(model, {"x": x}, out, recipe, dims={"x": {0: BATCH}}, **named)
    return Frozen(model=model, result=result, artifact=artifact_of(result))


@pytest.fixture(scope="session")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """A convnet for batch 1 to 4, frozen by Inductor in about 15 s; read-only."""
    return frozen(
        seeded(TinyConv),
        random_inputs(2, 3, 16, 16),
        tmp_path_factory.mktemp("inductor-frozen") / "conv",
        name="conv",
        recipe="inductor-frozen",
        device_class=HERE,
    )


@dataclass(frozen=True, kw_only=True)
class Several:
    """A candidate for several thread counts and points, its judgement, and an artifact with all its
    payloads.
    """

    model: nn.Module
    subject: Subject
    session: Session
    candidate: Candidate
    judgement: Judgement
    artifact: Artifact


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> Several:
    """The convnet by Inductor for 1 and 2 threads, and for batch 1, batch 3 and all: 6 builds, a
    minute; read-only.
    """
    folder = tmp_path_factory.mktemp("several")
    model, target = seeded(TinyConv), target_here(HERE, (2, 1))
    subject = subject_of(
        model,
        {"x": random_inputs(2, 3, 16, 16)},
        {"x": {0: BATCH}},
        points=[{"batch": 1}, {"batch": 3}],
    )
    first = candidate_of(subject, "inductor-frozen", folder / "candidate", target)
    session = session_of(subject, target)
    judgement: Any = judge(session, [first])
    (folder / "further").mkdir()
    candidate = build_further(subject, first, target, folder / "further")
    judgement = judge_further(session, judgement, candidate.without(judgement.winner.dropped))
    winner = replace(judgement.winner, candidate=candidate, dropped=())
    everything = replace(judgement, winner=winner)
    made = {"source": "tests.support.models.TinyConv"}
    artifact = assemble(session, everything, dest=folder / "conv", provenance=made, failures={})
    return Several(
        model=model,
        subject=subject,
        session=session,
        candidate=candidate,
        judgement=judgement,
        artifact=artifact,
    )


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """A torchscript-frozen artifact of an MLP for batch 1 to 4; read-only."""
    return frozen(
        seeded(Mlp),
        random_inputs(2, 4),
        tmp_path_factory.mktemp("torchscript-frozen") / "mlp",
        name="mlp",
        recipe="torchscript-frozen",
        device_class=HERE,
    )


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    """The portable artifact of the same MLP; read-only."""
    return frozen(
        seeded(Mlp),
        random_inputs(2, 4),
        tmp_path_factory.mktemp("portable") / "mlp",
        name="mlp",
        recipe="portable",
        device_class="portable",
    )


@pytest.fixture(scope="session")
def published(
    scripted: Frozen, portable: Frozen, tmp_path_factory: pytest.TempPathFactory
) -> Store:
    """A store with version 1 of `mlp` for this machine's class and `portable`; read-only."""
    store = Store.open(str(tmp_path_factory.mktemp("published")), create=True)
    store.publish(
        "mlp",
        source_key="key",
        artifacts=[scripted.artifact, portable.artifact],
    )
    return store


@pytest.fixture
def store(published: Store, tmp_path: Path) -> Store:
    """A copy of the published store, which a test may change."""
    return Store(Path(shutil.copytree(published.root, tmp_path / "store")))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an empty database, mlflow.db: making one takes MLflow seconds."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("template")
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """The address of an S3 server."""
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a prefix in an empty bucket; this process and its children use it with a cache of
    their own.
    """
    for name, value in {
        **ENVIRONMENT,
        "AWS_ENDPOINT_URL": s3_address,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    make_bucket(s3_address, name)
    return f"s3://{name}/models"


@pytest.fixture(scope="session")
def registry_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    """Debian's docker-registry; skips where it is not installed."""
    with running_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def registry(
    registry_server: RunningRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The URI of an empty store in a registry with TLS; this process and its children log in to it,
    and have a cache of their own.
    """
    monkeypatch.setenv("DOCKER_CONFIG", str(registry_server.docker_config))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("freezer.files.registries.BACKOFF_S", 0.01)
    return (
        f"oci://{registry_server.host}/fleet-{uuid.uuid4().hex[:12]}/models"
        f"?tls_ca_file_path={registry_server.authority}"
    )


@pytest.fixture
def front(registry_server: RunningRegistry, registry: str) -> Iterator[Front]:
    """A front before the registry, with a login."""
    with front_of(registry_server) as opened:
        yield opened


@pytest.fixture
def gs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a prefix in an empty bucket of an emulator of Google Cloud Storage."""
    server_module = pytest.importorskip("gcp_storage_emulator.server")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = server_module.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    try:
        port = server._api._httpd.server_address[1]
        yield f"gs://anonymous@bucket/models?endpoint_override=127.0.0.1:{port}&scheme=http&retry_limit_seconds=2"
    finally:
        server.stop()
