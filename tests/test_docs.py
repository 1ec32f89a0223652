"""Every Python block of README and docs runs, and every recipe loads."""

import re
from pathlib import Path

import pytest

from train.config import load_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run_in_order(page, capsys):
    scope = {"__name__": "docs"}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), scope)


def test_the_readme_script_is_short():
    (script,) = blocks(ROOT / "README.md")
    assert len([line for line in script.splitlines() if line]) <= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_recipes_load_and_say_how_to_run_them(recipe):
    load_recipe(recipe)
    comment = re.match(r"(#.*\n)+", recipe.read_text())[0]
    first = comment.splitlines()[0]
    assert re.match(r"# (make |python -m train |torchrun --nproc-per-node \d+ -m train )", first)
    assert first.startswith("# make ") or f"-m train recipes/{recipe.name}" in first
    assert "Expected:" in comment and "Cost:" in comment
