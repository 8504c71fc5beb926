"""`python -m foretune`, and the command `foretune`."""

import sys

from . import __version__


def main() -> None:
    """Run the command line, or say what to install."""
    try:
        from .cli import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing == "foretune":
            raise
        if sys.argv[1:] == ["--version"]:
            print(__version__)
            return
        sys.exit(
            f"foretune: the command line needs {missing}, which is not installed: "
            'pip install "foretune[apps,data]"'
        )
    app(prog_name="foretune")


if __name__ == "__main__":
    main()
