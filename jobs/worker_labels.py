"""`python -m jobs.worker_labels`: what `ray start` must be told on this machine. Use it as

    env $(python -m jobs.worker_labels --environment) ray start --address=HEAD:6379 $(python -m jobs.worker_labels)

Needs neither ray nor torch.
"""

from __future__ import annotations

import json as json_
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from freezer.errors import UsageError
from freezer.hardware.cgroups import available_cpus
from freezer.hardware.device_classes import PORTABLE, best_level, device_class
from freezer.hardware.host import this_host
from freezer.hardware.machine import detect
from jobs.exits import exiting

LABEL = "coldpress.dev/"
MEMORY_SHARE = 0.8
"""Share of the machine's memory that Ray may give out; the rest is for Ray itself, and for what was estimated too low."""

OBJECT_STORE_BYTES = 200_000_000
"""Tasks exchange paths and figures, never weights. Without a size Ray takes 30% of the memory."""

MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Of a container, below /sys/fs/cgroup: v2, v1."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """What a machine offers as a worker.

    Attributes:
        classes: that it is labelled with.
        environment: to start Ray under.
    """

    classes: tuple[str, ...]
    num_cpus: int
    num_gpus: int
    memory_bytes: int
    environment: Mapping[str, str]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its node."""
        return {f"{LABEL}{name}": "true" for name in self.classes}

    @property
    def arguments(self) -> list[str]:
        """Of `ray start`; none holds a space."""
        return [
            f"--labels={','.join(f'{key}={value}' for key, value in self.labels.items())}",
            f"--num-cpus={self.num_cpus}",
            f"--num-gpus={self.num_gpus}",
            f"--memory={self.memory_bytes}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
        ]

    def to_json(self) -> dict[str, Any]:
        """All of it, for programs."""
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
        typer.Option("--device-class", help="Serve this class alone. Repeatable. Default: all that the machine can."),
    ] = None,
    environment: Annotated[bool, typer.Option("--environment", help="Print the variables to start Ray under instead.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
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
    """What this machine offers, cut to the classes that are wanted, where any are.

    A class's own tasks run under its limits wherever they run. A worker that is to be of a lesser class than its machine in all
    that it does (what is portable, what torch picks by itself) is started under the limits of the best class that is left.

    Raises:
        UsageError: it cannot serve a wanted class, or has GPUs of several classes, of which Ray would give out any.
    """
    machine = detect()
    for name in wanted:
        device_class(name)
        if name not in machine.classes:
            why = machine.why_not.get(name, "the hardware is of another kind")
            raise UsageError(
                f"this machine cannot serve {name}: {why}; it can {', '.join(machine.classes)}", code="CP-DEVICE-CLASS"
            )
    classes = tuple(name for name in machine.classes if name != PORTABLE and (not wanted or name in wanted))
    if not classes:
        raise UsageError(
            "this machine is of no device class but portable, and a worker needs one; see `coldpress classes`",
            code="CP-DEVICE-CLASS",
        )
    gpus = [name for name in machine.classes if device_class(name).kind == "cuda"]
    if len(gpus) > 1:
        raise UsageError(
            f"this machine has GPUs of several classes ({', '.join(gpus)}), and Ray would give out any of them; set "
            "CUDA_VISIBLE_DEVICES to those of one class, and start one worker for each",
            code="CP-DEVICE-CLASS",
        )
    num_gpus = _num_visible(len(this_host().gpus)) if set(gpus) & set(classes) else 0
    return Worker(
        classes=classes,
        num_cpus=available_cpus(),
        num_gpus=num_gpus,
        memory_bytes=int(_memory_bytes() * MEMORY_SHARE),
        environment=_environment(classes, machine.classes),
    )


def _environment(classes: Sequence[str], served: Sequence[str]) -> dict[str, str]:
    """Ray's workers at normal niceness, since they time things; as many kept idle as two classes need; limits of a lesser class."""
    level = best_level(classes)
    limits = device_class(level).limits if level and level != best_level(served) else {}
    return {"RAY_worker_niceness": "0", "RAY_num_workers_soft_limit": str(2 * available_cpus()), **limits}


def _num_visible(num_gpus: int) -> int:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return num_gpus if listed is None else min(num_gpus, len([part for part in listed.split(",") if part.strip()]))


def _memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The machine's memory, or its container's."""
    total: int = psutil.virtual_memory().total
    for name in MEMORY_LIMITS:
        path = groups / name
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            total = min(total, int(text))
    return total


if __name__ == "__main__":
    app()
