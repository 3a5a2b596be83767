"""An environment held against the jaxlib that is installed in it."""

from importlib.metadata import version

import pytest

from ebbtide.jax.environment_check import check_environment

MODULE = "ebbtide.jax.environment_check"


def test_flags_are_looked_for_in_the_installed_library() -> None:
    checked = check_environment({"XLA_FLAGS": "--xla_no_such_flag=1"}, is_scanned=False)
    assert checked.jaxlib_version == version("jaxlib")
    assert checked.findings[0].name == "xla_no_such_flag"


def test_layers_that_are_unrolled_need_fewer_flags() -> None:
    scanned, unrolled = (check_environment({}, is_scanned=is_it) for is_it in (True, False))
    names = [{finding.name for finding in found.findings} for found in (scanned, unrolled)]
    assert names[1] < names[0]
    assert "xla_gpu_enable_pipelined_host_offloading" in names[0] - names[1]


def test_without_jaxlib_no_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.find_jaxlib_version", lambda: None)
    monkeypatch.setattr(f"{MODULE}.find_xla_libraries", lambda: ())
    checked = check_environment({"XLA_FLAGS": "--xla_no_such_flag=1"}, is_scanned=False)
    assert checked.jaxlib_version is None
    assert "jaxlib" not in {finding.name for finding in checked.findings}
