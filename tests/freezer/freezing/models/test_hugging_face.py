"""Inputs of transformers models, inferred from class and config, and calls that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freezer.errors import ColdpressError
from freezer.freezing.models import inferred_inputs, load_source, prepare
from freezer.freezing.sources import parse_source
from freezer.spec import declared_spec

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 30,
}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30}
WHISPER = {
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 8},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 30},
    **{"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 0},
}


def source(kind: str, args: dict[str, Any]) -> Any:
    return parse_source(f"transformers:{kind}", folder=Path(), args=args, weights="random")


@pytest.mark.parametrize(
    ("kind", "args", "names"),
    [
        ("BertConfig", SMALL, "input_ids attention_mask token_type_ids"),
        ("GPT2LMHeadModel", GPT, "input_ids attention_mask use_cache"),
        ("ViTConfig", {**SMALL, "image_size": 8, "patch_size": 4}, "pixel_values"),
        ("WhisperConfig", WHISPER, "input_features decoder_input_ids use_cache"),
    ],
)
def test_inferred_inputs_run(kind: str, args: dict[str, Any], names: str) -> None:
    declared = inferred_inputs(source(kind, args), None)
    assert declared is not None
    assert list(declared["inputs"]) == names.split()
    subject = prepare("m", load_source(source(kind, args)), declared_spec(**declared))
    assert {dim.name: dim.max for dim in subject.spec.dims}["batch"] == 8


IDS = {"input_ids": {"shape": [1, 8], "dtype": "int64"}}


@pytest.mark.parametrize(
    ("kind", "inputs", "code"),
    [
        ("GPT2LMHeadModel", IDS, "CP-OUTPUTS"),
        ("GPT2LMHeadModel", {"ids": {"shape": [1, 8]}}, "CP-EAGER"),
        ("GPT2LMHeadModel", {**IDS, "use_cache": {"value": False}}, None),
        ("PerceiverModel", None, "CP-SPEC"),
    ],
)
def test_calls_are_refused_before_loading(kind: str, inputs: Any, code: str | None) -> None:
    args = GPT if kind == "GPT2LMHeadModel" else {}
    try:
        inferred_inputs(source(kind, args), inputs and declared_spec(inputs, {}))
        refused = None
    except ColdpressError as error:
        refused = error.code
    assert refused == code
