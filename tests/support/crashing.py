"""Campaigns that kill their own process at an instant: before or after the n-th step that changes a
disk or MLflow.

`python -m tests.support.crashing HERE=FOLDER portable=FOLDER` imports everything once, and then
for each line `FOLDER NUM` on its
standard input runs a campaign in a fork: store and database in FOLDER, killed with SIGKILL at
instant NUM (0: never). It answers with the exit status and the number of instants. The builds and
judges are real tasks, in this process, whose children are replaced."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlflow

from freezer.artifact import Artifact, Measured, write_artifact
from freezer.store import Store
from pipeline.ledger import Ledger
from pipeline.planning import FileDigests, Plan
from pipeline.records import BuildResult, Failure
from pipeline.scheduling import Executor
from pipeline.sources import Materials
from pipeline.worker import (
    BuildRequest,
    JudgeRequest,
    JudgeResult,
    build_task,
    judge_task,
)
from pipeline.worker.child import End
from pipeline.workspace import remove_abandoned, workplace
from tests.support.campaigns import entry, run_with
from tests.support.one_node import InProcess, OneNode
from tests.support.steps import HERE

CAMPAIGN = "crash"
MODELS = {
    "first": {HERE: "published", "portable": "published"},
    "kept": {HERE: "kept-eager", "portable": "published"},
    "drifts": {HERE: "rejected", "portable": "rejected"},
    "gone": {HERE: "failed", "portable": "failed"},
    "crashes": {HERE: "crashed", "portable": "published"},
}

ON_DISK = ("fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir")
IN_MLFLOW = (
    *(
        "create_run",
        "log_batch",
        "log_text",
        "log_figure",
        "set_terminated",
        "update_run",
        "delete_run",
    ),
    *(
        "create_logged_model",
        "log_model_artifacts",
        "finalize_logged_model",
        "create_registered_model",
    ),
    *("create_model_version", "set_model_version_tag", "set_registered_model_alias"),
)


class Instants:
    """Counts the steps that change something, and kills this process at one of them."""

    def __init__(self, die_at: int) -> None:
        self.num, self._die_at = 0, die_at
        self._lock = threading.Lock()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **named: Any) -> Any:
            if threading.current_thread().name == "lease":
                return function(*args, **named)
            self._tick()
            value = function(*args, **named)
            self._tick()
            return value

        return step

    def _tick(self) -> None:
        with self._lock:
            self.num += 1
            if self.num == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)


def _crashes(request: JudgeRequest) -> bool:
    return MODELS[request.entry.name][request.device_class] == "crashed"


def _judged(request: JudgeRequest, staging: Path, artifacts: Mapping[str, Artifact]) -> JudgeResult:
    """The result of one judge; it writes what is published."""
    verdict = MODELS[request.entry.name][request.device_class]
    if verdict == "published":
        judged = staging / request.device_class
        copy = staging / f"copy-{request.device_class}"
        shutil.copytree(artifacts[request.device_class].folder, copy)
        judged.mkdir()
        write_artifact(artifacts[request.device_class].manifest, copy, judged / "artifact")
    return JudgeResult(
        verdict=verdict,
        reason="because",
        has_artifact=verdict == "published",
        recipe=next(iter(request.builds)),
        figures=Measured(speedup=2.0),
        judge_s=2.5,  # also of one that is judged beside, or again by itself
    )


def child_of(artifacts: dict[str, Artifact]) -> Callable[..., End]:
    """Replace the child of a build or judge: write what it would write."""

    def isolated(child: Any, request: Any, staging: Path, *_: Any) -> End:
        verdict = MODELS[request.entry.name][request.device_class]
        if isinstance(request, BuildRequest):
            if verdict == "failed":
                return End(
                    failure=Failure(kind="capture", code="CP-CAPTURE", message="no graph"),
                    wall_s=0.5,
                )
            for recipe, key in request.builds.items():
                (staging / recipe).mkdir()
                (staging / recipe / "payload").write_text(key)
                workplace(request.store).keep(staging / recipe, "candidates", key)
            built = [BuildResult(key=key, recipe=recipe) for recipe, key in request.builds.items()]
            return End(parts=tuple((result, 0) for result in built))
        judged = [each for each in (request.beside, request) if each is not None]
        parts = [_judged(each, staging, artifacts) for each in judged if not _crashes(each)]
        failure = None
        if _crashes(request):
            failure = Failure(kind="crash", code="CP-CRASH", message="it died")
        return End(parts=tuple(parts), failure=failure, wall_s=2.5)

    return isolated


def run_here(folder: Path, artifacts: dict[str, Artifact]) -> int:
    """Run or continue the campaign in this process, and return its exit code."""
    store = Store.open(str(folder / "store"), create=True)
    uri = f"sqlite:///{folder}/mlflow.db"
    for module in (build_task, judge_task):
        setattr(module, "in_child", child_of(artifacts))  # noqa: B010
    remove_abandoned(store.root)
    entries = [entry(name, folder, tags={"team": "a"}) for name in MODELS]

    def executor(plan: Plan, ledger: Ledger, digests: FileDigests) -> Executor:
        materials = Materials(store.root, uri, digests)
        fleet = OneNode(InProcess(), store.root)
        return Executor(plan, fleet, store, ledger, materials, lambda _: None)

    return run_with(executor, store, uri, CAMPAIGN, entries).exit_code


def trial(folder: Path, die_at: int, artifacts: dict[str, Artifact]) -> tuple[int, int]:
    """Run the campaign in a fork; return its wait status and number of instants."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            instants = Instants(die_at)
            for name in ON_DISK:
                setattr(os, name, instants.around(getattr(os, name)))
            for name in IN_MLFLOW:
                setattr(
                    mlflow.MlflowClient, name, instants.around(getattr(mlflow.MlflowClient, name))
                )
            code = run_here(folder, artifacts)
            os.write(write, str(instants.num).encode())
            os._exit(code)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(99)
    os.close(write)
    status = os.waitpid(pid, 0)[1]
    with os.fdopen(read) as counted:
        return status, int(counted.read() or 0)


def main(*folders: str) -> None:
    """Run trials until the input ends."""
    import mlflow.pyfunc

    import freezer.pyfunc
    from pipeline.tracking import projection

    assert projection, (freezer.pyfunc, mlflow.pyfunc)
    artifacts = {
        name: Artifact.read(Path(folder))
        for name, _, folder in (text.partition("=") for text in folders)
    }
    sys.stdout.write("ready\n")
    for line in sys.stdin:
        sys.stdout.flush()
        folder, die_at = line.split()
        status, num = trial(Path(folder), int(die_at), artifacts)
        sys.stdout.write(f"{status} {num}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
