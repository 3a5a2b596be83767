import json
import sys
from pathlib import Path

import pytest

from ebbtide.compare.texts import MISSING_TEXT, cut_windows, read_text


def encode_by_characters(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_training_and_held_out_windows_never_overlap() -> None:
    content = "".join(chr(code) for code in range(100, 140))
    windows = cut_windows(content, encode_by_characters, context=5, num_train=4, num_held_out=2)
    assert windows.train == [list(range(start, start + 5)) for start in (100, 105, 110, 115)]
    assert windows.held_out == [list(range(120, 125)), list(range(125, 130))]


def test_a_prefix_too_short_for_its_windows_is_not_the_end_of_the_text() -> None:
    def encode_sparsely(text: str) -> list[int]:
        return [1] * (len(text) // 20)

    windows = cut_windows("x" * 400, encode_sparsely, context=5, num_train=2, num_held_out=1)
    assert windows.train == [[1] * 5] * 2


def test_a_short_text_says_which_half_is_short_and_of_what() -> None:
    with pytest.raises(ValueError, match=r"first \(training\) half .* has 10 tokens.*need 12"):
        cut_windows("x" * 20, encode_by_characters, context=4, num_train=3, num_held_out=1)
    with pytest.raises(ValueError, match=r"second \(held-out\) half .* give a longer --text"):
        cut_windows("x" * 20, encode_by_characters, context=4, num_train=2, num_held_out=3)


def test_a_file_is_read_whole(text_file: Path) -> None:
    text = read_text(text_file)
    assert text.name == "tide.txt"
    assert len(text.content) == 16_000


def test_a_file_that_is_not_text_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "noise.bin"
    path.write_bytes(b"ok\xff")
    with pytest.raises(ValueError, match=r"noise\.bin: byte 2 is not UTF-8"):
        read_text(path)


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_text(tmp_path)


def test_the_packaged_text_is_joined_chapter_by_chapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verses = [("Job", 1, "There was a man."), ("Job", 1, "He was upright."), ("Job", 2, "Again.")]
    folder = tmp_path / "bible" / "data"
    folder.mkdir(parents=True)
    (folder / "kjv.jsonl").write_text(
        "\n".join(json.dumps({"book": b, "chapter": c, "text": t}) for b, c, t in verses)
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "bible", raising=False)
    assert read_text(None).content == "Job 1\nThere was a man. He was upright.\n\nJob 2\nAgain."


def test_a_missing_packaged_text_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "bible", raising=False)
    with pytest.raises(ValueError) as caught:
        read_text(None)
    assert str(caught.value) == MISSING_TEXT
    assert "make demo" in MISSING_TEXT and "--text FILE" in MISSING_TEXT
