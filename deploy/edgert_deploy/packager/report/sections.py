"""The sections of the page, in their order. A plot is in a table cell beside its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any

from edgert.printable import counted
from edgert_deploy.common.quantities import difference_text, share_text, size_text
from edgert_deploy.packager.report import Report
from edgert_deploy.packager.report.meaning import meaning
from edgert_deploy.packager.report.plots import Scale, bars, segments, spread
from edgert_deploy.packager.report.tables import ROWS_SHOWN_MAX, code, legend, table

HEADINGS = {"before": "Preprocessing", "after": "Postprocessing"}
PRECISION_CLASSES = {"int8": "int8", "fp32": "fp32", "fp16": "other"}


def signed(value: float) -> str:
    return difference_text(value) if value else "0"


def _targets(report: Report) -> str:
    receipts = {target["profile"]: target for target in report.receipt.get("targets", [])}
    parts = ["<p>A device serves with the first artifact that loads and answers the golden samples correctly.</p>"]
    for target in report.manifest.targets:
        built = receipts.get(target.profile, {})
        machines = ", ".join(target.machines) or "any processor"
        artifacts = "".join(f"<li>{_artifact(report, name)}</li>" for name in target.artifacts)
        left_out = built.get("left_out", [])
        notes = [f"No {engine['engine']} artifact: {engine['reason']}" for engine in left_out]
        reasons = tuple(engine["reason"] for engine in left_out)
        notes += [warning for warning in built.get("warnings", []) if not warning.endswith(reasons)]
        if target.reference:
            notes.append(f"Devices can compare live answers with {target.reference}.")
        listed = f'<ul class="plain soft">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""
        parts.append(
            f"<h3>{escape(target.profile)}</h3><p class=soft>{escape(machines)}</p><ol>{artifacts}</ol>{listed}"
        )
    return "".join(parts)


def _artifact(report: Report, name: str) -> str:
    artifact = report.manifest.artifact(name)
    accuracy = artifact.accuracy
    return (
        f"{code(name)}: {escape(artifact.engine)}, {escape(artifact.precision.upper())}, "
        f"{size_text(report.manifest.artifact_bytes(artifact))}, {escape(accuracy.metric)} {accuracy.artifact:.4f}"
    )


def _candidates(report: Report) -> str:
    rows = []
    for candidate in report.candidates():
        accuracy, metrics = candidate["accuracy"], sorted(candidate.get("other_metrics", {}).items())
        others = ", ".join(f"{escape(name)} {both['artifact']:.4g}" for name, both in metrics)
        rows.append(
            [
                code(candidate["id"]),
                escape(candidate["kind"].upper()),
                escape(candidate.get("recipe", "")),
                share_text(candidate.get("int8_share")),
                f"{accuracy['fp32']:.4f}",
                f"{accuracy['artifact']:.4f}",
                signed(-accuracy["drop"]),
                '<span class="good">pass</span>' if candidate["passed"] else '<span class="bad">fail</span>',
                "packed" if candidate["packed"] else "not packed",
                f'<span class="soft">{others}</span>',
            ]
        )
    accuracy, gate = report.candidates()[0]["accuracy"], report.receipt.get("gate", {})
    limit = gate.get("max_drop", report.manifest.artifacts[0].accuracy.max_drop)
    classes = "" if gate.get("max_class_drop") is None else f", {gate['max_class_drop']:g} in any class or slice"
    lead = (
        f"<p>{escape(accuracy['metric'])} on {counted(accuracy['samples'], 'hold-out sample')}; an artifact may lose at most "
        f"{limit:g}{classes}. The column In INT8 has the share of multiply-accumulates, read from the artifact's file.</p>"
    )
    columns = "Candidate|Precision|Recipe|In INT8#|FP32#|Artifact#|Change#|Gate||Other metrics"
    return lead + table("All candidates that were built and judged", columns, rows)


def _by_group(report: Report, key: str, heading: str) -> str:
    """Return a table for each artifact. The table with the largest loss is first. Other tables are folded."""
    candidates = [candidate for candidate in report.candidates() if candidate["packed"] and candidate.get(key)]
    candidates.sort(key=lambda candidate: (min(map(_group_change, candidate[key])), candidate["id"]))
    if not candidates:
        return ""
    parts = [legend([("fp32", "FP32 source"), ("int8", "artifact")])]
    for number, candidate in enumerate(candidates):
        groups, worst = _groups(candidate, candidate[key], heading), min(candidate[key], key=_group_change)
        change = _group_change(worst)
        lost = f"{escape(worst['name'])} lost most, {signed(change)}" if change < 0 else "none lost"
        folded = f"<details><summary>{code(candidate['id'])}: {lost}</summary>{groups}</details>"
        parts.append(folded if number else f"<h3>{code(candidate['id'])}</h3>{groups}")
    return "".join(parts)


def _group_change(group: dict[str, Any]) -> float:
    return float(group["artifact"] - group["fp32"])


def _groups(candidate: dict[str, Any], groups: list[dict[str, Any]], heading: str) -> str:
    if len(groups) > ROWS_SHOWN_MAX:  # in a long table, the losses matter more than the order of the classes
        groups = sorted(groups, key=_group_change)
    rows = []
    for group in groups:
        change = signed(_group_change(group))
        rows.append(
            [
                escape(group["name"]),
                bars([("fp32", group["fp32"]), ("int8", group["artifact"])]),
                f"{group['fp32']:.4f}",
                f"{group['artifact']:.4f}",
                f'<span class="bad">{change}</span>' if _group_change(group) < 0 else change,
                str(group["samples"]),
            ]
        )
    kind = candidate["kind"].upper()
    caption = f"{candidate['id']}: {candidate['accuracy']['metric']} by {heading.lower()}"
    return table(caption, f"{heading}|FP32, {kind}~|FP32#|{kind}#|Change#|Samples#", rows)


def _sizes(report: Report) -> str:
    source = report.manifest.source_size_bytes
    sizes = [("source", source), *((a.id, report.manifest.artifact_bytes(a)) for a in report.manifest.artifacts)]
    largest = max(size for _, size in sizes)
    rows = [
        [
            code(name),
            bars([("fp32" if name == "source" else "int8", size / largest)]),
            size_text(size),
            "" if name == "source" else f"{source / max(size, 1):.1f}x",
        ]
        for name, size in sizes
    ]
    return table("Bytes of the model's files", "|~|Size#|Smaller by#", rows)


def _latency(report: Report) -> str:
    times = report.times()
    slowest = max((timing["p50_ms"] for _, timing in times), default=0.0) or 1.0
    rows = []
    for profile, timing in times:
        cells = [f'<span class="bad">{escape(timing["error"])}</span>', "", "", ""]
        if not timing["error"]:
            bar = bars([("int8", timing["p50_ms"] / slowest)])
            cells = [bar, f"{timing['p50_ms']:.3g}", f"{timing['p90_ms']:.3g}", str(timing["threads"])]
        rows.append([escape(profile), code(timing["id"]), escape(timing["where"]), *cells])
    columns = "Target|Candidate|Measured on|~|p50, ms#|p90, ms#|Threads#"
    return table("Time of one inference", columns, rows) if rows else ""


def _harm(report: Report) -> str:
    parts = [_harm_table(f"Measured for {engine}", layers, "name") for engine, layers in report.harms()]
    lead = "<p>The noise in the model's outputs if only this layer is in INT8. A lower SQNR means a more harmful layer.</p>"
    if not parts and (worst := report.worst_activations(ROWS_SHOWN_MAX)):
        parts = [_harm_table("The layers whose own answers lose most to 8 bits", worst, "layer")]
        lead = (
            "<p>INT8 passed, so no layer was measured alone. The table has the layers whose own answers lose most when "
            "they are rounded to 8 bits. The accuracy above includes the effect of this noise on later layers.</p>"
        )
    floats = [
        f"<li>{code(candidate['id'])}: {escape(', '.join(candidate['float_layers']))}</li>"
        for candidate in report.candidates()
        if candidate.get("float_layers")
    ]
    if floats:
        parts.append(f'<h3>In float for accuracy</h3><ul class="plain">{"".join(floats)}</ul>')
    return lead + "".join(parts) if parts else ""


def _harm_table(caption: str, layers: Sequence[dict[str, Any]], name: str) -> str:
    # At 0 dB, there is as much noise as signal. The bar's length is the distance to 60 dB.
    rows = [
        [
            code(layer[name]),
            escape(layer["op"]),
            bars([("bad", 1 - layer["sqnr_db"] / 60)]),
            _decibels(layer["sqnr_db"]),
        ]
        for layer in layers
    ]
    return table(caption, "Layer|Kind|Harm~|SQNR, dB#", rows)


def _ranges(report: Report) -> str:
    ranges = report.receipt.get("activations", [])
    if not ranges:
        return ""
    scale = Scale.over([value for activation in ranges for value in (activation["low"], activation["high"])])
    rows = [
        [
            code(activation["layer"]),
            escape(activation["op"]),
            spread(scale, activation["low"], activation["high"], activation["quantiles"]),
            f"{activation['low']:.3g}",
            f"{activation['high']:.3g}",
            _decibels(activation["sqnr_db"]),
        ]
        for activation in ranges
    ]
    lead = (
        "<p>The values between the layers of the FP32 model on calibration samples, in the order of the graph. All ranges "
        "share one axis, which is logarithmic away from 0. SQNR is the signal to noise ratio of the layer's own answer if it "
        "is rounded to 8 bits.</p>"
    )
    key = legend([("most", "99.8 % of the values"), ("", "line: all values; tick: the median")])
    return lead + key + table("Activation ranges", "Layer|Kind|Range~|Least#|Greatest#|SQNR, dB#", rows)


def _layers(report: Report) -> str:
    rows = []
    for name, kinds in report.layers.items():
        for kind, counts in kinds.items():
            total = sum(counts.values())
            shares = [(PRECISION_CLASSES.get(p, "other"), n / total) for p, n in counts.items()]
            words = ", ".join(f"{n} {escape(p.upper())}" for p, n in counts.items())
            rows.append([code(name), escape(kind), segments(shares), words])
    key = legend([("int8", "INT8"), ("fp32", "FP32"), ("other", "other")])
    return key + table("Read from the artifacts' files", "Artifact|Kind|~|Layers", rows) if rows else ""


def _goldens(report: Report) -> str:
    rows = [
        [
            code(golden.artifact),
            code(golden.other),
            escape(golden.output),
            f"{golden.difference:.3g}",
            f"{golden.tolerance:.3g}",
            "" if golden.same_class is None else f"{golden.same_class:.0%}",
        ]
        for golden in report.goldens
    ]
    tolerances = [
        [code(a.id), escape(spec.name), f"{atol:.3g}"]
        for a in report.manifest.artifacts
        for spec, atol in zip(report.manifest.outputs, a.golden_atol, strict=False)
    ]
    columns = "Artifact|Other|Output|Largest difference#|Tolerance#|Same class#"
    return (
        f"<p>Each artifact ships with its answers to {counted(report.golden_samples, 'hold-out sample')}. A device serves if its "
        "answers are within the tolerance; this section compares the artifacts with each other.</p>"
        + (table("Golden answers, artifact beside artifact", columns, rows) if rows else "")
        + table("How much a device's answers may differ", "Artifact|Output|Tolerance#", tolerances)
    )


def _meaning(report: Report) -> str:
    manifest = report.manifest
    facts = [(HEADINGS.get(kind, kind.capitalize()), text) for kind, text in meaning(manifest)]
    facts.append(("Source", f"{manifest.source_size_bytes} bytes"))
    facts.append(("Downgrade", f"from releases up to {manifest.downgrade_from}" if manifest.downgrade_from else "no"))
    facts.append(("Expires", manifest.expires or "never"))
    facts += [(name.capitalize(), report.receipt[name]) for name in ("licence", "notes") if report.receipt.get(name)]
    rows = [[escape(name), escape(value)] for name, value in facts]
    return table("", "|", [*rows, ["Source's SHA-256", code(manifest.source_sha256)]])


def _contents(report: Report) -> str:
    files = [[code(f.path), f"{f.size_bytes:,}", code(f.sha256[:16])] for f in report.manifest.files]
    tools = [
        [code(a.id), escape(", ".join(f"{tool} {version}" for tool, version in sorted(a.tools.items())))]
        for a in report.manifest.artifacts
    ]
    listed = table("Files, each signed by its SHA-256", "File|Bytes#|SHA-256 begins", files)
    return listed + table("Made with", "Artifact|Tools", tools)


def _decibels(value: float) -> str:
    return "exact" if value >= 200 else f"{value:.1f}"


SECTIONS: tuple[tuple[str, str, Callable[[Report], str]], ...] = (
    ("targets", "Targets", _targets),
    ("candidates", "Candidates", _candidates),
    ("classes", "Accuracy by class", partial(_by_group, key="classes", heading="Class")),
    ("slices", "Accuracy by slice", partial(_by_group, key="slices", heading="Slice")),
    ("buckets", "Accuracy by bucket", partial(_by_group, key="buckets", heading="Bucket")),
    ("outputs", "Agreement of further outputs", partial(_by_group, key="outputs", heading="Output")),
    ("size", "Size", _sizes),
    ("latency", "Latency", _latency),
    ("harm", "The most harmful layers", _harm),
    ("ranges", "Activation ranges", _ranges),
    ("layers", "Layers by precision", _layers),
    ("golden", "Golden answers", _goldens),
    ("meaning", "Inputs and outputs", _meaning),
    ("contents", "Contents of the bundle", _contents),
)
