"""MobileNetV3-Large and EfficientNet-B0 for benchmarks/peers.yaml: inverted residuals, as in their
papers, with random weights.

Batch norms have the statistics of what they normalize, as trained ones have. With others the signal
fades to denormal numbers, or rounding grows until engines differ by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SEED = 0
NUM_CLASSES = 1000

Activation = Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """An inverted residual block.

    Attributes:
        expanded: channels between the 1x1 convolutions.
        num_out: output channels.
        kernel, stride: of the depthwise convolution.
        activation: after the first two convolutions.
        squeezed: channels inside squeeze and excitation; None without it.
        gate: the last function of squeeze and excitation.
    """

    expanded: int
    num_out: int
    kernel: int
    stride: int
    activation: Activation
    squeezed: int | None
    gate: Activation


class ConvNorm(nn.Sequential):
    """Convolution, batch norm and, if given, activation."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        activation: Activation | None = None,
    ) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(
                num_in,
                num_out,
                kernel,
                stride=stride,
                padding=kernel // 2,
                groups=groups,
                bias=False,
            ),
            nn.BatchNorm2d(num_out),
        ]
        super().__init__(*layers, *([] if activation is None else [activation()]))


class SqueezeExcite(nn.Module):
    """Scale channels by a function of their means."""

    def __init__(
        self, channels: int, squeezed: int, activation: Activation, gate: Activation
    ) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            activation(),
            nn.Conv2d(squeezed, channels, 1),
            gate(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scaled channels."""
        scaled: Tensor = x * self.gate(x)
        return scaled


class InvertedResidual(nn.Module):
    """Expand, filter each channel, reduce; added to the input where the shapes are equal."""

    def __init__(self, num_in: int, stage: Stage) -> None:
        super().__init__()
        wide, layers = stage.expanded, list[nn.Module]()
        if wide != num_in:
            layers.append(ConvNorm(num_in, wide, 1, activation=stage.activation))
        layers.append(
            ConvNorm(
                wide,
                wide,
                stage.kernel,
                stride=stage.stride,
                groups=wide,
                activation=stage.activation,
            )
        )
        if stage.squeezed is not None:
            inner = nn.ReLU if stage.gate is nn.Hardsigmoid else stage.activation
            layers.append(SqueezeExcite(wide, stage.squeezed, inner, stage.gate))
        layers.append(ConvNorm(wide, stage.num_out, 1))
        self.layers = nn.Sequential(*layers)
        self.adds = stage.stride == 1 and num_in == stage.num_out

    def forward(self, x: Tensor) -> Tensor:
        """The features of the next block."""
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


def mobilenet_v3_large() -> nn.Module:
    """MobileNetV3-Large (Howard et al. 2019, table 1); float32 [n, 1000] from `image`, float32 [n,
    3, 224, 224].
    """
    table = [  # kernel, expanded, out, squeeze and excitation, activation, stride
        (3, 16, 16, False, nn.ReLU, 1),
        (3, 64, 24, False, nn.ReLU, 2),
        (3, 72, 24, False, nn.ReLU, 1),
        (5, 72, 40, True, nn.ReLU, 2),
        (5, 120, 40, True, nn.ReLU, 1),
        (5, 120, 40, True, nn.ReLU, 1),
        (3, 240, 80, False, nn.Hardswish, 2),
        (3, 200, 80, False, nn.Hardswish, 1),
        (3, 184, 80, False, nn.Hardswish, 1),
        (3, 184, 80, False, nn.Hardswish, 1),
        (3, 480, 112, True, nn.Hardswish, 1),
        (3, 672, 112, True, nn.Hardswish, 1),
        (5, 672, 160, True, nn.Hardswish, 2),
        (5, 960, 160, True, nn.Hardswish, 1),
        (5, 960, 160, True, nn.Hardswish, 1),
    ]
    stages = [
        Stage(
            expanded=expanded,
            num_out=num_out,
            kernel=kernel,
            stride=stride,
            activation=activation,
            squeezed=_multiple_of_8(expanded / 4) if excites else None,
            gate=nn.Hardsigmoid,
        )
        for kernel, expanded, num_out, excites, activation, stride in table
    ]
    head = [nn.Linear(960, 1280), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1280, NUM_CLASSES)]
    return _network(16, stages, 960, nn.Hardswish, head)


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0 (Tan and Le 2019, table 1); float32 [n, 1000] from `image`, float32 [n, 3,
    224, 224].
    """
    table = [  # kernel, factor of expansion, out, blocks, stride of the first
        (3, 1, 16, 1, 1),
        (3, 6, 24, 2, 2),
        (5, 6, 40, 2, 2),
        (3, 6, 80, 3, 2),
        (5, 6, 112, 3, 1),
        (5, 6, 192, 4, 2),
        (3, 6, 320, 1, 1),
    ]
    stages, num_in = list[Stage](), 32
    for kernel, factor, num_out, num_blocks, stride in table:
        for index in range(num_blocks):
            stages.append(
                Stage(
                    expanded=num_in * factor,
                    num_out=num_out,
                    kernel=kernel,
                    stride=stride if index == 0 else 1,
                    activation=nn.SiLU,
                    squeezed=max(1, num_in // 4),
                    gate=nn.Sigmoid,
                )
            )
            num_in = num_out
    return _network(32, stages, 1280, nn.SiLU, [nn.Dropout(0.2), nn.Linear(1280, NUM_CLASSES)])


def _network(
    stem: int,
    stages: Sequence[Stage],
    features: int,
    activation: Activation,
    head: Sequence[nn.Module],
) -> nn.Module:
    """A stem with stride 2, the blocks, a 1x1 convolution, global pooling, and the head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        widths = [stem, *(stage.num_out for stage in stages)]
        model = _Named(
            ConvNorm(3, stem, 3, stride=2, activation=activation),
            *(
                InvertedResidual(num_in, stage)
                for num_in, stage in zip(widths, stages, strict=False)
            ),
            ConvNorm(widths[-1], features, 1, activation=activation),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            *head,
        )
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0  # the statistics are those of the last batch
        with torch.no_grad():
            model.train()(torch.randn(8, 3, 224, 224))
    return model.eval()


class _Named(nn.Module):
    """Layers in sequence; its input has a name."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.layers(image)
        return scores


def _multiple_of_8(value: float) -> int:
    """The nearest multiple of 8 that is at least nine tenths of a value."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * value else rounded + 8
