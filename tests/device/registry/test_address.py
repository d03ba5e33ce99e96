from __future__ import annotations

import pytest

from edgert.errors import ConfigInvalid
from edgert.registry.address import parse_repository


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("oci://registry.example.org/plant/models", "https://registry.example.org/v2/plant/models"),
        ("oci://10.0.0.7:5000/models", "https://10.0.0.7:5000/v2/models"),
        ("oci://[::1]:5000/models", "https://[::1]:5000/v2/models"),
        ("oci+http://mirror/a__b/c-d/e.f", "http://mirror/v2/a__b/c-d/e.f"),
    ],
)
def test_an_address_has_the_url_of_its_repository(text: str, url: str) -> None:
    repository = parse_repository(text)
    assert repository.url == url
    assert str(repository) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "registry.example.org/models",
        "https://registry.example.org/models",
        "oci://registry.example.org",
        "oci://registry.example.org/",
        "oci://registry.example.org/Models",
        "oci://registry.example.org/models:latest",
        "oci://registry.example.org/models/../other",
        "oci://registry.example.org:99999/models",
        "oci://pi:secret@registry.example.org/models",
        "oci://regis try/models",
        "oci:///models",
        "oci://host/" + "a" * 600,
    ],
)
def test_other_texts_are_refused_as_addresses(text: str) -> None:
    with pytest.raises(ConfigInvalid) as raised:
        parse_repository(text)
    assert "secret" not in raised.value.message
