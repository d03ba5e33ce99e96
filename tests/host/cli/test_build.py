"""The real command in its own process has results on stdout, progress on stderr and stable exit codes."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edgert.bundle.expiry import expiry_time

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.model_file import read_model_file
from tests.support import models
from tests.support.paths import DIGITS, ROOT
from tests.support.shell import Shell, code_of

pytestmark = pytest.mark.usefixtures("probes_are_forks")


def test_a_bundle_is_built_and_inspected_and_verified(shell_here: Shell) -> None:
    for module in ("nncf", "openvino", "ai_edge_litert"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    extras = ["--preprocess", str(DIGITS / "preprocess.toml"), "--labels", str(DIGITS / "labels.txt")]
    extras += ["--licence", "CC-BY-4.0", "--notes", "trained on UCI digits"]
    done = shell_here.build("--target", "jetson-orin-nano", *extras, engines="all")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:-1]] == [
        ["this-machine", "onnxruntime", "int8"],
        ["this-machine", "openvino", "int8"],
        ["this-machine", "tflite", "int8"],
        ["jetson-orin-nano", "tensorrt", "int8"],
        ["jetson-orin-nano", "onnxruntime", "int8"],
    ]
    assert all(line.endswith("pass") and "0.9925" in line for line in lines[1:-1])
    assert "building" in done.stderr
    assert shell_here.files() == {"digits.edgert"}

    assert "every byte is as signed" in shell_here("bundle", "verify", "digits.edgert").stdout
    shown = shell_here("bundle", "inspect", "digits.edgert").stdout
    for words in (
        "digits, release 1",
        "this-machine",
        "jetson-orin-nano",
        "image FP32 [N, 1, 8, 8]",
        "10 labels",
        "Conv 2 int8",
        "in INT8: 100 % of the multiply-accumulates",
        "with 95 % confidence",
    ):
        assert words in shown
    manifest = json.loads(shell_here("bundle", "inspect", "digits.edgert", "--json").stdout)["manifest"]
    assert manifest["preprocess"]["scale"] == 0.0625


def test_a_model_file_describes_the_build_and_options_override_it(shell_here: Shell) -> None:
    done = shell_here("build", str(DIGITS / "digits.toml"), "--engines", "first", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["bundle"], value["model"], value["release"]) == ("digits.edgert", "digits", 1)
    assert [row["target"] for row in value["targets"]] == [
        "raspberry-pi-4",
        "intel-nuc",
        "jetson-orin-nano",
        "this-machine",
    ]
    manifest = json.loads(shell_here("bundle", "inspect", "digits.edgert", "--json").stdout)["manifest"]
    assert (manifest["preprocess"]["scale"], len(manifest["classify"]["labels"])) == (0.0625, 10)
    words = ("--engines", "first", "--target", "this-machine", "--release", "2", "--name", "other", "--json")
    value = json.loads(shell_here("build", str(DIGITS / "digits.toml"), *words).stdout)
    assert (value["bundle"], value["release"]) == ("other.edgert", 2)
    assert [row["target"] for row in value["targets"]] == ["this-machine"]


def test_init_writes_a_model_file_that_builds(shell_here: Shell) -> None:
    for name in ("digits.onnx", "calibration.npz", "holdout.npz", "preprocess.toml", "labels.txt"):
        shutil.copy(DIGITS / name, shell_here.folder)
    assert json.loads(shell_here("build", "--init", "digits.onnx", "--json").stdout) == {"model_file": "digits.toml"}
    text = (shell_here.folder / "digits.toml").read_text()
    done = shell_here("build", "--init", "digits.onnx")
    assert (done.returncode, "--init --force" in done.stderr) == (4, True)
    done = shell_here("build", "--init", "--force", "digits.onnx", "--labels", "labels.txt")
    assert (done.returncode, "--init does not use --labels" in done.stderr) == (2, True)
    shutil.copy(DIGITS / "digits.onnx", shell_here.folder / "my digits.onnx")
    done = shell_here("build", "--init", "my digits.onnx")
    assert done.stdout == "my digits.toml: edit it, then run edgert build 'my digits.toml'\n"
    assert "edgert build 'my digits.toml'" in (shell_here.folder / "my digits.toml").read_text().splitlines()[0]
    done = shell_here("build", "--init", "--force", "digits.onnx", "--convert-with", "tf/bin/python")
    assert done.stdout.endswith("run edgert build digits.toml --convert-with tf/bin/python\n")
    assert (shell_here.folder / "digits.toml").read_text() == text
    assert shell_here("build", "digits.toml", "--engines", "first", "--precision", "fp32").returncode == 0


def test_a_new_model_file_names_the_profiles_of_the_devices(shell_here: Shell) -> None:
    shutil.copy(DIGITS / "digits.onnx", shell_here.folder)
    targets = {}
    for name, profile in (
        ("none yet", ""),
        ("pc", "generic-x86-64"),
        ("pi", "raspberry-pi-4"),
        ("pc-2", "generic-x86-64"),
    ):
        if profile:
            assert shell_here("device", "add", name, "--local", f"./{name}", "--profile", profile).returncode == 0
        assert shell_here("build", "--init", "--force", "digits.onnx").returncode == 0
        targets[name] = read_model_file(shell_here.folder / "digits.toml")["targets"]
    assert targets == {
        "none yet": ["this-machine"],
        "pc": ["generic-x86-64"],
        "pi": ["generic-x86-64", "raspberry-pi-4"],
        "pc-2": ["generic-x86-64", "raspberry-pi-4"],
    }
    words = ("build", "--init", "--force", "digits.onnx", "--target", "intel-nuc")
    assert shell_here(*words).returncode == 0
    assert 'targets = ["intel-nuc"]' in (shell_here.folder / "digits.toml").read_text()


def test_a_build_without_samples_or_targets_names_what_is_missing(shell_here: Shell) -> None:
    done = shell_here.build(holdout=None, target=None)
    assert done.returncode == 2
    assert "missing --holdout, --target (edgert profiles lists the targets): give them" in done.stderr
    assert "edgert build --init MODEL" in done.stderr
    (shell_here.folder / "net.toml").write_text('model = "net.onnx"\nmax_dorp = 1\n')
    done = shell_here("build", "net.toml", "--json")
    assert code_of(done) == "input.config_invalid"
    assert "did you mean 'max_drop'" in done.stdout


def test_stdout_contains_only_json(shell: Shell) -> None:
    done = shell.build("--json", "--release", "7", "--name", "other", "--precision", "fp32")
    value = json.loads(done.stdout)
    assert (value["model"], value["release"], value["targets"][0]["passed"]) == ("other", 7, True)
    assert (value["targets"][0]["precision"], value["targets"][0]["int8_share"]) == ("fp32", 0.0)
    verified = json.loads(shell("bundle", "verify", "digits.edgert", "--json").stdout)
    assert (verified["key_id"], verified["digest"]) == (value["key_id"], value["digest"])


def test_four_targets_are_built_for_all_their_engines(shell_here: Shell) -> None:
    targets = ("raspberry-pi-4", "intel-nuc", "jetson-orin-nano", "this-machine")
    done = shell_here.build(
        "--json", *(word for target in targets for word in ("--target", target)), target=None, engines="all"
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["targets"]
    assert [row["target"] for row in rows] == list(targets)
    assert [row["engine"] for row in rows] == ["tflite", "openvino", "tensorrt", "onnxruntime"]
    assert all(row["passed"] and row["size_bytes"] < row["source_size_bytes"] for row in rows)
    assert all(row["int8_share"] == one["int8_share"] == 1.0 for row in rows for one in row["artifacts"])
    assert [[one["artifact"] for one in row["artifacts"]] for row in rows] == [
        ["tflite-int8", "onnxruntime-int8-arm"],
        ["openvino-int8", "onnxruntime-int8"],
        ["tensorrt-int8", "onnxruntime-int8-arm"],
        ["onnxruntime-int8", "openvino-int8", "tflite-int8"],
    ]


@dataclass(frozen=True)
class BuiltApart:
    """A bundle from a separate process, the TOOLS that this process imported, and its files in TMPDIR."""

    bundle: bytes
    imported: str
    left: list[Path]


TOOLS = ("onnxruntime", "openvino", "ai_edge_litert", "tflite_runtime", "tensorrt", "sympy", "nncf")
BUILD = f"""
import sys
from edgert_deploy.cli import main
code = main(sys.argv[1:])
print([name for name in {TOOLS} if name in sys.modules])
sys.exit(code)
"""


@pytest.fixture(scope="module")
def built_twice(shell_with_key: Shell, tmp_path_factory: pytest.TempPathFactory) -> list[BuiltApart]:
    """Two builds of four targets for all engines, with different folders, hashes, time zones and jobs."""
    words = [w for t in ("raspberry-pi-4", "intel-nuc", "jetson-orin-nano", "this-machine") for w in ("--target", t)]
    root, built = tmp_path_factory.mktemp("twice"), []
    for number, jobs in ((1, "1"), (2, "2")):
        folder = root / ("deep/" * number)
        (folder / "tmp").mkdir(parents=True)
        for name in ("digits.onnx", "calibration.npz", "holdout.npz"):
            shutil.copy(DIGITS / name, folder)
        shell = Shell(folder)
        shell.env |= {
            "EDGERT_CONFIG_DIR": shell_with_key.env["EDGERT_CONFIG_DIR"],
            "PYTHONHASHSEED": f"{number}",
            "TZ": f"UTC{number}",
            "TMPDIR": str(folder / "tmp"),
        }
        named: dict[str, str | None] = {"model": "digits.onnx", "calibration": "calibration.npz", "target": None}
        named["engines"] = "all"
        words_all = shell.build_words(*words, "--no-cache", "--jobs", jobs, **named, holdout="holdout.npz")
        done = subprocess.run(
            [sys.executable, "-c", BUILD, *words_all], capture_output=True, text=True, cwd=folder, env=shell.env
        )
        assert done.returncode == 0, done.stderr
        imported, left = done.stdout.splitlines()[-1], list((folder / "tmp").iterdir())
        built.append(BuiltApart((folder / "digits.edgert").read_bytes(), imported, left))
    return built


def test_two_builds_of_all_targets_give_the_same_bytes(built_twice: list[BuiltApart]) -> None:
    """The folder, the order of Python's hashes, the time zone and the number of jobs change no byte of any builder."""
    assert [each.left for each in built_twice] == [[], []]
    assert built_twice[0].bundle == built_twice[1].bundle


