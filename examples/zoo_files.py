"""Writers of the files that examples/zoo.yaml names, and of its registered model; examples/prepare.py calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from examples.models import digits
from examples.zoo import SEED, audio_codec, ranker, speaker_embedder
from freezer.legacy import torchscript_deprecations_silenced
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
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    model.save_pretrained(path)
    return "a folder of transformers with config and weights"


ZOO_FILES: Mapping[str, Callable[[Path], str]] = {
    "speaker.pt2": write_speaker,
    "ranker.pth": write_ranker,
    "codec.jit": write_codec,
    "bert": write_bert,
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
