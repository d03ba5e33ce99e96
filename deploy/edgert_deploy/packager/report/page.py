"""The report as one HTML page: no script, no request, its styles inside; what a bundle says is escaped wherever it stands.

Each section appears when there is something to show in it. A plot stands in a table cell beside its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from edgert import __version__
from edgert.tensors import TensorSpec
from edgert_deploy.common.quantities import size_text
from edgert_deploy.packager.report import Report
from edgert_deploy.packager.report.plots import Scale, bars, segments, spread
from edgert_deploy.packager.report.tables import NUMBER, PLOT, ROWS_SHOWN_MAX, legend, table

STYLE = Path(__file__).with_name("style.css")
PRECISION_CLASSES = {"int8": "int8", "fp32": "fp32", "fp16": "other"}


def page(report: Report) -> str:
    """The whole document."""
    sections = [(anchor, title, body) for anchor, title, write in SECTIONS if (body := write(report))]
    links = "".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title, _ in sections)
    bodies = "".join(
        f'<section id="{anchor}" aria-labelledby="{anchor}-title"><h2 id="{anchor}-title">{escape(title)}</h2>{body}</section>'
        for anchor, title, body in sections
    )
    manifest = report.manifest
    title = f"{manifest.model}, release {manifest.release}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title><style>{STYLE.read_text()}</style></head>
<body><a class="skip" href="#main">To the content</a>
<header><h1>{escape(title)}</h1><p class="soft">Content <code>{report.digest[:16]}</code>, signed by
<code>{escape(", ".join(report.key_ids))}</code> (this page does not check signatures; <code>edgert bundle verify</code> does).</p>
{_tiles(report)}<nav aria-label="Sections"><ul>{links}</ul></nav></header>
<main id="main">{bodies}</main><footer><p>Written by edgert {escape(__version__)} from the bundle alone.</p></footer></body></html>
"""


def _tiles(report: Report) -> str:
    manifest, candidates = report.manifest, [c for c in report.candidates() if c["packed"]]
    worst = max(candidates, key=lambda c: c["accuracy"]["drop"])
    passed = all(c["passed"] for c in candidates)
    accuracy = worst["accuracy"]
    tiles = [
        ("Accuracy gate", f'<span class="{"good" if passed else "bad"}">{"passed" if passed else "not passed"}</span>'),
        (
            f"Worst {accuracy['metric']}",
            f"{accuracy['artifact']:.4f} <span class=soft>({_signed(-accuracy['drop'])})</span>",
        ),
        ("Targets", str(len(manifest.targets))),
        ("Artifacts", str(len(manifest.artifacts))),
        ("Bundle", size_text(report.size_bytes)),
        ("Source", size_text(manifest.source_size_bytes)),
    ]
    return f'<dl class="tiles">{"".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in tiles)}</dl>'


def _targets(report: Report) -> str:
    receipts = {target["profile"]: target for target in report.receipt.get("targets", [])}
    parts = []
    for target in report.manifest.targets:
        said = receipts.get(target.profile, {})
        machines = ", ".join(target.machines) or "any processor"
        preferred = "".join(f"<li>{_artifact_words(report, name)}</li>" for name in target.artifacts)
        notes = [f"Goes without {one['engine']}: {one['reason']}" for one in said.get("left_out", [])]
        notes += [remark for remark in said.get("warnings", []) if "goes without" not in remark]
        if target.reference:
            notes.append(f"Live answers may be compared with {target.reference}.")
        listed = f'<ul class="plain soft">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""
        parts.append(
            f"<h3>{escape(target.profile)}</h3><p class=soft>{escape(machines)}</p><ol>{preferred}</ol>{listed}"
        )
    return (
        "<p>A device serves with the first artifact that loads there and answers the golden samples rightly.</p>"
        + "".join(parts)
    )


def _artifact_words(report: Report, name: str) -> str:
    artifact = report.manifest.artifact(name)
    accuracy = artifact.accuracy
    return (
        f"<code>{escape(name)}</code>: {escape(artifact.engine)}, {escape(artifact.precision.upper())}, "
        f"{size_text(report.artifact_bytes(artifact))}, {escape(accuracy.metric)} {accuracy.artifact:.4f}"
    )


