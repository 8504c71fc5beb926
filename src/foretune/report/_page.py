"""From a run's folder to one HTML page that needs nothing beside itself.

All text is escaped, nothing is fetched, no script runs, and the same folder gives the same bytes.
Figures are images with their bytes in the page: in an image a browser runs no script, follows no link
and fetches nothing, whatever an SVG holds. Control codes are written out.
"""

import base64
import json
import math
import re
from datetime import datetime
from importlib import resources
from pathlib import Path, PureWindowsPath
from typing import Any

from .._files.digests import digest_of_json
from .._files.files import write_whole
from ._text import shown

Json = dict[str, Any]
"""What a file of JSON holds."""
# By example: the types of their entries.
_CONFIG: Json = {
    **{"kind": str, "title": str, "command": str, "created": str, "device": str},
    **{"versions": dict, "settings": dict},
}
_ITEM = {
    **{"index": object, "observed": object, "suggested": object, "probability_wrong": object},
    **{"image": str, "row": dict, "wrong": object},
}
_EXAMPLE = {"index": object, "label": object, "score": object, "image": str, "row": dict}
_RESULT: Json = {
    "headline": str,
    "notes": [str],
    "tables": [{"title": str, "note": str, "columns": [str], "rows": [[object]]}],
    "figures": [{"file": str, "title": str, "caption": str}],
    "gallery": {"title": str, "note": str, "items": [_ITEM]},
    "comparisons": [{"title": str, "note": str, "groups": [{"title": str, "items": [_EXAMPLE]}]}],
}
_NUMERIC = re.compile(r"[-+\u2212<>]?\s?\d[\d.,eE+\u2212-]*\s?%?(\s?[±(].*|\sto\s.*)?")
_WIDTH = re.compile(rb"viewBox=\"[\d.]+ [\d.]+ (\d{1,5})")

_WHICH = "Give a folder of `foretune clean`, `foretune attribute` or of an experiment"


class ReportError(ValueError):
    """A run's folder cannot be made into a page; the message says which file, and what to do."""


def write_page(folder: str | Path) -> Path:
    """Write `report.html` in a run's folder, and return its path.

    A run without `result.json` gets a page that says that it is unfinished. A figure that is not
    there leaves a note in its place; anything else that is missing or broken raises `ReportError`.
    """
    import jinja2  # pyright: ignore[reportMissingImports]
    from markupsafe import Markup  # pyright: ignore[reportMissingImports]

    def safe(value: object) -> object:
        if not isinstance(value, str) or isinstance(value, Markup):
            return value
        return shown(value, allowed="\t\n\r")

    folder = Path(folder)
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder. {_WHICH}.")
    again = f"{_WHICH}; where it is one, restore the file from a copy"
    config = _read(folder / "config.json", _CONFIG, again)
    result = None
    if (folder / "result.json").exists():
        result = read_result(folder)
        _prepare(folder, result)
    metrics = folder / "metrics.jsonl"
    records = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=safe,
    )
    environment.filters |= {"plain": _plain, "percent": _percent, "when": _when}
    template = resources.files("foretune.report").joinpath("page.html").read_text(encoding="utf-8")
    page = environment.from_string(template).render(config=config, result=result, records=records)
    path = folder / "report.html"
    write_whole(path, page.encode("utf-8", "replace"))
    return path


def read_result(folder: Path) -> Json:
    """Return a finished run's result, complete in what a page shows, or raise `ReportError`."""
    advice = "Remove it and give the run's command again to write it anew"
    return _read(folder / "result.json", _RESULT, advice)


def _read(path: Path, shape: Json, advice: str) -> Json:
    try:
        return _fill(parsed(path.read_text(encoding="utf-8")), shape, "it")
    except FileNotFoundError:
        problem = f"{path} is missing"
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{path} is broken ({' '.join(str(error).split())})"
    raise ReportError(f"{problem}. {advice}.")


def signed(content: object) -> str:
    """Return content as JSON; a dict with a digest, by which `parsed` knows that it is whole."""
    content = json.loads(json.dumps(content))  # as it is read: all keys are text
    if isinstance(content, dict):
        content["sha256"] = digest_of_json(content)
    return json.dumps(content, indent=2) + "\n"


def parsed(text: str) -> Any:
    """Return what JSON holds, or raise `ValueError`; a dict without a digest is taken as it is."""
    content = json.loads(text)
    if isinstance(content, dict) and content.pop("sha256", None) not in (
        None,
        digest_of_json(content),
    ):
        raise ValueError("its content is not what was written: its digest does not match")
    return content


def _fill(value: Any, shape: Any, where: str) -> Any:
    """The value, checked against an example of its types; what is not there is empty."""
    if shape is object:
        return value
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if value is None:
        value = kind()
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {type(value).__name__}, expected {kind.__name__}")
    if isinstance(shape, dict):
        return {name: _fill(value.get(name), part, name) for name, part in shape.items()}
    if isinstance(shape, list):
        return [_fill(part, shape[0], f"an entry of {where}") for part in value]
    return value


