"""Targets: the device class, thread counts and device that a build and its judge are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from freezer.codec import Json, frozen
from freezer.errors import UsageError
from freezer.freezing.environment import check_environment, cpu_toolchain
from freezer.freezing.models import device_of_model
from freezer.hardware import (
    PORTABLE,
    DeviceClass,
    best_level,
    describe_host,
    detect,
    device_class,
    lesser_classes,
    packed_dtype,
    this_host,
)
from freezer.runtime.devices import CPU, class_of, current, device_of, gpu_versions, with_index
from freezer.runtime.torch_settings import plain_precision, threads


@frozen
class Target:
    """The device class and thread counts that payloads are built for.

    Attributes:
        num_threads: thread count of the verdict, and of the first payload.
        further_threads: other counts, each of which may get payloads of its own.
        device: where the model is captured, built and judged: the CPU, or for a CUDA class a GPU
            with its index.
    """

    device_class: DeviceClass
    num_threads: int
    further_threads: tuple[int, ...] = ()
    device: torch.device = CPU

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """All thread counts, the one of the verdict first."""
        return (self.num_threads, *self.further_threads)

    def at(self, num_threads: int) -> Target:
        """The same class with one thread count."""
        return replace(self, num_threads=num_threads, further_threads=())


def target_here(
    name: str, num_threads: int | Sequence[int], device: str | torch.device | None = None
) -> Target:
    """The target, if this process can build and judge for it.

    Args:
        name: name of the device class.
        num_threads: one count, or several with that of the verdict first. Payloads for GPUs and
            portable ones fit any count.
        device: for a CUDA class, the GPU to build on (`cuda:1`); by default the current one if it
            is of the class, otherwise the first that is.

    Raises:
        UsageError: the machine is not of the class, the process does not have the class's limits,
            the device is of another class, or a count is below 1 or repeated.
    """
    counts = _counts(num_threads)
    wanted, machine = device_class(name), detect()
    if wanted.kind == "cuda":
        check_environment(wanted)
        gpu = device_of(wanted, machine, device)
        return Target(device_class=wanted, num_threads=counts[0], device=gpu)
    if name not in machine.classes:
        reason = machine.why_not.get(name, "the hardware is of another kind")
        raise UsageError(
            f"this machine cannot build for {name}: {reason}; it can for"
            f" {', '.join(machine.classes)}",
            code="CP-DEVICE-CLASS",
        )
    target = Target(
        device_class=wanted,
        num_threads=counts[0],
        further_threads=() if wanted.kind == "portable" else counts[1:],
    )
    packed_layouts(target, ("float32",))
    check_environment(wanted)
    return target


def _counts(num_threads: int | Sequence[int]) -> tuple[int, ...]:
    counts = (num_threads,) if isinstance(num_threads, int) else tuple(num_threads)
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise UsageError(
            f"got thread counts {list(counts)}, expected one or more of at least 1, without"
            " repetition"
        )
    return counts


def resolve_device(
    model: nn.Module | None,
    name: str,
    device: str | torch.device | None,
    inputs: Iterable[Tensor] = (),
) -> tuple[str, torch.device]:
    """Choose the device class and the device of a freeze.

    Args:
        model: model to freeze; None if it is not loaded yet, which then happens on the CPU.
        name: name of a device class, or `auto`.
        device: requested device; None for the model's own.
        inputs: inputs of the model, whose device counts if the model has no weights.

    Returns:
        The name, still `auto` on a CPU, where the model's weights decide; and a GPU with its index,
        or the CPU.

    Raises:
        UsageError: this process has no such device, or it is not of the class.
    """
    own = CPU if model is None else device_of_model(model, inputs)
    if device is None and own.type == "cuda" and name in ("auto", class_of(own)):
        device = own
    if name == "auto" and device is not None and with_index(device).type == "cuda":
        name = class_of(with_index(device))
    if name == "auto" or device_class(name).kind != "cuda":
        if device is not None and with_index(device).type != "cpu":
            raise UsageError(
                f"got device {device} for {name}, which runs on a CPU; omit the device, or name the"
                " GPU's class",
                code="CP-DEVICE-CLASS",
            )
        return name, CPU
    return name, target_here(name, 1, device).device


def class_here(dtypes: Iterable[str], precision: Iterable[str] = ()) -> str:
    """The device class that `auto` means in this process for a model whose weights have these
    dtypes.

    It is the machine's level; or the machine's own finer class if oneDNN packs such weights
    differently than at that level, such as bfloat16 and int8 on a CPU with instructions for them;
    or if its hardware gains from a lower precision that is consented to.
    """
    machine, dtypes = detect(), set(dtypes)
    level = best_level(machine.classes) or PORTABLE
    own = machine.hardware or level
    if own in machine.classes and set(precision) & set(device_class(own).precisions):
        return own
    for name in (level, machine.hardware):
        if name in machine.classes and machine.serves(_layouts(device_class(name), dtypes)):
            return name
    return level


def _layouts(wanted: DeviceClass, dtypes: Iterable[str]) -> dict[str, str]:
    """The layouts of a class for weights of these dtypes."""
    packed = set(map(packed_dtype, dtypes))
    return {dtype: layout for dtype, layout in wanted.layouts.items() if dtype in packed}


def packed_layouts(target: Target, dtypes: Iterable[str]) -> dict[str, str]:
    """The layouts of packed weights for the target's class, by dtype; dtypes that are never packed
    are omitted.

    Args:
        target: target of this process.
        dtypes: dtypes of the tensors that a program computes with, such as `float32`.

    Raises:
        UsageError: oneDNN uses another layout in this process; code CP-DEVICE-CLASS.
    """
    wanted, machine = target.device_class, detect()
    if wanted.kind != "cpu":
        return {}
    found = _layouts(wanted, dtypes)
    if machine.serves(found):
        return found
    limits = " ".join(f"{key}={value}" for key, value in wanted.limits.items())
    name = next(name for name, layout in found.items() if machine.layouts[name] != layout)
    raise UsageError(
        f"this process would pack weights for {machine.layouts[name]} ({name}), and those of"
        f" {wanted.name} are packed for {found[name]} ({name}); set {limits} before Python starts,"
        f" use `coldpress freeze --device-class {wanted.name}`, which does, or freeze for"
        " `auto`",
        code="CP-DEVICE-CLASS",
    )


def check_unlimited(target: Target, engine: str) -> None:
    """Check that an engine that uses every instruction of its CPU is as fast here as on a CPU of
    the target's class.

    Raises:
        UsageError: the class is for GPUs (code CP-DEVICE-CLASS), or lesser than this machine's
            level (code CP-BETTER-CPU).
    """
    name = target.device_class.name
    if target.device_class.kind != "cpu":
        raise UsageError(
            f"{engine} runs on CPUs only, so not for {name}; omit the recipe",
            code="CP-DEVICE-CLASS",
        )
    if name in lesser_classes(describe_host(this_host(), {}).classes):
        raise UsageError(
            f"{engine} cannot be limited to the instructions of {name}, and uses all of this CPU;"
            f" it needs a machine whose best class is {name}",
            code="CP-BETTER-CPU",
        )


@contextmanager
def working_conditions(target: Target) -> Iterator[None]:
    """Threads, precision and device of everything that is built or measured for a target."""
    with threads(target.num_threads), plain_precision(target.device), current(target.device):
        yield


def toolchain(device: torch.device = CPU) -> Json:
    """Versions of everything that shapes a payload; for a GPU also its driver and name."""
    return {**cpu_toolchain(), **gpu_versions(device)}
