"""edgert's own wheel: the code that this host runs, packed for its devices.

If this host runs edgert from a source tree, this module builds the wheel. If edgert is an installed package, the module
packs the installed files into a wheel again. In both cases, `_pack` keeps the files of the two packages and rewrites
their metadata. So a source tree and an installed package of one version give a wheel with the same content and the same
runtime id. The tools that built, installed or compressed the package make no difference.
"""

from __future__ import annotations

import base64
import email.parser
import hashlib
import importlib.util
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

import edgert
from edgert.durable import os_error_as, sha256_of
from edgert.errors import ConfigInvalid
from edgert_deploy.bootstrap.pip import run_module, run_pip
from edgert_deploy.common.file_cache import remove_abandoned
from edgert_deploy.common.folders import cache_folder

OWN_PACKAGES = ("edgert", "edgert_deploy")
WHEEL_TIME = (2020, 2, 2, 0, 0, 0)  # every file in the wheel has this time
WHEEL = "Wheel-Version: 1.0\nGenerator: edgert\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def own_wheel(progress: Callable[[str], None] = lambda _: None) -> Path:
    """Build edgert's own wheel from this source tree, or repack the installed package.

    So a device always gets the code that its host runs. Repacking needs neither an index nor a build tool.
    """
    kept_in, source = cache_folder() / "own", source_tree()
    kept_in.mkdir(parents=True, exist_ok=True)
    remove_abandoned(kept_in.glob(".new-*"))
    with tempfile.TemporaryDirectory(prefix=".new-", dir=kept_in) as folder:
        if source is not None:
            progress(f"building edgert's wheel from {source}")
            wheel = _pack(_built(source, Path(folder)), Path(folder))
        else:
            progress("packing edgert's wheel from the installed package")
            wheel = _pack(_installed(installed_distribution()), Path(folder))
        stored = kept_in / sha256_of(wheel)[:16] / wheel.name
        stored.parent.mkdir(exist_ok=True)
        os.replace(wheel, stored)
    return stored


def content_digest(wheel: Path) -> str:
    """Return a hash of the unpacked content of a wheel from `own_wheel`: the SHA-256 of its RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        return hashlib.sha256(archive.read(record)).hexdigest()


def source_tree() -> Path | None:
    """Return the repository from which this code runs; None if this code is an installed package."""
    root = Path(edgert.__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "deploy" / "edgert_deploy").is_dir() else None


def installed_distribution() -> Distribution:
    """Return the installed package of this code. Raises ConfigInvalid if this code is not installed."""
    package = Path(edgert.__file__).resolve()
    for distribution in distributions(name="edgert"):
        if Path(str(distribution.locate_file("edgert/__init__.py"))).resolve() == package:
            return distribution
    raise ConfigInvalid(f"edgert in {package.parent} is not an installed package: pip install 'edgert[host]'")


def _built(source: Path, folder: Path) -> dict[str, bytes]:
    """Build a wheel of the source tree; return the files in the wheel."""
    doing = "build edgert's own wheel"
    if importlib.util.find_spec("hatchling"):  # hatchling downloads nothing, and takes less time than pip
        run_module("hatchling", ["build", "-t", "wheel", "-d", str(folder / "built")], doing, cwd=source)
    else:
        run_pip(["wheel", "--no-deps", "--wheel-dir", str(folder / "built"), str(source)], doing)
    with zipfile.ZipFile(next((folder / "built").glob("edgert-*.whl"))) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def _installed(installed: Distribution) -> dict[str, bytes]:
    """Return the files in the RECORD of an installed edgert. Raises ConfigInvalid for a missing file."""
    content = {}
    for name in map(str, installed.files or ()):
        if not _is_code(name) and ".dist-info/" not in name:  # such as the command `edgert`
            continue
        advice = "pip install --force-reinstall edgert"
        with os_error_as(ConfigInvalid, f"{name} of the installed edgert cannot be read", advice):
            content[name] = Path(str(installed.locate_file(name))).read_bytes()
    if not content or "edgert/__init__.py" not in content or "edgert_deploy/__init__.py" not in content:
        raise ConfigInvalid("the installed edgert lists no files: pip install --force-reinstall edgert")
    return content


def _pack(files: Mapping[str, bytes], folder: Path) -> Path:
    """Write a wheel of `files` to `folder`, without byte code and the metadata that tools add."""
    info = next(name.split("/")[0] for name in files if name.endswith(".dist-info/METADATA"))
    kept_metadata = (f"{info}/entry_points.txt", f"{info}/licenses/")
    content = {name: data for name, data in files.items() if _is_code(name) or name.startswith(kept_metadata)}
    content[f"{info}/METADATA"] = _metadata(files[f"{info}/METADATA"]).encode()
    content[f"{info}/WHEEL"] = WHEEL.encode()
    rows = [f"{name},sha256={_record_hash(data)},{len(data)}" for name, data in sorted(content.items())]
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in sorted(content.items()):
            entry = zipfile.ZipInfo(name, WHEEL_TIME)
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return wheel


def _is_code(name: str) -> bool:
    return name.split("/")[0] in OWN_PACKAGES and not name.endswith(".pyc")


def _metadata(written: bytes) -> str:
    """Return the metadata that an installer needs, in a fixed order and spelling."""
    metadata = email.parser.BytesParser().parsebytes(written, headersonly=True)
    lines = ["Metadata-Version: 2.1", *(f"{key}: {metadata[key]}" for key in ("Name", "Version", "Requires-Python"))]
    lines += [f"Provides-Extra: {extra}" for extra in sorted(metadata.get_all("Provides-Extra", []))]
    lines += sorted(f"Requires-Dist: {Requirement(line)}" for line in metadata.get_all("Requires-Dist", []))
    return "\n".join([*lines, ""])


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
