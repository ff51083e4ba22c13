"""Compare frozen models with eager on this machine's GPU: `python -m benchmarks.gpu`.

Needs torch with CUDA, safetensors and archspec; Inductor's recipes also need g++ and binutils. Each
model is frozen by each recipe, in `--jobs` processes; then eager, torch.compile and every candidate
that passed the drift gate are timed side by side by device events, with nothing else running. The
table goes to benchmarks/results/gpu-<device>-<date>.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import freezer
from benchmarks.pages import markdown_table, results_page, today
from freezer.errors import ColdpressError
from freezer.freezing.recipes import RECIPES, is_exact
from freezer.freezing.target import toolchain
from freezer.runtime.devices import no_cuda, visible
from freezer.runtime.torch_settings import full_on_gpu
from freezer.spec import Accuracy, Limits, SamplingPolicy
from freezer.timing import Sampling, meter_of, sample

POLICY = SamplingPolicy(warmup_s=0.5, time_limit_s=4.0, percentiles=("p50", "p90"))
QUICK = SamplingPolicy(
    warmup_s=0.1, time_limit_s=0.5, min_rounds=2, busy_limit=2.0, steal_limit=2.0, accept_noise=True
)
"""For the judges of freezes, whose timing is not used."""

BUDGET = Accuracy(sqnr_db_min=20.0)
"""Of recipes in a lower precision."""

NUM_INPUTS = 4


class ConvNet(nn.Module):
    """A convnet of ResNet's basic blocks: [batch, 3, 64, 64] to [batch, 100]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
            for _ in range(6)
        )
        self.head = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def transformer() -> nn.Module:
    """Six encoder layers: [batch, 128, 512] to the same."""
    layer = nn.TransformerEncoderLayer(
        512, 8, 2048, batch_first=True, norm_first=True, activation="gelu"
    )
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def mlp() -> nn.Module:
    """Eight layers: [batch, 1024] to [batch, 1024]."""
    return nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.GELU())))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convnet": (ConvNet, (3, 64, 64)),
    "transformer": (transformer, (128, 512)),
    "mlp": (mlp, (1024,)),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model, dtype and batch."""

    model: str
    dtype: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, {self.dtype}, batch {self.batch}"

    def subject(self, device: torch.device) -> tuple[nn.Module, list[Tensor]]:
        """The model, seeded, and its inputs."""
        kind, shape = MODELS[self.model]
        torch.manual_seed(0)
        model = kind().eval().to(device, DTYPES[self.dtype])
        inputs = [torch.randn(self.batch, *shape) for _ in range(NUM_INPUTS)]
        return model, [x.to(device, DTYPES[self.dtype]) for x in inputs]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The samples of a cell, the accuracy of its artifacts, and why recipes are missing."""

    cell: Cell
    sampling: Sampling
    sqnr_db: Mapping[str, float | None]
    missing: Mapping[str, str]


def main() -> int:
    """Time everything, write the page, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", action="append", choices=sorted(MODELS), help="Repeatable. Default: all."
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=sorted(DTYPES),
        help="Repeatable. Default: float32 and float16.",
    )
    parser.add_argument("--batch", action="append", type=int, help="Repeatable. Default: 1 and 32.")
    parser.add_argument(
        "--recipe", action="append", help="Repeatable. Default: all but inductor-max-autotune."
    )
    parser.add_argument("--jobs", type=int, default=1, help="Freezes at once. Default: 1.")
    given = parser.parse_args()
    if (why := no_cuda()) is not None:
        print(f"no GPU to measure on: {why}", file=sys.stderr)
        return 2
    device = visible()[0][0]
    recipes = given.recipe or [
        name
        for name, item in RECIPES.items()
        if not item.portable and not item.packages and name != "inductor-max-autotune"
    ]
    cells = [
        Cell(model=name, dtype=dtype, batch=batch)
        for name in given.model or MODELS
        for dtype in given.dtype or ("float32", "float16")
        for batch in given.batch or (1, 32)
    ]
    of_cell = {
        cell: [item for item in recipes if cell.dtype == "float32" or is_exact(item)]
        for cell in cells
    }
    path = results_page(f"gpu-{slug(torch.cuda.get_device_name(device))}")
    with tempfile.TemporaryDirectory(prefix="coldpress-") as work:
        missing = freeze_all(of_cell, Path(work), given.jobs)
        timed: list[Timed] = []
        for cell in cells:
            print(f"timing {cell}", flush=True)
            timed.append(measure(cell, device, Path(work), of_cell[cell], missing[cell]))
            path.write_text(page(timed, device))
    print(f"wrote {path}")
    return 0


def freeze_all(
    of_cell: Mapping[Cell, Sequence[str]], work: Path, num_jobs: int
) -> dict[Cell, dict[str, str]]:
    """Freeze each cell by each of its recipes, into `work`; return why recipes failed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=8) as pool:
        running = {
            cell: {recipe: pool.submit(freeze, cell, recipe, work) for recipe in recipes}
            for cell, recipes in of_cell.items()
        }
        found: dict[Cell, dict[str, str]] = {}
        for cell, freezes in running.items():
            why = {recipe: future.result() for recipe, future in freezes.items()}
            found[cell] = {recipe: reason for recipe, reason in why.items() if reason}
            print(f"froze {cell}: {len(why) - len(found[cell])} of {len(why)}", flush=True)
    return found


