"""Make the files of the example catalogs: `python -m examples.prepare`. Takes about 10 seconds;
existing files are kept.

data/digits.safetensors          weights of a convnet, trained here on scikit-learn's bundled digits
data/digits_samples.safetensors   real inputs for freezing it, `<index>/image`
data/digits_test.safetensors      images and labels of the test split, for the task metric
data/digits_held_out.safetensors  the same in sets, `<index>/image`, `<index>/label`
data/vad.jit                      a TorchScript file with a branch on a number

`python -m examples.prepare zoo broken` also makes the files of these catalogs (zoo_files.py,
broken_files.py) and registers a model of the zoo in MLflow.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.models import (
    DATA,
    DIGITS_HELD_OUT,
    DIGITS_SAMPLES,
    DIGITS_TEST,
    DIGITS_WEIGHTS,
    VAD,
    DigitsNet,
    voice_activity,
)
from freezer.runtime.loaders import torchscript_deprecations_silenced

SEED = 0
NUM_EPOCHS = 12
TRAIN_BATCH = 64
PEAK_LEARNING_RATE = 4e-3
SAMPLE_SIZES = (1, 1, 1, 8, 8, 8, 64, 64)
"""Batches of the sample sets, within the catalog's 1 to 64."""

CATALOGS = ("zoo", "broken")
"""The catalogs with files of their own."""

TRACKING_URI = "sqlite:///mlflow.db"


@dataclass(frozen=True, kw_only=True)
class Split:
    """The digits: images float32 [n, 1, 8, 8] in 0..1, labels int64 [n]; a fifth for testing."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


Maker = Callable[[Path], str]
"""Writes a file or folder at a path and returns a description."""


def prepare(
    folder: Path = DATA,
    *,
    catalogs: Sequence[str] = (),
    tracking_uri: str = TRACKING_URI,
    force: bool = False,
) -> list[Path]:
    """Make the missing files of the example catalog.

    Args:
        folder: where to write them; the catalogs read the default folder.
        catalogs: `zoo` and `broken` also make the files of these catalogs.
        tracking_uri: the MLflow in which the zoo's model is registered.
        force: make all of them again.

    Returns:
        The paths of the files and folders.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in _makers(catalogs).items():
        path = folder / name
        print(f"{path}: {_make(path, make) if force or not path.exists() else 'up to date'}")
        paths.append(path)
    if "zoo" in catalogs:
        from examples.zoo_files import ALIAS, REGISTERED, register_digits

        print(
            f"models:/{REGISTERED}@{ALIAS} in {tracking_uri}:"
            f" {register_digits(tracking_uri, force=force)}"
        )
    return paths


def _makers(catalogs: Sequence[str]) -> dict[str, Maker]:
    """The maker of each file, by file name."""
    makers: dict[str, Maker] = {
        DIGITS_WEIGHTS.name: write_digits_weights,
        DIGITS_SAMPLES.name: write_digits_samples,
        DIGITS_TEST.name: write_digits_test,
        DIGITS_HELD_OUT.name: write_digits_held_out,
        VAD.name: write_vad,
    }
    if "zoo" in catalogs:
        from examples.zoo_files import ZOO_FILES

        makers |= ZOO_FILES
    if "broken" in catalogs:
        from examples.broken_files import BROKEN_FILES

        makers |= BROKEN_FILES
    return makers


def _make(path: Path, make: Maker) -> str:
    """Make a file or folder atomically."""
    unfinished = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        said = make(unfinished)
        _remove(path)
        unfinished.replace(path)
    finally:
        _remove(unfinished)
    return said


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def write_digits_weights(path: Path) -> str:
    """Train the convnet and write its weights."""
    split = digits_split()
    model = train_digits(split)
    with torch.no_grad():
        accuracy = (
            (model(split.test_images).argmax(dim=1) == split.test_labels).double().mean().item()
        )
    safetensors.torch.save_file(model.state_dict(), path)
    return (
        f"trained on {len(split.train_labels)} digits, accuracy {accuracy:.1%} on"
        f" {len(split.test_labels)} others"
    )


def write_digits_samples(path: Path) -> str:
    """Write sets of test images without repeating an image."""
    sets = digits_split().test_images[: sum(SAMPLE_SIZES)].split(list(SAMPLE_SIZES))
    safetensors.torch.save_file(
        {f"{index}/image": images.contiguous() for index, images in enumerate(sets)}, path
    )
    return (
        f"{len(sets)} sets of {', '.join(str(size) for size in sorted(set(SAMPLE_SIZES)))} images"
    )


def write_digits_test(path: Path) -> str:
    """Write the test split."""
    split = digits_split()
    safetensors.torch.save_file({"images": split.test_images, "labels": split.test_labels}, path)
    return f"{len(split.test_labels)} images with their labels"


def write_digits_held_out(path: Path) -> str:
    """Write the test split in sets of images with their labels."""
    split = digits_split()
    sets: dict[str, Tensor] = {}
    pairs = zip(split.test_images.split(60), split.test_labels.split(60), strict=True)
    for index, (images, labels) in enumerate(pairs):
        sets |= {f"{index}/image": images.clone(), f"{index}/label": labels.clone()}
    safetensors.torch.save_file(sets, path)
    return f"{len(split.test_labels)} images with their labels, in {len(sets) // 2} sets"


def write_vad(path: Path) -> str:
    """Script the voice-activity detector and write it."""
    with torchscript_deprecations_silenced():
        scripted = torch.jit.script(voice_activity(SEED))
        torch.jit.save(scripted, str(path))
    return "a scripted voice-activity detector with random weights"


@cache
def digits_split() -> Split:
    """The digits of scikit-learn, split for training and testing, stratified by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=0.2, random_state=SEED, stratify=labels
    )
    return Split(
        train_images=_as_images(train),
        train_labels=torch.from_numpy(train_labels).long(),
        test_images=_as_images(test),
        test_labels=torch.from_numpy(test_labels).long(),
    )


def _as_images(pixels: object) -> Tensor:
    """Scikit-learn's rows of 64 values in 0..16 as float32 [n, 1, 8, 8] in 0..1."""
    return (torch.as_tensor(pixels, dtype=torch.float32) / 16).reshape(-1, 1, 8, 8).contiguous()


def train_digits(split: Split) -> nn.Module:
    """The trained convnet in eval mode; reproducible on one machine with one thread count."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = DigitsNet().train()
        steps = NUM_EPOCHS * -(-len(split.train_labels) // TRAIN_BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=PEAK_LEARNING_RATE, total_steps=steps
        )
        for _ in range(NUM_EPOCHS):
            for picks in torch.randperm(len(split.train_labels)).split(TRAIN_BATCH):
                loss = functional.cross_entropy(
                    model(split.train_images[picks]), split.train_labels[picks]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return model.eval()


def main() -> None:
    """Make the files."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.prepare", description="Make the files of the example catalogs."
    )
    parser.add_argument(
        "catalogs",
        nargs="*",
        metavar="CATALOG",
        help="zoo, broken: also make the files of these catalogs",
    )
    parser.add_argument(
        "--tracking-uri", default=TRACKING_URI, help="MLflow in which to register the zoo's model"
    )
    parser.add_argument("--force", action="store_true", help="make existing files again")
    given = parser.parse_args()
    unknown = [name for name in given.catalogs if name not in CATALOGS]
    if unknown:
        parser.error(f"got {unknown[0]!r}, expected {' or '.join(CATALOGS)}")
    prepare(catalogs=given.catalogs, tracking_uri=given.tracking_uri, force=given.force)


if __name__ == "__main__":
    main()