def _prepare(folder: Path, result: Json) -> None:
    """Put the figures themselves, and cells as they are shown, in the result."""
    for table in result["tables"]:
        width = len(table["columns"])
        if any(len(row) != width for row in table["rows"]):
            what = f"table {table['title']!r} has a row that is not as long as its {width} columns"
            raise ReportError(f"{folder / 'result.json'}: {what}. Make them equal.")
        cells = [[(_number(x), _is_number(x)) for x in row] for row in table["rows"]]
        table["cells"] = cells
        table["numeric"] = [bool(cells) and all(row[i][1] for row in cells) for i in range(width)]
    for figure in result["figures"]:
        alt = figure["title"] or figure["caption"] or figure["file"]
        figure["html"] = _embed(folder, figure["file"], alt)
    gallery = result["gallery"]
    for item in gallery["items"]:
        item["html"] = _pictured(folder, item, item["observed"])
    known = [item["wrong"] for item in gallery["items"] if isinstance(item["wrong"], bool)]
    gallery |= {"known": len(known), "wrong": sum(known)}
    gallery["pictures"] = [item for item in gallery["items"] if item["image"]]
    gallery["others"] = [item for item in gallery["items"] if not item["image"]]
    gallery["columns"] = _columns(gallery["others"])
    for comparison in result["comparisons"]:
        items = [item for group in comparison["groups"] for item in group["items"]]
        for item in items:
            item["html"] = _pictured(folder, item, item["label"])
            item["score"] = None if item["score"] is None else _number(item["score"])
        comparison |= {"pictured": any(x["html"] for x in items), "columns": _columns(items)}


def _columns(items: list[Json]) -> list[tuple[str, str]]:
    """The columns of rows, each with the attribute that puts numbers to the right."""
    from markupsafe import Markup  # pyright: ignore[reportMissingImports]

    names = dict.fromkeys(name for item in items for name in item["row"])
    numbers = {name: all(_is_number(x["row"].get(name)) for x in items) for name in names}
    return [(name, Markup(' class="n"' if numbers[name] else "")) for name in names]


def _pictured(folder: Path, item: Json, label: object) -> str:
    alt = f"Example {_plain(item['index'])}, labelled {_plain(label)}"
    return item["image"] and _embed(folder, item["image"], alt)


def _is_number(x: object) -> bool:
    if isinstance(x, str):
        return _NUMERIC.fullmatch(x) is not None
    return x is None or (isinstance(x, int | float) and not isinstance(x, bool))


def _number(x: object) -> str:
    if not isinstance(x, float):
        many = isinstance(x, int) and not isinstance(x, bool) and abs(x) >= 10_000
        return f"{x:,}" if many else _plain(x)
    if 1e4 <= abs(x) < 1e12:
        return f"{x:,.0f}"
    return re.sub(r"e([+-])0*(\d)", r"e\1\2", f"{x:.4g}").replace("e+", "e")


def _plain(x: object) -> str:
    if x is None:
        return "–"  # noqa: RUF001
    return x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)


def _percent(x: object) -> str:
    if isinstance(x, bool) or not isinstance(x, int | float) or not math.isfinite(x):
        return _plain(x)
    return ">99.9%" if 0.9995 <= x < 1 else f"{100 * x:.1f}%"


def _when(text: str) -> str:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".strip()


def _embed(folder: Path, name: str, alt: str) -> str:
    """The figure as an image with its bytes in the page; a note where there is none."""
    from markupsafe import Markup  # pyright: ignore[reportMissingImports]

    parts = PureWindowsPath(name)  # knows / and \, and drives
    path = next((p for p in (folder / name, folder / "figures" / name) if p.is_file()), None)
    outside = path and not path.resolve().is_relative_to(folder.resolve())
    if parts.anchor or ".." in parts.parts or outside:
        what = f"{folder / 'result.json'} names {name!r}, which is outside the run's folder"
        raise ReportError(f"{what}. Name figures relative to that folder, without '..'.")
    data = path.read_bytes() if path else b""
    kind = "png" if data.startswith(b"\x89PNG") else "svg+xml" if b"<svg" in data else None
    if kind is None:
        why = "unreadable" if path else "missing"
        return Markup('<p class="absent">(figure {}: {})</p>').format(why, shown(name))
    style = ""
    if kind == "svg+xml" and (size := _WIDTH.search(data)):
        # In pixels per point: text stays readable on a phone (its box scrolls) and does not get huge.
        width = int(size[1])
        bounds = f"min-width:{0.84 * width:.0f}px;max-width:{1.45 * width:.0f}px"
        style = Markup(' style="width:100%;{}"').format(bounds)
    uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return Markup('<img src="{}" alt="{}"{}>').format(uri, shown(alt), style)
