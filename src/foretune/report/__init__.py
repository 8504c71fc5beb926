"""A run's folder, the page made of it, its figures, and what a command says of it."""

from .._outer.files import RunError as RunError
from .._outer.files import write_whole as write_whole
from ._console import Lines as Lines
from ._console import Phases as Phases
from ._console import command_line as command_line
from ._console import note_finished as note_finished
from ._console import plain_errors as plain_errors
from ._console import say as say
from ._console import show_result as show_result
from ._figures import curves as curves
from ._figures import drawing as drawing
from ._figures import histogram as histogram
from ._figures import picture as picture
from ._folder import RunFolder as RunFolder
from ._folder import digest as digest
from ._page import ReportError as ReportError
from ._page import write_page as write_page
