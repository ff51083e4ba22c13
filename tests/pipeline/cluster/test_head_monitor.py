"""The monitor of a head: answers and silence."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from freezer.errors import InfrastructureError
from pipeline.cluster.head_monitor import SILENCE_S, Head
from tests.support.boards import Clock


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def address_of(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_head_that_listens_answers(listening: socket.socket) -> None:
    clock = Clock()
    head = Head(address_of(listening), clock=clock)
    for _ in range(3):
        clock.now += 2 * SILENCE_S  # like a driver that was suspended
        assert head.answers()
        head.check()
        assert head.answers()
        assert not head.is_silent


def test_a_head_may_come_back_in_time(listening: socket.socket) -> None:
    clock = Clock()
    address = address_of(listening)
    head = Head(address, clock=clock)
    listening.close()
    for _ in range(4):
        head.check()
        assert not head.answers()
        assert head.is_silent
        clock.now += SILENCE_S / 4
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))):
        head.check()
        clock.now += SILENCE_S
        assert head.answers()
        assert not head.is_silent


def test_a_head_that_stays_silent_ends_the_campaign(listening: socket.socket) -> None:
    clock = Clock()
    address = address_of(listening)
    head = Head(address, clock=clock)
    listening.close()
    head.check()
    clock.now += SILENCE_S + 1
    head.check()
    with pytest.raises(
        InfrastructureError,
        match=rf"{address} has not answered for 31 s; .*run the same command again",
    ) as raised:
        head.answers()
    assert raised.value.code == "CP-RAY"


@pytest.mark.parametrize(
    ("address", "silent"), [("auto", False), ("127.0.0.1", False), ("ray://127.0.0.1:9", True)]
)
def test_only_addresses_with_a_port_are_checked(address: str, silent: bool) -> None:
    head = Head(address)
    head.check()
    assert head.is_silent == silent
