"""The models of examples/zoo.yaml that are not in a library: a UNet, a recommender, recurrent and
streaming models.

Every factory returns a model in eval mode with seeded random weights, and batch-norm statistics
other than 0 and 1, so that folding has an effect. Random weights need no download; speed and drift
depend little on their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SEED = 0


def whisper_encoder(config: Mapping[str, Any]) -> nn.Module:
    """The encoder of Whisper, without its decoder.

    Args:
        config: arguments of transformers.WhisperConfig.
    """
    import transformers

    with _seeded():
        encoder: nn.Module = transformers.WhisperModel(
            transformers.WhisperConfig(**config)
        ).get_encoder()
    return encoder.eval()


class _DoubleConv(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class UNet(nn.Module):
    """A UNet for segmentation: from the bytes of an image to a map of scores for each class."""

    def __init__(self, width: int, depth: int, num_classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem = _DoubleConv(3, width)
        self.down = nn.ModuleList(_DoubleConv(one, two) for one, two in pairwise(widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(two, one, 2, stride=2) for one, two in pairwise(widths)
        )
        self.merge = nn.ModuleList(_DoubleConv(two, one) for one, two in pairwise(widths))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Scores, float32 [n, classes, h, w], of images, uint8 [n, 3, h, w]; h and w are multiples
        of 2 ** depth.
        """
        x = image.to(self.head.weight.dtype) / 255
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(down(functional.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        scores: Tensor = self.head(x)
        return scores


def unet(width: int = 16, depth: int = 3, num_classes: int = 4) -> nn.Module:
    """A UNet."""
    with _seeded():
        return _settled(UNet(width, depth, num_classes))


class Recommender(nn.Module):
    """A click model like DLRM: embedding bags, products of all pairs of vectors, and layers that
    compute a score.
    """

    def __init__(self, tables: list[int], width: int, hidden: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in tables)
        self.bottom = nn.Sequential(
            nn.Linear(13, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        num_vectors = len(tables) + 1
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.pairs: Tensor
        self.register_buffer("pairs", rows * num_vectors + columns, persistent=False)
        num_features = width + len(rows)
        self.top = nn.Sequential(
            nn.Linear(num_features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, dense: Tensor, ids: list[Tensor]) -> Tensor:
        """The probability of a click, float32 [n], from float32 [n, 13] and, for each table, int64
        [n, ids in a bag].
        """
        figures = self.bottom(dense)
        vectors = torch.stack(
            [figures, *(bag(one) for bag, one in zip(self.bags, ids, strict=True))], dim=1
        )
        meetings = (vectors @ vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        return torch.sigmoid(self.top(torch.cat([figures, meetings], dim=1))).squeeze(1)


def recommender(tables: list[int], width: int = 64, hidden: int = 512) -> nn.Module:
    """A click model.

    Args:
        tables: number of ids in each table.
        width: of an embedding.
        hidden: width of the layers.
    """
    with _seeded():
        return Recommender(tables, width, hidden).eval()


class LstmDecoder(nn.Module):
    """A language model that is called with a few tokens at a time: the state of its LSTM is passed
    in and returned.
    """

    def __init__(self, vocab_size: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers, batch_first=True)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(
        self, tokens: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Scores, float32 [n, length, vocabulary], and the next state.

        Args:
            tokens: int64 [n, length].
            state: hidden and cell state, each float32 [layers, n, hidden]; zeros for the first
                call.
        """
        steps, state = self.lstm(self.embedding(tokens), state)
        return self.head(steps), state


def lstm_decoder(vocab_size: int = 2048, hidden: int = 384, num_layers: int = 2) -> nn.Module:
    """A recurrent language model."""
    with _seeded():
        return LstmDecoder(vocab_size, hidden, num_layers).eval()


class Ranker(nn.Module):
    """Scores candidates for a user: a Transformer reads the user's history, in which padding is
    masked.
    """

    def __init__(self, num_items: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.reader = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.score = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """`scores`, float32 [n, candidates], and `user`, float32 [n, width].

        Args:
            features: `history`, int64 [n, length]; `mask`, bool of the same shape, False for
                padding; and `candidates`, int64 [n, candidates].
        """
        mask = features["mask"]
        read = self.reader(self.items(features["history"]), src_key_padding_mask=~mask)
        keep = mask.unsqueeze(2)
        user = (read * keep).sum(1) / keep.sum(1).clamp(min=1)
        candidates = self.items(features["candidates"])
        pairs = torch.cat([candidates, user.unsqueeze(1).expand_as(candidates)], dim=2)
        return {"scores": self.score(pairs).squeeze(2), "user": user}


def ranker(num_items: int = 5000, width: int = 128, num_layers: int = 3) -> nn.Module:
    """A model that ranks items; examples/prepare.py pickles it."""
    with _seeded():
        return Ranker(num_items, width, num_layers).eval()


class SpeakerEmbedder(nn.Module):
    """Voice prints of recordings: dilated convolutions over the frames, then mean and deviation
    over time.
    """

    def __init__(self, num_bands: int, width: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(num_bands, width, 5, padding=2), nn.ReLU(), nn.BatchNorm1d(width)
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i),
                nn.ReLU(),
                nn.BatchNorm1d(width),
            )
            for i in range(num_blocks)
        )
        self.head = nn.Linear(2 * width, 192)

    def forward(self, frames: Tensor) -> Tensor:
        """Unit voice prints, float32 [n, 192], from log-mel frames, float32 [n, bands, length]."""
        x = self.stem(frames)
        for block in self.blocks:
            x = x + block(x)
        pooled = torch.cat([x.mean(dim=2), x.std(dim=2)], dim=1)
        return functional.normalize(self.head(pooled), dim=1)


def speaker_embedder(num_bands: int = 80, width: int = 192, num_blocks: int = 4) -> nn.Module:
    """A model of voice prints; examples/prepare.py exports it."""
    with _seeded():
        return _settled(SpeakerEmbedder(num_bands, width, num_blocks))


class AudioCodec(nn.Module):
    """A neural audio codec: `encode` maps a waveform to codes, `decode` maps them back.

    TorchScript keeps both methods.
    """

    def __init__(self, width: int, num_codes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, width, 7, stride=4, padding=3),
            nn.ELU(),
            nn.Conv1d(width, 2 * width, 8, stride=4, padding=2),
            nn.ELU(),
            nn.Conv1d(2 * width, 2 * width, 8, stride=4, padding=2),
        )
        self.codebook = nn.Embedding(num_codes, 2 * width)
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(2 * width, 2 * width, 8, stride=4, padding=2),
            nn.ELU(),
            nn.ConvTranspose1d(2 * width, width, 8, stride=4, padding=2),
            nn.ELU(),
            nn.ConvTranspose1d(width, 1, 8, stride=4, padding=2),
        )

    @torch.jit.export
    def encode(self, audio: Tensor) -> Tensor:
        """Codes, int64 [n, samples / 64], from a waveform, float32 [n, samples]."""
        latent = self.encoder(audio.unsqueeze(1)).transpose(1, 2)
        latent = functional.layer_norm(latent, latent.shape[-1:])
        # The nearest entry of the codebook; |latent|^2 is the same for all entries.
        distances: Tensor = (
            self.codebook.weight.square().sum(dim=1) - 2 * latent @ self.codebook.weight.t()
        )
        return distances.argmin(dim=2)

    @torch.jit.export
    def decode(self, codes: Tensor) -> Tensor:
        """A waveform, float32 [n, 64 * length], from codes, int64 [n, length]."""
        return torch.tanh(self.decoder(self.codebook(codes).transpose(1, 2))).squeeze(1)

    def forward(self, audio: Tensor) -> Tensor:
        """Encode and decode a waveform."""
        return self.decode(self.encode(audio))


def audio_codec(width: int = 96, num_codes: int = 1024) -> nn.Module:
    """A codec; examples/prepare.py scripts it."""
    with _seeded():
        model = AudioCodec(width, num_codes)
        for module in model.modules():
            if isinstance(module, nn.Conv1d) and module.bias is not None:
                nn.init.zeros_(
                    module.bias
                )  # biases would dominate the waveform, and all codes would be equal
        return model.eval()


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed random weights; the caller's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def _settled(model: nn.Module) -> nn.Module:
    """The model in eval mode, with batch-norm statistics as after training."""
    for module in model.modules():
        if (
            isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
            and module.running_mean is not None
            and module.running_var is not None
        ):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()