def _candidates(report: Report) -> str:
    rows = []
    for one in report.candidates():
        accuracy = one["accuracy"]
        state = "packed" if one["packed"] else "not packed"
        verdict = '<span class="good">pass</span>' if one["passed"] else '<span class="bad">fail</span>'
        also = one.get("also", {})
        counted = ", ".join(f"{escape(name)} {both['artifact']:.4g}" for name, both in sorted(also.items()))
        rows.append(
            [
                f"<code>{escape(one['id'])}</code>",
                escape(one["kind"].upper()),
                f"{accuracy['fp32']:.4f}",
                f"{accuracy['artifact']:.4f}",
                _signed(-accuracy["drop"]),
                verdict,
                state,
                f'<span class="soft">{counted}</span>',
            ]
        )
    metric = report.candidates()[0]["accuracy"]
    lead = f"<p>{escape(metric['metric'])} on {metric['samples']} hold-out samples; {_limits(report)}</p>"
    columns = [
        ("Candidate", ""),
        ("Precision", ""),
        ("FP32", NUMBER),
        ("Artifact", NUMBER),
        ("Change", NUMBER),
        ("Gate", ""),
        ("", ""),
        ("Counted as well", ""),
    ]
    return lead + table("All candidates that were built and judged", columns, rows)


def _limits(report: Report) -> str:
    gate = report.receipt.get("gate")
    if gate is None:
        return f"at most {report.manifest.artifacts[0].accuracy.max_drop:g} may be lost."
    classes = gate["max_class_drop"]
    return f"at most {gate['max_drop']:g} may be lost" + (
        "." if classes is None else f", {classes:g} in any class or slice."
    )


def _classes(report: Report) -> str:
    return _by_group(report, "classes", "Class")


def _slices(report: Report) -> str:
    return _by_group(report, "slices", "Slice")


def _by_group(report: Report, key: str, heading: str) -> str:
    """The artifact of which a group lost most is shown, the others are folded away."""
    found = [one for one in report.candidates() if one["packed"] and one.get(key)]
    found.sort(key=lambda one: (min(_group_change(group) for group in one[key]), one["id"]))
    tables = [(one["id"], min(one[key], key=_group_change), _groups(one, one[key], heading)) for one in found]
    shown = [f"<h3><code>{escape(name)}</code></h3>{table}" for name, _, table in tables[:1]]
    folded = [
        f"<details><summary><code>{escape(name)}</code>: {_worst_words(worst)}</summary>{table}</details>"
        for name, worst, table in tables[1:]
    ]
    if not tables:
        return ""
    return legend([("fp32", "FP32 source"), ("int8", "artifact")]) + "".join(shown + folded)


def _worst_words(worst: dict[str, Any]) -> str:
    change = _group_change(worst)
    return f"{escape(worst['name'])} lost most, {_signed(change)}" if change < 0 else "none lost"


def _group_change(group: dict[str, Any]) -> float:
    return float(group["artifact"] - group["fp32"])


def _groups(candidate: dict[str, Any], groups: list[dict[str, Any]], heading: str) -> str:
    if len(groups) > ROWS_SHOWN_MAX:  # then the order of the classes matters less than who lost
        groups = sorted(groups, key=_group_change)
    rows = [
        [
            escape(group["name"]),
            bars([("fp32", group["fp32"]), ("int8", group["artifact"])]),
            f"{group['fp32']:.4f}",
            f"{group['artifact']:.4f}",
            _change(_group_change(group)),
            str(group["samples"]),
        ]
        for group in groups
    ]
    kind = escape(candidate["kind"].upper())
    columns = [
        (heading, ""),
        (f"FP32, {kind}", PLOT),
        ("FP32", NUMBER),
        (kind, NUMBER),
        ("Change", NUMBER),
        ("Samples", NUMBER),
    ]
    caption = f"{candidate['id']}: {candidate['accuracy']['metric']} by {heading.lower()}"
    return table(caption, columns, rows)


def _change(value: float) -> str:
    return f'<span class="bad">{_signed(value)}</span>' if value < 0 else _signed(value)


def _signed(value: float) -> str:
    return f"{value:+.4f}" if value else "0"


def _sizes(report: Report) -> str:
    source = report.manifest.source_size_bytes
    sizes = [("source", source), *((a.id, report.artifact_bytes(a)) for a in report.manifest.artifacts)]
    largest = max(size for _, size in sizes)
    rows = [
        [
            f"<code>{escape(name)}</code>",
            bars([("fp32" if name == "source" else "int8", size / largest)]),
            size_text(size),
            "" if name == "source" else f"{source / max(size, 1):.1f}x",
        ]
        for name, size in sizes
    ]
    return table("Bytes of the model's files", [("", ""), ("", PLOT), ("Size", NUMBER), ("Smaller by", NUMBER)], rows)


