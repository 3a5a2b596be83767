"""The program that looks at folders and measures them."""

import json
from pathlib import Path

import pytest

from ebbtide.doctor.disk_trial import main


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_folder_is_looked_at_and_nothing_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["look", str(tmp_path)])
    file_system, free, direct = told(capsys)
    assert set(file_system) == {"file_system"}
    free_bytes = free["free_bytes"]
    assert isinstance(free_bytes, int) and free_bytes > 0
    assert isinstance(direct["is_direct"], bool)
    assert list(tmp_path.iterdir()) == []


def test_folders_are_measured_at_once_and_nothing_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    main(["measure", *map(str, folders)])
    rates = told(capsys)
    assert [rate["folder"] for rate in rates] == [str(folder) for folder in folders]
    for rate in rates:
        write, read = rate["write_bytes_per_s"], rate["read_bytes_per_s"]
        assert isinstance(write, int) and isinstance(read, int) and min(write, read) > 0
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_a_folder_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for what in ("look", "measure"):
        main([what, str(tmp_path / "gone")])
        error = told(capsys)[-1]["error"]
        assert isinstance(error, str) and "gone" in error
