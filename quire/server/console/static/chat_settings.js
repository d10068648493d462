// The settings of a chat: a form made from one table, and the fields of the request that it amounts to.

import { h } from "./dom.js";

/**
 * A setting. `kind` says how its text is read; an empty one is left out, so the model's own default applies.
 * @typedef {{name: string, label: string, kind: "number" | "whole" | "text" | "lines" | "ids" | "json" | "check" | "choice",
 *   hint?: string, choices?: [string, string][], wide?: boolean}} Setting
 */

/** @type {[string, string][]} */
const FORMATS = [
  ["", "Any text"], ["json_object", "A JSON object"], ["json", "JSON of a schema"], ["regex", "A regular expression"],
  ["choice", "One of these lines"], ["grammar", "A grammar"],
];
/** @type {[string, string][]} */
const EARLY_STOPPING = [
  ["", "Default"], ["false", "When no beam scores higher now"], ["true", "At once"], ["never", "When none can score higher"],
];

/** @type {[string, boolean, Setting[]][]} */
const GROUPS = [
  ["Sampling", true, [
    { name: "temperature", label: "Temperature", kind: "number" },
    { name: "top_p", label: "Top p", kind: "number" },
    { name: "top_k", label: "Top k", kind: "whole" },
    { name: "min_p", label: "Min p", kind: "number" },
    { name: "seed", label: "Seed", kind: "whole", hint: "random" },
    { name: "n", label: "Answers (n)", kind: "whole", hint: "1" },
  ]],
  ["Length and stopping", false, [
    { name: "max_completion_tokens", label: "At most, tokens", kind: "whole", hint: "until the context is full" },
    { name: "min_tokens", label: "At least, tokens", kind: "whole", hint: "0" },
    { name: "stop", label: "Stop texts, one a line", kind: "lines", wide: true },
    { name: "stop_token_ids", label: "Stop token ids", kind: "ids", wide: true },
    { name: "ignore_eos", label: "Go on after the end-of-sequence token", kind: "check" },
    { name: "include_stop_str_in_output", label: "Keep the stop text in the answer", kind: "check" },
    { name: "keep_special_tokens", label: "Show special tokens", kind: "check" },
  ]],
  ["Penalties and bans", false, [
    { name: "presence_penalty", label: "Presence penalty", kind: "number", hint: "0" },
    { name: "frequency_penalty", label: "Frequency penalty", kind: "number", hint: "0" },
    { name: "repetition_penalty", label: "Repetition penalty", kind: "number" },
    { name: "priority", label: "Priority", kind: "whole", hint: "0" },
    { name: "logit_bias", label: "Logit bias, as JSON", kind: "json", hint: '{"42": -5}', wide: true },
    { name: "allowed_token_ids", label: "Allowed token ids", kind: "ids", hint: "all", wide: true },
    { name: "bad_words", label: "Texts that must not occur, one a line", kind: "lines", wide: true },
  ]],
  ["Format of the answer", false, [
    { name: "format", label: "Format", kind: "choice", wide: true, choices: FORMATS },
    { name: "format_text", label: "Schema, pattern, lines or grammar", kind: "text", wide: true },
    { name: "chat_template_kwargs", label: "Arguments of the chat template, as JSON", kind: "json", hint: '{"enable_thinking": false}', wide: true },
  ]],
  ["Beam search", false, [
    { name: "use_beam_search", label: "Search for the likeliest answers", kind: "check" },
    { name: "best_of", label: "Width", kind: "whole", hint: "n" },
    { name: "length_penalty", label: "Length penalty", kind: "number", hint: "1" },
    { name: "early_stopping", label: "Early stopping", kind: "choice", wide: true, choices: EARLY_STOPPING },
  ]],
  ["Speed", false, [
    { name: "prediction", label: "A text that the answer may repeat", kind: "text", wide: true },
    { name: "early_exit", label: "Early exit, confidence", kind: "number", hint: "off" },
  ]],
];

/** A setting that cannot be read. */
export class BadSetting extends Error {}

