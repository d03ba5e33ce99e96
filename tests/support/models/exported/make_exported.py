"""Write the models of this folder: run it in an environment with torch, onnx and onnxscript (no other test needs them).

    python tests/support/models/exported/make_exported.py

The files came from torch 2.15 and onnxscript 0.7.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

FOLDER = Path(__file__).parent
OPSET = 18


class Text(nn.Module):  # type: ignore[misc]  # torch is not installed where types are checked
    """A text classifier with attention: token ids and their mask -> scores, and a state of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(ids)
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4.0
        scores = scores + (1.0 - mask[:, None, :].float()) * -10000.0
        states = self.norm(x + torch.softmax(scores, -1) @ self.value(x))
        weight = mask[:, :, None].float()
        return self.head((states * weight).sum(1) / weight.sum(1)), states


class Picture(nn.Module):  # type: ignore[misc]  # torch is not installed where types are checked
    """A small image classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image)


class Speech(nn.Module):  # type: ignore[misc]  # torch is not installed where types are checked
    """One step of a recurrent network: its state is [layers, batch, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, (h, c) = self.lstm(x, (h, c))
        return self.head(y[:, -1]), h, c


class Repeats(nn.Module):  # type: ignore[misc]  # torch is not installed where types are checked
    """Data decides how often the layer runs: a Loop, and an If inside its condition."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        for _ in range(int(times.max())):
            x = torch.tanh(self.layer(x))
        return x


class Chooses(nn.Module):  # type: ignore[misc]  # torch is not installed where types are checked
    """Data decides which layer runs: an If."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, switch: torch.Tensor) -> torch.Tensor:
        if bool(switch.sum() > 0):
            return self.one(x)
        return self.other(x)


def export(model: nn.Module, inputs: tuple[Any, ...], name: str, shapes: Any, **options: Any) -> None:
    torch.onnx.export(
        model.eval(), inputs, str(FOLDER / name), dynamo=True, opset_version=OPSET, dynamic_shapes=shapes, **options
    )


def export_script(model: nn.Module, inputs: tuple[Any, ...], name: str, names: list[str]) -> None:
    torch.onnx.export(
        torch.jit.script(model.eval()),
        inputs,
        str(FOLDER / name),
        dynamo=False,
        opset_version=17,
        input_names=names,
        output_names=["y"],
        dynamic_axes={one: {0: "batch"} for one in [*names, "y"]},
    )


def main() -> None:
    torch.manual_seed(1)
    batch, tokens = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("tokens", min=2, max=512)
    ids, mask = torch.randint(0, 40, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    both = {0: batch, 1: tokens}
    export(
        Text(),
        (ids, mask),
        "text.onnx",
        {"ids": both, "mask": both},
        external_data=False,
        input_names=["ids", "mask"],
        output_names=["scores", "states"],
    )
    # As the exporter writes it today: the weights in picture.onnx.data.
    export(Picture(), (torch.randn(2, 3, 16, 16),), "picture.onnx", {"image": {0: batch}}, output_names=["scores"])
    export(
        Picture().half(),
        (torch.randn(2, 3, 16, 16).half(),),
        "half.onnx",
        {"image": {0: batch}},
        external_data=False,
        output_names=["scores"],
    )
    state = torch.zeros(2, 2, 8)
    export(
        Speech(),
        (torch.randn(2, 5, 6), state, state.clone()),
        "speech.onnx",
        {"x": {0: batch}, "h": {1: batch}, "c": {1: batch}},
        external_data=False,
        output_names=["y", "h_next", "c_next"],
    )
    one = torch.ones(2, 1, dtype=torch.int64)
    export_script(Repeats(), (torch.randn(2, 4), one), "repeats.onnx", ["x", "times"])
    export_script(Chooses(), (torch.randn(2, 4), one), "chooses.onnx", ["x", "switch"])
    for path in FOLDER.glob("*.onnx"):
        without_paths(path)


def without_paths(path: Path) -> None:
    """Remove the exporter's notes of where this file lies."""
    proto = onnx.load(path, load_external_data=False)
    for message in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        message.ClearField("metadata_props")
        message.ClearField("doc_string")
    path.write_bytes(proto.SerializeToString())


if __name__ == "__main__":
    main()