def test_a_build_imports_neither_engines_nor_tools_into_its_own_process(built_twice: list[BuiltApart]) -> None:
    """Therefore, an engine or a tool cannot crash the process."""
    assert [each.imported for each in built_twice] == ["[]", "[]"]


def test_an_unchanged_target_is_not_built_again(shell_here: Shell) -> None:
    first = shell_here.build()
    assert "cache" not in first.stderr
    bundle = (shell_here.folder / "digits.edgert").read_bytes()
    assert shell_here.build().stderr.splitlines() == [
        "this-machine: judging onnxruntime int8, taken from the build cache, in onnxruntime on 400 samples",
        "comparing each artifact's answers between kernels and between numbers of threads",
        "writing digits.edgert",
    ]
    assert (shell_here.folder / "digits.edgert").read_bytes() == bundle
    assert "cache" not in shell_here.build("--no-cache").stderr


def test_a_gate_failure_exits_with_3_and_writes_no_bundle(shell_here: Shell) -> None:
    models.write_samples(shell_here.folder / "dark.npz", image=np.zeros((16, 1, 8, 8), np.float32))
    done = shell_here.build(calibration="dark.npz")
    assert done.returncode == 3
    assert "error: target this-machine: onnxruntime top1 fell by" in done.stderr
    row, tried = done.stdout.splitlines()[-2:]
    assert row.endswith("FAIL")
    assert "onnxruntime tried: " in tried
    assert "min-max 0." in tried
    done = shell_here.build("--json", calibration="dark.npz")
    assert (done.returncode, code_of(done)) == (3, "build.accuracy_too_low")
    (target,) = json.loads(done.stdout)["targets"]
    assert (target["target"], target["engine"], target["passed"]) == ("this-machine", "onnxruntime", False)
    assert target["drop"] > target["max_drop"]
    assert [candidate["passed"] for candidate in target["candidates"]] == [False] * len(target["candidates"])
    assert shell_here.files() == {"dark.npz"}