export function makeSettings() {
  const system = /** @type {HTMLTextAreaElement} */ (h("textarea", { rows: 3, placeholder: "You are a helpful assistant." }));
  const probabilities = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", checked: true }));
  /** @type {Map<string, {setting: Setting, input: HTMLInputElement}>} */
  const inputs = new Map();
  const groups = GROUPS.map(([title, isOpen, settings]) => {
    const fields = settings.map((setting) => {
      const input = makeInput(setting);
      inputs.set(setting.name, { setting, input });
      const isCheck = setting.kind === "check", kind = isCheck ? "check" : setting.wide ? "wide" : "";
      return h("label", { class: kind }, isCheck ? [input, setting.label] : [setting.label, input]);
    });
    return h("details", { open: isOpen }, h("summary", null, title), h("div", { class: "fields" }, fields));
  });

  /** The fields of a request. Raises BadSetting. @returns {Record<string, any>} */
  function read() {
    /** @type {Record<string, any>} */
    const body = {};
    for (const [name, { setting, input }] of inputs) {
      const value = readValue(setting, input);
      if (value !== undefined) body[name] = value;
    }
    return finish(body, probabilities.checked);
  }

  return {
    element: h(
      "div",
      { class: "settings" },
      h("label", { class: "fields" }, h("span", { class: "system" }, "System prompt"), system),
      h("label", { class: "fields" }, h("span", { class: "check" }, probabilities, " Ask for probabilities")),
      groups
    ),
    read,
    system: () => system.value.trim(),
    /** Show the model's own defaults. @param {Record<string, number>} sampling */
    setDefaults(sampling) {
      for (const [name, value] of Object.entries(sampling)) inputs.get(name)?.input.setAttribute("placeholder", String(value));
    },
  };
}

/** @param {Setting} setting @returns {HTMLInputElement} */
function makeInput({ name, kind, hint, choices }) {
  if (kind === "choice") return /** @type {any} */ (h("select", { name }, (choices ?? []).map(([value, text]) => h("option", { value }, text))));
  if (kind === "check") return /** @type {any} */ (h("input", { type: "checkbox", name }));
  if (kind === "lines" || kind === "text" || kind === "json") return /** @type {any} */ (h("textarea", { name, rows: 2, placeholder: hint, spellcheck: "false" }));
  return /** @type {any} */ (h("input", { name, type: "text", inputmode: kind === "ids" ? "text" : "decimal", placeholder: hint, autocomplete: "off" }));
}

/** @param {Setting} setting @param {HTMLInputElement} input @returns {any} */
function readValue({ kind, label }, input) {
  if (kind === "check") return input.checked || undefined;
  const text = kind === "lines" || kind === "text" ? input.value : input.value.trim();
  if (!text) return undefined;
  switch (kind) {
    case "number":
    case "whole":
      if (kind === "whole" ? /^-?\d+$/.test(text) : Number.isFinite(Number(text))) return toNumber(text);
      throw new BadSetting(`${label}: ${text} is not a ${kind === "whole" ? "whole number" : "number"}.`);
    case "ids":
      if (!/^\d+([\s,]+\d+)*$/.test(text)) throw new BadSetting(`${label}: give token ids with commas between them.`);
      return text.split(/[\s,]+/).map(Number);
    case "lines":
      return text.split("\n").filter(Boolean);
    case "json":
      return parse(label, text);
    default:
      return text;
  }
}

/** @param {string} text */
function toNumber(text) {
  const value = Number(text);
  if (Number.isInteger(value) && !Number.isSafeInteger(value)) {
    throw new BadSetting(`${text} is too large for a browser; give at most ${Number.MAX_SAFE_INTEGER}.`);
  }
  return value;
}

/** @param {string} label @param {string} text */
function parse(label, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new BadSetting(`${label}: ${/** @type {Error} */ (error).message}`);
  }
}

/**
 * Turn the form's own names into fields of the API. @param {Record<string, any>} body @param {boolean} probabilities
 */
function finish({ format, format_text: text, keep_special_tokens: keep, prediction, early_stopping: early, ...body }, probabilities) {
  if (keep) body.skip_special_tokens = false;
  if (prediction) body.prediction = { type: "content", content: prediction };
  if (early) body.early_stopping = early === "never" ? early : early === "true";
  if (format && format !== "json_object" && !text) throw new BadSetting("Format of the answer: the text below it is empty.");
  if (format === "json_object") body.structured_outputs = { json_object: true };
  else if (format === "json") body.structured_outputs = { json: parse("Schema", text) };
  else if (format === "choice") body.structured_outputs = { choice: text.split("\n").filter(Boolean) };
  else if (format) body.structured_outputs = { [format]: text };
  else if (text) throw new BadSetting("Format of the answer: choose what the text below it is.");
  if (probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}
