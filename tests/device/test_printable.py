"""Foreign text reaches a terminal without control characters."""

from __future__ import annotations

from edgert.printable import counted, endpoint, file_error, printable


def test_plain_text_of_any_language_stays() -> None:
    for text in ("a line\n\tand another", "Küche, 厨房, مطبخ", "p99 ≤ 8 ms ▁▂▃"):
        assert printable(text) == text


def test_control_characters_and_escapes_and_overrides_are_replaced() -> None:
    for text in (
        "\x1b[2J",
        "\x1b]0;title\x07",
        "\x9b31m",
        "a\rb",
        "\x00",
        "\u202egnp.exe",
        "\u2066x\u2069",
        "\u2028",
        "\ud800",
    ):
        shown = printable(text)
        assert "\ufffd" in shown
        assert not any(c in shown for c in "\x1b\x07\x9b\r\x00\u202e\u2066\u2069\u2028\ud800")


def test_a_cell_has_one_line_and_a_bounded_length() -> None:
    assert printable("a\nb", newlines=False) == "a\ufffdb"
    assert printable("x" * 20, 10) == "x" * 10 + "... (10 more characters)"


def test_the_count_of_one_thing_is_printed_in_the_singular() -> None:
    assert [counted(number, "file") for number in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


def test_an_address_of_ipv6_is_distinguished_from_its_port() -> None:
    assert (endpoint("broker", 1883), endpoint("::1", 1883)) == ("broker:1883", "[::1]:1883")


def test_an_error_of_the_system_reads_as_the_file_and_the_reason() -> None:
    full = OSError(28, "No space left on device", "/var/b")
    assert file_error(full, "other") == "/var/b: No space left on device; free some space"
    assert "worn out" in file_error(OSError(30, "Read-only file system", "/var/b"))
    assert "FAT" in file_error(OSError(1, "Operation not permitted", "/var/b"))
    assert file_error(OSError(24, "Too many open files"), "pi") == "pi: Too many open files"
    assert file_error(OSError(24, "Too many open files")) == "Too many open files"
    assert file_error(OSError("no number"), "pi") == "pi: no number"
