"""The console's page: its bytes, its first paint, and frames a second of the block map while every block changes.

    python benchmarks/console_page.py [--blocks 50000]

It drives headless Chromium on a made-up engine, so it needs playwright and chromium, and no model. Frames are those of
software rendering on the CPU: a GPU is faster.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics

from playwright.sync_api import Page, sync_playwright

from quire.server.console.page import FOLDER
from tests.browser.conftest import FLAGS
from tests.browser.fake_engine import FakeServer, serving

SECONDS = 5
# Every block changes its state or owner before each frame: far more than a stream of ten lines a second brings.
FRAMES = """async (seconds) => {
    const { live } = await import('./console/static/stream.js');
    live.stop();
    const replica = live.replicas.get(0), times = [], end = performance.now() + 1000 * seconds;
    let number = 0;
    while (performance.now() < end) {
        for (let block = 0; block < replica.states.length; block++) {
            replica.states[block] = 2;
            replica.owners[block] = 1 + ((block + number) % 64);
        }
        number++;
        live.changed.set(number);
        times.push(await new Promise(requestAnimationFrame));
    }
    return times.slice(1).map((time, index) => time - times[index]);
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=50_000)
    arguments = parser.parse_args()
    with serving(FakeServer(num_blocks=arguments.blocks)) as fake, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        paints = [first_paint(browser.new_page(), fake.url) for _ in range(5)]
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{fake.url}/console#live")
        page.wait_for_selector("tbody tr")
        frames = page.evaluate(FRAMES, SECONDS)
        browser.close()
    print(
        json.dumps(
            {
                "bytes": sum(path.stat().st_size for path in FOLDER.iterdir()),
                "first_paint_ms": {"median": statistics.median(paints), "max": max(paints)},
                "blocks": arguments.blocks,
                "frames_per_s": 1000 * len(frames) / sum(frames),
                "slowest_frame_ms": max(frames),
            }
        )
    )


def first_paint(page: Page, url: str) -> float:
    """Milliseconds from navigation to the first contentful paint, with an empty cache."""
    page.goto(f"{url}/console#live")
    page.wait_for_selector("main h1")
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
    return float(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))


if __name__ == "__main__":
    main()