def freeze(cell: Cell, recipe: str, work: Path) -> str:
    """Freeze a cell with a recipe; return the reason if it is not published, else an empty text."""
    model, inputs = cell.subject(visible()[0][0])
    options = freezer.FreezeOptions(
        recipes=[recipe], limits=Limits(speedup_min=0.0), num_threads=1, policy=QUICK
    )
    if not is_exact(recipe):
        lower: Any = [RECIPES[recipe].precision]
        options = replace(options, precision=lower, accuracy=BUDGET)
    try:
        result = freezer.freeze(model, [inputs[0]], out=folder(work, cell, recipe), options=options)
    except ColdpressError as error:
        return str(error).splitlines()[0]
    return "" if result.verdict == "published" else result.reason


def folder(work: Path, cell: Cell, recipe: str) -> Path:
    """Where an artifact is."""
    return work / f"{cell.model}-{cell.dtype}-{cell.batch}" / recipe


def measure(
    cell: Cell, device: torch.device, work: Path, recipes: Sequence[str], missing: Mapping[str, str]
) -> Timed:
    """Time the artifacts of a cell beside eager and torch.compile."""
    model, inputs = cell.subject(device)
    compiled: dict[str, Callable[..., Any]] = {
        "torch.compile": torch.compile(model),
        "torch.compile, CUDA graphs": torch.compile(model, mode="reduce-overhead"),
    }
    frozen = {
        recipe: freezer.load(folder(work, cell, recipe))
        for recipe in recipes
        if recipe not in missing
    }
    entrants = {name: partial(_exact, call) for name, call in ({"eager": model} | compiled).items()}
    calls: dict[str, list[Callable[[], Any]]] = {
        entrant: [partial(call, x) for x in inputs]
        for entrant, call in (entrants | dict(sorted(frozen.items()))).items()
    }
    with meter_of(device, POLICY) as meter, torch.no_grad():
        sampling = sample(calls, POLICY, meter=meter)
    torch.compiler.reset()
    manifests = {name: loaded.manifest for name, loaded in frozen.items()}
    sqnr_db = {name: item.drift.sqnr_db for name, item in manifests.items() if item is not None}
    return Timed(cell=cell, sampling=sampling, sqnr_db=sqnr_db, missing=missing)


def _exact(model: Callable[..., Any], x: Tensor) -> Any:
    """A call with the precision of frozen models."""
    with full_on_gpu():
        return model(x)


def page(cells: Sequence[Timed], device: torch.device) -> str:
    """The page: the machine, the command, and a table for each cell."""
    made = ", ".join(f"{name} {value}" for name, value in toolchain(device).items())
    lines = [
        f"# Frozen models on a GPU: {torch.cuda.get_device_name(device)}",
        "",
        f"`{' '.join(('python -m benchmarks.gpu', *sys.argv[1:]))}`, {today()}.",
        "",
        f"{made}.",
        "",
        (
            "Medians of device events around each call, in milliseconds, interleaved in one run;"
            " the spread is from the median of the"
        ),
        (
            "fastest round to that of the slowest. TF32 and sums in half precision are off for all,"
            " including eager."
        ),
    ]
    for cell in cells:
        rows = [_row(entrant, cell) for entrant in cell.sampling.samples_ms]
        head = ("", "ms", "spread", "times as fast as eager", "dB")
        lines += [
            "",
            f"## {cell.cell}",
            "",
            *markdown_table(head, rows),
        ]
        lines += (
            ["", *(f"{recipe} is missing: {why}" for recipe, why in cell.missing.items())]
            if cell.missing
            else []
        )
        num_rounds, num_dropped = len(cell.sampling.samples_ms["eager"]), cell.sampling.num_dropped
        lines += [
            "",
            (
                f"{num_rounds} rounds, {num_dropped} dropped as disturbed. Device:"
                f" {dict(cell.sampling.device or {})}."
            ),
        ]
    return "\n".join(lines) + "\n"


def _row(entrant: str, timed: Timed) -> tuple[str, ...]:
    sampling, sqnr_db = timed.sampling, timed.sqnr_db.get(entrant)
    blocks = [statistics.median(block) for block in sampling.samples_ms[entrant]]
    accuracy = "" if sqnr_db is None else f"{sqnr_db:.0f}"
    if not blocks:
        return entrant, "", "", "", accuracy
    median, eager = (
        statistics.median(sampling.pooled(entrant)),
        statistics.median(sampling.pooled("eager")),
    )
    spread = f"{min(blocks):.3f} to {max(blocks):.3f}"
    return entrant, f"{median:.3f}", spread, f"{eager / median:.2f}", accuracy


def slug(name: str) -> str:
    """The name of a device as part of a file name."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


if __name__ == "__main__":
    sys.exit(main())
