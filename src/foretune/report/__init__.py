"""From a run's folder to one self-contained HTML page, and the figures on it."""

from ._figures import curves as curves
from ._figures import drawing as drawing
from ._figures import histogram as histogram
from ._figures import picture as picture
from ._files import write_whole as write_whole
from ._page import ReportError as ReportError
from ._page import write_page as write_page
