"""Models of transformers: load one, and infer its inputs from its class and config.

`inferred_inputs` calls the model without weights, which takes a second, and shows what a freeze
would refuse once it has loaded them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from freezer.errors import (
    CaptureError,
    ColdpressError,
    JudgeError,
    MissingDependencyError,
    SourceError,
    SpecError,
    described,
    install_command,
)
from freezer.freezing.diagnostics import sentence
from freezer.freezing.models.calls import call_source
from freezer.freezing.models.checks import check_signature
from freezer.freezing.models.samples import example_spec
from freezer.freezing.sources import TRUST, Source
from freezer.runtime.tensor_files import read_samples
from freezer.runtime.tensors import dtype_name, flatten
from freezer.spec import InputSpec, declared_spec

MAX_LENGTH = 128
"""Most tokens of inferred inputs; a decoder gets a quarter."""

AUDIO = {"samples": {"min": 16_000, "max": 48_000}, "frames": {"min": 64, "max": 512}}
"""Lengths of inferred audio: 1 to 3 s at 16 kHz, or their features."""

_UNDECIDED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""What a call raises where values decide."""

Fields = dict[str, Any]


@contextmanager
def source_errors(source: Source) -> Iterator[None]:
    """Turn any exception of a source's code into an error that names the source."""
    try:
        yield
    except ColdpressError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise SourceError(
                f"source {source} runs code of its own when it is loaded; add {TRUST} if you know"
                " its origin",
                code="CP-TRUST",
            ) from None
        raise SourceError(f"source {source}: {sentence(error, 'run')}") from error


def load_transformers(source: Source, *, weights: bool = True) -> Any:
    """Load a model with the weights of a file, or make it from its config.

    Args:
        source: a transformers source.
        weights: whether to load weights.
    """
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(
            f"source {source} needs transformers; {install_command('transformers')}"
        ) from None
    if source.weights == "random":
        kind = getattr(transformers, source.location)
        if issubclass(kind, transformers.PreTrainedConfig):
            return transformers.AutoModel.from_config(kind(**source.args))
        return kind(kind.config_class(**source.args))
    settings = {"trust_remote_code": source.trust, **source.args}
    config = transformers.AutoConfig.from_pretrained(source.location, **settings)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if weights:
        return (kind or transformers.AutoModel).from_pretrained(source.location, **settings)
    if kind is None:
        return transformers.AutoModel.from_config(config, trust_remote_code=source.trust)
    return kind._from_config(config)


def inferred_inputs(
    source: Source, spec: InputSpec | None, samples: Path | None = None
) -> Fields | None:
    """Infer the inputs of a model, and check that a freeze would accept its call.

    Args:
        source: a transformers source.
        spec: declared inputs, which are only checked, as are the shapes of the samples.
        samples: a file of real input sets.

    Returns:
        The `inputs` and `dims` of a catalog; None for declared ones.

    Raises:
        SourceError: the class, the config or the code of the model cannot be loaded.
        SpecError: the inputs cannot be inferred, or an input is not a parameter of `forward`.
        CaptureError: the model returns something other than tensors, such as a cache.
        JudgeError: the model fails on the declared inputs.
    """
    with source_errors(source), torch.device("meta"):
        model = load_transformers(source, weights=False).eval()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model.to_empty(device="cpu")
    if spec is None and samples is not None:
        spec, _ = example_spec(read_samples(samples)[0], {})
    if spec is not None:
        check_signature(model, spec)
        _returns_tensors(model, spec, fake)
        return None
    declared = _inferred(model)
    try:
        if "use_cache" in _parameters(model) and _returns_a_cache(model, declared, fake):
            declared["inputs"]["use_cache"] = {"value": False}
        _returns_tensors(model, declared_spec(**declared), fake)
    except JudgeError as error:
        raise _undeclared(model, str(error)) from error
    return declared


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _returns_a_cache(model: Any, declared: Fields, fake: FakeTensorMode) -> bool:
    """Whether a call returns something other than tensors, or may: only values decide."""
    try:
        return not _returns_tensors(model, declared_spec(**declared), fake)
    except CaptureError:
        return True


