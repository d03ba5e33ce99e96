"""The documentation names only things that exist: files, commands with their options, make targets, benchmarks.

The same holds for commands in scripts that `make test` does not run.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import tomlkit

from edgert.cli import edgertd
from edgert_deploy.cli import edgert
from edgert_deploy.common.project import takes_default
from tests.support.paths import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "hil/README.md")),
    *sorted((ROOT / "bench").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
PROGRAMS: dict[str, click.Group] = {"edgert": edgert, "edgertd": edgertd}
FOLDERS = ("edgert", "deploy", "devices", "docs", "tests", "hil", "bench", "examples", ".ci")
PATH = re.compile(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*{{}},-]*)`")
SECTION = re.compile(r"^(?=#+ )", re.MULTILINE)
START = re.compile(r"^Paths [\w ]*start at `([\w/]+/)`", re.MULTILINE)  # the folder of all paths of a section
FILE = re.compile(r"`([\w./-]*\w(?:/|\.(?:py|sh|toml|h)))`")  # also without a folder
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(?:sh|bash|console)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(edgertd? [^`]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)")
SCRIPTS = [path for folder in ("hil", "bench", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
NOT_OURS = re.compile(r"(.*my-board.*|edgert\.toml|edgert/(v1|hint)/.*)")  # a user's files; MQTT topics


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    named = {
        (path, start)
        for section in SECTION.split(page.read_text())
        for path in PATH.findall(section)
        for start in [start_of(section)]
        if not NOT_OURS.fullmatch(path)
    }
    assert sorted(path for path, start in named if not exists(path, page, start=start)) == []


def test_the_architecture_names_only_files_that_exist() -> None:
    """A path starts at the top folder, at the section's start, in the folder of the path before it, or above that."""
    missing, checked = [], 0
    for section in SECTION.split((ROOT / "docs/architecture.md").read_text()):
        starts = [ROOT, ROOT / start_of(section)]
        before = starts[1]
        for name in FILE.findall(section):
            folders = [folder for folder in (*starts, before, before.parent) if (folder / name).exists()]
            if folders:
                before = folders[0] / name if name.endswith("/") else (folders[0] / name).parent
            missing += [] if folders or NOT_OURS.fullmatch(name) else [name]
            checked += 1
    assert missing == []
    assert checked > 200


def start_of(section: str) -> str:
    """Return the folder at which the paths of a section start, or "" for the top folder."""
    found = START.search(section)
    return found[1] if found else ""


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_links_of_a_page_lead_to_files(page: Path) -> None:
    links = {link for link in LINK.findall(page.read_text()) if "://" not in link}
    assert sorted(link for link in links if not (page.parent / link).exists()) == []


def test_a_sentence_that_announces_a_block_is_followed_by_one() -> None:
    texts = {page_id(page): FENCE.sub("code", page.read_text()) for page in PAGES}
    assert [(page, line) for page, text in texts.items() for line in re.findall(r"(.*:)\n\n+(?:#|\Z)", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_commands_of_a_page_are_valid(page: Path) -> None:
    text = page.read_text()
    lines = [line for block in BLOCK.findall(text) for line in commands_in(block)]
    problems = [problem for line in lines for problem in problems_of(line, complete=True)]
    inline = [line.replace("\\|", "|").replace("\n", " ") for line in INLINE.findall(BLOCK.sub("", text))]
    assert problems + [problem for line in inline for problem in problems_of(line, complete=False)] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_make_targets_and_benchmarks_that_a_page_names_exist(page: Path) -> None:
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^)make ([a-z][a-z0-9-]*)", text, re.MULTILINE))
    assert sorted(target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)) == []
    modules = set(re.findall(r"python -m ((?:bench|hil|examples)\.[\w.]+)", text))
    paths = {name: ROOT / name.replace(".", "/") for name in modules}
    files = {name: path / "__main__.py" if path.is_dir() else path.with_suffix(".py") for name, path in paths.items()}
    assert sorted(name for name, file in files.items() if not file.exists()) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("edgert keys new", ""),
        ("edgert fleet forget pi-7", ""),  # the project may name the broker
        ("edgert publish-runtime 4 --profile raspberry-pi-4", "--python is missing"),
        ("edgert deploy", "bundle is missing"),
        ("edgert keys new extra", "too many arguments: ['extra']"),
        ("edgert keys new --nane x", "No such option"),
        ("edgert keys nev", "no command nev"),
    ],
)
def test_a_wrong_command_line_is_found(line: str, problem: str) -> None:
    found = problems_of(line, complete=True)
    assert len(found) == bool(problem)
    assert all(problem in text for text in found)


def test_the_commands_that_scripts_call_exist() -> None:
    lines = [(script, line) for script in SCRIPTS for line in commands_called(script)]
    assert len(lines) > 100
    problems = [f"{page_id(script)}: {text}" for script, line in lines for text in problems_of(line, complete=False)]
    assert problems == []


