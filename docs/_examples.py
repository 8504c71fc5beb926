"""Shows the examples of docstrings as code in the documentation."""

import re

import griffe


class Examples(griffe.Extension):
    """Fences each run of lines that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Change the docstring of an object that was loaded."""
        if obj.docstring is not None:
            lines = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^>>> .*?(?=\n\s*\n|\Z)",
                lambda example: f"```pycon\n{example[0]}\n```",
                lines,
                flags=re.MULTILINE | re.DOTALL,
            )
