"""A bill of materials of a wheelhouse or a bundle, in the form of CycloneDX 1.5.

The form: https://cyclonedx.org/docs/1.5/json/. The document contains no time and no random number. So the same
components give the same document.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NAME = "sbom.cdx.json"


@dataclass(frozen=True)
class Component:
    """A package of PyPI. `needs` has the names of other packages. `sha256` and `licence` (SPDX) may be ""."""

    name: str
    version: str
    sha256: str = ""
    licence: str = ""
    needs: tuple[str, ...] = ()

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"

    def as_json(self) -> dict[str, Any]:
        named = {"type": "library", "bom-ref": self.purl, "name": self.name, "version": self.version, "purl": self.purl}
        hashes = {"hashes": [{"alg": "SHA-256", "content": self.sha256}]} if self.sha256 else {}
        return {**named, **hashes, **({"licenses": [{"expression": self.licence}]} if self.licence else {})}


def sbom(about: dict[str, Any], components: Iterable[Component]) -> dict[str, Any]:
    """Return the document. `about` is the component that contains the others, in CycloneDX's form."""
    parts = sorted(components, key=lambda part: (part.name, part.version))
    purls = {part.name: part.purl for part in parts}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": about},
        "components": [part.as_json() for part in parts],
        "dependencies": [
            {"ref": part.purl, "dependsOn": sorted({purls[name] for name in part.needs if name in purls} - {part.purl})}
            for part in parts
        ],
    }
