"""The check of our table of MaxText's names, against wheels that are made here."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from ebbtide.integrations.maxtext_names import DEAD_KEYS, DECODERS, KEYS, OFFLOADING, SAVING
from scripts.check_maxtext import DECODER_TYPES, TYPES, find_differences


def make_wheel(
    folder: Path, *, keys: tuple[str, ...] = KEYS, given: tuple[str, ...] = KEYS
) -> Path:
    """A wheel with what the check reads."""
    fields = "\n".join(f"  {name}: RematLocation = 0" for name in (*keys, *DEAD_KEYS))
    decoders = "\n".join(f"  D{i} = {name!r}" for i, name in enumerate(DECODERS))
    calls = "\n".join(f"name(x, {name!r})" for name in given)
    wheel = folder / "maxtext.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(TYPES, f"class Remat:\n{fields}\ntensors = {list(keys)}\n")
        archive.writestr(DECODER_TYPES, f"class DecoderBlockType:\n{decoders}\n")
        policies = sorted({*SAVING, *OFFLOADING})
        archive.writestr("maxtext/layers/all.py", f"{calls}\npolicies = {policies}\n")
        archive.writestr("maxtext/kernels/new.py", "type Newer = int  # is not read\n")
    return wheel


def test_our_own_table_agrees_with_itself(tmp_path: Path) -> None:
    assert find_differences(make_wheel(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        (
            {"keys": KEYS[:-1]},
            [
                f"keys that custom reads: {KEYS[-1]} is not in the wheel",
                f"fields of a place: {KEYS[-1]} is not in the wheel",
            ],
        ),
        (
            {"keys": (*KEYS, "new")},
            [
                "keys that custom reads: new is not in our table",
                "fields of a place: new is not in our table",
            ],
        ),
        ({"given": KEYS[1:]}, [f"keys: no layer gives {KEYS[0]}"]),
        ({"given": (*KEYS, "engram")}, ["dead keys: engram is given"]),
    ],
)
def test_each_difference_is_a_line(
    changes: dict[str, tuple[str, ...]], differences: list[str], tmp_path: Path
) -> None:
    assert find_differences(make_wheel(tmp_path, **changes)) == differences
