"""Flags are looked for in the files of the libraries."""

from importlib.metadata import version
from pathlib import Path

from ebbtide.jax.known_flags import find_jaxlib_version, find_unknown_flags, find_xla_libraries


def test_a_flag_is_a_string_with_a_zero_at_its_end(tmp_path: Path) -> None:
    library = tmp_path / "libxla.so"
    library.write_bytes(b"\x7fELFxla_one\0xla_two_more\0")
    assert find_unknown_flags(["xla_two", "xla_one", "xla_no"], [library]) == ("xla_no", "xla_two")


def test_every_library_must_know_a_flag_and_without_one_nothing_is_unknown(tmp_path: Path) -> None:
    names = ["xla_a", "xla_b"]
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(f"xla_{name}".encode() + b"\0")
    assert find_unknown_flags(names, [tmp_path / "a"]) == ("xla_b",)
    assert find_unknown_flags(names, [tmp_path / "a", tmp_path / "b"]) == ("xla_a", "xla_b")
    assert find_unknown_flags(names, []) == ()


def test_the_installed_jaxlib_knows_the_flags_that_plans_use() -> None:
    libraries = find_xla_libraries()
    assert libraries and all(path.suffix == ".so" for path in libraries)
    assert find_unknown_flags(["xla_force_host_platform_device_count"], libraries) == ()
    assert find_unknown_flags(["xla_no_such_flag"], libraries) == ("xla_no_such_flag",)
    assert find_jaxlib_version() == version("jaxlib")
