"""Models that show what engines other than torch have to keep: layouts, dtypes, nested outputs,
tied weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import seeded


class ConvMaps(nn.Module):
    """[batch, 3, 8, 8] to logits and a feature map in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Linear(8, 5),
        )

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        features = torch.relu(self.norm(self.conv(image)))
        return {
            "logits": self.head(features.mean((2, 3))),
            "map": features.contiguous(memory_format=torch.channels_last),
        }


class TinyEncoder(nn.Module):
    """Ids [batch, length] and a mask to logits by tied weights, and a tuple of ids and looked-up
    constants.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.lengths: Tensor = nn.Buffer(torch.arange(20))

    def forward(self, ids: Tensor, mask: Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.layer(self.embed(ids) * scale, src_key_padding_mask=mask)
        return {
            "logits": self.head(hidden),
            "more": (hidden.transpose(1, 2), [self.lengths[ids], mask.any()]),
        }


class Kinds(nn.Module):
    """Outputs of every dtype and layout that needs care: inputs themselves, no dims, no elements,
    half precision.
    """

    def forward(self, x: Tensor, flag: Tensor) -> tuple[Tensor, ...]:
        return (
            *(x, flag, x.sum(), (x > 9).any(), x[:0], x.permute(2, 0, 1)),
            *(
                x.to(dtype)
                for dtype in (
                    torch.float16,
                    torch.bfloat16,
                    torch.float64,
                    torch.int64,
                    torch.int8,
                    torch.uint8,
                )
            ),
        )


def convnet() -> nn.Module:
    return seeded(ConvMaps)


def encoder() -> nn.Module:
    return seeded(TinyEncoder)
