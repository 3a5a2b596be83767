"""Whatever is in a file, a reader takes it or says in a sentence why not."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.readers import READERS, Reader

NUM_FILES = 200
"""For each reader; `benchmarks/fuzz.py` tries 100,000."""


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_broken_files_are_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    num_read = 0

    @settings(max_examples=NUM_FILES, suppress_health_check=[HealthCheck.too_slow])
    @given(st.randoms(use_true_random=False))
    def try_one(chance: Random) -> None:
        nonlocal num_read
        num_read += reader.is_read(reader.make(chance), tmp_path)

    try_one()
    # Some damage leaves something to read, so that what comes after reading was tried too.
    assert num_read > 0
