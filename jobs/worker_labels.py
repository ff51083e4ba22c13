"""`python -m jobs.worker_labels`: arguments of `ray start` for this machine. Usage:

    env $(python -m jobs.worker_labels --environment) ray start --address=HEAD:6379 $(python -m
    jobs.worker_labels)

Needs neither ray nor torch.
"""

from __future__ import annotations

import json as json_
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

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
from jobs.exits import exiting
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
        environment: variables to start Ray with.
    """

    classes: tuple[str, ...]
    num_cpus: int
    num_gpus: int
    memory_bytes: int
    environment: Mapping[str, str]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its node."""
        return {f"{LABEL}{name}": "true" for name in self.classes}

    @property
    def arguments(self) -> list[str]:
        """Arguments of `ray start`, without spaces."""
        return [
            f"--labels={','.join(f'{key}={value}' for key, value in self.labels.items())}",
            f"--num-cpus={self.num_cpus}",
            f"--num-gpus={self.num_gpus}",
            f"--memory={self.memory_bytes}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "labels": self.labels,
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "memory_bytes": self.memory_bytes,
            "arguments": self.arguments,
            "environment": dict(self.environment),
        }


@app.command()
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
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print the arguments of `ray start` for this machine: labels, CPUs, GPUs, memory."""
    with exiting(Console(stderr=True)):
        worker = this_worker(device_class_ or ())
    if json:
        print(json_.dumps(worker.to_json(), indent=2))
    elif environment:
        print(" ".join(f"{name}={value}" for name, value in worker.environment.items()))
    else:
        print(" ".join(worker.arguments))


def this_worker(wanted: Sequence[str]) -> Worker:
    """Describe this machine as a worker of some classes, or of all its classes.

    Tasks of a class always run under its limits. To restrict everything else too (portable tasks,
    torch's own choices), a worker of lesser classes is started under the limits of the best one.

    Raises:
        UsageError: the machine cannot serve a class, or has GPUs of several classes, among which
            Ray cannot choose.
    """
    machine = detect()
    for name in wanted:
        device_class(name)
        if name not in machine.classes:
            why = machine.why_not.get(name, "the hardware is different")
            raise UsageError(
                f"this machine cannot serve {name}: {why}; it can serve"
                f" {', '.join(machine.classes)}",
                code="CP-DEVICE-CLASS",
            )
    classes = tuple(
        name for name in machine.classes if name != PORTABLE and (not wanted or name in wanted)
    )
    if not classes:
        raise UsageError(
            "this machine has no device class but portable, and a worker needs one; see `coldpress"
            " classes`",
            code="CP-DEVICE-CLASS",
        )
    gpus = [name for name in machine.classes if device_class(name).kind == "cuda"]
    if len(gpus) > 1:
        raise UsageError(
            f"this machine has GPUs of several classes ({', '.join(gpus)}), and Ray cannot choose"
            " among them; set CUDA_VISIBLE_DEVICES to the GPUs of one class, and start one worker"
            " for each class",
            code="CP-DEVICE-CLASS",
        )
    num_gpus = _num_visible(len(this_host().gpus)) if set(gpus) & set(classes) else 0
    return Worker(
        classes=classes,
        num_cpus=available_cpus(),
        num_gpus=num_gpus,
        memory_bytes=int(machine_bytes() * MEMORY_SHARE),
        environment=_environment(classes, machine.classes),
    )


def _environment(classes: Sequence[str], served: Sequence[str]) -> dict[str, str]:
    """Return normal niceness, for timings; idle workers for two classes; token authentication;
    limits of a lesser class.
    """
    level = best_level(classes)
    limits = device_class(level).limits if level and level != best_level(served) else {}
    # A head demands the token that it finds; other nodes send theirs only in this mode.
    mode = {"RAY_AUTH_MODE": "token"} if "RAY_AUTH_MODE" not in os.environ and _has_token() else {}
    return {
        "RAY_worker_niceness": "0",
        "RAY_num_workers_soft_limit": str(2 * available_cpus()),
        **mode,
        **limits,
    }


def _has_token() -> bool:
    """Whether Ray would find a token; a local Ray writes one into the home of its user."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or path.is_file()


def _num_visible(num_gpus: int) -> int:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        num_gpus
        if listed is None
        else min(num_gpus, len([part for part in listed.split(",") if part.strip()]))
    )


if __name__ == "__main__":
    app()