def test_the_table_names_a_gate_that_compares_only_similarity(shell_here: Shell) -> None:
    models.write(models.mlp(), shell_here.folder / "plain.onnx")
    models.write_samples(shell_here.folder / "plain.npz", x=models.random(20, 4))
    words = ("--precision", "fp32", "--allow-overlap")
    done = shell_here.build(*words, model="plain.onnx", calibration="plain.npz", holdout="plain.npz")
    assert done.returncode == 0, done.stderr
    assert (
        "  this figure is only the similarity to FP32: give labels in the hold-out, --postprocess or --metric module:function"
        in done.stdout.splitlines()
    )


def test_each_invalid_input_gives_one_clear_error_and_leaves_no_file(shell_here: Shell) -> None:
    models.write(models.mlp("float[N,K] x) => (float[N,3] scores"), shell_here.folder / "open.onnx")
    (shell_here.folder / "text.onnx").write_text("hello")
    models.write_samples(shell_here.folder / "few.npz", image=np.zeros((3, 1, 8, 8), np.float32))
    models.write_samples(shell_here.folder / "bytes.npz", image=np.zeros((30, 1, 8, 8), np.uint8))
    (shell_here.folder / "labels.txt").write_text("only one\n")
    with zipfile.ZipFile(shell_here.folder / "net.pt", "w") as archive:  # the files of a TorchScript model
        for name in ("net/code/net.py", "net/data.pkl", "net/constants.pkl"):
            archive.writestr(name, b"")
    (shell_here.folder / "cut.tflite").write_bytes(b"\x1c\0\0\0TFL3" + bytes(20))
    bomb = models.model(
        "float[N,1,8,8] image) => (float[N,1,8,8] y",
        "c = ConstantOfShape (s) r = ReduceSum <keepdims = 0> (c) y = Add (image, r)",
        {"s": np.array([2**20, 2**20])},
    )
    models.write(bomb, shell_here.folder / "bomb.onnx")
    (shell_here.folder / "pre.toml").write_text('input = "nothing"\n')
    before = shell_here.files()
    cases: list[tuple[dict[str, str], str, int]] = [
        ({"model": "open.onnx"}, "input.source_invalid", 4),
        ({"model": "text.onnx"}, "input.source_invalid", 4),
        ({"model": "missing.onnx"}, "input.config_invalid", 4),
        ({"model": "bomb.onnx"}, "input.source_invalid", 4),
        ({"model": "cut.tflite"}, "input.source_invalid", 4),
        ({"model": "net.pt", "convert-with": "/nowhere/python"}, "input.config_invalid", 4),
        ({"calibration": "no_such_module:samples"}, "input.calibration_invalid", 4),
        ({"calibration": "few.npz"}, "input.calibration_invalid", 4),
        ({"calibration": "bytes.npz"}, "input.calibration_invalid", 4),
        ({"holdout": "missing.npz"}, "input.calibration_invalid", 4),
        ({"target": "toaster"}, "input.config_invalid", 4),
        ({"key": "missing.pem"}, "input.config_invalid", 4),
        ({"labels": "labels.txt"}, "input.config_invalid", 4),
        ({"preprocess": "pre.toml"}, "input.config_invalid", 4),
        ({"name": "Not Allowed"}, "input.config_invalid", 4),
        ({"out": "missing/digits.edgert"}, "input.config_invalid", 4),
        ({"release": "0"}, "input.usage", 2),
        ({"downgrade-from": "1"}, "input.usage", 2),
        ({"max-drop": "-1"}, "input.usage", 2),
        ({"max-drop": "5"}, "input.config_invalid", 4),
        ({"budget": "soon"}, "input.usage", 2),
        ({"metric": "f1"}, "input.config_invalid", 4),
    ]
    for replaced, code, exit_code in cases:
        done = shell_here.build("--json", **replaced)
        assert (code_of(done), done.returncode) == (code, exit_code), replaced
        assert ("torch: converting net.pt to ONNX" in done.stderr) == ("convert-with" in replaced)
    assert shell_here.files() == before


