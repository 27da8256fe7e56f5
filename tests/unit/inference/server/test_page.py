"""The page in a real browser: tokens, probabilities, experts, narrow and wide, dark and light."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
import httpx

from tests.helpers import free_port
from tests.unit.inference.server.served import Served, serving, small_model

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
).split()


class Browser:
    """A session of WebDriver's protocol."""

    def __init__(self, url: str, folder: Path) -> None:
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = httpx.post(f"{url}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=120).json()
        self._url = f"{url}/session/{answer['value']['sessionId']}"

    def call(self, path: str, **body: Any) -> Any:
        answer = httpx.post(f"{self._url}/{path}", json=body, timeout=60).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def run(self, script: str) -> Any:
        return self.call("execute/sync", script=script, args=[])

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("goog/cdp/execute", cmd=command, params=parameters)

    def show(self, width: int, scheme: str) -> None:
        metrics = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot")["data"]))

    def wait(self, script: str) -> None:
        deadline = time.monotonic() + 60
        while not self.run(f"return Boolean({script})"):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def fill(self, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            self.run(f"document.getElementById({name!r}).value = {json.dumps(value)}")

    def close(self) -> None:
        httpx.delete(self._url, timeout=60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    port = free_port()
    with subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/status", timeout=60).json()["value"]["ready"]:
                    break
            assert time.monotonic() < deadline, "chromedriver does not answer"
            time.sleep(0.1)
        found = Browser(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("chromium"))
        yield found
        found.close()
        run.terminate()


@pytest.fixture(scope="module", params=["moe", "dense"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(small_model(tmp_path_factory.mktemp(request.param), request.param)[0]) as found:
        yield found


OPTIONS = dict(prompt="the naïve 🙂 birds\nin", temperature=0.5, seed=3)  # no text ends within 24 tokens


def texts(answer: dict[str, Any], show: Callable[[str], str]) -> list[str]:
    return [show(text) for text in answer["choices"][0]["logprobs"]["tokens"]]


def test_tokens_come_with_their_probabilities_and_experts(served: Served, browser: Browser, tmp_path: Path) -> None:
    is_moe = served.model.config.is_moe
    options = OPTIONS | {"max_tokens": 24}
    answer = served.post(**options, echo=True, logprobs=5, experts=is_moe).json()
    choice = answer["choices"][0]
    browser.show(1200, "light")
    browser.call("url", url=f"{served.url}/")
    browser.wait("model")
    browser.fill(options)
    browser.run("document.getElementById('go').click()")
    browser.wait("document.getElementById('speed').textContent")

    tokens = browser.run("return tokens.map(one => [one.text, one.logprob, one.span.className, one.experts])")
    assert [one[0] for one in tokens] == choice["logprobs"]["tokens"]
    assert [one[1] for one in tokens[1:]] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-5)
    assert sum("prompt" in one[2] for one in tokens) == answer["usage"]["prompt_tokens"]
    assert [one[3] for one in tokens] == ([*choice["experts"], None] if is_moe else [None] * len(tokens))
    shown = browser.run("return document.getElementById('tokens').textContent").replace("·", "")
    assert "naïve" in shown and "🙂" in shown  # characters of several tokens
    speed = browser.run("return document.getElementById('speed').textContent")
    assert f"24 tokens after {answer['usage']['prompt_tokens']} of the prompt" in speed and "(length)" in speed

    place = answer["usage"]["prompt_tokens"] + 1
    box = browser.run(f"const b = tokens[{place}].span.getBoundingClientRect(); return [b.x + 2, b.y + b.height / 2]")
    browser.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    browser.wait("!document.getElementById('detail').hidden")
    rows = browser.run(
        "return [...document.getElementById('alternatives').rows].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert len(rows) == len(choice["logprobs"]["top_logprobs"][place]) and sum(row[0] == "▸" for row in rows) == 1
    layers = browser.run(
        "return [...document.querySelectorAll('#layers tr')]"
        ".map(row => [...row.querySelectorAll('i')].map(one => +one.textContent))"
    )
    assert layers == (choice["experts"][place] if is_moe else [])
    assert browser.run("return document.getElementById('load').hidden") is not is_moe

    for width in (360, 1200):
        for scheme in ("light", "dark"):
            browser.show(width, scheme)
            browser.picture(tmp_path / f"page_{'moe' if is_moe else 'dense'}_{width}_{scheme}.png")
            overflow = browser.run("const d = document.documentElement; return d.scrollWidth - d.clientWidth")
            assert overflow <= 0, f"the page is wider than {width} pixels"
    assert browser.call("se/log", type="browser") == [], "the console has no errors"


def test_an_error_is_shown_and_stop_ends_a_request(served: Served, browser: Browser) -> None:
    browser.call("url", url=f"{served.url}/")
    browser.wait("model")
    browser.run(
        "document.getElementById('temperature').value = -1; document.getElementById('go').form.noValidate = true"
    )
    browser.run("document.getElementById('go').click()")
    browser.wait("document.getElementById('error').textContent")
    assert "temperature=-1" in browser.run("return document.getElementById('error').textContent")
    browser.fill(OPTIONS | {"max_tokens": 500})
    browser.run("document.getElementById('go').click()")
    browser.wait("tokens.length > 20")
    browser.run("document.getElementById('stop').click()")
    browser.wait("!document.getElementById('go').disabled")
    served.wait_until_idle()
    assert 20 < browser.run("return tokens.length") < 490
    assert browser.run("return document.getElementById('error').textContent") == ""
    browser.call("se/log", type="browser")  # the 400 above
