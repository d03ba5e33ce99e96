"""Functions of the user, `module:function` or `FOLDER/module:function`, run in this interpreter.

Python searches for the module in FOLDER, then in the working folder, then in its own path. For a function in a model
file, FOLDER is the folder of the model file.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid

NAME = re.compile(r"(?P<folder>.*/)?(?P<module>[A-Za-z_][\w.]*):(?P<function>[A-Za-z_][\w.]*)")


def is_function(text: str) -> bool:
    """Whether `text` names a function and not a file."""
    return bool(NAME.fullmatch(text)) and not Path(text).exists()


def in_folder(folder: Path, text: str) -> str:
    """Put `folder` in front of the name of a function. Return any other text unchanged."""
    return str(folder / text) if NAME.fullmatch(text) else text


def plain_name(name: str) -> str:
    """Return `module:function` without its folder."""
    return name.rpartition("/")[2]


def user_function(name: str) -> Callable[..., Any]:
    """Return the function called `name`. Raises ConfigInvalid, and any error of the module itself."""
    match = NAME.fullmatch(name)
    assert match is not None  # `is_function` has checked it
    module, attribute = match["module"], match["function"]
    folders = list(dict.fromkeys([str(Path(match["folder"] or ".").resolve()), str(Path.cwd())]))
    sys.path[:0] = folders
    try:
        function: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise ConfigInvalid(
                f"{plain_name(name)}: its module imports {error.name}, which is not installed for {sys.executable}; "
                "install this package"
            ) from error
        raise ConfigInvalid(
            f"{plain_name(name)}: no module {module!r} in {', in '.join(folders)} or in this Python; "
            f"check the name, or give the module's folder, as FOLDER/{plain_name(name)}"
        ) from error
    except SystemExit as error:
        raise ConfigInvalid(
            f"{plain_name(name)}: its module ends the program when it is imported (exit code {error.code}): "
            "put the call that ends the program under if __name__ == '__main__'"
        ) from error
    finally:
        for folder in folders:
            sys.path.remove(folder)
    for part in attribute.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise ConfigInvalid(f"{plain_name(name)}: module {module!r} has no function {attribute!r}; check the name")
    return function  # type: ignore[no-any-return]  # checked just above
