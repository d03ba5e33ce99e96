"""The zoo's tables as Markdown: two for bench/trained-models.md, and one for README.md."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from edgert.checks.bench import processor_name
from edgert.environment import code_digest
from edgert_deploy.packager.build_cache import CODE

Row = Mapping[str, Any]
Cell = tuple[str, str]  # model, engine

# A table of bench/trained-models.md: the heading of each column, and the key of its value in a row.
MODELS = {"model": "model", "kind": "kind", "metric": "metric", "FP32's score": "fp32"}
RESULTS = {
    "model": "model",
    "engine": "engine",
    "EdgeRT: recipe, score": "ours_text",
    "vendor's best: recipe, score": "vendor_text",
    "faster": "faster",
    "smaller": "smaller",
    "in INT8": "int8_share",
    "why not INT8": "why_not_int8",
}
ENGINES = {"tflite": "TFLite", "openvino": "OpenVINO", "onnxruntime": "ONNX Runtime", "tensorrt": "TensorRT"}
TIMED = ("tflite", "openvino", "onnxruntime")
CELL_LETTERS_MAX = 100
NEXT_REASON = re.compile("; (?=[A-Z])")
LOST = re.compile(r"-> (\S+) on ")  # FP32's score -> the candidate's score
SLOWER = re.compile(r" took .* took ")
INT8_SHARE_MIN = 0.9  # of the work; below it the build says "mixed", too
CODE_LETTERS = 8
# The code of the packager that quantizes, judges and chooses.
FOLDERS = ("accuracy", "builders", "candidates", "tflite_lowering")


def measured_by() -> dict[str, str]:
    """Return a row's origin: the day, the machine, and a digest of the code that quantizes and judges."""
    digests = "".join(code_digest(CODE / folder) for folder in FOLDERS)
    code = hashlib.sha256(digests.encode()).hexdigest()[:CODE_LETTERS]
    host = f"{processor_name()}, {os.cpu_count()} cores"
    return {"date": date.today().isoformat(), "host": host, "code": code}


def markdown(rows: Sequence[Row], cells: Sequence[Cell], code: str) -> Iterator[str]:
    """Yield the lines of all tables: `rows` are the latest of `cells`, `code` is the present digest."""
    if not rows:
        yield "No row is measured yet; without --only-print they are made."
        return
    yield "For bench/trained-models.md:"
    yield ""
    hosts = sorted({row["host"] for row in rows if row.get("host")})
    yield f"{_dates(rows)}, code `{code}`{' on ' if hosts else ''}{'; '.join(hosts)}; times are medians of runs in turn."
    yield from _of_models(rows)
    known = {(row["model"], row["engine"]) for row in rows}
    for words, missing in (
        ("Not measured yet", [cell for cell in cells if cell not in known]),
        ("Measured with earlier code", [(row["model"], row["engine"]) for row in rows if row.get("code") != code]),
    ):
        if missing:
            yield ""
            yield f"{words}: {_engines_by_model(missing)}."
    yield ""
    yield "For README.md:"
    yield ""
    timed = [row for row in rows if row["engine"] in TIMED and row["kind"] != "tabular"]
    yield from _table(("model", *(ENGINES[name] for name in TIMED)), list(_by_model(timed)))


def _of_models(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the tables of bench/trained-models.md: the models, and the result of each model in each engine."""
    shown = [
        {
            **row,
            "engine": ENGINES[row["engine"]],
            "why_not_int8": _why_not_int8(row.get("refused")),
            "ours_text": _recipe_and_score(row, "recipe", "ours"),
            "vendor_text": _recipe_and_score(row, "vendor_recipe", "vendor"),
        }
        for row in rows
    ]
    first_rows = {row["model"]: row for row in reversed(shown)}
    models = [first_rows[name] for name in dict.fromkeys(row["model"] for row in shown)]
    for columns, chosen in ((MODELS, models), (RESULTS, shown)):
        yield ""
        yield from _table(list(columns), [[_shown(row.get(key)) for key in columns.values()] for row in chosen])


def _recipe_and_score(row: Row, recipe: str, score: str) -> str:
    return ", ".join(filter(None, (_shown(row.get(recipe)), _shown(row.get(score)))))


def _why_not_int8(reasons: str | None) -> str | None:
    """Return the score or the slowness for which the build's first choice, in INT8, was not packed."""
    if reasons is None:
        return None
    first = NEXT_REASON.split(reasons)[0]  # the build joins all reasons by semicolons
    lost = LOST.search(first)
    return f"scored {float(lost[1]):g}" if lost else "slower" if SLOWER.search(first) else first


def _by_model(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the README's line of each model, with a cell for each of TIMED."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = {row["engine"]: row for row in rows if row["model"] == model}
        yield [model, *(_cell(mine[name]) if name in mine else "" for name in TIMED)]


def _cell(row: Row) -> str:
    """Return the packed precision, its speed as a multiple of FP32's, and its score."""
    if row["ours"] is None:
        return "refused"
    recipe, share = str(row["recipe"]), row.get("int8_share")
    mixed = " in float" in recipe or (share is not None and share < INT8_SHARE_MIN)
    kind = recipe.upper() if recipe in ("fp16", "fp32") else "mixed" if mixed else "INT8"
    return f"{kind}, {row['faster']:.2f}x, {_shown(row['ours'])}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value).replace("|", " ")
    return text if len(text) <= CELL_LETTERS_MAX else text[:CELL_LETTERS_MAX].rsplit(" ", 1)[0] + " ..."


def _dates(rows: Sequence[Row]) -> str:
    days = sorted({row["date"] for row in rows if row.get("date")})
    shown = [f"{day.day} {day:%B %Y}" for day in map(date.fromisoformat, dict.fromkeys([*days[:1], *days[-1:]]))]
    return " to ".join(shown)


def _engines_by_model(cells: Sequence[Cell]) -> str:
    engines: dict[str, list[str]] = {}
    for model, engine in cells:
        engines.setdefault(model, []).append(ENGINES[engine])
    return "; ".join(f"{model} on {', '.join(names)}" for model, names in engines.items())
