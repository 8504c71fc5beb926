"""A notebook can be made of each example, and says what the script says."""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def make():
    for package in ("jupytext", "mkdocs"):
        pytest.importorskip(package, reason="notebooks need the dependency group `docs`")
    return runpy.run_path(str(ROOT / "docs/_notebooks.py"))["notebook"]


def test_each_script_is_listed_with_its_notebook():
    page = (ROOT / "docs/gallery.md").read_text()
    listed = re.findall(r"^\| \[`(\w+)`\]\(\.\./examples/\1\.py\) \|", page, re.MULTILINE)
    assert sorted(listed) == [script.stem for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_cells_are_the_code_of_the_script(script, make):
    cells = json.loads(make(script))["cells"]
    assert cells[0]["source"][0].startswith("# ")
    assert any("pip install" in line for line in cells[0]["source"])
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    for part in code:
        compile(part, script.stem, "exec")
    in_script = ast.parse(script.read_text().replace("parse_args()", "parse_args([])"))
    in_script.body = in_script.body[1:]  # without the docstring
    assert ast.dump(ast.parse("\n".join(code))) == ast.dump(in_script)


def test_a_notebook_is_made_of_parts(make, tmp_path):
    script = tmp_path / "small.py"
    script.write_text('"""A title.\n\nWords.\n"""\n\nimport sys\n\n# %% A part\nprint(sys.path)\n')
    cells = json.loads(make(script))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown", "code"]
    assert cells[0]["source"][:3] == ["# A title\n", "\n", "Words.\n"]
    assert ["".join(cell["source"]) for cell in cells[1:]] == [
        "import sys",
        "## A part",
        "print(sys.path)",
    ]
    assert make(script) == make(script)
