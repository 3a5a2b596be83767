"""What `ebbtide doctor` says of JAX's flags, among other findings and by itself."""

import importlib.util

import pytest

from ebbtide.commands import doctor_jax
from ebbtide.doctor import Severity

VARIABLES = ("XLA_FLAGS", "JAX_REMAT3", "JAX_OPTIMIZATION_LEVEL")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_said_where_jax_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert doctor_jax.find_in_flags(is_scanned=True) == ()


def test_flags_that_are_missing_are_notes_where_nobody_asked_for_jax() -> None:
    findings = doctor_jax.find_in_flags(is_scanned=True)
    missing = [finding for finding in findings if "JAX, missing: " in finding.what]
    assert missing and {finding.severity for finding in missing} == {Severity.NOTE}
    assert missing[0].advice.endswith("(openxla/xla#18139).")


def test_a_release_that_is_known_to_be_wrong_is_serious(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.jax.environment_check.find_jaxlib_version", lambda: "0.11.0")
    found = doctor_jax.find_in_flags(is_scanned=True)
    (release,) = [finding for finding in found if finding.severity is Severity.SERIOUS]
    assert release.what == "JAX, unsafe: jaxlib"
    assert release.evidence.startswith("jaxlib 0.11.0 gives wrong gradients without an error")


def test_what_ends_the_process_is_serious_with_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    (first, *_) = doctor_jax.find_in_flags(is_scanned=False)
    assert (first.code.value, first.severity) == ("jax", Severity.SERIOUS)
    assert first.what == "JAX, unknown: xla_no_such_flag"
    assert first.advice == (
        "Leave it out, or look for its present name (xla/parse_flags_from_env.cc)."
    )
