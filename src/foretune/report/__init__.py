"""A run's folder, the page made of it, its figures, and what a command says of it."""

# For foretune's own commands and experiments; no public names.
from .._files.files import RunError  # noqa: F401
from ._console import Lines, command_line, plain_errors, say, show_result  # noqa: F401
from ._figures import curves, histogram, picture  # noqa: F401
from ._folder import RunFolder  # noqa: F401
from ._page import ReportError as ReportError
from ._page import write_page as write_page
from ._text import shown  # noqa: F401
