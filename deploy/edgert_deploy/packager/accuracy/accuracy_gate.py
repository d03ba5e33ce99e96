"""The accuracy gate: it compares an artifact's answers with FP32's answers to the hold-out samples.

A mean hides losses in a part of the samples. So the result also has the score of each class and each slice of the
hold-out. metrics.py computes the scores. artifact_runs.py gets the answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgert.bundle.manifest import ROUNDING_MARGIN, Accuracy
from edgert.printable import counted
from edgert_deploy.packager.accuracy.confidence import drop_interval, samples_needed
from edgert_deploy.packager.accuracy.grids import may_be_grid_of_logits
from edgert_deploy.packager.accuracy.metrics import Cosine, by_value, has_scores, no_better_than_chance, sqnr_db
from edgert_deploy.packager.accuracy.reference import Metric, OtherMetric, Outputs, Reference
from edgert_deploy.packager.settings import DROP_MAX

ALIKE_DROP_MAX = 0.1  # the check for similar answers uses --max-drop, but at most this value
SCORE_TOLERANCE = 1e-3  # the rounding error of a score of 0 or 1
SHOWN_DROP_MIN = 5e-5  # four digits would show a smaller drop as 0
NEAR_CHANCE = 0.1  # the share of the way from chance to 1 up to which FP32's top-1 causes a warning
GROUP_SAMPLES_MIN = 10  # a smaller group never fails a build, because one sample is over 10 % of the group


@dataclass(frozen=True)
class Limits:
    """The largest drops that an artifact may have.

    Attributes:
        max_drop: The limit for all samples, for each bucket, and for each output that the metric does not read.
        max_class_drop: The limit for each class and each slice. None means no limit.
    """

    max_drop: float = DROP_MAX
    max_class_drop: float | None = None


@dataclass(frozen=True)
class Group:
    """The score of a part of the hold-out: of a "class", a "slice" or a "bucket".

    The kind "output" is an output that the metric does not read; its score is its agreement with FP32.
    """

    kind: str
    name: str
    samples: int
    fp32: float
    artifact: float

    @property
    def drop(self) -> float:
        return self.fp32 - self.artifact


@dataclass(frozen=True)
class GateResult:
    """The gate's result for one artifact.

    Attributes:
        other_metrics: Metrics for readers of the receipt. The gate does not use them.
        drop_interval: The interval that contains the true drop with 95 % confidence. None if the metric is not a share
            of samples.
        similarity_only: Whether the metric only compares values with FP32's values, because it recognizes no decision
            in the outputs.
    """

    accuracy: Accuracy
    limits: Limits
    groups: tuple[Group, ...] = ()
    other_metrics: tuple[OtherMetric, ...] = ()
    drop_interval: tuple[float, float] | None = None
    similarity_only: bool = False

    @property
    def passed(self) -> bool:
        return self.accuracy.passed and not self.failed_groups

    @property
    def sqnr_db(self) -> float:
        return next(metric.artifact for metric in self.other_metrics if metric.name == "sqnr_db")

    @property
    def failed_groups(self) -> tuple[Group, ...]:
        """The groups whose drop is above their limit, without groups of fewer than GROUP_SAMPLES_MIN samples.

        On some engines, each bucket is a separate artifact. So the limit of a bucket is `max_drop`. The limit of an
        output is `max_drop`, too.
        """
        limit = {"bucket": self.limits.max_drop, "output": self.limits.max_drop}
        failed = []
        for group in self.groups:
            allowed = limit.get(group.kind, self.limits.max_class_drop)
            if allowed is not None and group.samples >= GROUP_SAMPLES_MIN and group.drop > allowed + ROUNDING_MARGIN:
                failed.append(group)
        return tuple(failed)

    def loss_text(self) -> str:
        total = self.accuracy
        if total.passed and self.failed_groups:
            group = max(self.failed_groups, key=lambda each: each.drop)
            scores = f"{group.fp32:.4f} -> {group.artifact:.4f}"
            if group.kind == "output":
                return (
                    f"{group.name} fell by {group.drop:.4f} ({scores} on {counted(group.samples, 'sample')}), though "
                    f"{total.metric} passes. To judge only the outputs that this metric reads, give --metric "
                    f"{total.metric.removeprefix('1-')}"
                )
            return (
                f"{group.kind} {group.name!r} lost {group.drop:.4f} of {total.metric} ({scores} on "
                f"{counted(group.samples, 'sample')})"
            )
        parts = [(other.artifact, other.name) for other in self.other_metrics if other.of_output]
        most = f"; {min(parts)[1]} fell most" if parts else ""
        drop = f"{total.drop:.4f}" if total.drop >= SHOWN_DROP_MIN else f"{total.drop:.1e}"
        return (
            f"{total.metric} fell by {drop} ({total.fp32:.4f} -> {total.artifact:.4f} on "
            f"{counted(total.samples, 'sample')}{most})"
        )


def judge(metric: Metric, reference: Reference, answers: Outputs, limits: Limits) -> GateResult:
    """Return the result for the artifact that gave `answers` to the hold-out."""
    answers, reference = reference.with_embeddings(answers), reference.as_embeddings()
    all_rows = reference.all_rows
    # FP32's agreement with itself counts as 1, even if its answers contain NaN.
    fp32 = 1.0 if metric.is_agreement else metric.score(reference.answers, all_rows)
    accuracy = Accuracy(metric.name, len(all_rows), fp32, metric.score(answers, all_rows), limits.max_drop)
    groups = [("class", name, rows) for name, rows in metric.classes().items()]
    if reference.holdout.slices is not None:
        groups += [("slice", name, rows) for name, rows in by_value(reference.holdout.slices).items()]
    if reference.holdout.buckets is not None:
        groups += [("bucket", name, rows) for name, rows in by_value(reference.holdout.sizes).items()]
    compared = []
    for kind, name, rows in groups:
        of_class = name if kind == "class" else ""
        fp32, artifact = (metric.score(outputs, rows, of_class) for outputs in (reference.answers, answers))
        compared.append(Group(kind, name, len(rows), fp32, artifact))
    if metric.other_outputs is not None:
        parts = metric.other_outputs.parts(answers, all_rows)
        compared += [Group("output", name, accuracy.samples, 1.0, score) for name, score in parts]
    interval = _drop_interval(metric, accuracy.drop, answers)
    others = _other_metrics(metric, reference, answers)
    return GateResult(accuracy, limits, tuple(compared), others, interval, metric.is_similarity)


def warnings(metric: Metric, reference: Reference, limits: Limits) -> list[str]:
    """Return a sentence for each reason why a passed gate may prove little."""
    judged = reference.as_embeddings()
    texts = [*_meaning_warnings(metric, judged), *_object_warnings(metric, judged), *_score_warnings(reference)]
    if not texts or metric.is_similarity:  # the other warnings already ask to check the samples
        texts += _alike_warnings(metric, judged, limits)
    return [*texts, *_count_warnings(metric, reference, limits)]


def _object_warnings(metric: Metric, reference: Reference) -> list[str]:
    """Warn if a detector finds no object. The artifact then scores 1 if it finds no object either."""
    names = [name for each in (metric, metric.other_outputs) if each is not None for name in each.without_objects]
    if not names:
        return []
    return [
        f"FP32 finds no object in any of the {counted(len(reference.all_rows), 'hold-out sample')}, so the gate compares no "
        f"objects and its result proves nothing ({', '.join(names)}): give hold-out samples that show objects, prepared as for "
        "training; if they do show objects, lower score_threshold in the --postprocess file"
    ]


def _score_warnings(reference: Reference) -> list[str]:
    """Warn if the user's rule for boxes reads other values than scores of 0 to 1 as scores."""
    rule = reference.detect
    if rule is None or rule.sigmoid:
        return []
    name = rule.scores or rule.boxes
    array = next(answers for spec, answers in zip(reference.specs, reference.answers, strict=True) if spec.name == name)
    rows = array if rule.form == "channels_first" else array.transpose(0, 2, 1)
    scores = rows if rule.scores else rows[:, 4:]
    low, high = float(scores.min()), float(scores.max())
    if array.dtype.kind != "f" or (low >= -SCORE_TOLERANCE and high <= 1 + SCORE_TOLERANCE):
        return []
    return [
        f"the scores of boxes in output {name!r} are {low:.4g} to {high:.4g}, not 0 to 1: if they are logits, set sigmoid = true "
        "in the --postprocess file. If some of them are angles or key points, omit --postprocess, and let your app read "
        "the output"
    ]


