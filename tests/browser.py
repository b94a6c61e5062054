"""Headless Chrome, controlled through chromedriver, for tests of HTML pages."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from contextlib import contextmanager
from urllib.request import Request, urlopen

CHROMIUM, DRIVER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome"),
    shutil.which("chromedriver"),
)
TIMEOUT_S = 60
CHART_FAULTS = """
const COLORS = ['green', 'blue', 'amber', 'violet', 'gray'], found = [];
const cross = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
                        Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
function* boxes(mark) {
  if (mark.tagName !== 'polyline') { yield mark.getBoundingClientRect(); return; }
  const matrix = mark.getScreenCTM(), length = mark.getTotalLength();
  for (let at = 0; at <= length; at += 3) {
    const {x, y} = mark.getPointAtLength(at).matrixTransform(matrix);
    yield {left: x - 1.5, right: x + 1.5, top: y - 1.5, bottom: y + 1.5};
  }
}
for (const chart of document.querySelectorAll('svg')) {
  if (!chart.getBoundingClientRect().width) continue;
  const name = chart.ariaLabel, texts = [...chart.querySelectorAll('text:not(.on-bar)')];
  const marks = [...chart.querySelectorAll('.bar, .dot, .line, .dashed')];
  texts.forEach((words, index) => {
    const box = words.getBoundingClientRect();
    for (const mark of marks) for (const part of boxes(mark))
      if (cross(box, part)) { found.push(`${name}: "${words.textContent}" covers ${mark.tagName}`); break; }
    for (const other of texts.slice(index + 1))
      if (cross(box, other.getBoundingClientRect()))
        found.push(`${name}: "${words.textContent}" on "${other.textContent}"`);
  });
  const near = chart.closest('figure, main');
  for (const color of COLORS)
    if (chart.querySelector(`.${color}`) && !near.querySelector(`.legend i.${color}`))
      found.push(`${name}: ${color} has no legend`);
  if (chart.querySelector('.dashed') && !near.querySelector('.legend i.dashed') && !/within/.test(name))
    found.push(`${name}: the dashed line has no legend`);
  if (chart.querySelector('.grid') && chart.querySelectorAll('.axis').length < 2)
    found.push(`${name}: an axis has no title`);
}
return found;
"""
"""Script that returns the faults of the charts of a page: text on marks, colors without legend, axes without title."""
OUTSIDE = """
const most = document.documentElement.clientWidth + 0.5, found = [];
for (const one of document.querySelectorAll('body *')) {
  const box = one.getBoundingClientRect();
  if (box.width && box.right > most && !one.closest('.scroll, svg')) found.push(one.tagName + ' ' + one.className);
}
for (const words of document.querySelectorAll('svg text')) {
  const box = words.getBoundingClientRect(), plot = words.closest('svg').getBoundingClientRect();
  if (box.width && (box.left < plot.left - 1 || box.right > plot.right + 1 || box.bottom > plot.bottom + 1))
    found.push('text ' + words.textContent);
}
if (document.documentElement.scrollWidth > most) found.push("the page scrolls sideways");
return found;
"""
"""Script that returns the parts of a page that are outside of the screen, or of a chart."""


class Browser:
    """One tab."""

    def __init__(self, port):
        self._url = f"http://127.0.0.1:{port}"
        options = {
            "goog:chromeOptions": {
                "binary": CHROMIUM,
                "args": ["--headless", "--no-sandbox", "--disable-dev-shm-usage"],
            },
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._url += "/session/" + self._post("/session", {"capabilities": {"alwaysMatch": options}})["sessionId"]

    def show(self, page, width, *, dark=False):
        """Load a file, or the page at an address, at a width in CSS pixels.

        Returns the console messages and the requested URLs.
        """
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._logs("browser"), self._logs("performance")
        self._post("/url", {"url": page if isinstance(page, str) else page.as_uri()})
        said = [entry["message"] for entry in self._logs("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self._logs("performance")]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        return said, asked

    def run(self, script):
        """Run JavaScript and return its result."""
        return self._post("/execute/sync", {"script": script, "args": []})

    def picture(self, path):
        """Save the whole page as a PNG file."""
        shot = self.devtools("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def devtools(self, command, parameters):
        """Send a command of the DevTools protocol."""
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def quit(self):
        with urlopen(Request(self._url, method="DELETE"), timeout=TIMEOUT_S):
            pass

    def _logs(self, kind):
        return self._post("/se/log", {"type": kind})

    def _post(self, path, body):
        request = Request(self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)["value"]


@contextmanager
def browser():
    """Yield a browser, and end it afterwards."""
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        port = next(found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        tab = Browser(port)
        try:
            yield tab
        finally:
            tab.quit()
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        process.stdout.close()


def page_faults(page):
    """Return what is outside of the screen and wrong with the charts of a file, at two widths.

    Nothing where there is no browser.
    """
    if not (CHROMIUM and DRIVER):
        return []
    with browser() as tab:
        found = []
        for width in (400, 1400):
            tab.show(page, width)
            tab.run("for (const one of document.querySelectorAll('details')) one.open = true;")
            found += tab.run(OUTSIDE) + tab.run(CHART_FAULTS)
        return found
