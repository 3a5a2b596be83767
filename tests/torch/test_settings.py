"""Settings of torch are put back for what is run again, and then left as the program set them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ebbtide.torch.internals import SETTINGS, Setting
from ebbtide.torch.settings import Settings

OTHERS: dict[type, Any] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    str: lambda value: "tf32" if value != "tf32" else "ieee",
    tuple: lambda value: (not value[0], *value[1:]),
    torch.dtype: lambda value: torch.float64 if value is torch.float32 else torch.float32,
}
KINDS = [(kind, setting) for kind, settings in SETTINGS.items() for setting in settings]


def another(value: Any) -> Any:
    """Return a value that a setting may have instead."""
    for kind, change in OTHERS.items():
        if type(value) is kind:
            return change(value)
    return list(type(value).__members__.values())[-1]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the process as it was."""
    before = [(setting, setting.get()) for _, setting in KINDS]
    yield
    for setting, value in before:
        setting.set(value)


@pytest.mark.parametrize(("kind", "setting"), KINDS, ids=[f"{k} {s.name}" for k, s in KINDS])
def test_each_setting_is_in_force_again_and_left_as_it_was(kind: str, setting: Setting) -> None:
    settings, noted = Settings(kind), setting.get()
    changed = another(noted)
    try:
        setting.set(changed)
    except RuntimeError as error:
        pytest.skip(f"this torch or machine has one choice alone: {error}")
    assert setting.get() == changed != noted
    with settings.in_force():
        assert setting.get() == noted
    assert setting.get() == changed


def test_an_error_leaves_the_settings_of_the_program() -> None:
    settings = Settings("cpu")
    torch.set_default_dtype(torch.float64)
    with pytest.raises(ZeroDivisionError), settings.in_force():
        assert torch.get_default_dtype() is torch.float32
        raise ZeroDivisionError
    assert torch.get_default_dtype() is torch.float64


def test_settings_that_did_not_change_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []

    def noting(setting: Setting) -> Setting:
        def note(value: Any) -> None:
            touched.append(setting.name)
            setting.set(value)

        return Setting(setting.name, setting.get, note)

    monkeypatch.setitem(SETTINGS, "cpu", tuple(map(noting, SETTINGS["cpu"])))
    settings = Settings("cpu")
    with settings.in_force():
        pass
    assert touched == []
    torch.set_default_dtype(torch.float64)
    with settings.in_force():
        pass
    assert touched == ["default dtype", "default dtype"]


def test_a_precision_that_was_inherited_is_inherited_again() -> None:
    backends: Any = torch.backends
    settings = Settings("cpu")
    backends.mkldnn.fp32_precision = "bf16"
    try:
        assert backends.mkldnn.matmul.fp32_precision == "bf16"
        with settings.in_force():
            assert backends.mkldnn.matmul.fp32_precision == "ieee"
        assert backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        backends.mkldnn.fp32_precision = "none"
    assert backends.mkldnn.matmul.fp32_precision == "none"


def test_a_device_of_another_type_has_the_settings_of_the_cpu() -> None:
    settings = Settings("meta")
    torch.set_default_dtype(torch.float64)
    with settings.in_force():
        assert torch.get_default_dtype() is torch.float32
