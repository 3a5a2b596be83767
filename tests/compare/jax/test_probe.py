"""Which device a run in JAX has."""

import pytest

from ebbtide.compare.jax.probe import probe_device, select_device


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        (None, {}),
        ("cpu", {"JAX_PLATFORMS": "cpu"}),
        ("cuda", {"JAX_PLATFORMS": "cuda"}),
        ("cuda:3", {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "3"}),
    ],
)
def test_a_device_is_chosen_by_variables(name: str | None, variables: dict[str, str]) -> None:
    assert select_device(name) == variables


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:"])
def test_another_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--device {name}: unknown device"):
        select_device(name)


def test_a_process_of_its_own_says_what_there_is() -> None:
    found = probe_device("cpu", select_device("cpu"))
    assert (found.platform, found.is_gpu) == ("cpu", False)
    assert set(found.versions) == {"jax", "jaxlib", "platform"}


def test_a_platform_that_does_not_start_says_why() -> None:
    with pytest.raises(ValueError, match=r"--device cuda: jax does not start \(.+\); give"):
        probe_device("cuda", {"JAX_PLATFORMS": "none-such"})