def _latency(report: Report) -> str:
    times = report.times()
    slowest = max((one["p50_ms"] for _, one in times), default=0.0) or 1.0
    rows = [
        [
            escape(profile),
            f"<code>{escape(one['id'])}</code>",
            escape(one["where"]),
            f'<span class="bad">{escape(one["error"])}</span>'
            if one["error"]
            else bars([("int8", one["p50_ms"] / slowest)]),
            *([""] * 3 if one["error"] else [f"{one['p50_ms']:.3g}", f"{one['p90_ms']:.3g}", str(one["threads"])]),
        ]
        for profile, one in times
    ]
    columns = [("Target", ""), ("Candidate", ""), ("Measured on", ""), ("", PLOT)]
    columns += [("p50, ms", NUMBER), ("p90, ms", NUMBER), ("Threads", NUMBER)]
    return table("Time of one inference", columns, rows) if rows else ""


def _ranges(report: Report) -> str:
    found = report.receipt.get("activations", [])
    if not found:
        return ""
    scale = Scale.over([value for one in found for value in (one["low"], one["high"])])
    rows = [
        [
            f"<code>{escape(one['layer'])}</code>",
            escape(one["op"]),
            spread(scale, one["low"], one["high"], one["quantiles"]),
            f"{one['low']:.3g}",
            f"{one['high']:.3g}",
            _decibels(one["sqnr_db"]),
        ]
        for one in found
    ]
    lead = (
        "<p>What passes between the layers of the FP32 model on calibration samples, in the order of the graph. The axis "
        "is the same for all, logarithmic away from 0. SQNR: signal to noise of the layer's own answer rounded to 8 bits.</p>"
    )
    legends = legend([("most", "99.8 % of the values"), ("", "line: all of them; tick: the median")])
    columns = [
        ("Layer", ""),
        ("Kind", ""),
        ("Range", PLOT),
        ("Least", NUMBER),
        ("Greatest", NUMBER),
        ("SQNR, dB", NUMBER),
    ]
    return lead + legends + table("Activation ranges", columns, rows)


def _harm(report: Report) -> str:
    parts = [_harm_table(f"Measured for {engine}", layers, "name") for engine, layers in report.harms()]
    lead = "<p>What is left of the model's outputs where one layer alone is in INT8: the lower, the more that layer hurts.</p>"
    if not parts and (found := report.receipt.get("activations")):
        worst = sorted(found, key=lambda one: one["sqnr_db"])[:ROWS_SHOWN_MAX]
        parts = [_harm_table("The layers whose own answers lose most to 8 bits", worst, "layer")]
        lead = (
            "<p>INT8 passed, so no layer was measured alone. These are the layers whose own answers lose most when "
            "rounded to 8 bits; what later layers make of that noise is in the accuracy above.</p>"
        )
    floats = [
        f"<li><code>{escape(one['id'])}</code>: {escape(', '.join(one['float_layers']))}</li>"
        for one in report.candidates()
        if one.get("float_layers")
    ]
    if floats:
        parts.append(f'<h3>In float for accuracy&#39;s sake</h3><ul class="plain">{"".join(floats)}</ul>')
    return lead + "".join(parts) if parts else ""


def _harm_table(caption: str, layers: Sequence[dict[str, Any]], name: str) -> str:
    # 0 dB: as much noise as signal; what is left of 60 dB is the length of the bar.
    rows = [
        [
            f"<code>{escape(one[name])}</code>",
            escape(one["op"]),
            bars([("bad", 1 - one["sqnr_db"] / 60)]),
            _decibels(one["sqnr_db"]),
        ]
        for one in layers
    ]
    return table(caption, [("Layer", ""), ("Kind", ""), ("Harm", PLOT), ("SQNR, dB", NUMBER)], rows)


def _layers(report: Report) -> str:
    rows = []
    for name, kinds in report.layers.items():
        for kind, counts in kinds.items():
            total = sum(counts.values())
            shares = [(PRECISION_CLASSES.get(p, "other"), n / total) for p, n in counts.items()]
            words = ", ".join(f"{n} {escape(p.upper())}" for p, n in counts.items())
            rows.append([f"<code>{escape(name)}</code>", escape(kind), segments(shares), words])
    if not rows:
        return ""
    legends = legend([("int8", "INT8"), ("fp32", "FP32"), ("other", "other")])
    columns = [("Artifact", ""), ("Kind", ""), ("", PLOT), ("Layers", "")]
    return legends + table("As the artifacts' files say", columns, rows)


