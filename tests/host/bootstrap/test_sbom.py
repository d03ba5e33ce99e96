"""A bill of materials is a valid CycloneDX document, and the same for the same components."""

from __future__ import annotations

import json
from importlib.resources import files

from jsonschema import Draft7Validator
from referencing import Registry, Resource

from edgert_deploy.bootstrap.sbom import Component, sbom

PARTS = [
    Component("numpy", "2.4.6", "a" * 64, "BSD-3-Clause"),
    Component("onnxruntime", "1.32.0", "b" * 64, needs=("numpy", "not-here")),
]


def test_an_sbom_meets_the_schema_of_cyclonedx() -> None:
    schemas = files("cyclonedx.schema") / "_res"
    read = {
        each.name.replace(".SNAPSHOT", ""): json.loads(each.read_text())
        for each in schemas.iterdir()
        if each.name.endswith(".schema.json")
    }
    registry: Registry[object] = Registry().with_resources(
        [
            (f"http://cyclonedx.org/schema/{name}", Resource.from_contents(schema))
            for name, schema in read.items()
            if name in ("spdx.schema.json", "jsf-0.82.schema.json")
        ]
    )
    Draft7Validator(read["bom-1.5.schema.json"], registry=registry).validate(
        sbom({"type": "application", "name": "edgert", "version": "0.1.0"}, PARTS)
    )


def test_an_sbom_does_not_depend_on_the_order_of_components_and_depends_only_on_listed_components() -> None:
    about = {"type": "application", "name": "edgert"}
    made = sbom(about, PARTS)
    assert sbom(about, reversed(PARTS)) == made
    assert made["dependencies"] == [
        {"ref": "pkg:pypi/numpy@2.4.6", "dependsOn": []},
        {"ref": "pkg:pypi/onnxruntime@1.32.0", "dependsOn": ["pkg:pypi/numpy@2.4.6"]},
    ]
