"""A run's folder becomes one page, complete, harmless and the same each time."""

import base64
import html.parser
import itertools
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from experiments.runs import logarithmic
from foretune import report

EVIL = "<script>alert(1)</script>"
CONFIG = {
    "kind": "cleaning",
    "title": "Data hyper-cleaning",
    "command": "foretune run cleaning --seeds 2 --name 'a & b'",
    "created": "2025-03-14T09:26:53+00:00",
    "device": "cpu",
    "versions": {"foretune": "0.1.0", "jax": "0.10.2"},
    "settings": {"seeds": 2, "radius": [500, 1000], "x64": False, "note": EVIL},
}
SMALL_PNG = [[0.0, 0.5], [1.0, 0.2]]


def panel(title="Accuracy", labels=("DH", "Baseline"), n=20):
    x = np.arange(n)
    lines = [{"label": name, "x": x, "y": np.sin(x + i)} for i, name in enumerate(labels)]
    lines[0]["band"] = (lines[0]["y"] - 0.1, lines[0]["y"] + 0.1)
    return {"title": title, "ylabel": "accuracy", "lines": lines}


def item(**changes):
    base = {"index": 12, "observed": "7", "suggested": "1", "probability_wrong": 0.998}
    return base | {"image": None, "row": None, "wrong": None} | changes


def result(**changes):
    methods = [["Oracle", 90.46, None, 12], ["Baseline", 87.7, "0.52 ± 0.01", 20000]]
    columns = ["method", "accuracy", "F1", "examples of the training set that are used"]
    return {
        "headline": "Cleaning brings 90.9 percent",
        "notes": ["Means over two seeds."],
        "tables": [{"title": "Test set", "note": "In %.", "columns": columns, "rows": methods}],
        "figures": [
            {"file": "curves.svg", "title": "Curves", "caption": "Two panels."},
            {"file": "figures/weights.svg", "title": "Weights", "caption": "At the end."},
        ],
        "gallery": {
            "title": "Most suspicious",
            "note": "Given label and model's label.",
            "items": [
                item(image="figures/suspect-12.png", wrong=True),
                item(
                    index=13, image="figures/suspect-12.png", wrong=False, probability_wrong=0.99999
                ),
                item(index=14, observed=EVIL, row={"age": 39, "job": "clerk"}, wrong=True),
            ],
        },
    } | changes


