"""Measure what a campaign adds to an MLflow server: rows, bytes, and CPU time of the server and of
the process that writes to it.

    python -m benchmarks.mlflow_growth [--items 1000] [--database sqlite]

An item is a model for a device class; each publishes an artifact of a small TorchScript model,
which the server stores in a folder. Builds and judges are done beforehand, so that nothing else
runs. PostgreSQL has its default settings, and a database of its own.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from sqlalchemy import create_engine, inspect, text

from benchmarks.pages import machine, markdown_table, today
from freezer.artifact import Artifact
from freezer.freezing.freeze import FreezeOptions, freeze
from freezer.spec import SamplingPolicy
from freezer.store import Store
from tests.support.campaigns import run_judged
from tests.support.mlflow_servers import MlflowServer, Postgres, server_options
from tests.support.steps import HERE

CLASSES = (HERE, "portable")


def growth_tables(database: str, num_items: int, folder: Path) -> list[str]:
    """Run a campaign against a server on an empty database; return what it added."""
    artifacts = artifacts_by_class(folder)
    models = {
        f"model-{index:06}": dict.fromkeys(CLASSES, "published")
        for index in range(num_items // len(CLASSES))
    }
    with ExitStack() as held:
        postgres = held.enter_context(Postgres()) if database == "postgresql" else None
        backend = postgres.database("mlflow") if postgres else f"sqlite:///{folder}/mlflow.db"
        server = held.enter_context(
            MlflowServer(server_options(backend, str(folder / "artifacts")), folder)
        )
        store = Store.open(str(folder / "store"), create=True)
        empty_rows, empty_bytes, began = (
            table_rows(backend),
            database_bytes(backend),
            time.monotonic(),
        )
        server_s, database_s, tracker_s = (
            cpu_s(server.processes()),
            cpu_s(postgres.processes() if postgres else []),
            children_s(),
        )
        report = run_judged(store, server.uri, "growth", artifacts, models=models, apart=True)
        if report.infrastructure or len(report.outcomes) != num_items:
            raise RuntimeError(f"{len(report.outcomes)} outcomes; {report.infrastructure}")
        wall_s = time.monotonic() - began
        used = {
            "process that writes to MLflow": children_s() - tracker_s,
            "server": cpu_s(server.processes()) - server_s,
            **({"PostgreSQL": cpu_s(postgres.processes()) - database_s} if postgres else {}),
        }
        rows = {name: count - empty_rows[name] for name, count in table_rows(backend).items()}
        added = database_bytes(backend) - empty_bytes
    files = [path.stat().st_size for path in (folder / "artifacts").rglob("*") if path.is_file()]
    frozen = len(models) * sum(
        sum(item.size_bytes for item in artifact.manifest.contents)
        for artifact in artifacts.values()
    )
    return [
        f"## {num_items:,} items on {database}, in {wall_s:.0f} s",
        "",
        (
            f"Database: {added / 1e6:.1f} MB. Artifacts: {len(files):,} files,"
            f" {sum(files) / 1e6:.1f} MB, of which {frozen / 1e6:.1f} MB are the frozen artifacts'"
            " own files."
        ),
        "",
        *markdown_table(
            ("CPU time of", "s", "for each item, ms"),
            [(k, f"{v:.0f}", f"{1e3 * v / num_items:.0f}") for k, v in used.items()],
        ),
        "",
        *markdown_table(
            ("table", "rows"),
            [
                (name, f"{count:,}")
                for name, count in sorted(rows.items(), key=lambda r: -r[1])
                if count
            ],
        ),
    ]


def artifacts_by_class(folder: Path) -> Mapping[str, Artifact]:
    """Freeze one model; its artifact stands for those of both classes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    ).eval()
    options = FreezeOptions(
        device_class="portable",
        num_threads=1,
        policy=SamplingPolicy(time_limit_s=2.0, warmup_s=0.2),
    )
    made = freeze(model, torch.zeros(4, 32), out=folder / "template", options=options).artifact
    if made is None:
        raise RuntimeError("the model was not frozen")
    return {
        name: Artifact(folder=made.folder, manifest=replace(made.manifest, device_class=name))
        for name in CLASSES
    }


def table_rows(backend: str) -> dict[str, int]:
    """Rows of each table of a database."""
    engine = create_engine(backend)
    with engine.connect() as connection:
        names = inspect(engine).get_table_names()
        found = {
            name: int(connection.execute(text(f'SELECT count(*) FROM "{name}"')).scalar_one())
            for name in names
        }
    engine.dispose()
    return found


def database_bytes(backend: str) -> int:
    """Size of a database, with its indexes."""
    engine = create_engine(backend)
    sizes = {"sqlite": "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"}
    with engine.connect() as connection:
        query = sizes.get(engine.dialect.name, "SELECT pg_database_size(current_database())")
        found = int(connection.execute(text(query)).scalar_one())
    engine.dispose()
    return found


def cpu_s(processes: list[psutil.Process]) -> float:
    """CPU time of processes and of their children that ended."""
    return sum(sum(process.cpu_times()[:4]) for process in processes)


def children_s() -> float:
    """CPU time of this process's children that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coldpress-growth-") as folder:
        tables = growth_tables(given.database, given.items, Path(folder))
    print("\n".join([f"# Growth of MLflow, {today()}", "", *machine(), "", *tables]))


if __name__ == "__main__":
    main()
