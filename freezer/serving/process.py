"""Options of a load, and a process that an artifact would serve in. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from freezer.codec import frozen
from freezer.errors import UsageError
from freezer.hardware import CudaHere, Host, Machine, describe_host

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey


def has_torch() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None


@frozen
class LoadOptions:
    """Options of `load`, `verify` and the speed check.

    Attributes:
        store: URI of the store; `./store` by default. Ignored for a folder.
        device_class: load only this class; `auto` loads the most specific class that serves.
        threads: threads that calls may use; by default torch's count in this process, for `numpy`
            OMP_NUM_THREADS or one for each physical core, limited by its CPU affinity and the
            quotas of its control groups. Payloads for exactly this count
            are opened, else those for the largest count below it.
        strict: raise if the first artifact does not serve, instead of trying the next. The error
            also has the refusals of the others by their manifests.
        limit_isa: allow oneDNN to be limited to the instruction set of a lesser class, for the
            whole process. Only works before torch's first oneDNN operation in the process.
        canary: run the smallest golden inputs of each payload and compare; set False only if
            another check replaces it. `verify` runs all.
        device: device to run on: `cpu`, `cuda:1`. Artifacts for other devices are refused. Default:
            the device that the artifact is made for; for a CUDA class the current GPU if it is of
            the class, else the first that is.
        trusted_keys: PEM files of public keys, one of which must have signed the artifact
            (`coldpress sign`). Empty: no signature is required. A signature names model, version
            and class, and is valid for these only.
        min_version: refuse an older version, which a store may offer as its latest. Ignored for a
            folder. To refuse `portable` if a better artifact is missing, name `device_class`.
        key: a user, session or machine. For the share of keys that `prod-canary` has, the version
            of `MODEL:prod-canary` is loaded in place of `MODEL:prod`.
        arrays: what calls return: `torch` for tensors, `numpy` for arrays. Both take anything that
            has `__dlpack__` or `__array__`. For `numpy`, payloads of ONNX Runtime and OpenVINO, and
            Inductor's for CPUs, are opened without importing torch. By default `torch` where it is
            installed, else `numpy`.
        runtime: `native` is what earlier releases called `arrays="numpy"` on the CPU.
    """

    store: str | None = None
    device_class: str = "auto"
    threads: int | None = None
    strict: bool = False
    limit_isa: bool = False
    canary: bool = True
    device: str | None = None
    trusted_keys: Sequence[str | Path] = ()
    min_version: int = 0
    key: str | None = None
    arrays: Literal["torch", "numpy"] | None = None
    runtime: Literal["torch", "native"] | None = None

    def __post_init__(self) -> None:
        arrays = "numpy" if self.runtime == "native" else self.runtime or self.arrays
        if arrays not in (None, "torch", "numpy") or self.arrays not in (None, arrays):
            raise UsageError(f"got {self.runtime or arrays!r}, expected arrays='torch' or 'numpy'")
        if self.runtime == "native":
            if self.device not in (None, "cpu"):
                raise UsageError("runtime='native' is for the CPU; omit it")
            object.__setattr__(self, "device", "cpu")
        object.__setattr__(self, "arrays", arrays)
        if self.threads is not None and self.threads < 1:
            raise UsageError(
                f"got threads={self.threads}, expected at least 1, or None for as many as this"
                " process may use"
            )

    @property
    def as_numpy(self) -> bool:
        """Whether calls return numpy arrays."""
        return self.arrays == "numpy" or (self.arrays is None and not has_torch())


@frozen
class ServingProcess:
    """The process that an artifact would serve in, and how.

    Attributes:
        host: hardware of the machine.
        environ: environment, which may limit the instruction set.
        num_threads: threads that calls may use.
        torch_version: version of torch, for example `2.13.0+cpu`; empty if it is not installed.
        options: options of the load; `device` has the index of a GPU.
        cuda: GPUs that may serve; read only where a published class needs one.
        engines: versions of the packages of ENGINES that are installed.
        trusted_keys: keys of `options.trusted_keys`.
    """

    host: Host
    environ: Mapping[str, str]
    num_threads: int
    torch_version: str
    options: LoadOptions = field(default_factory=LoadOptions)
    cuda: CudaHere = field(default_factory=CudaHere)
    engines: Mapping[str, str] = field(default_factory=dict)
    trusted_keys: Sequence[EllipticCurvePublicKey] = ()

    def machine(self, limits: Mapping[str, str] | None = None) -> Machine:
        """The machine as this process sees it, also under further limits of the instruction set."""
        return describe_host(self.host, {**self.environ, **(limits or {})})
