from ebbtide.compare.harness import References


def test_each_kind_of_rows_has_its_reference() -> None:
    references = References()
    assert references.find("trl", is_compiled=False) is None
    assert references.find("keep", is_compiled=False) == "keep"
    references.add("keep", is_compiled=False)
    assert references.find("checkpoint", is_compiled=False) == "keep"
    assert references.find("compile-keep", is_compiled=False) == "compile-keep"
    assert references.find("compile-budget:0", is_compiled=False) is None
    references.add("compile-keep", is_compiled=False)
    assert references.find("compile-budget:0", is_compiled=False) == "compile-keep"
    assert references.find("ebbtide", is_compiled=False) == "keep"


def test_with_compile_all_rows_have_one_reference() -> None:
    references = References()
    references.add("keep", is_compiled=True)
    for name in ("checkpoint", "compile-keep", "compile-budget:0"):
        assert references.find(name, is_compiled=True) == "keep"
