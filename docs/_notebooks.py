"""Makes a notebook of each script in `examples`, for the site (`mkdocs.yml` names this file as a hook).

The scripts are in Jupytext's percent format, `# %% Heading` before each part. The docstring becomes the
first cell, a heading becomes text, and the options, which a notebook has no command line for, a list.
The same script always gives the same notebook, without outputs.

    python docs/_notebooks.py FOLDER    the notebooks without the site
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbformat.v4 import new_markdown_cell, new_notebook

SCRIPTS = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
OPTIONS = "parse_args()", "parse_args([])  # options go into this list, as strings"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebook(script: Path) -> str:
    """Return the text of a script's notebook."""
    text = script.read_text()
    module = ast.parse(text)
    title, _, rest = (ast.get_docstring(module) or "").partition("\n")
    origin = f"This notebook was made from `examples/{script.name}`, with the same code."
    cells = [new_markdown_cell(f"# {title.rstrip('.')}\n{rest}\n\n{origin}")]
    code = "\n".join(text.splitlines()[module.body[0].end_lineno :]).strip()
    for cell in jupytext.reads(code, "py:percent").cells:
        if heading := cell.metadata.pop("title", ""):
            cells.append(new_markdown_cell(f"## {heading}"))
        cell.source = cell.source.replace(*OPTIONS)
        cells.append(cell)
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    made = new_notebook(cells=cells, metadata=METADATA)
    nbformat.validate(made)
    return nbformat.writes(made) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the notebooks to the site's files, as `notebooks/NAME.ipynb`."""
    for script in SCRIPTS:
        name = f"notebooks/{script.stem}.ipynb"
        files.append(File.generated(config, name, content=notebook(script)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links to scripts, which are not in the site, into links to their notebooks."""
    return re.sub(r"\(((?:\.\./)*)\.\./examples/(\w+)\.py\)", r"(\1notebooks/\2.ipynb)", markdown)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for script in SCRIPTS:
        (folder / script.name).with_suffix(".ipynb").write_text(notebook(script))