def _alike_warnings(metric: Metric, reference: Reference, limits: Limits) -> list[str]:
    """Warn if FP32's answers are so similar that an artifact which ignores its input would pass."""
    rows = reference.all_rows
    if metric.has_own_unit or len(rows) < 2:
        return []
    median = [np.median(a, axis=0).astype(a.dtype) if a.dtype.kind == "f" else a[0] for a in reference.answers]
    same = [np.broadcast_to(each, a.shape) for each, a in zip(median, reference.answers, strict=True)]
    if metric.score(reference.answers, rows) - metric.score(same, rows) > min(limits.max_drop, ALIKE_DROP_MAX):
        return []
    return [
        f"FP32's answers to the {len(rows)} hold-out samples are so alike that an artifact which ignores its input would "
        f"pass ({metric.name}): prepare the samples as for training, and add samples whose answers differ"
    ]


def _count_warnings(metric: Metric, reference: Reference, limits: Limits) -> list[str]:
    samples, limit = len(reference.all_rows), limits.max_drop
    if not metric.counts_samples or limit <= 0 or samples >= samples_needed(limit):
        return []
    return [
        f"{counted(samples, 'hold-out sample')}: too few for --max-drop {limit:g}: even if the artifact loses no sample, the "
        f"true drop may be {min(3 / samples, 1):.4f} (95 % confidence); give at least {samples_needed(limit)} samples"
    ]