def test_the_pages_that_code_names_exist() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c", ".h")]
    named = {(path, name) for path in files for name in re.findall(r"(?<![\w/.])docs/[\w./-]*\w", path.read_text())}
    assert (
        sorted(f"{path.relative_to(ROOT)}: {name}" for path, name in named if not exists(name, path, prefix=True)) == []
    )


def exists(path: str, page: Path, *, prefix: bool = False, start: str = "") -> bool:
    """Whether `path` (with * and {a,b}) names a file here, from the top folder, from `start` or from the page's."""
    choices = re.search(r"\{([^}]*)\}", path)
    if choices:
        paths = [path.replace(choices[0], choice, 1) for choice in choices[1].split(",")]
        return all(exists(one, page, prefix=prefix, start=start) for one in paths)
    pattern = path.rstrip("/") + ("*" if prefix else "")
    return any(next(folder.glob(pattern), None) is not None for folder in (ROOT, ROOT / start, page.parent))


def commands_in(block: str) -> Iterator[str]:
    for line in block.replace("\\\n", " ").splitlines():
        words = line.removeprefix("$ ").removeprefix("sudo ").strip()
        if words.split(" ")[0] in PROGRAMS:
            yield words


def commands_called(script: Path) -> Iterator[str]:
    """The literal words of calls such as `host.edgert("deploy", bundle, "all")` and `edgertd(device, "stop")`."""
    for call in ast.walk(ast.parse(script.read_text())):
        if isinstance(call, ast.Call):
            name = str(getattr(call.func, "attr", getattr(call.func, "id", ""))).lstrip("_")
            words = call.args[1:] if name == "edgertd" else call.args
            texts = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            if name in PROGRAMS and texts:
                yield shlex.join([name, *texts])


def problems_of(line: str, *, complete: bool) -> list[str]:
    """Return the faults of a command line; a `complete` one also has what the command requires, and no more.

    A project may give a required option, such as --broker.
    """
    words = shlex.split(re.split(r" [|>&]|\u2026|\.\.\.", line)[0], comments=True)
    command, rest, context = follow(words)
    if isinstance(context, str):
        return [f"{line}: {context}"]
    if not complete:
        known = {
            name for parameter in command.get_params(context) for name in parameter.opts + parameter.secondary_opts
        }
        given = {word.split("=")[0] for word in rest if word.startswith("--")} - {"--"}
        return [f"{line}: no option {name}" for name in sorted(given - known)]
    if isinstance(command, click.Group):
        return [] if set(words) & {"--help", "--version"} else [f"{line}: incomplete"]
    try:
        values, left, _ = command.make_parser(context).parse_args(rest)
    except click.UsageError as error:
        return [f"{line}: {error.message}"]
    given = {name for name, value in values.items() if isinstance(value, str | list | tuple) and value}
    required = [p for p in command.params if p.required and p.name not in given]
    path = context.command_path.partition(" ")[2]
    missing = [f"{line}: {p.opts[0]} is missing" for p in required if not takes_default(path, p.opts[0].lstrip("-"))]
    return missing + [f"{line}: too many arguments: {left}" for _ in left[:1]]


def follow(words: list[str]) -> tuple[click.Command, list[str], click.Context | str]:
    """The command that `words` name, the words behind it, and its context or the fault."""
    command: click.Command = PROGRAMS[words[0]]
    context, rest = click.Context(command, info_name=words[0]), words[1:]
    while isinstance(command, click.Group) and rest:
        try:
            _, rest, _ = command.make_parser(context).parse_args(rest)
        except click.UsageError as error:
            return command, rest, error.message
        found = command.get_command(context, rest[0]) if rest else None
        if found is None:
            return command, rest, f"no command {rest[0]}" if rest else context
        command, rest = found, rest[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    return command, rest, context


@pytest.mark.parametrize("package", ["edgert", "deploy/edgert_deploy"])
def test_the_map_of_the_architecture_names_every_folder(package: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    folders = sorted(path.parent.name for path in (ROOT / package).glob("*/__init__.py"))
    assert [folder for folder in folders if f"| `{folder}/` |" not in page] == []


@pytest.mark.parametrize(("head", "package"), [("### The device\n", "edgert"), ("### The host\n", "edgert_deploy")])
def test_the_map_of_the_architecture_has_the_order_of_the_layers(head: str, package: str) -> None:
    contracts = tomlkit.parse((ROOT / "pyproject.toml").read_text()).unwrap()["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == [package])
    place = {folder: number for number, layer in enumerate(layers) for folder in re.findall(r"\w+", layer)}
    sections = SECTION.split((ROOT / "docs/architecture.md").read_text())
    table = next(section for section in sections if section.startswith(head))
    places = [place[folder] for folder in re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)]
    assert places == sorted(places)
