"""The page of a report in a real browser: nothing asked for, nothing cut off, readable in light and dark."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.measure.runs import write_run

from chabok.measure.cost import Price
from chabok.measure.report import recompute
from chabok.measure.report.page import to_html

CHROMIUM = os.environ.get("CHABOK_TEST_CHROMIUM") or shutil.which("chromium") or ""
CONTRAST = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * x + .7152 * y + .0722 * z;
  };
  const back = element => {
    for (; element; element = element.parentElement) {
      const found = rgb(getComputedStyle(element).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("h1,h2,p,dt,dd,th,td,li,figcaption,summary,svg text")) {
    if (!element.textContent.trim() || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const one = light(rgb(element.matches("svg *") ? style.fill : style.color)), other = light(back(element));
    const ratio = (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
    found.push([ratio, element.textContent.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0])[0];
}"""


@pytest.mark.wide
@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium; CHABOK_TEST_CHROMIUM names one")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_whole_and_readable(scheme: Any, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    run = write_run(tmp_path / "a.jsonl", failing=0.02, notes=["a note"], price=Price.machine(0.1))
    page_file = tmp_path / "a.html"
    page_file.write_text(to_html(recompute(run)), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1180, "height": 900})
        asked: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.goto(page_file.as_uri())
        assert asked == [page_file.as_uri()]
        assert said == []
        ratio, text = page.evaluate(CONTRAST)
        assert ratio >= 4.5, text
        for width in (1180, 760, 360):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        outside = page.evaluate(
            """() => [...document.querySelectorAll("figure svg text")].filter(text => {
              const inner = text.getBoundingClientRect();
              const outer = text.ownerSVGElement.getBoundingClientRect();
              return inner.left < outer.left - 1 || inner.right > outer.right + 1;
            }).map(text => text.textContent)"""
        )
        assert outside == []
        page.locator("summary").first.click()
        assert page.locator("figure details[open] table").first.is_visible()
        browser.close()
