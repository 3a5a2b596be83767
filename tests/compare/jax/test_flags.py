"""What a row's process is started with."""

from pathlib import Path

import pytest

from ebbtide.compare.jax import flags
from ebbtide.compare.jax.flags import (
    FLAGS,
    MEMORY_FRACTION,
    TUNED_FOLDER,
    choose_environment,
    describe_left_out,
)
from ebbtide.compare.jax.names import FLAG_SETS
from ebbtide.jax.flags import COMMAND_BUFFER, HOST_LIMIT, HOST_PREALLOCATE, PIPELINING


@pytest.fixture
def all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "find_xla_libraries", lambda: ())


def test_every_flag_set_has_flags() -> None:
    assert set(FLAGS) == set(FLAG_SETS)


@pytest.mark.usefixtures("all_known")
def test_only_overlap_takes_command_buffers_away() -> None:
    with_them = [name for name in FLAG_SETS if COMMAND_BUFFER not in FLAGS[name]]
    assert with_them == ["none", "lhs", "pipelined"]
    ours = choose_environment("overlap", {}, host_bytes=None).xla_flags
    assert f"--{COMMAND_BUFFER}= " in ours
    assert f"--{PIPELINING}=true" in ours


@pytest.mark.usefixtures("all_known")
def test_ours_come_after_those_of_the_environment() -> None:
    made = choose_environment("none", {"XLA_FLAGS": "--xla_mine=1"}, host_bytes=None)
    assert made.variables["XLA_FLAGS"] == f"--xla_mine=1 {made.xla_flags}"
    assert f"--{PIPELINING}=false" in made.xla_flags
    assert made.left_out == ()


def test_flags_that_the_library_does_not_know_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flags, "find_unknown_flags", lambda names, libraries: (PIPELINING,))
    made = choose_environment("pipelined", {}, host_bytes=None)
    assert PIPELINING not in made.variables["XLA_FLAGS"]
    assert describe_left_out(made.left_out) == (
        f"without {PIPELINING}, which this jaxlib does not know"
    )
    assert describe_left_out(()) == ""


@pytest.mark.usefixtures("all_known")
def test_the_users_own_limits_stay() -> None:
    ours = choose_environment("lhs", {}, host_bytes=100 * 2**30).variables
    assert (ours[HOST_LIMIT], ours[HOST_PREALLOCATE]) == ("100", "false")
    assert 0.75 < float(ours[MEMORY_FRACTION]) < 1
    theirs = {HOST_LIMIT: "7", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    made = choose_environment("lhs", theirs, host_bytes=100 * 2**30).variables
    assert set(made) == {"XLA_FLAGS"}


@pytest.mark.usefixtures("all_known")
def test_rows_share_the_kernels_that_were_tried_and_do_not_say_so_in_their_flags() -> None:
    made = choose_environment("lhs", {}, host_bytes=None, tuned=Path("/run/tuned"))
    assert made.variables["XLA_FLAGS"] == f"{made.xla_flags} --{TUNED_FOLDER}=/run/tuned"
    assert TUNED_FOLDER not in made.xla_flags
    theirs = {"XLA_FLAGS": f"--{TUNED_FOLDER}=/mine"}
    made = choose_environment("lhs", theirs, host_bytes=None, tuned=Path("/run/tuned"))
    assert made.variables["XLA_FLAGS"].count(TUNED_FOLDER) == 1
