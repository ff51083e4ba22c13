"""A contest of benchmarks/peers.py: the entrants of one model, each in a process of its own, timed
in interleaved blocks.

One process runs at a time. Each round runs a block of every entrant in a new random order. A round
is dropped if other processes or the hypervisor used the CPUs, by the limits of a judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.pages import ROOT
from benchmarks.peer_engines import PEERS, missing_packages
from freezer.hardware import available_cpus
from freezer.spec import SamplingPolicy
from freezer.timing import Sampling

BLOCK_S = 120.0
"""Longest block of an entrant, with the wait for its threads."""

TRIES = 3
"""Rounds tried, as a multiple of those wanted."""

SQNR_MIN_DB = 90.0
"""Outputs below it are not those of float32 arithmetic, which is near 120; bfloat16 reaches 50 to
80.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContestOptions:
    """How to compare.

    Attributes:
        peers: names of entrants.
        num_threads: of every entrant.
        rounds: undisturbed rounds to keep.
        block_ms: least duration of a block of calls.
        build_limit_s: longest build of an entrant.
    """

    peers: tuple[str, ...]
    num_threads: int
    rounds: int = 15
    block_ms: float = 60.0
    build_limit_s: float = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlace:
    """Where a model is found.

    Attributes:
        name, catalog: the entry.
        folder: for files of its entrants; temporary.
        logs: folder of logs.
        store: with its artifact.
        tracking_uri: MLflow, for sources in its registry.
    """

    name: str
    catalog: Path
    folder: Path
    logs: Path
    store: str
    tracking_uri: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """The result of one entrant.

    Attributes:
        problem: why it was not timed; empty if it was.
        note: settings that apply.
        build_s: from the loaded model to the first answers.
        max_abs_err, sqnr_db, num_different: distance from eager; see `peer_child`.
        medians_ms: median latency in each kept round.
        spun_s: median time for which its threads went on after a block.
        idle_cpu: CPU time that it used while others ran, as a share of that time.
    """

    name: str
    problem: str = ""
    note: str = ""
    build_s: float = 0.0
    max_abs_err: float = 0.0
    sqnr_db: float | None = None
    num_different: int = 0
    medians_ms: tuple[float, ...] = ()
    spun_s: float = 0.0
    idle_cpu: float = 0.0

    @property
    def differs(self) -> bool:
        """Whether its outputs are not eager's in float32."""
        return self.num_different > 0 or (self.sqnr_db is not None and self.sqnr_db < SQNR_MIN_DB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """The result of one model.

    Attributes:
        model: its name.
        entrants: in the order of PEERS.
        num_dropped: disturbed rounds; if `disturbed`, they are among the rounds that count.
        disturbed: whether so few rounds were undisturbed that all count.
        load: load average of a minute at the start; of later models it is the benchmark's own.
        seconds: that it took.
    """

    model: str
    entrants: tuple[Entrant, ...]
    num_dropped: int
    disturbed: bool
    load: float
    seconds: float
    run: str = field(default="")

    @property
    def timed(self) -> dict[str, Entrant]:
        """The entrants with measurements."""
        return {entrant.name: entrant for entrant in self.entrants if entrant.medians_ms}

    def sampling(self) -> Sampling:
        """The medians as samples, for `freezer.timing.sampling.speedup`."""
        samples = {
            name: [[median] for median in entrant.medians_ms]
            for name, entrant in self.timed.items()
        }
        return Sampling(
            samples_ms=samples,
            num_dropped=self.num_dropped,
            settled=True,
            stable=not self.disturbed,
        )


class EntrantError(Exception):
    """An entrant cannot be built, or ended."""


class Child:
    """The process of an entrant."""

    def __init__(self, name: str, place: ModelPlace, num_threads: int) -> None:
        job = {
            "peer": name,
            "model": place.name,
            "catalog": str(place.catalog),
            "folder": str(place.folder),
            "store": place.store,
            "tracking_uri": place.tracking_uri,
            "num_threads": num_threads,
        }
        self._used_s = 0.0
        cache = (
            place.folder / f"inductor-{name}"
        )  # of its own, so that each build takes its whole time
        with (place.logs / f"{place.name}-{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peer_child", json.dumps(job)],
                cwd=ROOT,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # with its compilers, for close()
            )

    def report(self, limit_s: float) -> dict[str, Any]:
        """Wait until it is built; the fields of an `Entrant` that describe the build."""
        try:
            return self._answer(limit_s)
        except EntrantError:
            self.close()
            raise

    def block(self, block_ms: float) -> dict[str, Any]:
        """Run a block; the answer of `peer_child`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"block_ms": block_ms}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EntrantError("its process ended between blocks") from None
        return self._answer(BLOCK_S)

    def cpu_s(self) -> float:
        """CPU time that the process has used."""
        with contextlib.suppress(psutil.Error):
            used = psutil.Process(self._process.pid).cpu_times()
            self._used_s = used.user + used.system
        return self._used_s

    def close(self) -> None:
        """End the process and its compilers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        if not ready:
            raise EntrantError(f"no answer within {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EntrantError(f"its process ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EntrantError(answer["error"])
        return answer


def contest(place: ModelPlace, options: ContestOptions) -> Contest:
    """Build all entrants of a model, and time them side by side."""
    started, load = time.monotonic(), os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        children, found = _built(place, options, stack)
        rounds, num_dropped = _rounds(children, found, options)
    disturbed = len(rounds) - num_dropped < min(5, options.rounds)
    kept = [answers for answers, dropped in rounds if disturbed or not dropped]
    return Contest(
        model=place.name,
        entrants=tuple(_timed(found[name], kept) for name in PEERS if name in found),
        num_dropped=num_dropped,
        disturbed=disturbed,
        load=load,
        seconds=time.monotonic() - started,
    )


def _built(
    place: ModelPlace, options: ContestOptions, stack: contextlib.ExitStack
) -> tuple[dict[str, Child], dict[str, Entrant]]:
    """The processes that are ready, and the report of every entrant.

    Eager comes first; it writes the inputs of all.
    """
    wanted = [name for name in PEERS if name in {*options.peers, "eager"}]
    missing = missing_packages(wanted)
    found = {
        name: Entrant(name=name, problem=f"not installed: {package}")
        for name, package in missing.items()
    }
    children = dict[str, Child]()

    def build(name: str) -> None:
        child = Child(name, place, options.num_threads)
        stack.callback(child.close)
        try:
            found[name] = Entrant(name=name, **child.report(options.build_limit_s))
        except EntrantError as error:
            found[name] = Entrant(name=name, problem=f"not built: {error}")
        else:
            children[name] = child

    build("eager")
    others = (
        [name for name in wanted if name != "eager" and name not in missing]
        if "eager" in children
        else []
    )
    pool = ThreadPoolExecutor(max_workers=available_cpus())
    try:
        list(pool.map(build, [name for name in others if not PEERS[name].alone]))
    except BaseException:  # Ctrl-C ends the processes, which the threads wait for
        pool.shutdown(wait=False, cancel_futures=True)
        stack.close()
        raise
    pool.shutdown()
    for name in others:
        if PEERS[name].alone:
            build(name)
    return children, found


Answers = Mapping[str, Mapping[str, Any]]


def _rounds(
    children: dict[str, Child], found: dict[str, Entrant], options: ContestOptions
) -> tuple[list[tuple[Answers, bool]], int]:
    """The answers of each round, and whether it was disturbed; and the number of those.

    Entrants that end are removed.
    """
    shuffle, order = random.Random(0), list(children)
    rounds, num_dropped = list[tuple[Answers, bool]](), 0
    while (
        order
        and len(rounds) - num_dropped < options.rounds
        and len(rounds) < TRIES * options.rounds
    ):
        shuffle.shuffle(order)
        answers = dict[str, Mapping[str, Any]]()
        with _watched(list(children.values())) as watch:
            for name in list(order):
                try:
                    answers[name] = children[name].block(options.block_ms)
                except EntrantError as error:
                    found[name] = replace(found[name], problem=f"ended: {error}")
                    order.remove(name)
        rounds.append((answers, watch.disturbed))
        num_dropped += watch.disturbed
    return rounds, num_dropped


def _timed(entrant: Entrant, rounds: Sequence[Answers]) -> Entrant:
    """An entrant with its measurements."""
    if entrant.problem:
        return entrant
    blocks = [answers[entrant.name] for answers in rounds]
    elapsed_s = sum(sum(one["samples_ms"]) for answers in rounds for one in answers.values()) / 1e3
    own_s = sum(sum(block["samples_ms"]) for block in blocks) / 1e3
    return replace(
        entrant,
        medians_ms=tuple(round(statistics.median(block["samples_ms"]), 6) for block in blocks),
        spun_s=statistics.median(block["spun_s"] for block in blocks),
        idle_cpu=sum(block["idle_cpu_s"] for block in blocks) / max(elapsed_s - own_s, 1e-9),
    )


@dataclass(slots=True)
class _Watch:
    disturbed: bool = False


@contextlib.contextmanager
def _watched(children: Sequence[Child]) -> Iterator[_Watch]:
    """Watch whether anything but the entrants uses the CPUs within the block, by the limits of a
    judge.
    """
    policy, watch = SamplingPolicy(), _Watch()
    started, busy_s, stolen_s, own_s = time.monotonic(), *_machine_s(), _own_s(children)
    yield watch
    later_busy_s, later_stolen_s = _machine_s()
    available_s = (time.monotonic() - started) * available_cpus()
    others_s = later_busy_s - busy_s - (_own_s(children) - own_s)
    stolen = later_stolen_s - stolen_s > policy.steal_limit * available_s + 0.01
    watch.disturbed = stolen or others_s > policy.busy_limit * available_s + 0.02


def _machine_s() -> tuple[float, float]:
    """CPU time of this process's CPUs that was used, and that the hypervisor took, in seconds."""
    times = [psutil.cpu_times(percpu=True)[cpu] for cpu in os.sched_getaffinity(0)]
    return sum(one.user + one.nice + one.system + one.irq + one.softirq for one in times), sum(
        one.steal for one in times
    )


def _own_s(children: Sequence[Child]) -> float:
    return time.process_time() + sum(child.cpu_s() for child in children)
