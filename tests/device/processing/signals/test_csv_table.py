"""CSV files of sensor values, as spreadsheets, loggers and pandas write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgert.errors import InputError
from edgert.processing.signals.csv_table import read_csv

TABLE = [[1.5, -2.0], [3.0, 4.25]]


@pytest.mark.parametrize(
    "content",
    [
        "1.5,-2\n3,4.25\n",
        "\ufeff1.5,-2\n3,4.25\n",  # the first line has values, not names
        "\ufeffax,ay\r\n1.5,-2\r\n3,4.25\r\n",
        '"ax","ay"\n"1.5","-2"\n"3","4.25"\n',
        "# logger 4\nax,ay\n\n1.5, -2 \n\n3,4.25",
        "1.5,-2,\n3,4.25,\n",  # a comma after the last value
        "ax,ay,\n1.5,-2,\n3,4.25,\n",
    ],
)
def test_every_value_of_a_table_is_read(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode())
    values = read_csv(path)
    assert values.dtype == np.float32
    assert values[:, :2].tolist() == TABLE
    assert np.isnan(values[:, 2:]).all()


def test_empty_cells_are_missing_values(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n,2\nnan,4\n")
    np.testing.assert_array_equal(read_csv(path), np.array([[np.nan, 2], [np.nan, 4]], np.float32))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("1;2\n3;4\n", "line 2 has '3;4', which is not a number"),
        ("ax;ay\n1,5;2,5\n", "line 2 has '5;2', which is not a number"),
        ("1.5\t2.5\n3.5\t4.5\n", "line 2 has '3.5"),
        ("ax,ay\nm/s2,m/s2\n1,2\n", "line 2 has 'm/s2', which is not a number"),
        ("ax,ay\n1,2\n3,n/a\n", "line 3 has 'n/a', which is not a number"),
        ("n/a,2\n3,4\n", "line 1 has 'n/a', which is not a number"),
        ("1,2\n3\n", "line 2 has 1 column, and the lines before have 2"),
        ("", "has no numbers"),
        ("ax,ay\n", "has no numbers"),
        (",\n,\n", "has no numbers"),
    ],
)
def test_the_refusal_of_a_file_that_is_not_a_table_names_the_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=f"not a table of numbers: .*{says}.*separated by commas"):
        read_csv(path)


@pytest.mark.parametrize("content", ["1,2\n".encode("utf-16"), b"\0\1\2\n\xff", b"1" * 200_000 + b"\n"])
def test_a_file_that_is_not_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a table of numbers: "):
        read_csv(path)
