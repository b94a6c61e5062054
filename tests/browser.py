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