def test_a_downgrade_is_signed_with_its_releases_and_its_expiry(shell_here: Shell) -> None:
    built = json.loads(shell_here.build("--json", "--downgrade-from", "3", "--precision", "fp32").stdout)
    manifest = json.loads(shell_here("bundle", "inspect", "digits.edgert", "--json").stdout)["manifest"]
    assert (built["downgrade_from"], manifest["downgrade_from"]) == (3, 3)
    days = (expiry_time(manifest["expires"]) - expiry_time(manifest["signed_at"])) / 86400
    assert (built["expires"], days) == (manifest["expires"], 30)
    assert "release 1, a downgrade from releases up to 3" in shell_here("bundle", "inspect", "digits.edgert").stdout


def test_samples_that_make_the_gate_worthless_are_refused_or_give_a_warning(shell_here: Shell) -> None:
    with np.load(DIGITS / "holdout.npz") as holdout:
        shifted = {**holdout, "labels": (holdout["labels"] + 1) % 10}
        unknown = {**holdout, "image2": holdout["image"]}
    np.savez(shell_here.folder / "shifted.npz", **shifted)
    np.savez(shell_here.folder / "unknown.npz", **unknown)
    same: dict[str, str | None] = {"holdout": "shifted.npz", "calibration": "shifted.npz"}
    done = shell_here.build("--json", "--precision", "fp32", **same)
    assert code_of(done) == "input.calibration_invalid"
    assert "hold-out sample 0 is also calibration sample 0" in done.stdout
    assert "--allow-overlap" in done.stdout
    done = shell_here.build("--json", "--precision", "fp32", "--allow-overlap", **same)
    overlap, chance = json.loads(done.stdout)["warnings"]
    assert "hold-out samples are also calibration samples" in overlap
    assert "chance is 0.1" in chance
    assert f"warning: {chance}" in done.stderr
    done = shell_here.build("--json", holdout="unknown.npz")
    assert code_of(done) == "input.calibration_invalid"
    assert "'image2'" in done.stdout


