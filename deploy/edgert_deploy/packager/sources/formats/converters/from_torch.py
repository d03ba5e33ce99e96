"""Convert a torch.export program (.pt2) or a TorchScript module (.pt) to ONNX (see __init__)."""

from __future__ import annotations

import json
import sys
import zipfile
from typing import Any

OPSET_OF_EXPORT, OPSET_OF_SCRIPT = 18, 17
QUANTIZED = ". PyTorch has quantized this module: save the module in float, because edgert build quantizes it itself"
WRAP = "Wrap it in a module that takes and returns only tensors, and save that module"


class Advised(Exception):
    """The module or the command must change. The text gives the next step."""


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
    except Advised as error:
        print(error, file=sys.stderr)
        return 5
    except Exception as error:  # noqa: BLE001 - the exporters raise any class
        text = short(error)
        is_quantized = "quantized::" in text  # a name of an operator
        print(text + QUANTIZED * is_quantized, file=sys.stderr)
        return 5 if is_quantized else 3
    return 0


def short(error: BaseException) -> str:
    """Return the first cause of the error on one line; the exporters wrap it in general advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _of_export(torch: Any, path: str, out: str) -> None:
    program = torch.export.load(path)
    options = {"opset_version": OPSET_OF_EXPORT, "external_data": False, "optimize": True, "verbose": False}
    torch.onnx.export(program, (), out, dynamo=True, output_names=_keys(torch, program), **options)


def _keys(torch: Any, program: Any) -> list[str] | None:
    """Return the keys of a dict of tensors that the module returns; None for other answers.

    A key that is also the name of an input is not possible in ONNX.
    """
    signature = program.graph_signature
    answers = torch.utils._pytree.tree_unflatten(signature.user_outputs, program.call_spec.out_spec)
    if not isinstance(answers, dict) or any(not isinstance(each, (str, type(None))) for each in answers.values()):
        return None
    keys = [str(key) for key, value in answers.items() if value is not None]
    return None if set(keys) & set(signature.user_inputs) else keys


def _of_script(torch: Any, path: str, inputs: dict[str, Any], out: str) -> None:
    module = torch.jit.load(path, map_location="cpu").eval()
    arguments = module.forward.schema.arguments[1:]
    names = [argument.name for argument in arguments]
    others = [f"{one.name}: {one.type}" for one in arguments if str(one.type) not in ("Tensor", "Optional[Tensor]")]
    if others:
        raise Advised(f"the module takes other inputs than tensors ({', '.join(others)}). {WRAP}")
    if set(names) != set(inputs):
        raise Advised(
            "TorchScript does not hold the shapes of its inputs; give each shape with --input NAME=1,3,224,224 or "
            f"NAME=int64:1,128 (its inputs: {', '.join(names)}; given: {', '.join(inputs) or 'none'})"
        )
    examples = tuple(_example(torch, name, **inputs[name]) for name in names)
    count = len(_tensors(torch, _answers(module, examples, inputs)))
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


def _answers(module: Any, examples: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
    """Return the module's answers. Raises Advised with the last line of TorchScript's traceback."""
    try:
        return module(*examples)
    except Exception as error:  # TorchScript raises any class
        given = ", ".join(
            f"{name}={one['datatype']}:{','.join(map(str, one['shape']))}" for name, one in inputs.items()
        )
        reason = (str(error).strip().splitlines() or ["no message"])[-1][:300]
        raise Advised(
            f"the module fails with the inputs {given}: {reason}. Give the shapes and types of its inputs with --input"
        ) from error


def _tensors(torch: Any, answers: Any) -> list[Any]:
    tensors = list(answers) if isinstance(answers, (tuple, list)) else [answers]
    others = {type(one).__name__ for one in tensors if not isinstance(one, torch.Tensor)}
    if others:
        raise Advised(f"the module returns other answers than tensors ({', '.join(sorted(others))}). {WRAP}")
    return tensors


def _example(torch: Any, name: str, datatype: str, shape: list[Any]) -> Any:
    if not all(type(length) is int for length in shape):
        raise Advised(
            f"TorchScript cannot make the input {name} a constant: give its shape with --input {name}=1,3,224,224"
        )
    dtype = getattr(torch, datatype)
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


if __name__ == "__main__":
    sys.exit(main())
