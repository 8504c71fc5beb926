"""The most suspicious examples of a run, as its page shows them."""

from typing import Any

from ..report import picture
from ..report._folder import RunFolder


def gallery_item(
    folder: RunFolder,
    cleaner: Any,
    i: Any,
    *,
    given: Any,
    model: Any,
    pixels: Any = None,
    row: dict[str, Any] | None = None,
    wrong: bool | None = None,
) -> dict[str, Any]:
    """Return example i with its given and suggested label, its picture written if it has one."""
    image = None
    if pixels is not None:
        image = f"figures/suspect-{i}.png"
        picture(folder.path / image, pixels)
    return {
        "index": int(i),
        "given": str(given),
        "model": str(model),
        "confidence": float(cleaner.confidence_[i]),
        "image": image,
        "row": row,
        "wrong": wrong,
    }
