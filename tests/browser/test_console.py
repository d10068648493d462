"""The console in a real browser, on a made-up engine whose every text is hostile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.server.console.page import FOLDER
from tests.browser.fake_engine import HOSTILE, FakeServer

pytestmark = pytest.mark.browser

SCREENS = ("live", "request/abc", "cache", "batching", "plan", "chat")
MAX_BYTES = 150_000
DRAWINGS = "() => [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"
PLACE_OF_A_LONG_REQUEST = """async () => {
    const { live } = await import('./console/static/stream.js');
    const { layOut } = await import('./console/static/blocks.js');
    const replica = live.replicas.get(0), left = (row) => row.max_tokens - row.output_tokens;
    const row = replica.running.filter((each) => each.own && each.blocks).sort((a, b) => left(b) - left(a))[0];
    const grid = layOut(replica.states.length, document.querySelector('canvas.blocks').clientWidth);
    const block = replica.owners.indexOf(row.number);
    return [Math.floor(block / grid.columns), block % grid.columns];
}"""


def send(page, text="Hello"):
    page.fill("#chat-input", text)
    page.press("#chat-input", "Enter")
    page.wait_for_selector("text=Show me in the engine")


def test_the_page_is_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES


@pytest.mark.parametrize("width", [390, 1280])
def test_every_screen_works_and_runs_nothing_of_others(visit, width):
    """No error, no request to another host, no markup from texts, and nothing is wider than the window."""
    with visit(FakeServer(), viewport={"width": width, "height": 800}) as seen:
        for screen in SCREENS:
            page = seen.open(screen)
            if screen == "chat":
                send(page)
            page.wait_for_selector("#connection[data-state=live]")
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, screen
            assert not seen.is_hacked(), screen
        assert seen.errors == []
        assert seen.outside == []
        assert page.inner_text("#model") == HOSTILE


def test_an_idle_engine_makes_no_tokens_a_second(visit):
    """Only pings come from it: the rate of its last busy seconds must not stay."""
    with visit(FakeServer()) as seen:
        page = seen.open("live")
        page.wait_for_selector("#connection[data-state=live]")
        page.wait_for_timeout(500)
        busy, idle = page.evaluate("""async () => {
            const { live } = await import('./console/static/stream.js');
            live.stop();
            const busy = live.rate('output_tokens_total'), lastS = live.history.at(-1).timeS;
            for (const passed of [2, 4, 6]) live.apply({ type: 'ping', time_s: lastS + passed });
            return [busy, live.rate('output_tokens_total')];
        }""")
        assert busy > 0
        assert idle == 0


def test_blocks_are_drawn_in_the_colour_of_their_state(visit):
    """The first block of the made-up engine is cached, the last one free: read from the canvas."""
    with visit(FakeServer(num_blocks=600), viewport={"width": 1280, "height": 800}) as seen:
        page = seen.open("live")
        page.wait_for_function("document.querySelector('canvas.blocks').clientHeight > 20")
        page.wait_for_timeout(400)
        pixels = page.evaluate(
            """async () => {
                const { live } = await import('./console/static/stream.js');
                const { layOut } = await import('./console/static/blocks.js');
                const canvas = document.querySelector('canvas.blocks'), pen = canvas.getContext('2d');
                const replica = live.replicas.get(0), grid = layOut(replica.states.length, canvas.clientWidth);
                const color = (name) => getComputedStyle(canvas).getPropertyValue(name);
                const wanted = { 0: color('--free'), 1: color('--cached') };
                const found = [];
                for (let block = 0; block < replica.states.length; block++) {
                    const x = (block % grid.columns) * grid.size + 2;
                    const y = Math.floor(block / grid.columns) * grid.size + 2;
                    const [r, g, b] = pen.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data;
                    found.push([replica.states[block], `rgb(${r}, ${g}, ${b})`, wanted[replica.states[block]]]);
                }
                return found;
            }"""
        )
        assert len(pixels) == 600
        assert {state for state, _, _ in pixels} >= {1, 2}
        plain = [(color, wanted) for state, color, wanted in pixels if state < 2]
        assert all(color == wanted for color, wanted in plain)
        owners = {color for state, color, _ in pixels if state == 2}
        assert len(owners) > 3
        assert not owners & {wanted for _, wanted in plain}


def test_the_keyboard_alone_reaches_a_request_through_its_block(visit):
    with visit(FakeServer()) as seen:
        page = seen.open("live")
        page.wait_for_selector("tbody tr")
        page.focus("canvas.blocks")
        rows, columns = page.evaluate(PLACE_OF_A_LONG_REQUEST)
        page.keyboard.press("Home")
        for key, times in (("ArrowDown", rows), ("ArrowRight", columns)):
            for _ in range(times):
                page.keyboard.press(key)
        assert "in use, by <img" in page.get_attribute("canvas.blocks", "aria-valuetext")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=From token 512 on")
        assert page.url.split("#")[1].startswith("request/")
        assert not seen.is_hacked()


def test_a_missing_key_is_asked_for_and_never_enters_an_address(visit):
    with visit(FakeServer(key="secret-key")) as seen:
        addresses = []
        seen.page.on("request", lambda request: addresses.append(request.url))
        page = seen.open("live")
        page.wait_for_selector("dialog[open]")
        page.keyboard.type("wrong-key")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open] >> text=does not accept this key")
        page.fill("#key-input", "secret-key")
        page.keyboard.press("Enter")
        page.wait_for_selector("#connection[data-state=live]")
        page.wait_for_selector("tbody tr")
        assert not any("key=" in address or "secret" in address for address in addresses)
        assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_a_dropped_stream_is_opened_again_and_the_page_says_so(visit):
    fake = FakeServer(drops=2)
    with visit(fake) as seen:
        page = seen.open("live")
        page.wait_for_selector("#connection[data-state=lost]")
        assert "trying again in" in page.inner_text("#connection")
        page.wait_for_selector("#connection[data-state=live]")
        page.wait_for_timeout(600)
        assert fake.num_streams == 3
        assert page.inner_text("#connection") == "live"


def test_a_chat_sends_its_settings_and_shows_probabilities(visit):
    fake = FakeServer()
    with visit(fake) as seen:
        page = seen.open("chat")
        assert page.get_attribute("input[name=temperature]", "placeholder") in (None, "0.2")
        page.fill("input[name=temperature]", "0.5")
        page.fill("input[name=seed]", "7")
        page.fill(".settings textarea >> nth=0", "Be brief.")
        page.click("summary >> text=Length and stopping")
        page.fill("textarea[name=stop]", "\n".join(("one", "two")))
        send(page)
        (body,) = fake.bodies
        assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        wanted = {"temperature": 0.5, "seed": 7, "stop": ["one", "two"], "logprobs": True, "stream": True}
        assert {name: body[name] for name in wanted} == wanted
        assert not {"n", "top_p", "min_tokens"} & body.keys()
        page.focus(".answer .text")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert "instead:" in page.inner_text(".answer .facts >> nth=0")
        page.click("text=Colour tokens by their probability")
        page.wait_for_selector(".answer pre")
        assert page.inner_text(".answer pre") == "<b>code</b>"
        assert page.inner_text(".answer .text").startswith(HOSTILE)
        page.click("text=Retry")
        page.wait_for_selector("text=Show me in the engine")
        assert fake.bodies[1]["messages"] == body["messages"]
        assert not seen.is_hacked()
        assert seen.errors == []


def test_a_setting_that_cannot_be_read_is_not_sent(visit):
    fake = FakeServer()
    with visit(fake) as seen:
        page = seen.open("chat")
        page.fill("input[name=temperature]", "warm")
        page.fill("#chat-input", "Hello")
        page.press("#chat-input", "Enter")
        page.wait_for_selector("text=warm is not a number")
        assert fake.bodies == []


def test_batching_draws_three_policies_and_lays_a_live_run_over_one(visit):
    with visit(FakeServer()) as seen:
        page = seen.open("batching")
        page.wait_for_selector("text=Simulated in")
        figures = page.eval_on_selector_all(".policy dd", "all => all.map((each) => each.textContent)")
        speeds = [float(text) for text in figures[::6]]
        assert len(speeds) == 3
        assert speeds[2] > max(speeds[:2])
        before = page.evaluate(DRAWINGS)
        page.click("text=Run it live")
        page.wait_for_selector("text=off in the median >> nth=1")
        page.wait_for_timeout(100)
        after = page.evaluate(DRAWINGS)
        assert after[:2] == before[:2]
        assert after[2] != before[2]
        page.focus("canvas >> nth=2")
        page.keyboard.press("ArrowDown")
        assert "Measured: first token" in page.get_attribute("canvas >> nth=2", "aria-valuetext")
        assert seen.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit, scheme):
    """axe-core is no dependency: $QUIRE_AXE names its axe.min.js."""
    path = os.environ.get("QUIRE_AXE")
    if not path:
        pytest.skip("QUIRE_AXE does not name axe.min.js")
    source = Path(path).read_text()
    with visit(FakeServer(), color_scheme=scheme) as seen:
        for screen in SCREENS:
            page = seen.open(screen)
            if screen == "chat":
                send(page)
            page.wait_for_timeout(500)
            page.evaluate(source)
            result = page.evaluate("axe.run(document)")
            found = [(each["id"], [node["html"][:160] for node in each["nodes"][:3]]) for each in result["violations"]]
            assert found == [], screen
