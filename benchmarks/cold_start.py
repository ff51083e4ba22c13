"""Time from the start of a process to its first answer, with the model on disk, and its resident
memory then.

    python -m benchmarks.cold_start [--models resnet50,unet] [--repeats 5] [--entrants
    native,onnxruntime] [--python PATH] [--out FILE]

`--python` names the interpreter of an environment without torch, for the entrants that need none.

First each model is frozen, exported and converted, into files that `--work` keeps for the next run.
Then every entrant starts in a
process of its own, in a new random order in each repeat: it imports what it needs, opens its file,
reads the inputs and answers. The clock runs from the start of the process until it reports the
answer. The entrants (`ENTRANTS`) are scripts as their documentation writes them, with default
settings, in float32. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import children
from benchmarks.pages import ROOT, machine, markdown_table, results_page, today
from freezer.files import write_whole

ANSWERED = b"answered"
WORK = ROOT / ".bench" / "cold-start"
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model to start.

    Attributes:
        factory: `module:function`, which makes it.
        name, shape, dtype: of its one input.
    """

    factory: str
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


MODELS: Mapping[str, Model] = {
    "resnet50": Model(
        factory="benchmarks.cold_start:resnet50", name="pixel_values", shape=(1, 3, 224, 224)
    ),
    "mobilenetv3-large": Model(
        factory="benchmarks.peer_models:mobilenet_v3_large", name="image", shape=(1, 3, 224, 224)
    ),
    "bert": Model(
        factory="benchmarks.cold_start:bert", name="input_ids", shape=(1, 128), dtype="int64"
    ),
    "unet": Model(factory="examples.zoo:unet", name="image", shape=(1, 3, 128, 128), dtype="uint8"),
}

_BEGIN = "import sys; import numpy as np; name, x = sys.argv[1], np.load('x.npy'); "
_END = "; print('answered', flush=True); sys.stdin.read()"
_TORCH = "import torch; torch.set_grad_enabled(False); x = torch.from_numpy(x); "
_ARRAYS = (
    "import freezer; model = freezer.load('./{}', arrays='numpy'); model(**{{name: x}});"
    " assert 'torch' not in sys.modules"
)

_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}
"""Without it, OpenVINO computes in bfloat16 on CPUs that have it."""

ENTRANTS: Mapping[str, tuple[str, str]] = {
    "native": (
        "freezer.load, Inductor's payload",
        _ARRAYS.format("artifact"),
    ),
    "load-onnxruntime": (
        "freezer.load, ONNX Runtime's payload",
        _ARRAYS.format("onnxruntime"),
    ),
    "load-openvino": (
        "freezer.load, OpenVINO's payload",
        _ARRAYS.format("openvino"),
    ),
    "torch": (
        "freezer.load, torch",
        _TORCH + "import freezer; model = freezer.load('./artifact'); model(**{name: x})",
    ),
    "aoti": (
        "aoti_load_package",
        _TORCH + "import torch._inductor;"
        " model = torch._inductor.aoti_load_package('artifact/payloads/all.pt2'); model(x)",
    ),
    "compile": (
        "torch.compile",
        _TORCH
        + "import importlib; module, function = sys.argv[2].split(':'); "
        + "model = getattr(importlib.import_module(module), function)();"
        " model = torch.compile(model); model(**{name: x})",
    ),
    "onnxruntime": (
        "ONNX Runtime",
        (
            "import onnxruntime; session = onnxruntime.InferenceSession('model.onnx');"
            " session.run(None, {name: x})"
        ),
    ),
    "openvino": (
        "OpenVINO",
        "import openvino; core = openvino.Core(); "
        f"model = core.compile_model('model.xml', 'CPU', {_FLOAT32}); model([x])",
    ),
    "openvino-cache": (
        "OpenVINO, cached",
        (
            "import openvino; core = openvino.Core(); core.set_property({'CACHE_DIR': 'cache'}); "
            f"model = core.compile_model('model.xml', 'CPU', {_FLOAT32}); model([x])"
        ),
    ),
}
"""Title and script of each entrant.

It runs in the model's folder, with the name of the input and the factory as arguments.
"""


