from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SLOW_IMPORT = "import sys, time\nprint('importing', flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize("package", ["edgert", "edgert_deploy"])
def test_ctrl_c_during_the_imports_of_a_command_prints_nothing(package: str, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(SLOW_IMPORT)  # stands for any of the imports
    words = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, sys.argv[1]); from {package}.entry import main; main()",
    ]
    with subprocess.Popen([*words, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == b""
    assert process.returncode == -signal.SIGINT  # a shell shows this as 130


def test_a_command_that_ignores_ctrl_c_from_its_start_still_ignores_it() -> None:
    code = "from edgert.entry import main; import signal, sys; sys.argv[1:] = ['--version']; main(); print(signal.getsignal(2) is signal.SIG_IGN)"
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    assert subprocess.run(ignoring, capture_output=True, text=True, check=True).stdout.endswith("\nTrue\n")


def test_the_entry_imports_none_of_the_slow_modules_before_it_handles_ctrl_c() -> None:
    code = "import sys, signal; import edgert.entry; print({'typing', 'dataclasses', 'click'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
