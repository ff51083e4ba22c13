"""Writers of the files and of the registered model of examples/zoo.yaml; examples/prepare.py calls
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from examples.models import digits
from examples.zoo import SEED, audio_codec, ranker, speaker_embedder
from freezer.runtime.loaders import torchscript_deprecations_silenced
from pipeline.tracking.connection import connect, database_file, reaching, resolve

if TYPE_CHECKING:
    from mlflow import MlflowClient

REGISTERED, ALIAS, EXPERIMENT = "digits", "champion", "examples"
MAX_RECORDINGS = 16
"""The largest batch of the exported program."""

BERT = {
    "vocab_size": 8000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "num_labels": 5,
}
MOBILENET = {"image_size": 192, "num_labels": 100}
EFFICIENTNET = {
    "image_size": 160,
    "width_coefficient": 0.75,
    "depth_coefficient": 0.6,
    "hidden_dim": 960,
    "num_labels": 100,
}


def write_speaker(path: Path) -> str:
    """Export the speaker embedder for 1 to 16 recordings."""
    batch = torch.export.Dim("batch", min=1, max=MAX_RECORDINGS)
    model = speaker_embedder()
    program = torch.export.export(
        model, (), {"frames": torch.zeros(2, 80, 200)}, dynamic_shapes={"frames": {0: batch}}
    )
    torch.export.save(program, path)
    return f"an exported program for 1 to {MAX_RECORDINGS} recordings"


def write_ranker(path: Path) -> str:
    """Pickle the ranker with `torch.save(model)`: its class and its weights."""
    torch.save(ranker(), path)
    return "a pickled model"


def write_codec(path: Path) -> str:
    """Script the codec with both methods."""
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(audio_codec()), str(path))
    return "a scripted model with the methods encode and decode"


def write_bert(path: Path) -> str:
    """Save a BERT classifier as a folder of transformers."""
    return _write_folder(path, "BertForSequenceClassification", BERT)


def write_mobilenet(path: Path) -> str:
    """Save a MobileNet as a folder of transformers."""
    return _write_folder(
        path, "MobileNetV2ForImageClassification", MOBILENET, calibrated_on=(16, 3, 192, 192)
    )


def write_efficientnet(path: Path) -> str:
    """Save an EfficientNet as a folder of transformers."""
    return _write_folder(
        path, "EfficientNetForImageClassification", EFFICIENTNET, calibrated_on=(16, 3, 160, 160)
    )


def _write_folder(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    *,
    calibrated_on: tuple[int, ...] | None = None,
) -> str:
    """Save a model of transformers with random weights, and batch-norm statistics from random
    images of a shape.
    """
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
    """Set the weights of batch norm to 1, and take its statistics from images.

    With random weights and statistics of 0 and 1 the signal fades to 1e-22 or 0 in deep narrow
    convnets, so that drift cannot be measured. The statistics depend on the machine's order of
    additions, so they belong in a file and not in a factory.
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
"""The writer of each file or folder; it takes a path and returns a description."""


def register_digits(tracking_uri: str, *, force: bool = False) -> str:
    """Register the trained digits in MLflow as `digits` with the alias `champion`, unless such a
    version exists.

    Args:
        tracking_uri: the MLflow server or database, which is also the registry.
        force: register another version, and set the alias to it.

    Returns:
        A description of the result.

    Raises:
        InfrastructureError: MLflow cannot be reached.
        FileNotFoundError: the weights of the digits have not been prepared.
    """
    uri = resolve(tracking_uri)
    client = connect(uri, create=True)

    import mlflow  # with the settings of the connection

    before = mlflow.get_tracking_uri()
    with reaching(uri):
        known = [
            model.aliases for model in client.search_registered_models(f"name = '{REGISTERED}'")
        ]
        if not force and known and ALIAS in known[0]:
            return "up to date"
        if not known:
            client.create_registered_model(REGISTERED)
        try:
            mlflow.set_tracking_uri(uri)  # logging and registering a model use only this
            version = client.create_model_version(
                REGISTERED, source=_log_digits(_experiment(client, uri))
            ).version
        finally:
            mlflow.set_tracking_uri(before)
        client.set_registered_model_alias(REGISTERED, ALIAS, version)
    return f"registered as version {version}"


def _experiment(client: MlflowClient, uri: str) -> str:
    """The id of the experiment `examples`, which is created if needed; its files are beside the
    database.
    """
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    database = database_file(uri)
    location = None if database is None else (database.parent / "mlruns" / EXPERIMENT).as_uri()
    return str(client.create_experiment(EXPERIMENT, artifact_location=location))


def _log_digits(experiment_id: str) -> str:
    """Log the digits as an exported program for any number of images, and return the
    model's URI.
    """
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