def resnet50() -> Any:
    """ResNet-50, which the defaults of transformers are, with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(num_labels=1000)
    ).eval()


def bert() -> Any:
    """BERT-base, which the defaults of transformers are, with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig()).eval()


def prepare(job: Mapping[str, Any]) -> dict[str, Any]:
    """Write a model's files into a folder: x.npy, artifact/ (Inductor's), onnxruntime/, openvino/,
    model.onnx and model.xml.
    """
    import numpy as np
    import openvino
    import torch

    import freezer
    from freezer.hardware import available_cpus

    model, folder = MODELS[job["model"]], Path(job["folder"])
    module_name, function = model.factory.split(":")
    source = getattr(importlib.import_module(module_name), function)()
    random_values = np.random.default_rng(0)
    x: Any = random_values.integers(0, 255, model.shape)
    if model.dtype == "float32":
        x = random_values.standard_normal(model.shape)
    np.save(folder / "x.npy", x.astype(model.dtype))
    example = {model.name: torch.from_numpy(x.astype(model.dtype))}
    for recipe, out in RECIPES.items():
        options = freezer.FreezeOptions(
            name=job["model"],
            recipes=[recipe],
            num_threads=available_cpus(),
            limits=freezer.Limits(speedup_min=0.0),
            policy=freezer.SamplingPolicy(
                time_limit_s=1.0, warmup_s=0.1, min_rounds=1, busy_limit=2.0, steal_limit=2.0
            ),
        )
        result = freezer.freeze(source, example, out=folder / out, options=options)
        if result.artifact is None:
            raise RuntimeError(f"{job['model']}: {result.reason} {result.failures}")
    with torch.no_grad():
        program = torch.export.export(source, (), example)
        torch.onnx.export(
            source,
            (),
            kwargs=example,
            f=folder / "model.onnx",
            dynamo=True,
            input_names=[model.name],
        )
        openvino.save_model(
            openvino.convert_model(program), folder / "model.xml", compress_to_fp16=False
        )
    return {"verdict": result.verdict}


RECIPES: Mapping[str, str] = {
    "inductor-frozen": "artifact",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
}
"""Folders of a model's artifacts by recipe."""


