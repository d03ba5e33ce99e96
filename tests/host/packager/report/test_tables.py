"""Tables escape their texts, fold the rows after the first ones, and count the rows that they leave out."""

from __future__ import annotations

from edgert_deploy.packager.report.tables import ROWS_MAX, ROWS_SHOWN_MAX, code, legend, table


def test_texts_are_escaped_and_cells_are_html() -> None:
    text = table("a <b>", "Name <i>|Size#", [[code("<x>"), "<b>1</b>"]])
    assert "<caption>a &lt;b&gt;</caption>" in text
    assert '<th scope="col">Name &lt;i&gt;</th><th scope="col" class="n">Size</th>' in text
    assert '<th scope="row"><code>&lt;x&gt;</code></th><td class="n"><b>1</b></td>' in text
    assert "&lt;most&gt;" in legend([("", "<most>")])


def test_a_table_without_headings_and_caption_still_has_a_label() -> None:
    text = table("", "|", [["a", "b"]])
    assert 'aria-label="Facts"' in text
    assert "<thead>" not in text
    assert "<caption>" not in text


def test_a_long_table_is_folded_and_the_rows_that_are_left_out_are_counted() -> None:
    def rows(count: int) -> str:
        return table("t", "N", [[str(i)] for i in range(count)])

    assert "<details>" not in rows(ROWS_SHOWN_MAX)
    assert "<summary>1 more</summary>" in rows(ROWS_SHOWN_MAX + 1)
    long = rows(ROWS_MAX + 3)
    assert f"<summary>{ROWS_MAX - ROWS_SHOWN_MAX} more (3 more are not shown)</summary>" in long
    assert long.count('scope="row"') == ROWS_MAX
