"""A spreadsheet can open the CSV safely, whatever text devices send."""

from __future__ import annotations

import csv
import io
from typing import Any

from edgert_deploy.fleet.store.results import csv_text


def test_text_that_a_spreadsheet_would_execute_is_escaped_and_histograms_stay_unchanged() -> None:
    rows: list[dict[str, Any]] = [
        {"event": "odd", "reason": "=HYPERLINK(1)", "value": -2.5, "buckets": "-1:1,157:1"},
        {"event": 'a "quoted", one', "reason": "-1+1|cmd", "@SUM": None, "more": "+49"},
    ]
    read = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert read[0] == {
        "event": "odd", "reason": "'=HYPERLINK(1)", "value": "-2.5", "buckets": "-1:1,157:1", "'@SUM": "", "more": "",
    }  # fmt: skip
    assert read[1]["event"] == 'a "quoted", one'
    assert read[1]["reason"] == "'-1+1|cmd"
    assert read[1]["more"] == "+49"