JOBS = {"prepare": prepare}


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The start of a process.

    Attributes:
        seconds: from its start to its first answer.
        resident_mb: resident memory after the answer, in 1e6 bytes.
    """

    seconds: float
    resident_mb: float


def started(entrant: str, model: Model, folder: Path, python: str) -> Start:
    """Start a process, and wait for its first answer.

    Args:
        entrant: one of ENTRANTS.
        model: the model to start.
        folder: folder of its files.
        python: interpreter of the entrants that need no torch.

    Raises:
        RuntimeError: it did not answer; the message has the end of its output.
    """
    script = ENTRANTS[entrant][1]
    command = [
        sys.executable if "torch;" in script or entrant == "native" else python,
        "-c",
        _BEGIN + script + _END,
        model.name,
        model.factory,
    ]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "",  # installed packages have bytecode, too
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    pipe = subprocess.PIPE
    begun = time.perf_counter()
    child = subprocess.Popen(command, cwd=folder, env=environ, stdin=pipe, stdout=pipe, stderr=pipe)
    assert child.stdout is not None
    line = child.stdout.readline()
    seconds = time.perf_counter() - begun
    memory = Path(f"/proc/{child.pid}/statm").read_text().split()
    _, errors = child.communicate(timeout=TIMEOUT_S)
    if not line.startswith(ANSWERED):
        raise RuntimeError(f"{entrant} did not answer: {errors.decode(errors='replace')[-1000:]}")
    return Start(seconds=seconds, resident_mb=int(memory[1]) * os.sysconf("SC_PAGESIZE") / 1e6)


def main() -> None:
    """Prepare the models, time the entrants, and write the page."""
    given = _arguments()
    models, entrants = given.models.split(","), given.entrants.split(",")
    if unknown := {*models} - {*MODELS} | {*entrants} - {*ENTRANTS}:
        raise SystemExit(
            f"unknown {', '.join(sorted(unknown))}; expected of {', '.join(MODELS)};"
            f" {', '.join(ENTRANTS)}"
        )
    for name in models:
        _prepared(given.work / name, name)
    found: dict[tuple[str, str], list[Start]] = defaultdict(list)
    problems: dict[tuple[str, str], str] = {}
    for repeat in range(-1, given.repeats):  # the first fills caches
        cells = [
            (model, entrant)
            for model in models
            for entrant in entrants
            if (model, entrant) not in problems
        ]
        random.shuffle(cells)
        for model, entrant in cells:
            try:
                start = started(entrant, MODELS[model], given.work / model, given.python)
            except RuntimeError as error:
                problems[model, entrant] = str(error)
                print(f"{model}: {error}", file=sys.stderr, flush=True)
                continue
            print(
                f"{model}: {entrant}: {start.seconds:.2f} s, {start.resident_mb:.0f} MB"
                + (" (not counted)" if repeat < 0 else ""),
                file=sys.stderr,
                flush=True,
            )
            if repeat >= 0:
                found[model, entrant].append(start)
    text = "\n".join(_page(models, entrants, found, given.repeats)) + "\n"
    out = given.out or results_page("cold-start")
    write_whole(out, text.encode())
    print(text)
    print(f"wrote {out}", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold_start", description="Time processes to their first answer."
    )
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--entrants", default=",".join(ENTRANTS), help="separated by commas")
    parser.add_argument(
        "--repeats", type=int, default=5, help="processes for each model and entrant"
    )
    parser.add_argument(
        "--work",
        type=lambda text: Path(text).absolute(),
        default=WORK,
        help="folder for the models' files",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of an environment without torch"
    )
    parser.add_argument("--out", type=Path, help="Markdown file; default: in benchmarks/results")
    return parser.parse_args()


def _prepared(folder: Path, name: str) -> None:
    """Write the files of a model, unless an earlier run has."""
    done = folder / "done"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    children.finish(
        children.start("cold_start", {"do": "prepare", "model": name, "folder": str(folder)})
    )
    done.touch()
    print(f"{name}: prepared in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def _page(
    models: Sequence[str],
    entrants: Sequence[str],
    found: Mapping[tuple[str, str], Sequence[Start]],
    repeats: int,
) -> list[str]:
    """The lines of the page."""
    from benchmarks.peer_page import versions

    peers = {
        name: version for name, version in versions().items() if name in ("onnxruntime", "openvino")
    }
    rows = [
        [ENTRANTS[entrant][0], *(_cell(found.get((model, entrant), ())) for model in models)]
        for entrant in entrants
    ]
    return [
        f"# Cold start, {today()}",
        *("", f"`{shlex.join(['python', '-m', 'benchmarks.cold_start', *sys.argv[1:]])}`", ""),
        *machine(),
        f"- {', '.join(f'{name} {version}' for name, version in peers.items())}",
        "",
        (
            f"Seconds from the start of a process to its first answer, and MB resident then: median"
            f" of {repeats} (least to greatest). Every"
        ),
        (
            "entrant at its defaults, float32, batch 1, files in the page cache; caches of"
            " compilers are full."
        ),
        (
            "`aoti_load_package` opens the same package as `freezer.load`, which also verifies"
            " digests and runs golden inputs."
        ),
        "",
        *markdown_table(["", *models], rows),
    ]


def _cell(starts: Sequence[Start]) -> str:
    if not starts:
        return "did not answer"
    seconds = [start.seconds for start in starts]
    resident_mb = statistics.median(start.resident_mb for start in starts)
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    return f"{statistics.median(seconds):.2f} ({spread}), {resident_mb:.0f} MB"


if __name__ == "__main__":
    main()
