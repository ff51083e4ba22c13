"""Compare frozen models with eager on this machine's GPU: `python -m benchmarks.gpu`.

Needs torch with CUDA, safetensors and archspec; Inductor's recipes also need g++ and binutils. Each
model is frozen by each recipe; then eager and every candidate that passed the drift gate are timed
side by side by device events. The table goes to benchmarks/results/gpu-<device>-<date>.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import freezer
from benchmarks.pages import markdown_table, results_page, today
from freezer.errors import ColdpressError, UsageError
from freezer.freezing.recipes import RECIPES, is_exact
from freezer.freezing.target import toolchain
from freezer.runtime.devices import no_cuda, visible
from freezer.runtime.torch_settings import full_on_gpu
from freezer.spec import Accuracy, Limits, SamplingPolicy
from freezer.timing import Sampling, meter_of, sample

POLICY = SamplingPolicy(time_limit_s=5.0, percentiles=("p50", "p90"))
QUICK = SamplingPolicy(warmup_s=0.1, time_limit_s=0.5, min_rounds=2)
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
    """The samples of one model, dtype and batch, and why recipes are missing."""

    model: str
    dtype: str
    batch: int
    sampling: Sampling
    missing: dict[str, str]


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
    cells: list[Cell] = []
    path = results_page(f"gpu-{slug(torch.cuda.get_device_name(device))}")
    for name in given.model or MODELS:
        for dtype in given.dtype or ("float32", "float16"):
            of_dtype = [item for item in recipes if dtype == "float32" or is_exact(item)]
            for batch in given.batch or (1, 32):
                print(f"{name}, {dtype}, batch {batch}", flush=True)
                cells.append(measure(name, dtype, batch, of_dtype, device))
                path.write_text(page(cells, device))
    print(f"wrote {path}")
    return 0


def measure(
    name: str, dtype: str, batch: int, recipes: Sequence[str], device: torch.device
) -> Cell:
    """Freeze a model by every recipe, and time the results beside eager."""
    kind, shape = MODELS[name]
    torch.manual_seed(0)
    model = kind().eval().to(device, DTYPES[dtype])
    inputs = [torch.randn(batch, *shape).to(device, DTYPES[dtype]) for _ in range(NUM_INPUTS)]
    entrants: dict[str, Callable[..., Any]] = {"eager": partial(_exact, model)}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="coldpress-") as work:
        for recipe in recipes:
            out = Path(work) / recipe
            try:
                options = freezer.FreezeOptions(
                    recipes=[recipe], limits=Limits(speedup_min=0.0), num_threads=1, policy=QUICK
                )
                if not is_exact(recipe):
                    lower: Any = [RECIPES[recipe].precision]
                    options = replace(options, precision=lower, accuracy=BUDGET)
                result = freezer.freeze(model, [inputs[0]], out=out, options=options)
                if result.artifact is None:
                    raise UsageError(result.reason)
                entrants[recipe] = freezer.load(out)
            except ColdpressError as error:
                missing[recipe] = str(error).splitlines()[0]
        calls: dict[str, list[Callable[[], Any]]] = {
            entrant: [partial(call, x) for x in inputs] for entrant, call in entrants.items()
        }
        with meter_of(device, POLICY) as meter, torch.no_grad():
            sampling = sample(calls, POLICY, meter=meter)
    return Cell(model=name, dtype=dtype, batch=batch, sampling=sampling, missing=missing)


def _exact(model: nn.Module, x: Tensor) -> Any:
    """Eager with the precision of frozen models."""
    with full_on_gpu():
        return model(x)


def page(cells: Sequence[Cell], device: torch.device) -> str:
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
        rows = [_row(entrant, cell.sampling) for entrant in cell.sampling.samples_ms]
        head = ("", "ms", "spread", "times as fast as eager")
        lines += [
            "",
            f"## {cell.model}, {cell.dtype}, batch {cell.batch}",
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


def _row(entrant: str, sampling: Sampling) -> tuple[str, str, str, str]:
    blocks = [statistics.median(block) for block in sampling.samples_ms[entrant]]
    if not blocks:
        return entrant, "", "", ""
    median, eager = (
        statistics.median(sampling.pooled(entrant)),
        statistics.median(sampling.pooled("eager")),
    )
    return (
        entrant,
        f"{median:.3f}",
        f"{min(blocks):.3f} to {max(blocks):.3f}",
        f"{eager / median:.2f}",
    )


def slug(name: str) -> str:
    """The name of a device as part of a file name."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


if __name__ == "__main__":
    sys.exit(main())
