"""The monitor of a head: answers, silence, and the end of the driver."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

from freezer.errors import InfrastructureError
from pipeline.cluster.head_monitor import ORDER_S, SILENCE_S, Head
from tests.support.clock import Clock
from tests.support.commands import finished
from tests.support.raylets import LOOPBACK, ROOT


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as found:
        yield found


def address_of(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


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
    ended: list[InfrastructureError] = []
    head = Head(address, end=ended.append, clock=clock)
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
    assert ended == []
    clock.now += ORDER_S
    head.check()
    assert [error.code for error in ended] == ["CP-RAY"]


BLOCKED = """
import sys, time
from pipeline.cluster import head_monitor
head_monitor.SILENCE_S, head_monitor.ORDER_S, head_monitor.CHECK_INTERVAL_S = 0.1, 0.1, 0.05
with head_monitor.Head(sys.argv[1]).watched():
    print("within a call of Ray's", end="")
    time.sleep(60)
"""


def test_a_blocked_driver_is_ended_with_a_message() -> None:
    with socket.create_server((LOOPBACK, 0)) as closed:
        address = address_of(closed)
    done = finished(sys.executable, "-c", BLOCKED, address, cwd=ROOT, timeout_s=30)
    assert done.returncode == 3
    assert done.stdout == "within a call of Ray's"
    assert done.stderr.startswith("CP-RAY: the head of the Ray cluster at ")


@pytest.mark.parametrize(
    ("address", "silent"), [("auto", False), ("127.0.0.1", False), ("ray://127.0.0.1:9", True)]
)
def test_only_addresses_with_a_port_are_checked(address: str, silent: bool) -> None:
    head = Head(address)
    head.check()
    assert head.is_silent == silent
