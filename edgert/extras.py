"""Packages that `pip install edgert` alone does not bring, and the extra of edgert that does.

Their modules are imported where they are first needed. The commands turn a missing one into an error that names the
line to install it with, wherever the import stands.
"""

from __future__ import annotations

from edgert.errors import ConfigInvalid

# top-level module -> the extras that install it, the usual one first
EXTRAS = {
    "ai_edge_litert": ("host",),
    "fabric": ("host",),
    "flatbuffers": ("host",),
    "google": ("fleet",),
    "httptools": ("http", "fleet"),
    "invoke": ("host",),
    "nncf": ("host",),
    "onnx": ("host",),
    "onnxruntime": ("host",),
    "onnxscript": ("torch",),
    "openvino": ("host",),
    "opentelemetry": ("fleet",),
    "packaging": ("host",),
    "paramiko": ("host",),
    "psycopg": ("fleet",),
    "pycocotools": ("detection",),
    "rich": ("host", "fleet"),
    "sqlalchemy": ("fleet",),
    "sympy": ("host",),
    "tensorflow": ("keras",),
    "tf2onnx": ("keras",),
    "tomlkit": ("host", "fleet"),
    "torch": ("torch",),
    "urllib3": ("host", "channels"),
}


def missing_package(error: Exception, extra: str = "") -> ConfigInvalid | None:
    """Return the error for a package that is not installed; None for other errors and modules that no extra brings.

    Where several extras bring it, `extra` is preferred.
    """
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    extras = EXTRAS.get(module)
    if extras is None:
        return None
    chosen = extra if extra in extras else extras[0]
    return ConfigInvalid(
        f"this command needs the package {module}, which is not installed here: pip install 'edgert[{chosen}]'"
    )
