"""`coldpress promote`, `gc` and `history`, as typed; and webhooks in both directions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import requests
from typer.testing import Result

from freezer.store import Store
from jobs.lifecycle import gc_app, promote_app
from jobs.optimize import _watch
from jobs.results import history_app
from tests.support.commands import invoked
from tests.support.raylets import LOOPBACK, free_port
from tests.support.steps import write_plain_artifact


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with three versions of `tiny`, in a working directory without MLflow's database."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = Store.open(str(tmp_path / "store"), create=True)
    for number in range(3):
        artifact = write_plain_artifact(tmp_path / str(number), bytes([number]) * 1000)
        store.publish("tiny", source_key=str(number), artifacts=[artifact])
    return store.uri


class _Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.events.append(json.loads(body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hook() -> Iterator[HTTPServer]:
    """A server that keeps what is posted to it."""
    with HTTPServer((LOOPBACK, 0), _Hook) as server:
        server.events = []  # type: ignore[attr-defined]
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(app: Any, *arguments: str, code: int = 0) -> Result:
    done = invoked(app, *arguments)
    assert done.exit_code == code, (done.output, done.exception)
    return done


def names(place: str) -> list[tuple[str, int]]:
    shown = run(history_app, "tiny", "--store", place, "--json").stdout
    return [(move["name"], move["version"]) for move in json.loads(shown)["names"]]


def test_promote_moves_and_tells_hooks(place: str, hook: HTTPServer) -> None:
    url = f"http://{LOOPBACK}:{hook.server_port}/moved"
    run(promote_app, "tiny:2", "--to", "prod", "--store", place, "--hook", url)
    run(promote_app, "tiny:2", "--to", "prod", "--store", place, "--hook", url)
    canary = ("tiny:3", "--to", "prod-canary", "--share", "10%", "--store", place, "--hook", url)
    run(promote_app, *canary)
    events: list[dict[str, Any]] = hook.events  # type: ignore[attr-defined]
    seen = [(e["model"], e["name"], e["before"], e["version"], e.get("share")) for e in events]
    assert seen == [("tiny", "prod", 0, 2, None), ("tiny", "prod-canary", 0, 3, 0.1)]
    assert names(place)[:2] == [("prod-canary", 3), ("prod", 2)]
    assert sorted(names(place)[2:]) == [("latest", 1), ("latest", 2), ("latest", 3)]
    run(promote_app, "tiny", "--to", "prod-canary", "--remove", "--store", place)
    assert names(place)[0] == ("prod-canary", 0)
    assert "prod" in run(history_app, "tiny", "--store", place).stdout


@pytest.mark.parametrize("url", [f"http://{LOOPBACK}:1/", "nowhere", "ftp://x/"])
def test_a_failing_hook_keeps_the_move(place: str, url: str) -> None:
    done = run(promote_app, "tiny:1", "--to", "prod", "--store", place, "--hook", url)
    assert "hook" in done.output
    assert Store.open(place).version("tiny:prod").number == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("tiny:1", "--to", "latest"),
        ("tiny:1", "--to", "prod", "--share", "10%"),
        ("tiny:1", "--to", "prod-canary"),
        ("tiny:1", "--to", "prod-canary", "--share", "ten"),
    ],
)
def test_wrong_promotions_change_nothing(place: str, arguments: tuple[str, ...]) -> None:
    run(promote_app, *arguments, "--store", place, code=2)
    run(promote_app, "tiny", "--to", "prod", "--remove", "--store", place, code=1)
    run(promote_app, "tiny:9", "--to", "prod", "--store", place, code=1)
    assert Store.open(place).layout("tiny").tags().keys() == {"1", "2", "3", "latest"}


def test_gc_marks_then_removes(place: str) -> None:
    def gc(*arguments: str) -> list[str]:
        """The first line of the table, of versions: removed, and marked."""
        shown = run(gc_app, "--keep", "1", "--store", place, *arguments).stdout
        words = shown.splitlines()[1].split()
        return [words[0], words[1], words[4]]

    assert gc("--dry-run", "--grace-h", "0") == ["versions", "1", "0"]
    assert gc() == ["versions", "0", "1"]
    assert Store.open(place).versions("tiny") == [1, 2, 3]
    gc("--grace-h", "0")
    assert Store.open(place).versions("tiny") == [2, 3]
    assert gc()[0] != "versions"


def test_a_webhook_starts_the_next_pass() -> None:
    """Polling would take an hour."""
    port, passes = free_port(), list[float]()

    def once() -> int:
        passes.append(time.monotonic())
        if len(passes) == 3:
            return 130
        answer = requests.post(f"http://{LOOPBACK}:{port}/", json={"entity": "x"}, timeout=10)
        assert answer.status_code == 204
        return 0

    assert _watch(once, 3600.0, f"{LOOPBACK}:{port}") == 130
    assert passes[-1] - passes[0] < 60
