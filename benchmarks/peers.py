"""Compare published artifacts with eager, torch.compile, TorchScript, AOTInductor, ONNX Runtime,
OpenVINO and Olive.

    python -m benchmarks.peers                             # the models of peers.yaml and of the zoo
    python -m benchmarks.peers --models 'resnet50,gpt2'          # some of them
    python -m benchmarks.peers my_catalog.yaml --out mine.md     # your own

A campaign first freezes and publishes the models, into a store in the work folder that the next run
uses again; another one with consent to lower precision, within a budget on generated held-out
samples. Then each model has a contest (peer_contest.py) of entrants (peer_engines.py). Finished
models are kept, and the same command continues an interrupted run. docs/guides/compare-engines.md
describes the protocol.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import yaml

from benchmarks.pages import ROOT, results_page
from benchmarks.peer_contest import Contest, ContestOptions, ModelPlace, contest
from benchmarks.peer_engines import CONSENT, PEERS
from benchmarks.peer_page import draw, render, summary_lines, versions
from freezer.codec import decode, encode
from freezer.errors import CatalogError, ColdpressError, UsageError
from freezer.files import write_whole
from freezer.hardware import available_cpus
from pipeline.catalog import read_catalog, refuse_bad_entries

CATALOGS = (ROOT / "benchmarks" / "peers.yaml", ROOT / "examples" / "zoo.yaml")
WORK = ROOT / ".bench"

CONSENTED = {"precision": ["bf16", "int8"], "recipes": ["auto"]}
BUDGET = {"cosine_min": 0.995}
"""Fields of the entries of artifacts with consent, and limits of their budget."""


def main() -> None:
    """Run the contests that are missing, and write the page and the plot."""
    given = _arguments()
    options = ContestOptions(
        peers=tuple(given.peers.split(",")),
        num_threads=given.threads,
        rounds=given.rounds,
        build_limit_s=given.build_limit,
    )
    if unknown := set(options.peers) - set(PEERS):
        raise UsageError(
            f"unknown peers {', '.join(sorted(unknown))}; expected some of {', '.join(PEERS)}"
        )
    models = _models(given.catalogs, given.models.split(","))
    work: Path = given.work.absolute()
    (work / "logs").mkdir(parents=True, exist_ok=True)
    tracking_uri = given.tracking_uri or f"sqlite:///{work / 'mlflow.db'}"
    if given.store is None and "coldpress" in options.peers:
        _publish(models, work, tracking_uri, "store")
    if given.store is None and "consent" in options.peers:
        consenting = _consenting(models, work, tracking_uri)
        _publish(consenting, work, tracking_uri, f"store{CONSENT}")
    revision = _revision()
    run = _run_key(options, revision)
    results = work / "results.jsonl"
    for name, catalog in models.items():
        if name in (done := _finished(results, run)):
            _say(f"{name}: continued, measured in {done[name].seconds:.0f} s")
            continue
        scratch = work / "scratch"
        shutil.rmtree(
            scratch, ignore_errors=True
        )  # of an interrupted run, whose processes may still write there
        scratch.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=scratch))
        found = contest(
            ModelPlace(
                name=name,
                catalog=catalog,
                folder=folder,
                logs=work / "logs",
                store=given.store or str(work / "store"),
                tracking_uri=tracking_uri,
            ),
            options,
        )
        shutil.rmtree(scratch, ignore_errors=True)
        with results.open("a") as file:
            file.write(json.dumps(encode(dataclasses.replace(found, run=run))) + "\n")
        _say(_line(found))
    contests = [_finished(results, run)[name] for name in models]
    _write(contests, options, given.out or results_page("peers"), revision)
    results.replace(work / f"results-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")


def _arguments() -> argparse.Namespace:
    defaults = ContestOptions(peers=tuple(PEERS), num_threads=available_cpus())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Compare published artifacts with peers."
    )
    parser.add_argument(
        "catalogs",
        nargs="*",
        type=Path,
        default=CATALOGS,
        help="default: benchmarks/peers.yaml examples/zoo.yaml",
    )
    parser.add_argument(
        "--models", default="*", help="globs over names of models, separated by commas"
    )
    parser.add_argument(
        "--peers",
        default=",".join(defaults.peers),
        help="entrants, separated by commas; eager always runs",
    )
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, help="undisturbed rounds of each model"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=defaults.num_threads,
        help="of every entrant; default: all CPUs",
    )
    parser.add_argument(
        "--build-limit",
        type=float,
        default=defaults.build_limit_s,
        help="seconds for building an entrant",
    )
    parser.add_argument(
        "--store",
        help=f"load artifacts from this store, and from STORE{CONSENT}, instead of publishing them",
    )
    parser.add_argument(
        "--tracking-uri",
        help="MLflow with the registered models of a catalog; default: one in the work folder",
    )
    parser.add_argument(
        "--work", type=Path, default=WORK, help="folder for the store, logs and finished models"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="Markdown file; the plot is written beside it. Default: in benchmarks/results",
    )
    return parser.parse_args()


def _models(catalogs: Sequence[Path], globs: Sequence[str]) -> dict[str, Path]:
    """The catalog of each chosen model; bad entries that are not chosen do not matter."""
    models, problems = dict[str, Path](), list[CatalogError]()
    for path in catalogs:
        catalog = read_catalog(path)
        problems += [one for one in catalog.problems if one.entry and _matches(one.entry, globs)]
        models |= {
            entry.name: path.absolute() for entry in catalog.entries if _matches(entry.name, globs)
        }
    for problem in problems:
        _say(problem.coded)
    refuse_bad_entries(problems, keep_going=False)
    if not models:
        raise UsageError(f"no model matches {','.join(globs)!r}")
    return models


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in globs)


def _consenting(models: dict[str, Path], work: Path, tracking_uri: str) -> dict[str, Path]:
    """The catalogs of the models that have held-out samples, with consent to lower precision."""
    found: dict[str, Path] = {}
    for catalog in dict.fromkeys(models.values()):
        folder = work / f"{catalog.stem}{CONSENT}"
        folder.mkdir(exist_ok=True)
        for file in catalog.parent.iterdir():  # that the catalog may name
            if not (folder / file.name).is_symlink():
                (folder / file.name).symlink_to(file)
        content = yaml.safe_load(catalog.read_text())
        entries = []
        for entry in content["models"]:
            name = entry["name"]
            samples = folder / f"{name}.held-out.safetensors"
            if models.get(name) == catalog and _held_out(name, catalog, samples, tracking_uri):
                entries.append(
                    {**entry, **CONSENTED, "accuracy": {"samples": str(samples), **BUDGET}}
                )
                found[name] = folder / f"{catalog.stem}{CONSENT}.yaml"
        text = yaml.safe_dump({**content, "models": entries})
        (folder / f"{catalog.stem}{CONSENT}.yaml").write_text(text)
    return found


def _held_out(name: str, catalog: Path, samples: Path, tracking_uri: str) -> bool:
    """Write the held-out samples of a model, unless they exist; whether it has any."""
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "catalog": str(catalog),
            "model": name,
            "folder": folder,
            "tracking_uri": tracking_uri,
            "held_out": str(samples),
        }
        command = [sys.executable, "-m", "benchmarks.peer_child", json.dumps(job)]
        if not samples.exists() and subprocess.run(command, cwd=ROOT, check=False).returncode:
            _say(f"{name}: no held-out samples; see above")
    return samples.exists()


def _publish(models: dict[str, Path], work: Path, tracking_uri: str, store: str) -> None:
    """Run a campaign for each catalog, or for each model if only some of a catalog are wanted.

    What is published is kept.
    """
    for catalog in dict.fromkeys(models.values()):
        wanted = [name for name, path in models.items() if path == catalog]
        whole = len(wanted) == len(read_catalog(catalog).entries)
        for only in ["*"] if whole else wanted:
            started = time.monotonic()
            command = [
                sys.executable,
                "-m",
                "jobs.optimize",
                str(catalog),
                "--store",
                str(work / store),
                "--only",
                only,
            ]
            command += ["--tracking-uri", tracking_uri, "--campaign", f"peers-{catalog.stem}"]
            with (work / "logs" / f"campaign-{catalog.stem}.log").open("a") as log:
                code = subprocess.run(
                    command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False
                ).returncode
            _say(
                f"campaign over {catalog.name} ({only}): exit code {code} after"
                f" {time.monotonic() - started:.0f} s; see {log.name}"
            )


def _finished(results: Path, run: str) -> dict[str, Contest]:
    """The finished contests of a run; a line that was cut off is ignored."""
    found = dict[str, Contest]()
    for line in results.read_text().splitlines() if results.exists() else []:
        try:
            one = decode(Contest, json.loads(line), origin=str(results))
        except json.JSONDecodeError:
            continue
        if one.run == run:
            found[one.model] = one
    return found


def _write(contests: Sequence[Contest], options: ContestOptions, out: Path, revision: str) -> None:
    plot = out.with_suffix(".png")
    command = shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]])
    draw(contests, plot)
    write_whole(out, render(contests, options, command, revision, plot.name).encode())
    print("\n".join(summary_lines(contests)))
    _say(f"wrote {out} and {plot}")


def _run_key(options: ContestOptions, revision: str) -> str:
    """A digest of what must be the same for results to be of one run."""
    parts = {**dataclasses.asdict(options), "revision": revision, **versions()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _revision() -> str:
    """The commit, with `-dirty` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--match", ""]
    return (
        subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        or "unknown"
    )


def _line(one: Contest) -> str:
    timed = sorted(one.timed.values(), key=lambda entrant: sum(entrant.medians_ms))
    order = ", ".join(
        f"{entrant.name} {sorted(entrant.medians_ms)[len(entrant.medians_ms) // 2]:.3g}"
        for entrant in timed
    )
    failed = [entrant.name for entrant in one.entrants if entrant.problem]
    return f"{one.model}: {one.seconds:.0f} s, {one.num_dropped} rounds dropped; ms: {order}" + (
        f"; did not run: {', '.join(failed)}" if failed else ""
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except ColdpressError as error:
        sys.exit(f"error: {error.coded}")
