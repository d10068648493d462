// Chat: a conversation with every setting of the server, and the figures of each answer.

import { events, request } from "./api.js";
import { Answer, usageFacts } from "./answer.js";
import { makeSettings } from "./chat_settings.js";
import { fill, h, legend } from "./dom.js";
import { live } from "./stream.js";

/**
 * @typedef {{user: string, answers: Answer[], used: number, element: HTMLElement, place: HTMLElement}} Exchange
 */

/** @returns {import("./main.js").Screen} */
export function makeChat() {
  const settings = makeSettings();
  const talk = h("div", { class: "talk" });
  const empty = h("p", { class: "empty" }, "Ask something. Every answer shows its speed, and how sure the model was of each token.");
  const hint = "Message. Enter sends, Shift+Enter starts a new line.";
  const input = /** @type {HTMLTextAreaElement} */ (
    h("textarea", { id: "chat-input", rows: 2, placeholder: hint, "aria-label": "Message", onkeydown: onKey })
  );
  const send = /** @type {HTMLButtonElement} */ (h("button", { type: "submit", class: "primary" }, "Send"));
  const colors = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", checked: true, onchange: recolor }));
  const clear = h("button", { type: "button", onclick: start }, "New chat");
  const composer = /** @type {HTMLFormElement} */ (h("form", { class: "composer", onsubmit: submit }, input, h("div", { class: "buttons" }, send, clear)));
  /** @type {Exchange[]} */
  let exchanges = [];
  let running = /** @type {AbortController | null} */ (null);

  function onKey(/** @type {KeyboardEvent} */ event) {
    if (event.key === "Escape") running?.abort();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    composer.requestSubmit();
  }

  function submit(/** @type {SubmitEvent} */ event) {
    event.preventDefault();
    if (running) return running.abort();
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    ask(text);
  }

  function start() {
    running?.abort();
    exchanges = [];
    fill(talk);
    empty.hidden = false;
    input.focus();
  }

  function recolor() {
    for (const exchange of exchanges) for (const answer of exchange.answers) answer.color(colors.checked);
  }

  /** The conversation before an exchange, as the API wants it. @param {Exchange[]} before @param {string} text */
  function messages(before, text) {
    const system = settings.system();
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before.flatMap((each) => [{ role: "user", content: each.user }, { role: "assistant", content: each.answers[each.used]?.text ?? "" }]),
      { role: "user", content: text },
    ];
  }

  /** @param {string} text */
  function ask(text) {
    const place = h("div", { class: "answers" });
    const exchange = { user: text, answers: /** @type {Answer[]} */ ([]), used: 0, place, element: h("article") };
    const edit = h("button", { type: "button", class: "link", onclick: () => editFrom(exchange) }, "Edit");
    const retry = h("button", { type: "button", class: "link", onclick: () => again(exchange) }, "Retry");
    const head = h("div", { class: "facts" }, h("span", null, "You"), edit, retry);
    exchange.element = h(
      "article",
      { class: "talk" },
      h("div", { class: "message user" }, head, h("div", { class: "text" }, text)),
      h("div", { class: "message" }, place)
    );
    exchanges.push(exchange);
    empty.hidden = true;
    talk.append(exchange.element);
    answerTo(exchange);
  }

  /** Drop an exchange and all behind it. @param {Exchange} exchange */
  function drop(exchange) {
    running?.abort();
    for (const each of exchanges.splice(exchanges.indexOf(exchange))) each.element.remove();
    empty.hidden = exchanges.length > 0;
  }

  /** @param {Exchange} exchange */
  function editFrom(exchange) {
    drop(exchange);
    input.value = exchange.user;
    input.focus();
  }

  /** @param {Exchange} exchange */
  function again(exchange) {
    drop(exchange);
    ask(exchange.user);
  }

  /** @param {Exchange} exchange @param {number} index */
  function answerAt(exchange, index) {
    while (exchange.answers.length <= index) {
      const number = exchange.answers.length, answer = new Answer(colors.checked);
      exchange.answers.push(answer);
      if (number === 1) exchange.place.prepend(usedChooser(exchange, 0));
      if (number) exchange.place.append(usedChooser(exchange, number));
      exchange.place.append(answer.element);
    }
    return exchange.answers[index];
  }

  /** Which of several answers the conversation goes on with. @param {Exchange} exchange @param {number} index */
  function usedChooser(exchange, index) {
    const name = `used-${exchanges.indexOf(exchange)}`;
    const radio = h("input", { type: "radio", name, checked: index === 0, onchange: () => (exchange.used = index) });
    return h("label", { class: "facts" }, radio, `Answer ${index + 1}: go on with it`);
  }

  /** @param {Exchange} exchange */
  async function answerTo(exchange) {
    const mine = (running = new AbortController());
    send.textContent = "Stop";
    let usage = null, id = "";
    try {
      /** @type {Record<string, any>} */
      const body = { ...settings.read(), messages: messages(exchanges.slice(0, -1), exchange.user), return_token_ids: true };
      const isStream = !body.use_beam_search;
      if (isStream) Object.assign(body, { stream: true, stream_options: { include_usage: true } });
      answerAt(exchange, 0);
      const response = await request("v1/chat/completions", { body, signal: mine.signal });
      id = response.headers.get("x-request-id") ?? "";
      for await (const document of isStream ? events(response) : [await response.json()]) {
        usage = document.usage ?? usage;
        for (const choice of document.choices) take(exchange, choice);
      }
    } catch (error) {
      if (mine.signal.aborted) answerAt(exchange, 0).finish ??= "stopped";
      else answerAt(exchange, 0).fail(/** @type {Error} */ (error).message);
    }
    const link = id ? h("a", { href: `#request/${encodeURIComponent(id)}` }, "Show me in the engine") : null;
    for (const answer of exchange.answers) answer.end([...usageFacts(usage), link?.cloneNode(true) ?? null]);
    if (running === mine) {
      running = null;
      send.textContent = "Send";
    }
  }

  /** @param {Exchange} exchange @param {any} choice */
  function take(exchange, choice) {
    const part = choice.delta ?? choice.message, answer = answerAt(exchange, choice.index);
    const [logprobs, tokens] = [choice.logprobs?.content, choice.token_ids?.length ?? 0];
    answer.push({ text: part.content ?? "", tokens, logprobs, finish: choice.finish_reason });
    const gap = document.documentElement.scrollHeight - innerHeight - scrollY;
    if (gap < 160) scrollTo({ top: document.documentElement.scrollHeight });
  }

  live.engine.watch((engine) => engine && settings.setDefaults(engine.sampling));
  const key = legend([["p1", "below 90%"], ["p2", "60%"], ["p3", "30%"], ["p4", "10%"], ["p5", "2%"]]);
  const shades = h("div", { class: "facts" }, h("label", null, colors, " Colour tokens by their probability"), key);
  return {
    element: h(
      "div",
      { class: "screen" },
      h("header", null, h("h1", null, "Chat"), shades),
      h("div", { class: "chat" }, h("div", null, empty, talk, composer), h("aside", { class: "panel", "aria-label": "Settings" }, settings.element))
    ),
    show: () => input.focus(),
    hide: () => {},
  };
}
