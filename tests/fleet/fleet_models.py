"""Two small models of catalog.yaml."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.models import Branching


def attention() -> nn.Module:
    """Self-attention of four heads, and two linear layers; takes [batch, length, 32].

    Its weights are normal ones, which torch fills with other numbers on Arm than on x86.
    """
    layer = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


def branches() -> nn.Module:
    """A layer and scripted control flow; takes [batch, 16]."""
    return torch.jit.script(nn.Sequential(nn.Linear(16, 4), Branching()))
