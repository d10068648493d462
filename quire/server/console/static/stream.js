// The live stream: read while the page is visible, opened again with back-off when it breaks, applied to the replicas.

import { ApiError, documents, json, request } from "./api.js";
import { Replica } from "./replica.js";
import { Signal } from "./signal.js";

const FIRST_DELAY_MS = 500, MAX_DELAY_MS = 15_000;
const SILENCE_MS = 8000; // the server sends something every 2 seconds
const KEPT_S = 60; // of totals, for rates

/** @typedef {{name: "connecting" | "live" | "lost" | "paused", text: string}} Connection */

class Live {
  constructor() {
    this.connection = new Signal(/** @type {Connection} */ ({ name: "connecting", text: "connecting" }));
    /** What the server says about its engine: its model, limits and policy. @type {Signal<any>} */
    this.engine = new Signal(null);
    /** @type {Map<number, Replica>} */
    this.replicas = new Map();
    this.masked = false;
    /** @type {Record<string, number>} */
    this.totals = {};
    /** @type {{timeS: number, totals: Record<string, number>}[]} */
    this.history = [];
    /** Set with every line. */
    this.changed = new Signal(0);
    /** @type {AbortController | null} */
    this.open = null;
    this.delayMs = FIRST_DELAY_MS;
    this.timer = 0;
  }

  start() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.restart()));
    if (!document.hidden) this.connect();
  }

  /** Ask again what the server says about its engine. */
  async refreshEngine() {
    this.engine.set(await json("console/engine"));
    return this.engine.value;
  }

  restart() {
    this.stop();
    this.delayMs = FIRST_DELAY_MS;
    this.connect();
  }

  pause() {
    this.stop();
    this.connection.set({ name: "paused", text: "paused" });
  }

  stop() {
    clearTimeout(this.timer);
    this.open?.abort();
    this.open = null;
  }

  async connect() {
    const open = (this.open = new AbortController());
    this.connection.set({ name: "connecting", text: "connecting" });
    try {
      await this.read(open);
      this.retry("The stream ended");
    } catch (error) {
      if (this.open !== open) return; // stopped on purpose
      if (error instanceof ApiError && error.status === 401) return this.connection.set({ name: "lost", text: "needs an API key" });
      if (error instanceof ApiError && error.status === 404) return this.connection.set({ name: "lost", text: "the live view is switched off" });
      this.retry(error instanceof ApiError && error.status === 503 ? "Loading the model" : "Connection lost");
    }
  }

  /** @param {AbortController} open */
  async read(open) {
    let watchdog = 0;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => open.abort(), SILENCE_MS);
    };
    try {
      for await (const line of documents(await request("console/live", { signal: open.signal }))) {
        heard();
        this.apply(line);
        if (this.connection.value.name !== "live") this.connection.set({ name: "live", text: "live" });
        this.delayMs = FIRST_DELAY_MS;
      }
    } finally {
      clearTimeout(watchdog);
      open.abort();
    }
  }

  /** @param {string} reason */
  retry(reason) {
    const wait = this.delayMs;
    this.delayMs = Math.min(MAX_DELAY_MS, 2 * wait);
    this.connection.set({ name: "lost", text: `${reason}; trying again in ${Math.max(1, Math.round(wait / 1000))} s` });
    this.timer = setTimeout(() => this.connect(), wait);
  }

  /** @param {any} line */
  apply(line) {
    if (line.type === "hello") {
      this.masked = line.masked;
      this.replicas.clear();
      this.history = [];
    } else if (line.type === "engine") {
      this.replica(line.replica).ready = line.ready;
    } else if (line.type === "snapshot" || line.type === "delta") {
      if (!this.replica(line.replica).apply(line)) throw new Error("a line of the stream is missing");
      this.keep(line);
    } else if (line.type === "ping" && this.history.length) {
      this.keep({ ...line, totals: this.totals }); // nothing has changed: rates fall to 0
    } else return;
    this.changed.set(this.changed.value + 1);
  }

  /** @param {number} number */
  replica(number) {
    let replica = this.replicas.get(number);
    if (!replica) this.replicas.set(number, (replica = new Replica()));
    return replica;
  }

  /** @param {any} line */
  keep(line) {
    this.totals = line.totals;
    this.history.push({ timeS: line.time_s, totals: line.totals });
    while (this.history[0].timeS < line.time_s - KEPT_S) this.history.shift();
  }

  /** The increase of a total a second, over the last seconds. @param {string} name @param {number} [seconds] */
  rate(name, seconds = 3) {
    const last = this.history.at(-1);
    if (!last) return 0;
    const first = this.history.find((each) => each.timeS >= last.timeS - seconds) ?? last;
    const passed = last.timeS - first.timeS;
    return passed > 0.2 ? Math.max(0, (last.totals[name] ?? 0) - (first.totals[name] ?? 0)) / passed : 0;
  }
}

export const live = new Live();