def make_run(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    records = [{"series": f"seed {i % 2}", "step": i, "value": 0.5} for i in range(6)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"series": "se')
    report.curves(folder / "figures/curves.svg", [panel("A"), panel("B")], xlabel="step")
    report.histogram(folder / "figures/weights.svg", {"right": [1, 0.9], "wrong": [0]}, xlabel="w")
    report.picture(folder / "figures/suspect-12.png", SMALL_PNG)
    (folder / "result.json").write_text(json.dumps(result(**changes)))
    return folder


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def page_of(folder):
    path = report.write_page(folder)
    assert path == Path(folder) / "report.html"
    return path.read_text(encoding="utf-8")


def test_a_page_has_all_sections(run):
    page = page_of(str(run))
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    sections = ["Results", "Figures", "Most suspicious"]
    assert headings == [*sections, "Notes", "Settings", "Versions", "Reproduce"]
    for text in (
        "<h1>Data hyper-cleaning</h1>",
        "Cleaning brings 90.9 percent",
        "2025-03-14 09:26 UTC",
        "6 records of metrics",
        '<th scope="row">Oracle</th><td class="n">90.46</td>',
        '<td class="n">87.7</td><td class="n">0.52 ± 0.01</td><td class="n">20,000</td>',
        "<caption><span>Test set</span></caption>",
        'alt="Curves"',
        "99.8%",
        "&gt;99.9%",
        'aria-label="the observed label is wrong"',
        "(2 of 3)",
        'alt="Example 12, labelled 7"',
        "clerk",
        "[500, 1000]",
        "--name &#39;a &amp; b&#39;</code>",
    ):
        assert text in page
    assert page.count('<img src="data:image/svg+xml;base64,') == 2
    assert page.count('<img src="data:image/png;base64,') == 2
    assert "unfinished" not in page


def test_text_from_files_is_escaped(run):
    page = page_of(run)
    assert EVIL not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 2
    assert "<script" not in page


def everywhere(value):
    """The same JSON with markup in place of every text, and before every name but the page's own."""
    if isinstance(value, dict):
        return {name: everywhere(part) for name, part in value.items()}
    if isinstance(value, list):
        return [everywhere(part) for part in value]
    return f'"><b class="{EVIL}">' if isinstance(value, str) else value


def test_no_text_becomes_markup(run):
    harmless = [tag for tag, _ in Elements(page_of(run)).found]
    changed = everywhere(result())
    for given, asked in zip(changed["figures"], result()["figures"], strict=True):
        given["file"] = asked["file"]
    for given, asked in zip(changed["gallery"]["items"], result()["gallery"]["items"], strict=True):
        given["image"] = asked["image"]
        given["row"] = {f"<b>{name}": value for name, value in (given["row"] or {}).items()}
    config = everywhere(CONFIG) | {name: {"<b>": EVIL} for name in ("settings", "versions")}
    (run / "result.json").write_text(json.dumps(changed))
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text(json.dumps({"series": f"<b>{EVIL}", "step": 0}))
    page = page_of(run)
    found = Elements(page).found
    assert {tag for tag, _ in found} <= set(harmless)
    assert "b" not in {tag for tag, _ in found}
    assert {name for _, a in found for name in a} <= {
        *("alt", "aria-hidden", "aria-label", "aria-labelledby", "charset", "class", "content"),
        *("datetime", "href", "http-equiv", "id", "lang", "name", "rel", "role", "scope", "src"),
        *("style", "tabindex", "title"),
    }
    assert EVIL not in page


def test_control_codes_do_not_break_a_figure(tmp_path):
    odd = "cat\x1b[31m\x00"
    path = report.curves(tmp_path / "c.svg", [panel(odd, (odd, "b"))], xlabel=odd)
    ElementTree.parse(path)
    assert "cat\N{REPLACEMENT CHARACTER}[31m" in path.read_text()


def test_a_page_refers_to_nothing_outside(run):
    page = page_of(run)
    assert not re.findall(r"https?://", page)
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline';" in page


def test_the_ids_of_a_page_are_unique_and_resolve(run):
    both = [{"file": "curves.svg", "title": str(i), "caption": ""} for i in range(2)]
    (run / "result.json").write_text(json.dumps(result(figures=both)))
    page = page_of(run)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    references = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"|labelledby="([^"]*)"', page)
    assert {"".join(names) for names in references} <= set(ids)


def test_the_same_folder_gives_the_same_bytes(tmp_path):
    first, second = (make_run(tmp_path / name / "run") for name in "ab")
    for _ in range(2):
        assert page_of(first) == page_of(second)
    for name in ("curves.svg", "weights.svg", "suspect-12.png"):
        one, other = ((folder / "figures" / name).read_bytes() for folder in (first, second))
        assert one == other


def test_an_unfinished_run(run):
    (run / "result.json").unlink()
    page = page_of(run)
    assert "This run is unfinished." in page
    assert "resumes it" in page
    assert "6 records of metrics" in page
    assert "radius" in page
    (run / "metrics.jsonl").unlink()
    assert "0 records of metrics" in page_of(run)


def test_little_is_enough(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "result.json").write_text('{"gallery": null}')
    assert "<h1>Run</h1>" in page_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", None, r"config\.json is missing\. Give a folder of `foretune clean`"),
        ("config.json", "{", r"config\.json is broken \(.*\)\. Give a folder of `foretune clean`"),
        ("config.json", "[]", r"config\.json is broken \(it is list, expected dict\)"),
        ("config.json", '{"settings": 3}', r"config\.json .*settings is int, expected dict"),
        ("result.json", '{"headline": "a', r"result\.json is broken .*give the run's command"),
        ("result.json", '{"notes": [3]}', r"result\.json .*an entry of notes is int, expected str"),
        (
            "result.json",
            '{"tables": [{"columns": ["a"], "rows": [[1, 2]]}]}',
            "not as long as its 1",
        ),
    ],
)
def test_what_is_missing_or_broken_is_named(run, name, text, message):
    (run / name).unlink()
    if text is not None:
        (run / name).write_text(text)
    with pytest.raises(report.ReportError, match=message) as caught:
        report.write_page(run)
    assert "\n" not in str(caught.value)


def test_a_missing_folder(tmp_path):
    with pytest.raises(
        report.ReportError, match=r"nowhere is not a folder\. Give a folder of `foretune clean`"
    ):
        report.write_page(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../secret.svg", "figures/../../x.svg", "..\\x.svg"]
)
def test_no_file_outside_the_folder_is_read(run, name):
    figure = {"file": name, "title": "", "caption": ""}
    gallery = {"title": "", "note": "", "items": [item(image=name)]}
    for changes in ({"figures": [figure]}, {"gallery": gallery}):
        (run / "result.json").write_text(json.dumps(result(**changes)))
        with pytest.raises(report.ReportError, match="outside the run's folder"):
            report.write_page(run)


def test_no_link_out_of_the_folder_is_followed(run, tmp_path):
    outside = tmp_path / "outside.svg"
    outside.write_text("<svg></svg>")
    (run / "figures/curves.svg").unlink()
    (run / "figures/curves.svg").symlink_to(outside)
    with pytest.raises(report.ReportError, match="outside the run's folder"):
        report.write_page(run)


def test_figures_that_cannot_be_shown_leave_a_note(run):
    (run / "figures/curves.svg").unlink()
    (run / "figures/suspect-12.png").write_text("no image")
    page = page_of(run)
    assert "(figure missing: curves.svg)" in page
    assert "(figure unreadable: figures/suspect-12.png)" in page


class Elements(html.parser.HTMLParser):
    """The elements of a page: names and attributes, in order."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_every_image_has_a_text(run):
    nameless = [
        {"file": "curves.svg", "title": "", "caption": "Two <b>panels."},
        {"file": "figures/weights.svg", "title": "", "caption": ""},
    ]
    (run / "result.json").write_text(json.dumps(result(figures=nameless)))
    images = [a for tag, a in Elements(page_of(run)).found if tag == "img"]
    assert [image["alt"] for image in images] == [
        *("Two <b>panels.", "figures/weights.svg"),
        *("Example 12, labelled 7", "Example 13, labelled 7"),
    ]


SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 50"'
HOSTILE = {
    "script": f"{SVG}><script>parent.location='https://evil.example'</script></svg>",
    "foreignobject": f"{SVG}><foreignObject><body onload='alert(1)'/></foreignObject></svg>",
    "meta": f'{SVG}><meta http-equiv="refresh" content="0;url=https://evil.example"/></svg>',
    "a": f'{SVG}><a href="https://evil.example" target="_top"><rect width="99"/></a></svg>',
    "onload": f'{SVG} onload="alert(1)"></svg>',
    "iframe": f'{SVG}/><iframe src="https://evil.example"></iframe>',
    "quote": f'"><script>alert(1)</script>{SVG}></svg>',
    "close": f"{SVG}></svg></figure></main></body></html><script>alert(1)</script>",
    "style": f"{SVG}><style>body {{ display: none }}</style></svg>",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_svg_is_never_part_of_the_page(run, name):
    harmless = [(tag, sorted(a)) for tag, a in Elements(page_of(run)).found]
    path = run / "figures/weights.svg"
    path.write_text(HOSTILE[name])
    page = page_of(run)
    assert [(tag, sorted(a)) for tag, a in Elements(page).found] == harmless
    images = [a["src"] for tag, a in Elements(page).found if tag == "img"]
    assert base64.b64decode(images[1].partition(",")[2]) == path.read_bytes()
    assert "evil.example" not in page
    assert not {"svg", "script", "iframe", "a", "foreignobject"} & {tag for tag, _ in harmless}


def test_cells_are_readable(tmp_path):
    rows = [[0.123456, 1.5e-7, 12345.678, True], [0.5, 1234.5, float("nan"), None]]
    table = {"title": "", "columns": list("abcd"), "rows": rows}
    page = page_of(make_run(tmp_path, tables=[table]))
    assert [*re.findall(r"<td[^>]*>([^<]*)</td>", page)[:8]] == [
        *("0.1235", "1.5e-7", "12,346", "true"),
        *("0.5", "1234", "nan", "–"),  # noqa: RUF001
    ]


def test_long_text_has_lines_and_the_rest_of_a_row_has_none(tmp_path):
    row = {"note": "a long finish that somebody wrote about", "grapes": 3}
    rows = [row, row | {"note": row["note"] + " at length"}]
    items = [item(index=i, row=row) for i, row in enumerate(rows)]
    page = page_of(make_run(tmp_path, gallery={"title": "", "note": "", "items": items}))
    assert f'<td>{rows[0]["note"]}</td><td class="n">3</td>' in page
    assert f'<td class="text">{rows[1]["note"]}</td><td class="n">3</td>' in page


def test_figures_stand_by_themselves(run):
    for name in ("curves.svg", "weights.svg"):
        svg = (run / "figures" / name).read_text()
        assert "currentColor" not in svg  # in an image it is not the page's
        assert "<metadata" not in svg
        assert "<text" in svg
        assert set(re.findall(r'font-family: ([^;"]*)', svg)) == {"sans-serif"}


def contrast(one, other):
    """The contrast ratio of two colours, as WCAG has it."""

    def luminance(colour):
        parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_figures_can_be_read_in_both_themes(run):
    page = page_of(run)
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", root))
        for root in re.findall(r":root \{([^}]*)\}", page)[:2]
    )
    for theme in (light, dark):
        for name in ("ink", "soft", "accent", "good", "bad"):
            assert contrast(theme[name], theme["paper"]) > 4.5
    (card,) = re.findall(r"figure img \{ background: (#\w{6}); \}", page)
    drawn = set(re.findall(r"#[0-9a-f]{6}", (run / "figures/curves.svg").read_text()))
    assert len(drawn) >= 3
    for behind in (light["paper"], card):
        assert min(contrast(colour, behind) for colour in drawn) >= 3


def test_logarithmic_curves_with_labels_of_their_own(tmp_path):
    line = {"label": "a", "x": [2, 64, 4096], "y": [0.01, 0.02, 0.05]}
    panels = [
        {"title": "Time", "ylabel": "s", "xlabel": "hyperparameters", "lines": [line]},
        {"title": "Memory", "ylabel": "MiB", "lines": [line]},
    ]
    svg = report.curves(tmp_path / "c.svg", panels, xlabel="weights", scale=logarithmic).read_text()
    for text in ("hyperparameters", "weights", ">1,000<", ">0.02<"):
        assert text in svg
    assert "mathdefault" not in svg


def test_curves_take_gaps_and_any_label(tmp_path):
    labels = ("_hidden", "$5 & <b>", "字", *map(str, range(6)))
    odd = panel("$x$", labels)
    odd["lines"][1]["y"] = np.where(np.arange(20) == 3, 0.5, np.nan)
    odd["lines"][2]["y"] = np.where(np.arange(20) == 3, np.inf, 0.5)
    svg = report.curves(
        tmp_path / "c.svg", [odd, panel("2"), panel("3")], xlabel="step"
    ).read_text()
    for text in ("_hidden", "$5 &amp; &lt;b&gt;", "字", "$x$"):
        assert text in svg
    assert "stroke-dasharray" in svg


def test_histograms(tmp_path):
    path = tmp_path / "h.svg"
    few = report.histogram(path, {"a": [0, 1, 1], "b": []}, xlabel="w").read_text()
    assert "log scale" not in few
    many = report.histogram(
        path, {"a": [0] * 101, "b": [1, np.nan]}, xlabel="w", bins=5
    ).read_text()
    assert "log scale" in many


def test_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")

    def pixels(x):
        with image.open(report.picture(tmp_path / "p.png", x)) as picture:
            return np.asarray(picture.convert("RGBA"))

    assert pixels(np.zeros((8, 6))).shape == (88, 66, 4)
    assert pixels(np.zeros((100, 50, 3), np.uint8)).shape == (100, 50, 4)
    grey = pixels([[-1.0, 0.0], [1.0, np.nan]])
    np.testing.assert_array_equal(grey[::42, ::42, 0], [[0, 128], [255, 0]])
    np.testing.assert_array_equal(pixels([[0.0, 0.2]])[0, ::42, 0], [0, 51])
    np.testing.assert_array_equal(pixels(np.full((2, 2, 4), 7, np.uint8))[0, 0], [7, 7, 7, 7])
    np.testing.assert_array_equal(pixels(np.full((2, 2, 1), 16))[0, 0], [0, 0, 0, 255])
    for bad in (np.zeros(3), np.zeros((2, 2, 2)), np.zeros((0, 3))):
        with pytest.raises(ValueError, match="pixels of shape"):
            report.picture(tmp_path / "p.png", bad)
    np.testing.assert_array_equal(pixels([[np.nan]])[0, 0], [0, 0, 0, 255])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    absent = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    if absent:
        pytest.skip(f"needs {' and '.join(absent)}, which a test does not install")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    quiet = "disable-background-networking disable-component-update disable-sync disable-quic"
    headless = "headless no-sandbox disable-gpu no-first-run disable-dev-shm-usage"
    for name in f"{quiet} {headless}".split():
        options.add_argument(f"--{name}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("shown") / "run")
    return report.write_page(folder)


def show(browser, path, scheme, width, height):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())


SIZES = [(360, 740), (1280, 900)]


@pytest.mark.parametrize(("scheme", "size"), [*itertools.product(["light", "dark"], SIZES)])
def test_a_browser_shows_the_page(browser, shown, scheme, size):
    show(browser, shown, scheme, *size)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return innerWidth") == size[0]
    for selector, count in {"table": 2, "figure > div > img": 2, ".gallery img": 2}.items():
        found = browser.find_elements("css selector", selector)
        assert len(found) == count
        assert all(x.is_displayed() and x.size["height"] > 50 for x in found)
    widest = browser.execute_script(
        "const page = document.documentElement; scrollTo(999, 0);"
        "return [page.scrollWidth - page.clientWidth, document.body.scrollWidth, scrollX]"
    )
    assert widest[0] <= 0
    assert widest[1] <= size[0]
    assert widest[2] == 0
    images = "return [...document.images].every(x => x.complete && x.naturalWidth >= 84)"
    assert browser.execute_script(images)
    fetched = "return performance.getEntriesByType('resource').map(x => x.name)"
    assert [x for x in browser.execute_script(fetched) if not x.startswith("data:")] == []


def test_dark_mode_is_dark(browser, shown):
    lightness = []
    for scheme in ("light", "dark"):
        show(browser, shown, scheme, *SIZES[0])
        script = "return getComputedStyle(document.body).backgroundColor"
        lightness.append(sum(map(int, re.findall(r"\d+", browser.execute_script(script))[:3])))
    assert lightness[0] > 700
    assert lightness[1] < 100


def test_wide_tables_scroll_in_their_own_box(browser, shown):
    show(browser, shown, "light", *SIZES[0])
    box = "const box = document.querySelector('.wide'); return box.scrollWidth > box.clientWidth"
    assert browser.execute_script(box)
