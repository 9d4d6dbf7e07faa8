"""The report in a real browser: it opens, can be clicked and searched, and the console stays empty."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.drawing.drawings import HOSTILE, flat, large, two_engines

from intarsia.drawing import Drawing, framed, page

webdriver = pytest.importorskip("selenium.webdriver")
Select = pytest.importorskip("selenium.webdriver.support.select").Select
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="no Chromium: apt-get install chromium chromium-driver"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1200"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def _open(browser: Any, folder: Path, drawing: Drawing) -> None:
    path = folder / "report.html"
    path.write_text(page(drawing), encoding="utf-8")
    browser.get(path.as_uri())


def _one(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def _all(browser: Any, selector: str) -> list[Any]:
    return list(browser.find_elements("css selector", selector))


def test_modules_open_by_a_click_down_to_nodes_with_their_reasons(browser: Any, tmp_path: Path) -> None:
    _open(browser, tmp_path, two_engines())
    _one(browser, "#collapse").click()
    assert len(_all(browser, "g.item.leaf")) == 1  # the model's input
    _one(browser, '[data-toggle="m:encoder"]').click()
    _one(browser, '[data-toggle="m:encoder.layer"]').click()
    _one(browser, '[data-toggle="m:encoder.layer.1"]').click()
    _one(browser, '[data-id="n:2"] rect.box').click()
    details = _one(browser, "#details").text
    assert "aten.i0.default" in details and "model.py:7" in details
    assert HOSTILE in details  # the reason, letter by letter
    assert browser.get_log("browser") == []


def test_texts_of_the_model_are_never_markup(browser: Any, tmp_path: Path) -> None:
    _open(browser, tmp_path, two_engines())
    assert _one(browser, "#heading").text == f"Plan {HOSTILE}"
    assert browser.title == "Intarsia report"
    assert _all(browser, "img") == [] and _all(browser, "main b") == []
    _one(browser, 'tr[data-segment="0"]').click()
    assert _one(browser, "pre.before").text == HOSTILE
    assert _one(browser, "pre.after").text == "one layer"
    assert browser.get_log("browser") == []


def test_measurements_advice_and_fallbacks_are_told(browser: Any, tmp_path: Path) -> None:
    _open(browser, tmp_path, two_engines())
    assert "67 %" in _one(browser, "#time").text and "2.000 ms" in _one(browser, "#time").text
    assert "1.33x" in _one(browser, "#trials").text
    assert "took it" in _one(browser, "#advice").text
    assert "aten.i0.default" in _one(browser, "#fallbacks").text
    choice = Select(_one(browser, "#bodies"))
    choice.select_by_visible_text("cond.true")
    assert _one(browser, "#heading").text == "inner"
    assert browser.get_log("browser") == []


def test_a_search_leads_to_the_node(browser: Any, tmp_path: Path) -> None:
    _open(browser, tmp_path, large())
    _one(browser, "#search").send_keys("layer321_part7\n")
    assert _one(browser, "#details h2").text == "layer321_part7"
    assert _one(browser, "g.item.selected").get_attribute("data-id") == "n:3218"
    seen, room = _one(browser, "g.item.selected").rect, _one(browser, "#graph").rect
    assert room["x"] < seen["x"] < room["x"] + room["width"]
    assert room["y"] < seen["y"] < room["y"] + room["height"]
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("drawing", [large(), flat()], ids=["modules", "without modules"])
def test_five_thousand_nodes_can_be_used(browser: Any, tmp_path: Path, drawing: Drawing) -> None:
    """Few boxes are seen at first; each level that is opened is laid out by itself."""
    _open(browser, tmp_path, drawing)
    assert 1 < len(_all(browser, "g.item")) < 100
    for _ in range(2):
        _one(browser, "#expand").click()
    assert len(_all(browser, "g.item")) > 50
    before = _one(browser, "#graph > g").get_attribute("transform")
    _one(browser, "#zoom-in").click()
    assert _one(browser, "#graph > g").get_attribute("transform") != before
    assert browser.get_log("browser") == []


def test_dark_and_light(browser: Any, tmp_path: Path) -> None:
    _open(browser, tmp_path, two_engines())
    paper = _one(browser, "body").value_of_css_property("background-color")
    _one(browser, "#theme").click()
    assert _one(browser, "body").value_of_css_property("background-color") != paper


def test_a_notebook_shows_it_in_a_frame_of_its_own(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><p>cell</p>{framed(page(two_engines()))}", encoding="utf-8")
    browser.get(path.as_uri())
    browser.switch_to.frame(0)
    for _ in range(50):
        if _all(browser, "g.item"):
            break
        time.sleep(0.1)
    assert len(_all(browser, "g.item")) > 1
    browser.switch_to.default_content()
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
