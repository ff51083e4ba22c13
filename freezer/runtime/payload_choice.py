"""Choose the open payload that serves a call. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freezer.artifact import Payload, is_exact, serving, set_within
from freezer.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class OpenPayload:
    """A payload and its runner."""

    payload: Payload
    run: Callable[..., Any]


class PayloadChoice:
    """Chooses the payload that serves a call by its sizes: one for exactly these sizes, else the
    first that accepts them.

    Args:
        payloads: open payloads for one thread count, or for any.
        dims: names of the declared dims.
        held: all payloads of the artifact, for `payload_for` with a thread count.
    """

    def __init__(
        self, payloads: Sequence[OpenPayload], dims: Sequence[str], held: Sequence[Payload]
    ) -> None:
        self._payloads = tuple(payloads)
        self._dims = tuple(dims)
        self._held = tuple(held)
        self._exact: dict[tuple[int, ...], OpenPayload] = {}
        for opened in payloads:
            sizes = {dim.name: dim.min for dim in opened.payload.dims}
            if is_exact(opened.payload) and set(sizes) == set(dims):
                self._exact.setdefault(tuple(sizes[name] for name in dims), opened)

    def choose(self, point: Mapping[str, int]) -> OpenPayload:
        """The open payload that serves these sizes.

        Raises:
            ContractError: none does.
        """
        exact = self._exact.get(tuple(point[name] for name in self._dims))
        if exact is not None:
            return exact
        for opened in self._payloads:
            if opened.payload.accepts(point):
                return opened
        raise ContractError(
            f"no payload serves {dict(point)};"
            f" {_listed([opened.payload for opened in self._payloads])}"
        )

    def payload_for(self, shape: Mapping[str, int], threads: int | None) -> Payload:
        """See `FrozenModel.payload_for`."""
        if set(shape) != set(self._dims):
            expected = (
                f"those of {', '.join(self._dims)}"
                if self._dims
                else "{}: the model declares no dim"
            )
            raise ContractError(f"got sizes of {sorted(shape)}, expected {expected}")
        if threads is None:
            return self.choose(shape).payload
        found = serving(set_within(self._held, threads), shape)
        if found is None:
            raise ContractError(
                f"no payload serves {dict(shape)} with {threads} threads; {_listed(self._held)}"
            )
        return found


def _listed(payloads: Sequence[Payload]) -> str:
    sizes = {payload.path: ", ".join(str(dim) for dim in payload.dims) for payload in payloads}
    return "the artifact holds " + "; ".join(
        f"{path} ({text})" if text else path for path, text in sizes.items()
    )
