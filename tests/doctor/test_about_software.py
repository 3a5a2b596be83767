"""Findings about versions and variables, on facts that a test makes up."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ebbtide.doctor.facts import Facts
from ebbtide.doctor.finding import Code, Finding, Severity
from ebbtide.doctor.findings import find
from tests.doctor.machines import GOOD, SOFTWARE

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def only(facts: Facts) -> Finding:
    (finding,) = find(facts)
    return finding


def with_variables(variables: Mapping[str, str]) -> Facts:
    return replace(GOOD, software=replace(SOFTWARE, variables=variables))


@pytest.mark.parametrize(
    ("version", "code", "severity"),
    [
        ("2.10.1+cu128", Code.OLD_VERSION, Severity.SERIOUS),
        ("1.13.1", Code.OLD_VERSION, Severity.SERIOUS),
        ("2.14.0", Code.UNTRIED_VERSION, Severity.NOTE),
    ],
)
def test_a_torch_that_ebbtide_does_not_run_with(
    version: str, code: Code, severity: Severity
) -> None:
    found = only(replace(GOOD, software=replace(SOFTWARE, versions={"torch": version})))
    assert (found.code, found.severity) == (code, severity)
    assert version in found.what


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0+cu130"])
def test_a_torch_that_ebbtide_runs_with(version: str) -> None:
    assert find(replace(GOOD, software=replace(SOFTWARE, versions={"torch": version}))) == ()


@pytest.mark.parametrize(
    "variables",
    [{}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
     {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}],
)  # fmt: skip
def test_segments_that_cannot_grow_are_noted(variables: dict[str, str]) -> None:
    found = only(with_variables(variables))
    assert (found.code, found.severity) == (Code.FIXED_SEGMENTS, Severity.NOTE)
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in found.advice


def test_either_variable_makes_segments_grow() -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = "max_split_size_mb:64,expandable_segments:true"
        assert find(with_variables({name: value})) == ()
    cpu = replace(SOFTWARE, torch_build="ROCm 6.4", variables={})
    assert find(replace(GOOD, software=cpu)) == ()


def test_two_settings_that_differ_are_noted() -> None:
    found = only(with_variables({**EXPANDABLE, "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}))
    assert (found.code, found.severity) == (Code.TWO_ALLOCATOR_SETTINGS, Severity.NOTE)
    assert found.evidence == (
        "PYTORCH_ALLOC_CONF=expandable_segments:True; PYTORCH_CUDA_ALLOC_CONF=backend:native"
    )


@pytest.mark.parametrize(
    ("name", "value", "code", "severity"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", Code.NO_CACHE, Severity.SERIOUS),
        ("CUDA_LAUNCH_BLOCKING", "1", Code.BLOCKING_LAUNCHES, Severity.SERIOUS),
        ("EBBTIDE_SANITIZE", "1", Code.SANITIZER, Severity.SERIOUS),
        ("EBBTIDE_DISABLE", "yes", Code.SWITCHED_OFF, Severity.SERIOUS),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", Code.ONE_CONNECTION, Severity.NOTE),
    ],
)
def test_variables_that_slow_copies_down(
    name: str, value: str, code: Code, severity: Severity
) -> None:
    found = only(with_variables({**EXPANDABLE, name: value}))
    assert (found.code, found.severity) == (code, severity)
    assert found.evidence == f"{name}={value}"
    assert find(with_variables({**EXPANDABLE, name: "0"})) == ()


@pytest.mark.parametrize(
    ("build", "advice"),
    [("CPU", "Install a torch that is built"), ("CUDA 13.0", "docker run --gpus all"),
     ("", "Install torch, or look above")],
)  # fmt: skip
def test_gpus_that_torch_cannot_use(build: str, advice: str) -> None:
    found = only(replace(GOOD, gpus=(), software=replace(SOFTWARE, torch_build=build)))
    assert (found.code, found.severity) == (Code.GPU_OUT_OF_REACH, Severity.SERIOUS)
    assert found.evidence.startswith("NVIDIA H200; torch is ")
    assert advice in found.advice


def test_no_gpu_at_all_is_a_note() -> None:
    cpu = replace(SOFTWARE, torch_build="CPU")
    found = only(replace(GOOD, gpus=(), pci_gpus=(), software=cpu))
    assert (found.code, found.severity) == (Code.NO_GPU, Severity.NOTE)
    assert found.evidence == "torch is built for CPU"


def test_serious_findings_come_first() -> None:
    found = find(with_variables({"CUDA_LAUNCH_BLOCKING": "1"}))
    assert [f.code for f in found] == [Code.BLOCKING_LAUNCHES, Code.FIXED_SEGMENTS]
