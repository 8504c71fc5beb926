"""Shows docstrings in the documentation: their examples as code, and what a class is made of."""

import re

import griffe


class Examples(griffe.Extension):
    """Fences each run of lines that begins with `>>>`, and gives Equinox's modules an `__init__`."""

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

    def on_class_members(self, *, cls: griffe.Class, **_) -> None:
        """Give a class whose docstring has `Args:` of its fields the signature that they make."""
        text = cls.docstring.value if cls.docstring else ""
        if "__init__" in cls.members or "Args:" not in text:
            return
        made = griffe.Parameters()
        for field in cls.attributes.values():
            if f" {field.name}:" in text:
                default, kind = field.value, griffe.ParameterKind.positional_or_keyword
                if isinstance(default, griffe.ExprCall):  # eqx.field(...)
                    given = [x for x in default.arguments if isinstance(x, griffe.ExprKeyword)]
                    names = {x.name: x.value for x in given}
                    default = names.get("default")
                    kind = griffe.ParameterKind.keyword_only if "kw_only" in names else kind
                made.add(griffe.Parameter(field.name, kind=kind, default=default))
        cls.set_member("__init__", griffe.Function("__init__", parameters=made))