def _meaning_warnings(metric: Metric, reference: Reference) -> list[str]:
    found = no_better_than_chance(reference, NEAR_CHANCE) if metric.checks_labels and has_scores(reference) else None
    if found is not None:
        ignored = (
            f"; the gate ignores these labels and compares with FP32 ({metric.name})" if metric.is_agreement else ""
        )
        return [
            f"the FP32 source's own top-1 is {found[0]:.4f} on the hold-out, chance is {found[1]:.4f}: check that samples are "
            f"prepared as for training, and that labels count from 0 in the model's order{ignored}"
        ]
    if metric.is_similarity:
        pairs = zip(reference.specs, reference.answers, strict=True)
        grids = ", ".join(repr(spec.name) for spec, answers in pairs if may_be_grid_of_logits(answers))
        return [
            "similarity only: the hold-out has no labels, so the gate only compares the answers with FP32's. "
            "Give `labels` in the hold-out, the rule of the outputs with --postprocess, or your own --metric module:function"
            + (
                f". If {grids} is a detector's grid of logits, export the decoded boxes, or write a metric"
                if grids
                else ""
            )
        ]
    return []


def _drop_interval(metric: Metric, drop: float, answers: Outputs) -> tuple[float, float] | None:
    drops = metric.drops(answers)
    if drops is None or not len(drops):
        return None
    low, high = drop_interval(drops)
    if metric.is_agreement:  # FP32's own score is 1, so no artifact can score higher
        low = max(low, 0.0)
    # The score of embeddings is their mean cosine if the cosine is lower than the share. The drop of that score may be
    # outside the interval, so the interval is widened.
    return min(low, drop), max(high, drop)


def _other_metrics(metric: Metric, reference: Reference, answers: Outputs) -> tuple[OtherMetric, ...]:
    others = metric.others(answers)
    if metric.name != Cosine.name:
        others.append(OtherMetric(Cosine.name, None, Cosine(reference).score(answers, reference.all_rows)))
    return (*others, OtherMetric("sqnr_db", None, sqnr_db(reference.answers, answers)))
