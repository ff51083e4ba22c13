"""What a result was measured on."""

from __future__ import annotations

from freezer.hardware.device_classes import best_level
from freezer.hardware.machine import detect


def where() -> list[str]:
    """The machine and the versions, one line each. What it imports is not in the memory of a benchmark that never calls it."""
    import mlflow
    import ray

    from freezer.freezing.target.target import toolchain
    from freezer.runtime.fingerprint import host_fingerprint

    host, made = host_fingerprint(), toolchain()
    level = best_level(detect().classes)
    return [
        f"- Machine: {host['cpu']}, {host['affinity']} of {host['num_cpus']} CPUs, `{level}`, Linux {host['kernel']}",
        f"- Versions: torch {made['torch']}, ray {ray.__version__}, mlflow {mlflow.__version__}, Python {made['python']}",
    ]