def _returns_tensors(model: Any, spec: InputSpec, fake: FakeTensorMode) -> bool:
    """Call a model with fake tensors; False where only values decide.

    Raises:
        CaptureError: it returns something other than tensors.
        JudgeError: it fails.
    """
    point = spec.first_point()
    try:
        with fake:
            tensors = {}
            for item in spec.tensors:
                tensors[item.name] = torch.zeros(item.at(point), dtype=getattr(torch, item.dtype))
            result = call_source(model, spec, tensors)
    except _UNDECIDED:
        return False
    except Exception as error:
        message = f"the eager model fails on its inputs: {described(error)}"
        raise JudgeError(message, code="CP-EAGER") from error
    flatten(result)
    return True


def _undeclared(model: Any, reason: str) -> SpecError:
    return SpecError(
        f"the inputs of {type(model).__name__} cannot be inferred: {reason}; declare them"
        " (`inputs:` in a catalog, `--inputs` for `coldpress freeze`), or give samples; forward"
        f" takes {', '.join(_parameters(model))}"
    )


def _inferred(model: Any) -> Fields:
    """The inputs and dims that a model's class and config name."""
    parameters = _parameters(model)
    config = model.config
    text, decoder = config.get_text_config(), config.get_text_config(decoder=True)
    found = {"decoder_input_ids": _tokens("decoder_length", getattr(decoder, "vocab_size", None))}
    if "input_ids" in parameters:
        found["input_ids"] = _tokens("length", getattr(text, "vocab_size", None))
        found["attention_mask"] = _tokens("length", None)
        if (getattr(text, "type_vocab_size", None) or 0) > 1:
            found["token_type_ids"] = _tokens("length", text.type_vocab_size)
    for name, shape in (
        ("pixel_values", _image(config)),
        ("input_values", _waveform(config)),
        ("input_features", _features(config)),
    ):
        found[name] = {"shape": ["batch", *shape], "dtype": dtype_name(model.dtype)}
    inputs = {name: found[name] for name in parameters if name in found}
    main = model.main_input_name
    for name in [main] if isinstance(main, str) else main:
        if name not in inputs:
            raise _undeclared(model, f"nothing is known about {name!r}")
    bounds = {
        "batch": {"max": 8},
        "length": _length(text, MAX_LENGTH),
        "decoder_length": _length(decoder, MAX_LENGTH // 4),
        **AUDIO,
    }
    used = {size for fields in inputs.values() for size in fields["shape"]}
    return {"inputs": inputs, "dims": {name: bounds[name] for name in bounds if name in used}}


def _setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these settings that a config, or the config of a part, has."""
    for part in (config, *(getattr(config, part, None) for part in config.sub_configs)):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def _tokens(dim: str, size: int | None) -> Fields:
    """Integers from 0, below the size of their table."""
    tokens: Fields = {"shape": ["batch", dim], "dtype": "int64"}
    return tokens if size is None else {**tokens, "range": [0, size - 1]}


def _length(config: Any, most: int) -> dict[str, int]:
    """Bounds of a number of tokens. RoBERTa and its like reserve two positions."""
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 2:
        most = min(most, positions - 2)
    return {"min": min(16, most), "max": most}


def _image(config: Any) -> list[int]:
    """Frames of a video, channels, height and width."""
    size, num_frames = _setting(config, "image_size", default=224), _setting(config, "num_frames")
    if isinstance(size, int):
        size = [size, size]
    elif isinstance(size, Mapping):
        size = [size["height"], size["width"]]
    channels = _setting(config, "num_channels", "in_channels", default=3)
    return [*([num_frames] if num_frames else []), channels, *size]


def _waveform(config: Any) -> list[int | str]:
    """Samples; of a spectrogram, frames and bins."""
    bins, length = (getattr(config, name, None) for name in ("num_mel_bins", "max_length"))
    return [length, bins] if bins and length else ["samples"]


def _features(config: Any) -> list[int | str]:
    """Frames and features; Whisper's are the other way round, of a fixed length."""
    size = _setting(config, "feature_projection_input_dim", "input_feat_per_channel")
    if size is not None:
        return ["frames", size * _setting(config, "input_channels", default=1)]
    frames = 2 * _setting(config, "max_source_positions", default=1500)
    return [_setting(config, "num_mel_bins", default=80), frames]
