// One request's life: its queue, the chunks of its prompt, its answer, preemptions, and what the cache had of it.

import { ApiError, json } from "./api.js";
import { fill, h, say } from "./dom.js";
import { makeLife } from "./life.js";
import { live } from "./stream.js";

/** @typedef {import("./life.js").Life} Life */

const REFRESH_MS = 500;
const PAST = new Set(["ended", "unknown"]); // states that do not change any more
const HINT = "Choose a request on the Live screen, or enter the x-request-id of a response. Lives are recorded while a console is open.";

/** @returns {import("./main.js").Screen} */
export function makeRequest() {
  const input = /** @type {HTMLInputElement} */ (
    h("input", { type: "text", class: "mono", autocomplete: "off", spellcheck: "false", placeholder: "x-request-id" })
  );
  const label = h("label", { class: "grow" }, h("span", { class: "visually-hidden" }, "Request id"), input);
  const lookup = h("form", { class: "lookup", onsubmit: submit }, label, h("button", { type: "submit" }, "Show"));
  const recent = h("p", { class: "facts" });
  const lives = h("div", { class: "screen" });
  const notice = h("p", { class: "empty", role: "status" });
  const element = h("div", { class: "screen" }, h("header", null, h("h1", null, "Request")), lookup, recent, notice, lives);
  /** @type {Map<string, ReturnType<typeof makeLife>>} */
  let shown = new Map();
  let wanted = "", timer = 0, isVisible = false;

  function submit(/** @type {SubmitEvent} */ event) {
    event.preventDefault();
    if (input.value.trim()) location.hash = `#request/${encodeURIComponent(input.value.trim())}`;
  }

  function showRecent() {
    const rows = [...live.replicas.values()].flatMap((replica) => [...replica.requests.values()]).filter((row) => row.id);
    const newest = rows.sort((a, b) => b.arrived_s - a.arrived_s).slice(0, 6);
    const links = newest.map((row) => h("a", { class: "mono", href: `#request/${encodeURIComponent(/** @type {string} */ (row.id))}` }, row.id));
    fill(recent, links.length ? "Now in the engine:" : "", links);
  }

  async function load() {
    clearTimeout(timer);
    const id = wanted;
    if (!id || !isVisible) return;
    try {
      const { requests } = await json(`console/requests/${encodeURIComponent(id)}`);
      if (id !== wanted) return;
      showLives(requests);
      if (requests.some((/** @type {Life} */ each) => !PAST.has(each.state))) timer = setTimeout(load, REFRESH_MS);
    } catch (error) {
      if (id !== wanted) return;
      fill(lives);
      shown.clear();
      say(notice, error instanceof ApiError ? error.message : String(error));
    }
  }

  /** @param {Life[]} requests */
  function showLives(requests) {
    say(notice, "");
    const kept = new Map(requests.map((each) => [each.id, shown.get(each.id) ?? makeLife()]));
    if ([...kept.keys()].join() !== [...shown.keys()].join()) fill(lives, [...kept.values()].map((life) => life.element));
    shown = kept;
    for (const each of requests) kept.get(each.id)?.set(each);
  }

  return {
    element,
    show(argument) {
      isVisible = true;
      showRecent();
      if (argument !== wanted) {
        wanted = input.value = argument;
        fill(lives);
        shown.clear();
      }
      say(notice, wanted ? "" : HINT);
      load();
    },
    hide() {
      isVisible = false;
      clearTimeout(timer);
    },
  };
}
