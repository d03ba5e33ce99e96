"""Convert a torch.export program (.pt2) or a TorchScript module (.pt) to ONNX (see __init__)."""

from __future__ import annotations

import json
import sys
import zipfile
from typing import Any

OPSET_OF_EXPORT, OPSET_OF_SCRIPT = 18, 17


class InputsNeeded(Exception):
    """The command names other inputs than the module has. The text gives the next step."""


def main() -> int:
    request = json.loads(sys.argv[1])
    try:
        import torch
    except ImportError as error:
        print(f"missing: {error.name or error}", file=sys.stderr)
        return 4
    try:
        with zipfile.ZipFile(request["model"]) as archive:
            names = archive.namelist()
        if any("/code/" in name for name in names) and any(name.endswith("/constants.pkl") for name in names):
            _of_script(torch, request["model"], request["inputs"], request["out"])
        else:
            _of_export(torch, request["model"], request["out"])
    except ModuleNotFoundError as error:
        print(f"missing: {error.name}", file=sys.stderr)
        return 4
    except InputsNeeded as error:
        print(error, file=sys.stderr)
        return 5
    except Exception as error:  # noqa: BLE001 - the exporters raise any class
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        return 3
    return 0


def _of_export(torch: Any, path: str, out: str) -> None:
    program = torch.export.load(path)
    torch.onnx.export(
        program, (), out, dynamo=True, opset_version=OPSET_OF_EXPORT, external_data=False, optimize=True, verbose=False
    )


def _of_script(torch: Any, path: str, inputs: dict[str, Any], out: str) -> None:
    module = torch.jit.load(path, map_location="cpu").eval()
    names = [argument.name for argument in module.forward.schema.arguments[1:]]
    if set(names) != set(inputs):
        raise InputsNeeded(
            "TorchScript does not hold the shapes of its inputs; give each shape with --input NAME=1,3,224,224 or "
            f"NAME=int64:1,128 (its inputs: {', '.join(names)}; given: {', '.join(inputs) or 'none'})"
        )
    examples = tuple(_example(torch, **inputs[name]) for name in names)
    answers = module(*examples)
    count = len(answers) if isinstance(answers, (tuple, list)) else 1
    outputs = [f"output{i}" for i in range(count)] if count > 1 else ["output"]
    torch.onnx.export(
        module,
        examples,
        out,
        dynamo=False,
        opset_version=OPSET_OF_SCRIPT,
        input_names=names,
        output_names=outputs,
        dynamic_axes={name: {0: "batch"} for name in [*names, *outputs]},
    )


def _example(torch: Any, datatype: str, shape: list[int]) -> Any:
    dtype = getattr(torch, datatype)
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


if __name__ == "__main__":
    sys.exit(main())
