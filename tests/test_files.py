from pathlib import Path

import pytest

from ebbtide.files import read_small_text


def test_a_file_of_as_many_bytes_is_read_and_one_more_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes("\u00e9".encode() * 1024)
    assert read_small_text(path, 2048) == "\u00e9" * 1024
    with pytest.raises(ValueError) as caught:
        read_small_text(path, 2047)
    assert str(caught.value) == ("the file has more than 2.0 KiB, as no good one of its kind does")


def test_what_is_no_text_or_no_file_is_the_callers_to_explain(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        read_small_text(path, 10)
    path.write_bytes(b"ab\xff")
    with pytest.raises(UnicodeDecodeError):
        read_small_text(path, 10)
