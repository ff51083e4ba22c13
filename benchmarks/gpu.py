"""How fast frozen models are on this machine's GPU, against eager and eager as a CUDA graph: `python -m benchmarks.gpu`.

It needs torch with CUDA, safetensors and archspec, and for Inductor's recipes g++ and binutils. Each model is frozen once by each
recipe; then eager and all that passed the drift gate, each as calls and as a CUDA graph, are timed side by side by events of the
device. The table goes to benchmarks/results/gpu-<device>-<date>.md.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import freezer
from freezer.artifact.manifest import Payload
from freezer.errors import ColdpressError, UsageError
from freezer.freezing.recipes.recipes import RECIPES
from freezer.freezing.target.target import toolchain
from freezer.limits import Limits, SamplingPolicy
from freezer.runtime.cuda import facts_of, no_cuda, visible
from freezer.runtime.cuda_graphs import CudaGraphs
from freezer.runtime.precision import full_on_gpu
from freezer.timing.meters import meter_of
from freezer.timing.sampling import Sampling, sample

RESULTS = Path(__file__).parent / "results"
POLICY = SamplingPolicy(time_limit_s=8.0, percentiles=("p50", "p90"))
ANY_SPEED = Limits(speedup_min=0.0)
NUM_INPUTS = 4
_STATIC = Payload(path="eager", digest="", size_bytes=0, kind="exported", num_threads=None)


class ConvNet(nn.Module):
    """A convnet of ResNet's basic blocks: [batch, 3, 64, 64] to [batch, 100]."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        parts = [
            nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(depth)
        ]
        self.blocks, self.head = nn.ModuleList(parts), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Transformer(nn.Module):
    """Six encoder layers: [batch, 128, 512] to the same."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        out: Tensor = self.encoder(x)
        return out


class Perceptron(nn.Module):
    """Eight layers: [batch, 1024] to [batch, 1024]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        """Features."""
        out: Tensor = self.layers(x)
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convnet": (ConvNet, (3, 64, 64)),
    "transformer": (Transformer, (128, 512)),
    "mlp": (Perceptron, (1024,)),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model, dtype and batch: what was timed, and why a recipe is missing."""

    model: str
    dtype: str
    batch: int
    sampling: Sampling
    missing: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Time everything and write the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="Repeatable. Default: all.")
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES), help="Repeatable. Default: float32 and float16.")
    parser.add_argument("--batch", action="append", type=int, help="Repeatable. Default: 1 and 32.")
    parser.add_argument("--recipe", action="append", help="Repeatable. Default: all but inductor-max-autotune.")
    given = parser.parse_args(arguments)
    if (why := no_cuda()) is not None:
        print(f"no GPU to measure on: {why}", file=sys.stderr)
        return 2
    device = visible()[0][0]
    recipes = given.recipe or [name for name, item in RECIPES.items() if not item.portable and name != "inductor-max-autotune"]
    cells: list[Cell] = []
    for name in given.model or MODELS:
        for dtype in given.dtype or ("float32", "float16"):
            for batch in given.batch or (1, 32):
                print(f"{name}, {dtype}, batch {batch}", flush=True)
                cells.append(measure(name, dtype, batch, recipes, device))
    path = RESULTS / f"gpu-{slug(torch.cuda.get_device_name(device))}-{datetime.date.today().isoformat()}.md"
    path.write_text(page(cells, device, sys.argv[1:] if arguments is None else arguments))
    print(f"wrote {path}")
    return 0


def measure(name: str, dtype: str, batch: int, recipes: Sequence[str], device: torch.device) -> Cell:
    """Freeze a model by every recipe, and time what came of it beside eager."""
    kind, shape = MODELS[name]
    torch.manual_seed(0)
    model = kind().eval().to(device, DTYPES[dtype])
    inputs = [torch.randn(batch, *shape).to(device, DTYPES[dtype]) for _ in range(NUM_INPUTS)]
    entrants: dict[str, Callable[..., Any]] = {"eager": partial(_exact, model), "eager, CUDA graph": _graphed(model, device)}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="coldpress-") as work:
        for recipe in recipes:
            out = Path(work) / recipe
            try:
                result = freezer.freeze(
                    model,
                    {"x": inputs[0]},
                    out=out,
                    options=freezer.FreezeOptions(recipes=[recipe], limits=ANY_SPEED, num_threads=1),
                )
                if result.verdict != "published":
                    raise UsageError(result.reason)
                entrants[recipe] = freezer.load(out)
                entrants[f"{recipe}, CUDA graph"] = freezer.load(out, cuda_graphs=True)
            except ColdpressError as error:
                missing[recipe] = str(error).splitlines()[0]
        calls: dict[str, list[Callable[[], Any]]] = {
            entrant: [partial(call, x) for x in inputs] for entrant, call in entrants.items()
        }
        with meter_of(device, POLICY) as meter, torch.no_grad():
            sampling = sample(calls, POLICY, meter=meter)
    return Cell(model=name, dtype=dtype, batch=batch, sampling=sampling, missing=missing)


def _exact(model: nn.Module, x: Tensor) -> Any:
    """Eager, as exact as what is frozen of it."""
    with full_on_gpu():
        return model(x)


def _graphed(model: nn.Module, device: torch.device) -> Callable[[Tensor], Any]:
    graphs = CudaGraphs(device)
    return lambda x: graphs.run(_STATIC, lambda tensors: [_exact(model, tensors[0])], [x])


def page(cells: Sequence[Cell], device: torch.device, arguments: Sequence[str]) -> str:
    """The page: the machine, the command, and a table for each model."""
    made = ", ".join(f"{name} {value}" for name, value in {**toolchain(device), **facts_of(device)}.items())
    lines = [
        f"# Frozen models on a GPU: {torch.cuda.get_device_name(device)}",
        "",
        f"`{' '.join(('python -m benchmarks.gpu', *arguments))}`, {datetime.date.today().isoformat()}.",
        "",
        f"{made}.",
        "",
        "Medians of device events around each call, in milliseconds, interleaved in one run; the spread is from the median of the",
        "fastest round to that of the slowest. TF32 and sums in half precision are off for all, eager too. A CUDA graph's call",
        "copies its inputs in and its results out.",
    ]
    for cell in cells:
        lines += [
            "",
            f"## {cell.model}, {cell.dtype}, batch {cell.batch}",
            "",
            "| | ms | spread | times as fast as eager |",
            "|---|---|---|---|",
        ]
        lines += [_row(entrant, cell.sampling) for entrant in cell.sampling.samples_ms]
        lines += ["", *(f"{recipe} is missing: {why}" for recipe, why in cell.missing.items())] if cell.missing else []
        lines += ["", f"{_rounds(cell.sampling)} Device: {dict(cell.sampling.device or {})}."]
    return "\n".join(lines) + "\n"


def _row(entrant: str, sampling: Sampling) -> str:
    blocks = [statistics.median(block) for block in sampling.samples_ms[entrant]]
    if not blocks:
        return f"| {entrant} | | | |"
    median, eager = statistics.median(sampling.pooled(entrant)), statistics.median(sampling.pooled("eager"))
    return f"| {entrant} | {median:.3f} | {min(blocks):.3f} to {max(blocks):.3f} | {eager / median:.2f} |"


def _rounds(sampling: Sampling) -> str:
    return f"{len(sampling.samples_ms['eager'])} rounds, {sampling.num_dropped} dropped as disturbed."


def slug(name: str) -> str:
    """A device's name as a part of a file name."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


if __name__ == "__main__":
    sys.exit(main())
