"""Fuzz the readers of foreign bytes (`targets.py`), each in a process of its own: `make fuzz`.

    python -m tests.fuzz                       # one minute for each reader
    python -m tests.fuzz wire http --seconds 600
    python -m tests.fuzz --only wire build/fuzz/wire-crash-...       # repeat one finding

atheris changes the inputs, and records the lines of code that each input reaches. A run writes a finding to build/fuzz/
and ends with exit status 1. Then mend the cause, and copy the file to tests/fuzz/corpus/TARGET/, so that `make test`
repeats it. A run keeps useful inputs in build/fuzz/corpus/, and the next run starts with them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "fuzz"
CASE_S_MAX = 20  # the limit for one input, because a probe of a model file may take this long
MEMORY_MB_MAX = 1500
NAMES = (
    "wire",
    "control",
    "envelope",
    "manifest",
    "channel",
    "registry",
    "delivery",
    "http",
    "mqtt",
    "store",
    "device",
    "rollout",
    "onnx",
    "tflite",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; all without one")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--only", help="run this target in this process, on the given files")
    options = parser.parse_args()
    if options.only:
        return fuzz(options.only, options.seconds, options.targets)
    if unknown := sorted(set(options.targets) - set(NAMES)):
        parser.error(f"there is no target {unknown[0]}; known: {', '.join(NAMES)}")
    failed = []
    for name in options.targets or NAMES:
        print(f"fuzz {name}: {options.seconds} s", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "tests.fuzz", "--only", name, "--seconds", str(options.seconds)]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"findings in: {', '.join(failed)}; see build/fuzz/" if failed else "no finding", file=sys.stderr)
    return 1 if failed else 0


def fuzz(name: str, seconds: int, files: list[str]) -> int:
    """Run one target; libFuzzer ends the process. With `files`, run it only on these files."""
    try:
        import atheris
    except ImportError:
        print("error: atheris is missing, which has wheels for x86-64 only: pip install atheris", file=sys.stderr)
        return 1
    with atheris.instrument_imports(include=["edgert", "edgert_deploy"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    begun = BUILD / "seeds" / name
    grown = BUILD / "corpus" / name
    for folder in (begun, grown):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (begun / str(number)).write_bytes(seed)
    kept = HERE / "corpus" / name
    folders = [str(folder) for folder in (grown, begun, kept) if folder.is_dir()]
    limits = [f"-max_len={target.length_max}", f"-timeout={CASE_S_MAX}", f"-rss_limit_mb={MEMORY_MB_MAX}"]
    words = [f"-max_total_time={seconds}", f"-artifact_prefix={BUILD}/{name}-", "-verbosity=0", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, *words, *(files or folders)], lambda data: target.run(bytes(data)))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
