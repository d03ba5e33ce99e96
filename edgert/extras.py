"""Packages that `pip install edgert` does not install, and the extras of edgert that install them.

Code imports these packages when it first needs them. If an import fails, the commands report an error with the command
that installs the package.
"""

from __future__ import annotations

import importlib.util

from edgert.errors import ConfigInvalid, EngineMissing

# top-level module -> the extras that install it, the usual extra first
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
    "tokenizers": ("text",),
    "tomlkit": ("host", "fleet"),
    "torch": ("torch",),
    "urllib3": ("channels", "host"),
}


def missing_package(error: Exception, extra: str = "") -> ConfigInvalid | None:
    """Return the error for a package that is not installed.

    Returns None for other errors, and for modules that no extra installs. If several extras install the module, the
    function prefers `extra`.
    """
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    extras = EXTRAS.get(module)
    if extras is None:
        return None
    chosen = extra if extra in extras else extras[0]
    return ConfigInvalid(
        f"this command needs the package {module}, which is not installed here: pip install 'edgert[{chosen}]'"
    )


def has_tokenizers() -> bool:
    """Return whether the library `tokenizers` is installed; do not import it."""
    return importlib.util.find_spec("tokenizers") is not None


def check_tokenizers() -> None:
    """Raise EngineMissing, with the installing command, if the library `tokenizers` is missing."""
    if not has_tokenizers():
        raise EngineMissing(
            "the model reads text, but the package tokenizers is not installed here: run edgert bootstrap DEVICE --with text "
            "on the host, or pip install 'edgert[text]' here"
        )
