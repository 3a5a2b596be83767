from ebbtide.naming import nearest, plain_name, unknown_name_message


def test_nearest_puts_the_most_similar_name_first() -> None:
    assert nearest("gredy", ["uniform", "lp", "greedy"]) == ["greedy", "uniform", "lp"]


def test_nearest_ignores_case() -> None:
    assert nearest("gib", ["GB", "GiB", "B"])[0] == "GiB"


def test_nearest_does_not_depend_on_the_order_of_the_valid_names() -> None:
    assert nearest("x", ["c", "a", "b", "a"]) == ["a", "b", "c"]


def test_message_lists_the_valid_names_nearest_first() -> None:
    assert unknown_name_message("planner", "gredy", ["lp", "greedy"]) == (
        "unknown planner 'gredy'; valid names, nearest first: greedy, lp"
    )


def test_message_without_valid_names_says_so() -> None:
    assert unknown_name_message("plan", "a", []) == "unknown plan 'a'; there are no valid names"


def test_names_from_files_are_printable_and_cut() -> None:
    assert plain_name("llama-3.1-8b") == "llama-3.1-8b"
    assert plain_name("a\x1b[31mb\nc") == "a?[31mb?c"
    assert plain_name("x" * 80) == "x" * 80
    assert plain_name("x" * 81) == "x" * 77 + "..."
