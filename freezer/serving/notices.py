"""Log why an artifact that serves may be slower than it could be. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from freezer.artifact import Manifest, Payload, counts_of, slower_than_eager
from freezer.hardware import PORTABLE

logger = logging.getLogger("coldpress")


def log_speed(
    manifest: Manifest, payloads: Sequence[Payload], num_threads: int, serving: int
) -> None:
    """Log sizes that are slower than eager, and threads that are not used.

    Args:
        manifest: of the artifact.
        payloads: that were opened.
        num_threads: that calls may use.
        serving: that calls do use.
    """
    served = {payload.path for payload in payloads}
    slower = (
        slower_than_eager(item for item in manifest.latency.points if item.payload in served)
        if manifest.latency
        else ""
    )
    if slower and manifest.device_class != PORTABLE:
        logger.warning(
            "%s for %s was measured slower than eager with %s",
            manifest.model,
            manifest.device_class,
            slower,
        )
    if counts_of(payloads) and serving != num_threads:
        logger.info(
            "%s for %s: calls run with %d of %d threads, as no payload is made for %d; for more"
            " speed freeze it with `threads: %s`",
            *(manifest.model, manifest.device_class, serving, num_threads, num_threads),
            sorted({*counts_of(manifest.payloads), num_threads}),
        )
