"""The models of examples/catalog.yaml: a trained convnet for digits, and an untrained
voice-activity detector.

`python -m examples.prepare` writes the files that they read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

DATA = Path(__file__).parent / "data"
DIGITS_WEIGHTS = DATA / "digits.safetensors"
DIGITS_SAMPLES = DATA / "digits_samples.safetensors"
DIGITS_TEST = DATA / "digits_test.safetensors"
DIGITS_HELD_OUT = DATA / "digits_held_out.safetensors"
VAD = DATA / "vad.jit"

TEST_BATCH = 64
"""Images per call of the task metric, the largest batch of the catalog; the last batch is smaller.
"""


class DigitsNet(nn.Module):
    """Three convolutions with batch norm and ReLU, for images of 8 by 8 pixels; 10 logits."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_conv_bn_relu(1, width),
            *_conv_bn_relu(width, 2 * width),
            nn.MaxPool2d(2),
            *_conv_bn_relu(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
        )
        self.classifier = nn.Linear(4 * width, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Logits, float32 [n, 10], of images, float32 [n, 1, 8, 8], scaled to 0..1."""
        logits: Tensor = self.classifier(self.features(image))
        return logits


def _conv_bn_relu(num_in: int, num_out: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    return nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()


def digits() -> nn.Module:
    """The trained convnet in eval mode.

    Raises:
        FileNotFoundError: its weights have not been prepared.
    """
    model = DigitsNet()
    model.load_state_dict(_prepared(DIGITS_WEIGHTS))
    return model.eval()


def digits_accuracy(predict: Callable[..., Any]) -> float:
    """The accuracy of a model on the test split, 0..1: the task metric of the catalog.

    Args:
        predict: called as `predict(image=…)` with float32 [n, 1, 8, 8]; returns logits [n, 10].

    Raises:
        FileNotFoundError: the test split has not been prepared.
    """
    split = _prepared(DIGITS_TEST)
    images, labels = split["images"], split["labels"]
    num_right = 0
    for start in range(0, len(labels), TEST_BATCH):
        logits = predict(image=images[start : start + TEST_BATCH])
        num_right += int((logits.argmax(dim=1) == labels[start : start + TEST_BATCH]).sum())
    return num_right / len(labels)


def _prepared(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; make it with `python -m examples.prepare`")
    return dict(safetensors.torch.load_file(path))


class VoiceActivity(nn.Module):
    """A speech probability for each chunk of 512 audio samples, like published voice-activity
    detectors.

    It needs TorchScript because of the branch on `sr`, a number and not a tensor. The state of its
    LSTM is passed in as `h` and `c` and returned, so a call changes nothing in the model. State in
    a buffer (`register_buffer`, written with `copy_`) works as well; `.double()` leaves a plain
    attribute in float32, so the float64 reference cannot run.
    """

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.frames_16k = nn.Conv1d(1, 64, 128, stride=64, bias=False)
        self.frames_8k = nn.Conv1d(1, 64, 64, stride=32, bias=False)
        self.norm = nn.BatchNorm1d(64)
        self.mix = nn.Conv1d(64, 64, 3, padding=1, bias=False)
        self.mix_norm = nn.BatchNorm1d(64)
        self.lstm = nn.LSTM(64, hidden, batch_first=True)
        self.score = nn.Linear(hidden, 1)

    def forward(
        self, audio: Tensor, h: Tensor, c: Tensor, sr: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The probability of speech, [n, 1], and the LSTM's next state, twice [1, n, hidden].

        Args:
            audio: float32 [n, 512], in -1..1.
            h: the LSTM's hidden state, [1, n, hidden]; zeros for the first chunk.
            c: its cell state, the same.
            sr: the sampling rate in Hz, 16000 or 8000.
        """
        if sr == 16000:
            frames = self.frames_16k(audio.unsqueeze(1))
        elif sr == 8000:
            frames = self.frames_8k(audio.unsqueeze(1))
        else:
            raise ValueError(f"sr is {sr}; expected 16000 or 8000")
        features = torch.relu(self.norm(frames))
        features = torch.relu(self.mix_norm(self.mix(features)))
        steps, (h_next, c_next) = self.lstm(features.transpose(1, 2), (h, c))
        return torch.sigmoid(self.score(steps[:, -1])), h_next, c_next


def voice_activity(seed: int = 0) -> VoiceActivity:
    """The detector with random weights, and batch-norm statistics other than 0 and 1, so that
    folding has an effect.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VoiceActivity()
        for module in model.modules():
            if (
                isinstance(module, nn.BatchNorm1d)
                and module.running_mean is not None
                and module.running_var is not None
            ):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.05, 0.5)
    return model.eval()
