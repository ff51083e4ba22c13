"""Writers of the files that examples/zoo.yaml names, and of its registered model; examples/prepare.py calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from examples.models import digits
from examples.zoo import SEED, audio_codec, ranker, speaker_embedder
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from pipeline.tracking.connection import connect, database_file, reaching, resolve

if TYPE_CHECKING:
    from mlflow import MlflowClient

REGISTERED, ALIAS, EXPERIMENT = "digits", "champion", "examples"
MAX_RECORDINGS = 16
"""The largest batch that the exported program takes."""

BERT = {
    "vocab_size": 8000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "num_labels": 5,
}
MOBILENET = {"image_size": 192, "num_labels": 100}
EFFICIENTNET = {"image_size": 160, "width_coefficient": 0.75, "depth_coefficient": 0.6, "hidden_dim": 960, "num_labels": 100}


def write_speaker(path: Path) -> str:
    """Export the speaker embedder for 1 to 16 recordings, and write the program."""
    batch = torch.export.Dim("batch", min=1, max=MAX_RECORDINGS)
    model = speaker_embedder()
    program = torch.export.export(model, (), {"frames": torch.zeros(2, 80, 200)}, dynamic_shapes={"frames": {0: batch}})
    torch.export.save(program, path)
    return f"an exported program for 1 to {MAX_RECORDINGS} recordings"


def write_ranker(path: Path) -> str:
    """Write the ranker whole, as `torch.save(model)` does: its class and its weights."""
    torch.save(ranker(), path)
    return "a pickled model"


def write_codec(path: Path) -> str:
    """Script the codec and write it with both its methods."""
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(audio_codec()), str(path))
    return "a scripted model with the methods encode and decode"


def write_bert(path: Path) -> str:
    """Write a BERT classifier as a folder that transformers reads."""
    return _write_folder(path, "BertForSequenceClassification", BERT)


def write_mobilenet(path: Path) -> str:
    """Write a MobileNet likewise."""
    return _write_folder(path, "MobileNetV2ForImageClassification", MOBILENET, calibrated_on=(16, 3, 192, 192))


def write_efficientnet(path: Path) -> str:
    """Write an EfficientNet likewise."""
    return _write_folder(path, "EfficientNetForImageClassification", EFFICIENTNET, calibrated_on=(16, 3, 160, 160))


def _write_folder(path: Path, architecture: str, config: Mapping[str, Any], *, calibrated_on: tuple[int, ...] | None = None) -> str:
    """Write a model of a class of transformers with random weights, batch norm's statistics taken from random images of a shape."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    made = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = made(made.config_class(**config)).eval()
        if calibrated_on is not None:
            calibrate(model, torch.randn(calibrated_on))
    model.save_pretrained(path)
    return "a folder of transformers with config and weights"


def calibrate(model: nn.Module, images: Tensor) -> None:
    """Give batch norm weights of 1, and take its statistics from images.

    With random weights and statistics of 0 and 1 the signal fades in deep narrow convnets, to 1e-22 or a plain 0, and nothing can
    be told of drift. The figures depend on the machine's order of additions, so they belong into a file, not into a factory.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        nn.init.ones_(norm.weight)
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


ZOO_FILES: Mapping[str, Callable[[Path], str]] = {
    "speaker.pt2": write_speaker,
    "ranker.pth": write_ranker,
    "codec.jit": write_codec,
    "bert": write_bert,
    "mobilenet": write_mobilenet,
    "efficientnet": write_efficientnet,
}
"""What writes each file or folder, given a path; it gives a sentence for people."""


def register_digits(tracking_uri: str, *, force: bool = False) -> str:
    """Register the trained digits in MLflow as `digits`, with the alias `champion`, unless there is such a version.

    Args:
        tracking_uri: of MLflow, whose registry is taken too.
        force: register one more version, and give it the alias.

    Returns:
        A sentence for people.

    Raises:
        InfrastructureError: MLflow cannot be reached.
        FileNotFoundError: the digits have not been trained yet.
    """
    uri = resolve(tracking_uri)
    client = connect(uri)

    import mlflow  # with the settings that connecting made

    before = mlflow.get_tracking_uri()
    with reaching(uri):
        known = [model.aliases for model in client.search_registered_models(f"name = '{REGISTERED}'")]
        if not force and known and ALIAS in known[0]:
            return "up to date"
        if not known:
            client.create_registered_model(REGISTERED)
        try:
            mlflow.set_tracking_uri(uri)  # what logs a model, and what registers it, asks for this alone
            version = client.create_model_version(REGISTERED, source=_log_digits(_experiment(client, uri))).version
        finally:
            mlflow.set_tracking_uri(before)
        client.set_registered_model_alias(REGISTERED, ALIAS, version)
    return f"registered as version {version}"


def _experiment(client: MlflowClient, uri: str) -> str:
    """The id of the experiment `examples`, made if it does not exist; its files lie beside a database, whoever makes it."""
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    database = database_file(uri)
    location = None if database is None else (database.parent / "mlruns" / EXPERIMENT).as_uri()
    return str(client.create_experiment(EXPERIMENT, artifact_location=location))


def _log_digits(experiment_id: str) -> str:
    """The URI of the digits as a model that MLflow keeps: an exported program for any number of images."""
    import mlflow
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    float32 = np.dtype("float32")
    images, scores = TensorSpec(float32, (-1, 1, 8, 8)), TensorSpec(float32, (-1, 10))
    with mlflow.start_run(experiment_id=experiment_id, run_name=REGISTERED):
        logged = mlflow.pytorch.log_model(
            digits(),
            name=REGISTERED,
            serialization_format="pt2",
            signature=ModelSignature(inputs=Schema([images]), outputs=Schema([scores])),
            input_example=np.zeros((4, 1, 8, 8), float32),
            pip_requirements=["torch"],
        )
    return str(logged.model_uri)