def test_profiles_are_listed(shell: Shell) -> None:
    shown = shell("profiles", "--profiles", str(ROOT / "devices")).stdout
    for words in ("raspberry-pi-4", "tflite", "int8", "aarch64"):
        assert words in shown
    assert "edgert profiles" in shell("build", "--help").stdout
    named = [row["name"] for row in json.loads(shell("profiles", "--json").stdout)["profiles"]]
    assert {"intel-nuc", "jetson-orin-nano", "this-machine"} <= set(named)


def test_every_command_shows_an_example_in_its_help(shell_here: Shell) -> None:
    for words in (
        ["build"],
        ["bundle", "inspect"],
        ["bundle", "verify"],
        ["keys"],
        ["keys", "new"],
        ["keys", "list"],
        ["profiles"],
    ):
        shown = shell_here(*words, "--help").stdout
        assert f"edgert {' '.join(words)}" in shown.partition("Example")[2], words


def test_errors_are_one_line_on_stderr(shell_here: Shell) -> None:
    done = shell_here.build(model="missing.onnx")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: there is no missing.onnx")


def test_verify_refuses_damage_and_other_keys(shell_here: Shell) -> None:
    assert shell_here.build("--precision", "fp32").returncode == 0
    assert shell_here("keys", "new", "--name", "other", "--dir", "keys").returncode == 0
    done = shell_here("bundle", "verify", "digits.edgert", "--key", "keys/other.pem", "--json")
    assert (code_of(done), done.returncode) == ("bundle.signature_invalid", 5)
    assert "trusted here" in done.stdout
    assert "device trusts" not in done.stdout
    data = bytearray((shell_here.folder / "digits.edgert").read_bytes())
    data[-2000] ^= 1
    (shell_here.folder / "digits.edgert").write_bytes(data)
    done = shell_here("bundle", "verify", "digits.edgert", "--json")
    assert (code_of(done), done.returncode) == ("bundle.corrupt", 5)


def test_keys_are_created_once_and_listed(shell_here: Shell) -> None:
    made = json.loads(shell_here("keys", "new", "--name", "second", "--json").stdout)
    assert Path(made["private"]).stat().st_mode & 0o777 == 0o600
    again = shell_here("keys", "new", "--name", "second", "--json")
    assert (code_of(again), again.returncode) == ("input.config_invalid", 4)
    listed = json.loads(shell_here("keys", "list", "--json").stdout)["keys"]
    assert (made["key_id"], True) in [(row["key_id"], row["can_sign"]) for row in listed]


def test_help_and_version_import_no_engine_and_name_every_command(shell: Shell) -> None:
    program = (
        "import sys; from edgert_deploy.cli import main; code = main(['--help']) + main(['build', '--help'])\n"
        "heavy = {'numpy', 'onnx', 'onnxruntime', 'openvino', 'fabric', 'paho'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=shell.env, check=True)
    for command in ("keys", "build", "bundle", "infer", "fleet", "device", "deploy", "rollback"):
        assert f"  {command} " in done.stdout
    assert shell("--version").stdout.startswith("edgert, version ")
    assert "--calibration" in done.stdout
    assert shell("no-such-command").returncode == 2


def test_an_unexpected_error_prints_no_traceback(shell: Shell) -> None:
    program = (
        "import sys, click\n"
        "from edgert.cli.command import main_with_errors\n"
        "def command(error):\n"
        "    def fail():\n        raise error\n"
        "    return click.Command('c', callback=fail)\n"
        "codes = [main_with_errors(command(e), []) for e in\n"
        "         (RuntimeError('odd'), KeyboardInterrupt(), PermissionError(13, 'Permission denied', '/x'))]\n"
        "print(codes)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=shell.env, check=True)
    assert done.stdout.strip() == "[1, 130, 4]"
    assert "Traceback" not in done.stderr
    assert "error: /x: Permission denied" in done.stderr
