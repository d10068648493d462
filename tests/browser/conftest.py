"""A browser for the console's tests: Debian's Chromium, driven by playwright. Without either the tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.browser.fake_engine import FakeServer, serving

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed with its module: while it is open, playwright's event loop runs in this thread, and no other one can."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield browser
        browser.close()


class Visit:
    """A page of the console. It notes errors, requests to other hosts, and whether markup of others was run."""

    def __init__(self, page: Any, fake: FakeServer) -> None:
        self.page = page
        self.fake = fake
        self.errors: list[str] = []
        self.outside: list[str] = []
        page.on("console", self._on_message)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._on_request)

    def _on_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(self.fake.url):
            self.outside.append(request.url)

    def open(self, screen: str) -> Any:
        self.page.goto(f"{self.fake.url}/console#{screen}")
        self.page.wait_for_selector("main h1")
        return self.page

    def is_hacked(self) -> bool:
        script = "'hacked' in window || document.querySelectorAll('main img, main script').length > 0"
        return bool(self.page.evaluate(script))


@pytest.fixture
def visit(browser: Any) -> Any:
    @contextmanager
    def make(fake: FakeServer, **options: Any) -> Iterator[Visit]:
        with serving(fake):
            context = browser.new_context(**options)
            context.set_default_timeout(15_000)
            try:
                yield Visit(context.new_page(), fake)
            finally:
                context.close()

    return make
