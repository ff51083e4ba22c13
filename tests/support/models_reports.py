"""Models with known effects of freezing.

TorchScript reads the types of attributes from annotations, so this module must not import
`annotations` from `__future__`."""

from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three convolutions with their batch norms, and two dropouts."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [
            part
            for _ in range(3)
            for part in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        ]
        self.features = nn.Sequential(*pairs, nn.Dropout(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)
