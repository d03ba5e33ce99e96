"""The rules for text and embeddings, from the user's tables and the defaults of model and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgert.bundle.text_rules import Embed, Text, check_embed, check_text
from edgert.errors import ConfigInvalid, EngineMissing
from edgert.processing.preprocessors import InputRule
from edgert.processing.text import TextPreprocessor
from edgert.toml_file import about, from_table, read_text
from edgert_deploy.packager.sources.source_model import SourceModel

FILE_BYTES_MAX = 64 * 1024**2
# The names that exports of the library `transformers` use.
INPUT_NAMES = {"input": "input_ids", "mask": "attention_mask", "types": "token_type_ids"}
PAD_TOKENS = ("[PAD]", "<pad>", "<|endoftext|>")


def read_text_rule(path: Path, table: dict[str, Any], source: SourceModel) -> Text:
    """Return the rule of the table `text`. Raises ConfigInvalid.

    The rule's tokenizer is a path on this host. If the inputs have the usual names, only the key `tokenizer` is
    required.
    """
    specs = {spec.name: spec for spec in source.app_inputs}
    if not isinstance(table.get("tokenizer"), str):
        raise ConfigInvalid(f"{path}: [text] needs tokenizer, the path of a tokenizer.json")
    file = path.parent / Path(table["tokenizer"]).expanduser()
    content = read_text(file, FILE_BYTES_MAX)
    usual = {key: name for key, name in INPUT_NAMES.items() if name in specs}
    values = {"pad_id": _pad_id(file, content), **usual, **table, "tokenizer": str(file)}
    if values.get("input") not in specs:
        raise ConfigInvalid(
            f"{path}: [text] needs input, the model's input for token ids (and mask and types, if the model has them); the "
            f"model's inputs are {', '.join(specs)}"
        )
    if "max_tokens" not in values:
        length = specs[values["input"]].shape[-1]
        values["max_tokens"] = length if length != -1 or source.buckets is None else source.buckets.largest
    rule = from_table(Text, values, f"{path}, table [text]")
    try:
        with about(path):
            check_text(rule, source.app_inputs, source.buckets)
            TextPreprocessor(rule, source.app_inputs, content.encode())
    except EngineMissing as error:
        raise ConfigInvalid("text needs the package tokenizers on this host: pip install 'edgert[text]'") from error
    return rule


def read_embed(path: Path, table: dict[str, Any], source: SourceModel, before: InputRule | None) -> Embed:
    """Return the rule of a table `embed`. By default, it uses the text rule's mask. Raises ConfigInvalid."""
    pooling = table.get("pooling", "mean")
    mask = {"mask": before.mask} if pooling == "mean" and isinstance(before, Text) else {}
    if "output" not in table and len(source.app_outputs) == 1:
        table = {"output": source.app_outputs[0].name, **table}
    rule = from_table(Embed, {**mask, **table}, f"{path}, table [embed]")
    with about(path):
        check_embed(rule, source.app_inputs, source.app_outputs)
    return rule


def _pad_id(file: Path, content: str) -> int:
    """Return the padding id of a tokenizer's file: the stated id, else a known token's id, else 0."""
    try:
        value = json.loads(content)
        if isinstance(value.get("padding"), dict):
            return int(value["padding"]["pad_id"])
        added = {entry["content"]: int(entry["id"]) for entry in value.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigInvalid(
            f"{file} is not a tokenizer of the library tokenizers: give the model's own tokenizer.json"
        ) from error
    return next((added[token] for token in PAD_TOKENS if token in added), 0)
