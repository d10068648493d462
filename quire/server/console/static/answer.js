// One answer: its text with code blocks, or its tokens coloured by probability, and the figures under it.

import { fill, h } from "./dom.js";
import { count, counted, duration } from "./format.js";

/**
 * @typedef {{token: string, logprob: number, bytes: number[] | null, top_logprobs: {token: string, logprob: number}[]}} TokenLogprob
 * @typedef {{text?: string, tokens?: number, logprobs?: TokenLogprob[] | null, finish?: string | null}} Piece
 */

// The least probability of the classes .p0 to .p5.
const LEAST = [0.9, 0.6, 0.3, 0.1, 0.02, 0];
const MAX_OTHERS = 4;

export class Answer {
  /** @param {boolean} isColored */
  constructor(isColored) {
    this.text = "";
    this.numTokens = 0;
    this.finish = /** @type {string | null} */ (null);
    this.isColored = isColored;
    /** @type {TokenLogprob[]} */
    this.tokens = [];
    /** @type {string[]} */
    this.texts = []; // of the tokens
    /** @type {(Node | string | null)[]} */
    this.more = []; // figures that are known at the end
    this.chosen = -1;
    this.due = false;
    this.decoder = new TextDecoder();
    this.startMs = performance.now();
    this.firstMs = this.lastMs = 0;
    this.body = h("div", { class: "text" });
    this.readout = h("p", { class: "facts", "aria-live": "polite" });
    this.facts = h("p", { class: "facts" });
    this.element = h("div", { class: "answer" }, this.body, this.readout, this.facts);
    this.body.addEventListener("pointerover", (event) => {
      const index = /** @type {HTMLElement} */ (event.target).dataset.index;
      if (index !== undefined) this.select(Number(index));
    });
    this.body.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !this.body.dataset.colored) return;
      event.preventDefault();
      this.select(Math.max(0, this.chosen + step));
    });
  }

  /** @param {Piece} piece */
  push(piece) {
    this.lastMs = performance.now();
    if (!this.firstMs && (piece.text || piece.tokens)) this.firstMs = this.lastMs;
    this.text += piece.text ?? "";
    this.numTokens += piece.tokens ?? 0;
    this.finish = piece.finish ?? this.finish;
    for (const token of piece.logprobs ?? []) {
      this.tokens.push(token);
      // A character that several tokens make up is shown at the last of them.
      this.texts.push(token.bytes ? this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token);
    }
    this.redraw();
  }

  /** @param {boolean} isColored */
  color(isColored) {
    this.isColored = isColored;
    this.redraw();
  }

  /** @param {(Node | string | null)[]} more */
  end(more) {
    this.more = more;
    this.redraw();
  }

  /** @param {string} message */
  fail(message) {
    this.element.append(h("p", { class: "bad", role: "alert" }, message));
  }

  redraw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      if (this.isColored && this.tokens.length) this.showTokens();
      else this.showText();
      this.showFacts();
    });
  }

  showText() {
    this.select(-1);
    delete this.body.dataset.colored;
    this.body.removeAttribute("tabindex");
    fill(this.body, splitCode(this.text).map(({ text, isCode }) => (isCode ? h("pre", { tabindex: "0" }, text) : text)));
  }

  /** Tokens that are shown stay; new ones are added. */
  showTokens() {
    if (!this.body.dataset.colored) fill(this.body);
    this.body.dataset.colored = "yes";
    this.body.tabIndex = 0;
    for (let index = this.body.children.length; index < this.tokens.length; index++) {
      const shade = LEAST.findIndex((least) => Math.exp(this.tokens[index].logprob) >= least);
      this.body.append(h("span", { class: `token p${shade}`, "data-index": index }, this.texts[index]));
    }
  }

  /** Say how likely a token was, and what else could have come. @param {number} index */
  select(index) {
    this.body.children[this.chosen]?.classList.remove("chosen");
    this.chosen = Math.min(this.tokens.length - 1, index);
    if (this.chosen < 0) return fill(this.readout);
    this.body.children[this.chosen]?.classList.add("chosen");
    const token = this.tokens[this.chosen];
    const others = token.top_logprobs.filter((each) => each.token !== token.token).slice(0, MAX_OTHERS).map(describe);
    fill(this.readout, h("b", null, describe(token)), others.length ? h("span", null, `instead: ${others.join(", ")}`) : "");
  }

  showFacts() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const speed = this.numTokens > 1 && seconds > 0 ? (this.numTokens - 1) / seconds : null;
    const figures = [
      counted(this.numTokens, "token"),
      this.firstMs ? `first after ${duration((this.firstMs - this.startMs) / 1000)}` : null,
      this.finish ? `ended: ${this.finish}` : null,
      ...this.more,
    ];
    fill(
      this.facts,
      speed === null ? null : h("span", null, h("b", null, speed.toFixed(speed < 100 ? 1 : 0)), " tokens/s"),
      figures.map((each) => (typeof each === "string" ? h("span", null, each) : each))
    );
  }
}

/** @param {{token: string, logprob: number}} token */
function describe({ token, logprob }) {
  const percent = 100 * Math.exp(logprob);
  const text = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return `“${text}” ${percent >= 10 ? percent.toFixed(0) : percent >= 0.1 ? percent.toFixed(1) : "<0.1"}%`;
}

/** Text outside and inside of code fences. An open fence lasts to the end. @param {string} text */
export function splitCode(text) {
  const parts = [];
  let rest = text;
  for (;;) {
    const open = /(^|\n)```[^\n]*\n/.exec(rest);
    if (!open) break;
    const begin = open.index + open[0].length, close = /\n```[ \t]*(?=\n|$)/.exec(rest.slice(begin - 1));
    parts.push({ text: rest.slice(0, open.index + open[1].length), isCode: false });
    const end = close ? begin - 1 + close.index : rest.length;
    parts.push({ text: rest.slice(begin, Math.max(begin, end)), isCode: true });
    rest = close ? rest.slice(end + close[0].length).replace(/^\n/, "") : "";
  }
  return [...parts, { text: rest, isCode: false }].filter((part) => part.text || part.isCode);
}

/** How the prompt and the drafts went. @param {any} usage */
export function usageFacts(usage) {
  const cached = usage?.prompt_tokens_details?.cached_tokens, details = usage?.completion_tokens_details ?? {};
  const drafted = (details.accepted_prediction_tokens ?? 0) + (details.rejected_prediction_tokens ?? 0);
  return [
    usage ? `prompt of ${counted(usage.prompt_tokens, "token")}, ${count(cached ?? 0)} from the cache` : null,
    drafted ? `${count(details.accepted_prediction_tokens)} of ${counted(drafted, "draft")} accepted` : null,
    details.early_exit_tokens ? `${counted(details.early_exit_tokens, "token")} from the exit` : null,
  ];
}
