"""`coldpress worker-labels`: arguments of `ray start` for this machine. Usage:

    export $(coldpress worker-labels --environment)
    ray start --address=HEAD:6379 $(coldpress worker-labels)

Needs neither ray nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

from typer import Option

from freezer.cli import command_app, exiting
from freezer.codec import frozen
from freezer.errors import UsageError
from freezer.hardware import (
    PORTABLE,
    available_cpus,
    best_level,
    detect,
    device_class,
    machine_bytes,
    this_host,
)
from pipeline.records import labels_of

MEMORY_SHARE = 0.8
"""Share of the machine's memory that Ray schedules; the rest is for Ray itself and for low
estimates.
"""

_OBJECT_STORE_BYTES = 200_000_000
"""Size of the object store; Ray's default is 30% of the memory, but tasks never exchange weights.
"""

app = command_app()


@frozen
class Worker:
    """A worker.

    Attributes:
        arguments: arguments of `ray start`, without spaces.
        environment: variables to start Ray with.
    """

    arguments: list[str]
    environment: Mapping[str, str]


@app.command()
@exiting()
def main(
    device_class_: Annotated[
        list[str] | None,
        Option(
            "--device-class",
            help="Serve only this class. Repeatable. Default: all classes of the machine.",
        ),
    ] = None,
    environment: Annotated[
        bool,
        Option("--environment", help="Print the environment variables to start Ray with."),
    ] = False,
) -> None:
    """Print the arguments of `ray start` for this machine: labels, CPUs, GPUs, memory."""
    worker = this_worker(device_class_ or ())
    variables = [f"{name}={value}" for name, value in worker.environment.items()]
    print(*(variables if environment else worker.arguments))


def this_worker(wanted: Collection[str]) -> Worker:
    """Describe this machine as a worker of some classes, or of all its classes.

    Tasks of a class always run under its limits. To restrict everything else too (portable tasks,
    torch's own choices), a worker of lesser classes is started under the limits of the best one.

    Raises:
        UsageError: the machine cannot serve a class, or has GPUs of several classes, among which
            Ray cannot choose.
    """
    machine = detect()
    for name in wanted:
        device_class(name)  # raises for an unknown one
        if name not in machine.classes:
            reason = machine.why_not.get(name, "the hardware is different")
            _refuse(f"this machine cannot serve {name}: {reason}")
    names = wanted or machine.classes
    classes = [name for name in machine.classes if name != PORTABLE and name in names]
    if not classes:
        _refuse("this machine has no device class but portable; see `coldpress classes`")
    gpus = [name for name in machine.classes if device_class(name).kind == "cuda"]
    if len(gpus) > 1:
        _refuse(
            f"this machine has GPUs of several classes ({', '.join(gpus)}); set"
            " CUDA_VISIBLE_DEVICES to those of one class, and start one worker for each class"
        )
    num_gpus = _num_visible(len(this_host().gpus)) if set(gpus) & set(classes) else 0
    return Worker(
        arguments=[
            f"--labels={','.join(map('='.join, labels_of(classes).items()))}",
            f"--num-cpus={available_cpus()}",
            f"--num-gpus={num_gpus}",
            f"--memory={int(machine_bytes() * MEMORY_SHARE)}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
        ],
        environment=_environment(classes, machine.classes),
    )


def _refuse(problem: str) -> NoReturn:
    raise UsageError(problem, code="CP-DEVICE-CLASS")


def _environment(classes: Sequence[str], served: Sequence[str]) -> dict[str, str]:
    """Return normal niceness, for timings; idle workers for two classes; token authentication;
    limits of a lesser class.
    """
    environment = {
        "RAY_worker_niceness": "0",
        "RAY_num_workers_soft_limit": str(2 * available_cpus()),
    }
    # A head demands the token that it finds; other nodes send theirs only in this mode.
    if "RAY_AUTH_MODE" not in os.environ and _has_token():
        environment["RAY_AUTH_MODE"] = "token"
    level = best_level(classes)
    if level and level != best_level(served):
        environment.update(device_class(level).limits)
    return environment


def _has_token() -> bool:
    """Whether Ray would find a token; a local Ray writes one into the home of its user."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or path.is_file()


def _num_visible(num_gpus: int) -> int:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return num_gpus
    return min(num_gpus, len([part for part in listed.split(",") if part.strip()]))


if __name__ == "__main__":
    app()
