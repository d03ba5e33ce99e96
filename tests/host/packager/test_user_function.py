"""Functions of the user: Python finds them in the given folder or in the working folder, or an error names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.packager.user_function import in_folder, is_function, plain_name, user_function


def write(folder: Path, module: str, answer: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(
        f"def answer():\n    return {answer!r}\nclass Own:\n    answer = answer\nnumber = 3\n"
    )


def test_the_given_folder_comes_before_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "user_one", "working folder")
    write(tmp_path / "models", "user_two", "model file")
    assert user_function("user_one:answer")() == "working folder"
    assert user_function("models/user_two:answer")() == "model file"
    assert user_function(f"{tmp_path}/models/user_two:Own.answer")() == "model file"
    assert user_function("models/user_one:answer")() == "working folder"
    assert user_function("json:dumps")(1) == "1"


def test_the_error_names_a_missing_function_and_the_searched_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models", "user_three", "here")
    looked = f"user_none:answer: no module 'user_none' in {tmp_path}/models, in {tmp_path} or in this Python"
    with pytest.raises(ConfigInvalid, match=looked + ".*FOLDER/user_none:answer"):
        user_function("models/user_none:answer")
    for name in ("none", "number"):
        with pytest.raises(ConfigInvalid, match=f"module 'user_three' has no function '{name}'"):
            user_function(f"models/user_three:{name}")


def test_a_module_that_fails_at_its_import_is_not_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_four.py").write_text("import no_such_library")
    with pytest.raises(ConfigInvalid, match="its module imports no_such_library, which is not installed for"):
        user_function("user_four:answer")
    (tmp_path / "user_script.py").write_text("raise SystemExit(3)")  # such a script cannot be imported
    with pytest.raises(
        ConfigInvalid,
        match=r"ends the program when it is imported \(exit code 3\): put the call that ends the program under if",
    ):
        user_function("user_script:answer")


@pytest.mark.parametrize("text", ["a:b", "a.b:c.d", "folder/a:b", "/abs/folder/a:b", "../a:b"])
def test_a_text_with_a_module_and_a_name_is_a_function(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_function(text)
    assert plain_name(text) in ("a:b", "a.b:c.d")


@pytest.mark.parametrize("text", ["a", "samples.npz", "a:", ":b", "a:1", "C:\\samples"])
def test_other_texts_are_not_taken_for_functions(text: str) -> None:
    assert not is_function(text)


def test_the_folder_is_put_before_the_name_of_a_function() -> None:
    assert in_folder(Path("/models"), "mine:score") == "/models/mine:score"
    assert in_folder(Path("/models"), "tools/mine:score") == "/models/tools/mine:score"
    assert in_folder(Path("/models"), "top1") == "top1"