def _goldens(report: Report) -> str:
    lead = (
        f"<p>Each artifact carries its answers to {report.golden_samples} hold-out samples. A device that answers them within "
        "the tolerance serves; here the artifacts are held against each other.</p>"
    )
    rows = [
        [
            f"<code>{escape(one.artifact)}</code>",
            f"<code>{escape(one.other)}</code>",
            escape(one.output),
            f"{one.difference:.3g}",
            f"{one.tolerance:.3g}",
            "" if one.same_class is None else f"{one.same_class:.0%}",
        ]
        for one in report.goldens
    ]
    tolerances = [
        [f"<code>{escape(a.id)}</code>", escape(spec.name), f"{atol:.3g}"]
        for a in report.manifest.artifacts
        for spec, atol in zip(report.manifest.outputs, a.golden_atol, strict=False)
    ]
    columns = [
        ("Artifact", ""),
        ("Beside", ""),
        ("Output", ""),
        ("Largest difference", NUMBER),
        ("Tolerance", NUMBER),
        ("Same class", NUMBER),
    ]
    compared = table("Golden answers, artifact beside artifact", columns, rows) if rows else ""
    return (
        lead
        + compared
        + table("What a device may differ by", [("Artifact", ""), ("Output", ""), ("Tolerance", NUMBER)], tolerances)
    )


def _meaning(report: Report) -> str:
    manifest = report.manifest
    facts = [(f"Input {spec.name}", _spec(spec)) for spec in manifest.inputs]
    facts += [(f"Output {spec.name}", _spec(spec)) for spec in manifest.outputs]
    if (before := manifest.preprocess) is not None:
        size = (
            "" if before.resize is None else f"{before.resize.rule} to {before.resize.height} x {before.resize.width}, "
        )
        files = ", JPEG and PNG files" if before.decode else ""
        value = f"(value * {before.scale:g} - {list(before.mean)}) / {list(before.std)}"
        facts.append(("Preprocessing", f"{before.input}: {size}{value}, {before.colour}, {before.model_layout}{files}"))
    after = manifest.classify or manifest.detect
    if after is not None:
        facts.append(
            (
                "Labels",
                f"{len(after.labels)}: {', '.join(after.labels[:ROWS_SHOWN_MAX])}{' ...' if len(after.labels) > ROWS_SHOWN_MAX else ''}",
            )
        )
    facts.append(("Source", f"{manifest.source_size_bytes} bytes"))
    facts.append(("A downgrade", "yes: devices take this release after a higher one" if manifest.downgrade else "no"))
    facts.append(("Expires", manifest.expires or "never"))
    facts += [(name.capitalize(), report.receipt[name]) for name in ("licence", "notes") if report.receipt.get(name)]
    rows = [[escape(name), escape(value)] for name, value in facts]
    rows.append(["Source's SHA-256", f"<code>{escape(manifest.source_sha256)}</code>"])
    return table("", [("", ""), ("", "")], rows)


def _contents(report: Report) -> str:
    rows = [
        [f"<code>{escape(file.path)}</code>", f"{file.size_bytes:,}", f"<code>{file.sha256[:16]}</code>"]
        for file in report.manifest.files
    ]
    tools = [
        [
            f"<code>{escape(a.id)}</code>",
            escape(", ".join(f"{tool} {version}" for tool, version in sorted(a.tools.items()))),
        ]
        for a in report.manifest.artifacts
    ]
    files = table("Files, each signed by its SHA-256", [("File", ""), ("Bytes", NUMBER), ("SHA-256 begins", "")], rows)
    return files + table("Made with", [("Artifact", ""), ("Tools", "")], tools)


def _spec(spec: TensorSpec) -> str:
    return f"{spec.datatype} [{', '.join('N' if n == -1 else str(n) for n in spec.shape)}]"


def _decibels(value: float) -> str:
    return "exact" if value >= 200 else f"{value:.1f}"


SECTIONS: tuple[tuple[str, str, Callable[[Report], str]], ...] = (
    ("targets", "Targets", _targets),
    ("candidates", "Candidates", _candidates),
    ("classes", "Accuracy by class", _classes),
    ("slices", "Accuracy by slice", _slices),
    ("size", "Size", _sizes),
    ("latency", "Latency", _latency),
    ("harm", "Layers that hurt most", _harm),
    ("ranges", "Activation ranges", _ranges),
    ("layers", "Layers by precision", _layers),
    ("golden", "Golden answers", _goldens),
    ("meaning", "Inputs and outputs", _meaning),
    ("contents", "What is in the bundle", _contents),
)
