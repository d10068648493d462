// Batching: the same arrivals under three policies, simulated on the server, and measured on its engine.

import { ApiError, events, json, request } from "./api.js";
import { h, legend, say, slider, tiles } from "./dom.js";
import { count, counted, duration, percent } from "./format.js";
import { makeGantt } from "./gantt.js";
import { section } from "./live.js";
import { errorOf } from "./roofline.js";
import { live } from "./stream.js";

const WAIT_MS = 120; // after the last movement of a slider
const MISSING_MS = 2000;
const POLICIES = {
  static: ["Static", "A batch is what waits when the last one has ended. Nobody joins it."],
  dynamic: ["Dynamic", "A batch starts when it is full, or when its oldest request has waited long enough."],
  continuous: ["Continuous", "Requests join and leave at every step."],
};
const FIGURES = ["Tokens/s", "First token", "Whole answer", "95th percentile", "Rows a step", "All done"];

/** @returns {import("./main.js").Screen} */
export function makeBatching() {
  let timer = 0, number = 0, isVisible = false;
  let running = /** @type {AbortController | null} */ (null);
  let load = /** @type {Record<string, number> | null} */ (null); // that the charts show
  const change = () => {
    clearTimeout(timer);
    timer = setTimeout(simulate, WAIT_MS);
  };
  const sliders = {
    rate: slider({ label: "Requests a second", min: 0.5, max: 100, value: 8, logarithmic: true, change }),
    num_requests: slider({ label: "Requests", min: 4, max: 64, value: 32, change }),
    prompt_tokens: slider({ label: "Prompt tokens", min: 8, max: 2048, value: 128, logarithmic: true, change }),
    output_tokens: slider({ label: "Answer tokens, in the mean", min: 4, max: 256, value: 48, logarithmic: true, change }),
    spread: slider({ label: "Spread of answers", min: 0, max: 1.5, value: 0.8, step: 0.1, show: (value) => value.toFixed(1), change }),
    batch_size: slider({ label: "Batch (static, dynamic)", min: 1, max: 64, value: 8, change }),
    batch_wait_s: slider({ label: "Longest wait (dynamic)", min: 0, max: 2, value: 0.5, step: 0.05, show: duration, change }),
    seed: slider({ label: "Seed", min: 0, max: 99, value: 0, change }),
  };
  const charts = Object.entries(POLICIES).map(([name, [title, text]]) => makeChart(name, title, text));
  const notice = h("p", { class: "notice", role: "status", hidden: true });
  const caption = h("p", { class: "dim" });
  const button = h("button", { type: "button", class: "primary", onclick: () => (running ? running.abort() : runLive()) }, "Run it live");
  const result = h("p", { class: "dim", role: "status" });

  function fields() {
    return Object.fromEntries(Object.entries(sliders).map(([name, each]) => [name, each.value]));
  }

  async function simulate() {
    const mine = ++number, given = fields();
    try {
      const engine = await live.refreshEngine();
      if (engine.no_profile) return showMissing(engine.no_profile);
      const most = engine.max_requests;
      const comparison = await json("console/batching", { body: { ...given, batch_size: Math.min(given.batch_size, most) } });
      if (mine !== number) return;
      notice.hidden = true;
      show(comparison);
      load = given;
    } catch (error) {
      if (mine !== number) return;
      notice.hidden = false;
      say(notice, error instanceof ApiError ? error.message : String(error));
    }
  }

  /** The costs are not known yet: look again. @param {string} text */
  function showMissing(text) {
    notice.hidden = false;
    say(notice, text);
    timer = setTimeout(() => isVisible && simulate(), MISSING_MS);
  }

  /** @param {any} comparison */
  function show(comparison) {
    const endS = Math.max(...Object.values(comparison.policies).map((/** @type {any} */ policy) => policy.end_s));
    for (const chart of charts) chart.set(comparison.policies[chart.name], endS);
    overlay([]);
    say(result, "");
    say(caption, `Simulated in ${duration(comparison.seconds)} with the costs of this machine's steps. ${errorOf(comparison.step_error)}`);
  }

  /** @param {import("./gantt.js").Measured[]} given */
  function overlay(given) {
    for (const chart of charts) chart.overlay(chart.name === livePolicy() ? given : []);
  }

  /** The chart that a live run belongs to. */
  function livePolicy() {
    const batching = live.engine.value?.batching ?? "continuous";
    return batching in POLICIES ? batching : "continuous";
  }

  async function runLive() {
    const { batch_size: _, batch_wait_s: __, ...sent } = load ?? fields();
    const spans = Array.from({ length: sent.num_requests }, () => /** @type {import("./gantt.js").Measured} */ ({}));
    const mine = number;
    let failed = 0, failure = "";
    running = new AbortController();
    button.textContent = "Stop";
    say(result, "Running…");
    try {
      for await (const event of events(await request("console/batching/run", { body: sent, signal: running.signal }))) {
        if (event.kind === "failed") [failed, failure] = [failed + 1, event.message];
        else spans[event.number][event.kind === "first" ? "firstS" : "endS"] = event.at_s;
        if (mine === number) overlay(spans);
        say(result, `Running: ${spans.filter((span) => span.endS !== undefined).length} of ${counted(spans.length, "request")} ended.`);
      }
      if (failed) say(result, `${counted(failed, "request")} failed: ${failure}`);
      else if (mine !== number || !load) say(result, `Measured in ${duration(Math.max(...spans.map((span) => span.endS ?? 0)))}.`);
      else say(result, compareEnds(spans));
    } catch (error) {
      say(result, running.signal.aborted ? "Stopped." : error instanceof Error ? error.message : String(error));
    }
    running = null;
    button.textContent = "Run it live";
  }

  /** @param {import("./gantt.js").Measured[]} spans */
  function compareEnds(spans) {
    const chart = /** @type {ReturnType<typeof makeChart>} */ (charts.find((each) => each.name === livePolicy()));
    const offs = chart.requests.map(([arrival, , , end], index) => Math.abs((end - arrival) / ((spans[index].endS ?? NaN) - arrival) - 1));
    const middle = offs.filter(Number.isFinite).sort((a, b) => a - b)[Math.floor(offs.length / 2)];
    const engine = live.engine.value?.batching;
    const about = engine && !(engine in POLICIES) ? ` This server batches by ${engine}, which none of the charts shows.` : "";
    const seconds = Math.max(...spans.map((span) => span.endS ?? 0));
    return `Measured in ${duration(seconds)}: the simulated times of whole answers are ${percent(middle)} off in the median.${about}`;
  }

  const marks = legend([["wait", "waits"], ["prompt", "prompt"], ["decode", "answer"], ["measured", "measured"]]);
  return {
    element: h(
      "div",
      { class: "screen" },
      h("header", null, h("h1", null, "Batching"), caption),
      section("Load", h("div", { class: "controls" }, Object.values(sliders).map((each) => each.element))),
      notice,
      h("div", { class: "buttons" }, button, result, h("span", { class: "right" }, marks)),
      h("div", { class: "policies" }, charts.map((chart) => chart.element))
    ),
    show() {
      isVisible = true;
      if (!load) simulate();
    },
    hide() {
      isVisible = false;
    },
  };
}

/** @param {string} name @param {string} title @param {string} text */
function makeChart(name, title, text) {
  const gantt = makeGantt(`${title} batching`), figures = tiles(FIGURES);
  figures.element.classList.add("small");
  const element = section(title, h("div", { class: "policy" }, h("p", { class: "dim explained" }, text), gantt.element, figures.element));
  const chart = {
    name,
    element,
    requests: /** @type {import("./gantt.js").Span[]} */ ([]),
    overlay: gantt.overlay,
    /** @param {any} policy @param {number} endS */
    set(policy, endS) {
      chart.requests = policy.requests;
      gantt.set(policy.requests, endS);
      figures.set({
        "Tokens/s": count(policy.output_tokens_per_s),
        "First token": duration(policy.ttft_mean_s),
        "Whole answer": duration(policy.e2e_mean_s),
        "95th percentile": duration(policy.e2e_p95_s),
        "Rows a step": policy.mean_rows.toFixed(1),
        "All done": duration(policy.end_s),
      });
    },
  };
  return chart;
}
