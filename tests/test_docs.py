"""What the documents say is there, is there: links, flags, names, rules and tests."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ebbtide.block import Activation, BackwardEvent, Block, OpKind
from ebbtide.cli import main
from ebbtide.compare.jax.names import FLAG_SETS, POLICIES
from ebbtide.compare.jax.shapes import SHAPES, SMOLLM2
from ebbtide.compare.names import DEFAULT_STRATEGIES, EBBTIDE_PREFIX, PEERS
from ebbtide.compare.results import Facts, JaxFigures, Row, Status, describe_row
from ebbtide.machine import MACHINE_FORMAT, MACHINE_VERSION, Machine
from ebbtide.plan import PLAN_FORMAT, PLAN_VERSION, Decision, Plan
from ebbtide.planner import NAMED_PLANS, named_plan
from ebbtide.timeline import TIMELINE_FORMAT, TIMELINE_VERSION, Lane, Span, Timeline
from ebbtide.workload import WORKLOAD_FORMAT, WORKLOAD_VERSION, Outside, Workload

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
COMPARE = ROOT / "docs" / "compare.md"
DESIGN = ROOT / "docs" / "design.md"
FORMATS = ROOT / "docs" / "formats.md"

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
RULE_CITED = re.compile(r"[Dd]esign rules? (\d+(?:(?:, | and )\d+)*)")
RULE_DEFINED = re.compile(r"^### Rule (\d+): ", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TEST_NAMED = re.compile(r"`(test_\w+)`")
TEST_DEFINED = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors_of(text: str) -> set[str]:
    """What a heading is called in a link: lower case, without marks, hyphens for spaces."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(text)
    }


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading."""
    broken: list[str] = []
    for link in LINK.findall(read(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(read(target))):
            broken.append(link)
    return broken


def read_sources(folder: str) -> str:
    return "\n".join(read(path) for path in sorted((ROOT / folder).rglob("*.py")))


def table_keys(page: Path) -> set[str]:
    """Every word in backticks in the first or second cell of a table's rows."""
    cells = [line.split("|")[1:3] for line in read(page).splitlines() if line.startswith("| ")]
    return {word for row in cells for cell in row for word in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](gone.md) [b](#one) [c](#two) [d](page.md#one) [e](https://x.y/z)\n")
    assert broken_links(page) == ["gone.md", "#two"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_ascii(page: Path) -> None:
    assert [line for line in read(page).splitlines() if not line.isascii()] == []


def test_the_documented_flags_are_those_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ebbtide", "compare", "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    known = set(FLAG.findall(capsys.readouterr().out))
    assert {"--model", "--strategies", "--json"} <= known
    assert set(FLAG.findall(read(COMPARE))) == known


def test_every_strategy_is_documented() -> None:
    documented = table_keys(COMPARE)
    strategies = {*PEERS, *(EBBTIDE_PREFIX + plan for plan in NAMED_PLANS)}
    assert strategies <= documented
    assert {name for name in DEFAULT_STRATEGIES if ":" not in name} <= documented
    undocumented = [name for name in documented if name.startswith(EBBTIDE_PREFIX)]
    assert set(undocumented) <= strategies


def test_every_strategy_and_model_in_jax_is_documented() -> None:
    section = read(COMPARE).partition("\n## In JAX\n")[2]
    words = set(re.findall(r"`([^`]+)`", section))
    assert {*POLICIES, *(f"@{name}" for name in FLAG_SETS), *SHAPES, SMOLLM2} <= words


def test_every_json_key_is_documented() -> None:
    in_jax = JaxFigures(micro_batch=1, global_batch=1, model_flops=1)
    row_keys = set(describe_row(Row(strategy="keep", status=Status.OK, jax=in_jax)))
    fact_keys = {re.sub("_bytes$", "_gib", field.name) for field in fields(Facts)}
    assert {*row_keys, *fact_keys, "step_ms_ranges", "rows"} <= table_keys(COMPARE)


def test_every_named_plan_is_in_the_readme() -> None:
    plans = read(ROOT / "README.md").partition("\n## Plans\n")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `([^`]+)` \|", plans, re.MULTILINE)) == NAMED_PLANS


def test_the_readme_and_the_example_have_the_same_two_lines() -> None:
    added = re.findall(r"^\+(.*)$", read(ROOT / "README.md"), re.MULTILINE)
    example = read(ROOT / "examples" / "train_gpt2.py").splitlines()
    assert len(added) == 2
    for line in added:
        start = line.partition('"40GiB"')[0]  # there it is an option
        assert any(ours.strip().startswith(start) for ours in example), line


def json_examples(page: Path) -> list[str]:
    return re.findall(r"^(?:```|~~~)json\n(.*?)^(?:```|~~~)$", read(page), re.DOTALL | re.MULTILINE)


def test_the_documented_files_are_what_is_written_and_read() -> None:
    forms = (Workload, Plan, Machine, Timeline)
    examples = json_examples(FORMATS)
    assert [form.from_json(text).to_json() for form, text in zip(forms, examples, strict=True)] == (
        examples
    )


def test_the_documented_plan_is_the_one_for_the_documented_workload() -> None:
    workload_text, plan_text, *_ = json_examples(FORMATS)
    workload = Workload.from_json(workload_text)
    assert workload.is_timed
    assert named_plan("offload", workload).to_json() == plan_text


def test_every_field_of_the_forms_is_documented() -> None:
    nouns = (Workload, Outside, Block, Activation, BackwardEvent, Plan, Machine, Timeline, Span)
    names = {field.name for noun in nouns for field in fields(noun)}
    assert names <= table_keys(FORMATS)


def test_every_value_of_the_forms_is_documented() -> None:
    values = {member.value for kind in (OpKind, Decision, Lane) for member in kind}
    assert values <= set(re.findall(r"`([^`\n]+)`", read(FORMATS)))


def test_every_version_of_the_forms_is_documented() -> None:
    headings = re.findall(r"^## `(.+)`, version (\d+)$", read(FORMATS), re.MULTILINE)
    assert headings == [
        (WORKLOAD_FORMAT, str(WORKLOAD_VERSION)),
        (PLAN_FORMAT, str(PLAN_VERSION)),
        (MACHINE_FORMAT, str(MACHINE_VERSION)),
        (TIMELINE_FORMAT, str(TIMELINE_VERSION)),
    ]


def test_every_design_rule_that_code_cites_is_defined() -> None:
    defined = [int(number) for number in RULE_DEFINED.findall(read(DESIGN))]
    assert defined == list(range(1, 13))
    cited = {
        int(number)
        for folder in ("src", "tests")
        for group in RULE_CITED.findall(read_sources(folder))
        for number in re.findall(r"\d+", group)
    }
    assert {1, 2, 3, 4} <= cited <= set(defined)


def test_every_test_that_the_design_names_exists() -> None:
    defined = set(TEST_DEFINED.findall(read_sources("tests")))
    assert [name for name in TEST_NAMED.findall(read(DESIGN)) if name not in defined] == []
