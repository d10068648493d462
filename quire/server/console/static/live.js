// Live: totals, blocks with their owners, the last steps, and every request with the reason why it waits.

import { makeBlockMap } from "./blocks.js";
import { fill, h, legend, say, tiles } from "./dom.js";
import { count, counted, duration, percent } from "./format.js";
import { makeRequestTable } from "./request_table.js";
import { makeSteps } from "./steps.js";
import { live } from "./stream.js";

/** @typedef {import("./replica.js").Replica} Replica */

const TABLE_MS = 250; // between two drawings of the table: text that changes faster cannot be read
const TILES = ["Running", "Waiting", "Blocks in use", "Tokens/s", "Step", "Predicted / actual", "Prompt cached", "Preemptions"];

/** @returns {import("./main.js").Screen} */
export function makeLive() {
  let shown = 0; // the replica
  let isVisible = false;
  let tableTimer = 0;
  const replicaOf = () => live.replicas.get(shown);
  const openRequest = (/** @type {string} */ id) => (location.hash = `#request/${encodeURIComponent(id)}`);
  const totals = tiles(TILES);
  const blocks = makeBlockMap(replicaOf, openRequest);
  const steps = makeSteps(() => replicaOf()?.steps ?? []);
  const table = makeRequestTable((number) => blocks.highlight(number));
  const replicas = h("div", { class: "tabs", role: "group", "aria-label": "Replicas", hidden: true });
  const notice = h("p", { class: "notice", role: "status", hidden: true });
  const caption = h("p", { class: "dim" });

  function update() {
    if (!isVisible) return;
    const replica = replicaOf() ?? live.replicas.values().next().value;
    showReplicas();
    showNotice(replica);
    if (!replica?.engine) return;
    totals.set(figures(replica));
    say(caption, describeEngine(replica));
    blocks.redraw();
    steps.redraw();
    if (!tableTimer) {
      tableTimer = setTimeout(() => {
        tableTimer = 0;
        const current = replicaOf();
        if (isVisible && current) table.update(current);
      }, TABLE_MS);
    }
  }

  /** @param {Replica | undefined} replica */
  function showNotice(replica) {
    notice.hidden = !replica || replica.ready;
    say(notice, notice.hidden ? "" : "The engine of this replica is being started again; its requests go on from their last token.");
  }

  function showReplicas() {
    const numbers = [...live.replicas.keys()].sort((a, b) => a - b);
    replicas.hidden = numbers.length < 2;
    if (replicas.hidden || replicas.childElementCount === numbers.length) return markReplica();
    fill(replicas, numbers.map((number) => h("button", { type: "button", onclick: () => chooseReplica(number) }, `Replica ${number}`)));
    markReplica();
  }

  function markReplica() {
    [...replicas.children].forEach((button, index) => {
      const replica = live.replicas.get(index);
      button.setAttribute("aria-pressed", String(index === shown));
      say(button, `Replica ${index} · ${replica?.ready ? counted(replica.numRunning, "request") : "starting"}`);
    });
  }

  /** @param {number} number */
  function chooseReplica(number) {
    shown = number;
    update();
    const replica = replicaOf();
    if (replica) table.update(replica);
  }

  const element = h(
    "div",
    { class: "screen" },
    h("header", null, h("h1", null, "Live"), caption, replicas),
    notice,
    totals.element,
    section("Blocks", blocks.element, legend([["owners", "in use, a colour each request"], ["shared", "shared"], ["cached", "cached"], ["free", "free"]])),
    section("Steps", steps.element, legend([["prompt", "prompt tokens"], ["decode", "decoded"], ["draft", "drafts"], ["cached", "time"], ["line", "predicted"]])),
    section("Requests", table.element)
  );
  live.changed.watch(update);
  live.connection.watch(update);
  return {
    element,
    show: () => {
      isVisible = true;
      update();
    },
    hide: () => (isVisible = false),
  };
}

/** A panel with a heading. @param {string} title @param {HTMLElement} content @param {HTMLElement} [beside] */
export function section(title, content, beside) {
  return h("section", { class: "panel", "aria-label": title }, h("header", null, h("h2", null, title), beside), content);
}

/**
 * Totals are those of all replicas; blocks and steps are those of the replica that is shown.
 * @param {Replica} replica
 */
function figures(replica) {
  const { totals } = live;
  const timed = replica.steps.slice(-50).filter((step) => step.seconds !== null);
  const sum = (/** @type {(step: import("./replica.js").Step) => number | null} */ value) => timed.reduce((all, step) => all + (value(step) ?? 0), 0);
  const predicted = timed.every((step) => step.predicted_s !== null) && timed.length;
  const used = replica.states.length ? 1 - replica.numFree / replica.states.length : 0;
  return {
    Running: count(totals.requests_running ?? 0),
    Waiting: count(totals.requests_waiting ?? 0),
    "Blocks in use": percent(used),
    "Tokens/s": count(live.rate("output_tokens_total")),
    Step: timed.length ? duration(sum((step) => step.seconds) / timed.length) : "–",
    "Predicted / actual": predicted ? percent(sum((step) => step.predicted_s) / sum((step) => step.seconds)) : "–",
    "Prompt cached": totals.prompt_tokens_total ? percent(totals.cached_prompt_tokens_total / totals.prompt_tokens_total) : "–",
    Preemptions: count(totals.preemptions_total ?? 0),
  };
}

/** @param {Replica} replica */
function describeEngine(replica) {
  const engine = /** @type {import("./replica.js").Engine} */ (replica.engine);
  return (
    `${count(engine.num_blocks)} blocks of ${engine.block_size} tokens, at most ${counted(engine.max_requests, "request")} and ` +
    `${counted(engine.max_tokens_per_step, "token")} in a step, ${engine.batching} batching, ${engine.device}`
  );
}
