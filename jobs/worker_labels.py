"""`coldpress worker-labels`: arguments of `ray start` for this machine. Usage:

    export $(coldpress worker-labels --environment)
    ray start --address=HEAD:6379 $(coldpress worker-labels)

Needs neither ray nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from freezer.cli import exiting
from freezer.errors import UsageError
from freezer.hardware import (
    PORTABLE,
    Machine,
    available_cpus,
    best_level,
    detect,
    device_class,
    machine_bytes,
    this_host,
)
from pipeline.records import LABEL

MEMORY_SHARE = 0.8
"""Share of the machine's memory that Ray schedules; the rest is for Ray itself and for low
estimates.
"""

_OBJECT_STORE_BYTES = 200_000_000
"""Size of the object store; Ray's default is 30% of the memory, but tasks never exchange weights.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """Resources of a worker.

    Attributes:
        classes: device classes of its labels.
        num_cpus, num_gpus, memory_bytes: what Ray schedules.
        environment: variables to start Ray with.
    """

    classes: tuple[str, ...]
    num_cpus: int
    num_gpus: int
    memory_bytes: int
    environment: Mapping[str, str]

    @property
    def arguments(self) -> list[str]:
        """Arguments of `ray start`, without spaces."""
        return [
            f"--labels={','.join(f'{LABEL}{name}=true' for name in self.classes)}",
            f"--num-cpus={self.num_cpus}",
            f"--num-gpus={self.num_gpus}",
            f"--memory={self.memory_bytes}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
        ]


@app.command()
@exiting()
def main(
    device_class_: Annotated[
        list[str] | None,
        typer.Option(
            "--device-class",
            help="Serve only this class. Repeatable. Default: all classes of the machine.",
        ),
    ] = None,
    environment: Annotated[
        bool,
        typer.Option("--environment", help="Print the environment variables to start Ray with."),
    ] = False,
) -> None:
    """Print the arguments of `ray start` for this machine: labels, CPUs, GPUs, memory."""
    worker = this_worker(device_class_ or ())
    words = worker.arguments
    if environment:
        words = [f"{name}={value}" for name, value in worker.environment.items()]
    print(" ".join(words))


def this_worker(wanted: Collection[str]) -> Worker:
    """Describe this machine as a worker of some classes, or of all its classes.

    Tasks of a class always run under its limits. To restrict everything else too (portable tasks,
    torch's own choices), a worker of lesser classes is started under the limits of the best one.

    Raises:
        UsageError: the machine cannot serve a class, or has GPUs of several classes, among which
            Ray cannot choose.
    """
    machine = detect()
    problem = _problem(machine, wanted)
    if problem is not None:
        raise UsageError(problem, code="CP-DEVICE-CLASS")
    names = wanted or machine.classes
    classes = [name for name in machine.classes if name != PORTABLE and name in names]
    gpus = [name for name in classes if device_class(name).kind == "cuda"]
    return Worker(
        classes=tuple(classes),
        num_cpus=available_cpus(),
        num_gpus=_num_visible(len(this_host().gpus)) if gpus else 0,
        memory_bytes=int(machine_bytes() * MEMORY_SHARE),
        environment=_environment(classes, machine.classes),
    )


def _problem(machine: Machine, wanted: Collection[str]) -> str | None:
    """The reason why the machine cannot be a worker of the classes."""
    for name in wanted:
        device_class(name)  # raises for an unknown one
        if name not in machine.classes:
            reason = machine.why_not.get(name, "the hardware is different")
            served = ", ".join(machine.classes)
            return f"this machine cannot serve {name}: {reason}; it can serve {served}"
    if set(wanted or machine.classes) == {PORTABLE}:
        return (
            "this machine has no device class but portable, and a worker needs one; see `coldpress"
            " classes`"
        )
    gpus = [name for name in machine.classes if device_class(name).kind == "cuda"]
    if len(gpus) > 1:
        return (
            f"this machine has GPUs of several classes ({', '.join(gpus)}), and Ray cannot choose"
            " among them; set CUDA_VISIBLE_DEVICES to the GPUs of one class, and start one worker"
            " for each class"
        )
    return None


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
