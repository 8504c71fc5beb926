"""What experiments add to a run: measurements, checkpoints, phases, drawings."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretune import report
from foretune._files.files import write_whole
from foretune.report import say
from foretune.report._figures import save_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:  # which takes long to import
    Axes = object


class RunFolder(report.RunFolder):
    """A run's folder with measurements, metrics.jsonl, one per line, and checkpoints to resume from."""

    @classmethod
    def shared(cls, path: Path) -> "RunFolder":
        """Return the folder of a run that another process has opened, and started this one for."""
        folder = cls.__new__(cls)
        folder.path = path
        return folder

    @property
    def metrics(self) -> Path:
        """The file of measurements."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    def records(self) -> list[dict[str, Any]]:
        """Return the measurements, without lines that cannot be read: an interrupt cuts one off."""
        found = []
        for line in self.metrics.read_bytes().splitlines() if self.metrics.exists() else []:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [record for record in found if isinstance(record, dict)]

    def keep_metrics(self, stays: Callable[[dict[str, Any]], bool]) -> None:
        """Keep the measurements that stay."""
        self.write_metrics([record for record in self.records() if stays(record)])

    def write_metrics(self, records: list[dict[str, Any]]) -> None:
        """Write the measurements in place of those that are there."""
        write_whole(self.metrics, "".join(json.dumps(record) + "\n" for record in records))

    def page(self) -> Path:
        """Write the report and return its path."""
        return report.write_page(self.path)


class Phases:
    """Says which of a run's phases begins, as in `[2/4] LabelCleaner`.

    Args:
        count: how many phases there are.
        done: how many of them are there from before, in a run that is resumed.
    """

    def __init__(self, count: int, done: int = 0):
        self.count, self.done = count, done

    def begin(self, what: str) -> None:
        """Say that the next phase begins, and what it does."""
        self.done += 1
        say(f"[{self.done}/{self.count}] {what}")


def logarithmic(axes: Axes, which: str = "xy") -> None:
    """Make axes of a figure logarithmic, with plain numbers."""
    from matplotlib import ticker

    for name in which:
        axis = getattr(axes, f"{name}axis")
        axes.set(**{f"{name}scale": "log"})
        low, high = axis.get_view_interval()
        subs = (1, 2, 5) if high < 100 * low else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs))
        axis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 10 else f"{x:g}")
        axis.set_minor_formatter(ticker.NullFormatter())


def drawing(path: Path, draw: Callable[[Axes], object], *, size: tuple[float, float]) -> Path:
    """Let `draw(axes)` draw on empty axes, in the style of the other figures, into an SVG file."""
    return save_svg(path, size, lambda figure: draw(figure.add_subplot()))
