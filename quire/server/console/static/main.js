// The page: which screen is shown, the API key, the name of the model, the state of the connection.

import { key } from "./api.js";
import { fill, h, say } from "./dom.js";
import { live } from "./stream.js";

/**
 * @typedef {object} Screen
 * @property {HTMLElement} element
 * @property {(argument: string) => void} show
 * @property {() => void} hide
 */

/** @type {Record<string, () => Promise<() => Screen>>} */
const SCREENS = {
  live: async () => (await import("./live.js")).makeLive,
  request: async () => (await import("./request.js")).makeRequest,
  cache: async () => (await import("./cache.js")).makeCache,
  batching: async () => (await import("./batching.js")).makeBatching,
  plan: async () => (await import("./plan.js")).makePlan,
  chat: async () => (await import("./chat.js")).makeChat,
};
const RETRY_MS = 2000;

/** @type {Map<string, Screen>} */
const made = new Map();
let shown = "";

const find = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** Show the screen that the address names: `#request/ID` is the screen `request` with the argument ID. */
async function navigate() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  if (name === "main") return find("main").focus();
  const wanted = name in SCREENS ? name : "live";
  const screen = await screenOf(wanted);
  if (shown !== wanted) {
    made.get(shown)?.hide();
    shown = wanted;
    fill(find("main"), screen.element);
    for (const link of document.querySelectorAll("#nav a")) {
      if (link.getAttribute("href") === `#${wanted}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${wanted[0].toUpperCase()}${wanted.slice(1)} · quire console`;
  }
  screen.show(decodeURIComponent(rest.join("/")));
}

async function screenOf(/** @type {string} */ name) {
  let screen = made.get(name);
  if (!screen) {
    screen = (await SCREENS[name]())();
    made.set(name, screen);
  }
  return screen;
}

function watchConnection() {
  const place = find("connection");
  live.connection.watch((state) => {
    place.dataset.state = state.name;
    say(place, state.text);
  });
}

function setUpKey() {
  const dialog = /** @type {HTMLDialogElement} */ (find("key-dialog"));
  const input = /** @type {HTMLInputElement} */ (find("key-input"));
  const open = () => {
    input.value = "";
    if (!dialog.open) dialog.showModal();
  };
  key.ask = () => {
    const refused = key.get() ? "The server does not accept this key." : "This server needs an API key.";
    find("key-button").hidden = false;
    say(find("key-reason"), `${refused} It stays in this tab, and is sent as a header.`);
    open();
  };
  find("key-button").addEventListener("click", open);
  find("key-cancel").addEventListener("click", () => dialog.close());
  find("key-form").addEventListener("submit", () => {
    key.set(input.value.trim());
    live.restart();
    showModel();
    made.forEach((screen, name) => name === shown && navigate());
  });
  find("key-button").hidden = !key.get();
}

/** The name of the model; while it is being loaded, ask again. */
async function showModel() {
  try {
    say(find("model"), (await live.refreshEngine()).model);
  } catch (error) {
    const status = /** @type {{status?: number}} */ (error).status;
    if (status !== 401) setTimeout(showModel, RETRY_MS);
  }
}

setUpKey();
watchConnection();
addEventListener("hashchange", navigate);
await navigate();
showModel();
live.start();
