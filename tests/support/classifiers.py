"""A small trained classifier, and files of held-out samples for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from freezer.spec import Dim

BATCH = Dim(name="batch", min=1, max=8)
DIMS = {"image": {0: BATCH}}

_NUM_CLASSES = 4


class Classifier(nn.Module):
    """Logits [batch, 4] of images [batch, 1, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1)),
            *(nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        )
        self.head = nn.Linear(128, _NUM_CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(image))
        return logits


def images(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images of four patterns, and their classes."""
    random = torch.Generator().manual_seed(seed)
    patterns = torch.randn(_NUM_CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(_NUM_CLASSES, (num,), generator=random)
    return patterns[labels] + 0.5 * torch.randn(num, 1, 8, 8, generator=random), labels


@cache
def classifier() -> Classifier:
    """The classifier, trained in a second."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in range(60):
            inputs, labels = images(64, step)
            loss = functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


class Outlier(nn.Module):
    """The classifier with a feature beside whose size int8 loses all others."""

    def __init__(self, size: float = 1e4) -> None:
        super().__init__()
        known = classifier()
        self.features, self.size = known.features, size
        self.head = nn.Linear(129, _NUM_CLASSES)
        with torch.no_grad():
            self.head.weight[:, 1:], self.head.weight[:, 0] = known.head.weight, 1e-6
            self.head.bias.copy_(known.head.bias)

    def forward(self, image: Tensor) -> Tensor:
        features = self.features(image)
        both = torch.cat([self.size * features.mean(1, keepdim=True), features], 1)
        logits: Tensor = self.head(both)
        return logits


class Faint(nn.Module):
    """The classifier's features, normalized: those of an empty image are smaller than a step of
    int8.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = classifier().features
        self.faint = nn.Parameter(2e-3 * torch.randn(128))
        self.mixed, self.norm = nn.Linear(128, 64, bias=False), nn.LayerNorm(64, eps=1e-12)
        self.head = nn.Linear(64, _NUM_CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        features = self.features(image) * image.abs().amax((1, 2, 3), keepdim=True).flatten(1)
        logits: Tensor = self.head(self.norm(self.mixed(features + self.faint)))
        return logits


def write_samples(path: Path, num: int, *, scale: float = 1.0) -> Path:
    """Write held-out samples in sets of eight, with labels."""
    inputs, labels = images(num, 10_000)
    sets: dict[str, Tensor] = {}
    for index, (some, classes) in enumerate(zip(inputs.split(8), labels.split(8), strict=True)):
        sets[f"{index}/image"] = some * scale
        sets[f"{index}/label"] = classes.clone()
    safetensors.torch.save_file({name: part.contiguous() for name, part in sets.items()}, path)
    return path


def is_right(logits: Tensor, labels: Tensor) -> float:
    """Metric of a budget: the share of right answers."""
    return float((logits.argmax(-1) == labels).double().mean())
