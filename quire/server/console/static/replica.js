// The state of one engine, as the lines of the live stream tell it: blocks, requests, steps, numbers.

export const FREE = 0, CACHED = 1, USED = 2, SHARED = 3;
const MAX_STEPS = 600;

/**
 * @typedef {{position: number | null, resource: string, resources: string[], sentence: string, estimate_s: number | null}} Wait
 * @typedef {{number: number, id: string | null, tenant: string | null, own: boolean, state: string, arrived_s: number,
 *   prompt_tokens: number, cached_tokens: number, computed_tokens: number, output_tokens: number, max_tokens: number,
 *   blocks: number, swapped_blocks: number, preemptions: number, drafted_tokens: number, accepted_tokens: number,
 *   beams: number, wait: Wait | null}} Row
 * @typedef {{step: number, start_s: number, seconds: number | null, predicted_s: number | null, failed: boolean,
 *   prompt_rows: number, prompt_tokens: number, decode_rows: number, draft_rows: number, draft_tokens: number,
 *   admitted: number, preempted: number}} Step
 * @typedef {{num_blocks: number, block_size: number, max_requests: number, max_tokens_per_step: number, batching: string, device: string}} Engine
 */

export class Replica {
  constructor() {
    /** @type {Engine | null} */
    this.engine = null;
    this.ready = true;
    this.sequence = 0;
    this.states = new Uint8Array(0);
    this.owners = new Uint32Array(0);
    /** @type {Map<number, Row>} */
    this.requests = new Map();
    /** @type {Step[]} */
    this.steps = [];
    this.numRunning = this.numWaiting = this.numFree = this.numCached = 0;
    this.timeS = 0;
    this.changes = 0; // counts lines, so that a drawing knows whether it is of the present state
  }

  /** Take over a line of the stream. Returns false if lines are missing before it. @param {any} line */
  apply(line) {
    if (line.type === "snapshot") this.reset(line.engine);
    else if (!this.engine || line.sequence !== this.sequence + 1) return false;
    this.ready = true;
    this.sequence = line.sequence;
    this.timeS = line.time_s;
    this.applyBlocks(line.blocks);
    for (const row of line.requests) this.requests.set(row.number, row);
    for (const { number } of line.ended) this.requests.delete(number);
    this.steps.push(...line.steps);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    this.numRunning = line.num_running;
    this.numWaiting = line.num_waiting;
    this.numFree = line.num_free_blocks;
    this.numCached = line.num_cached_blocks;
    this.changes += 1;
    return true;
  }

  /** @param {Engine} engine */
  reset(engine) {
    this.engine = engine;
    this.states = new Uint8Array(engine.num_blocks);
    this.owners = new Uint32Array(engine.num_blocks);
    this.requests.clear();
    this.steps = [];
  }

  /** Runs of first block (from 1), number of blocks, state, owner. @param {number[]} runs */
  applyBlocks(runs) {
    for (let at = 0; at < runs.length; at += 4) {
      const first = runs[at] - 1, end = first + runs[at + 1];
      this.states.fill(runs[at + 2], first, end);
      this.owners.fill(runs[at + 3], first, end);
    }
  }

  get running() {
    return [...this.requests.values()].filter((row) => !row.wait);
  }

  /** In the order in which they go. */
  get waiting() {
    const rows = [...this.requests.values()].filter((row) => row.wait);
    const position = (/** @type {Row} */ row) => row.wait?.position ?? Infinity;
    return rows.sort((a, b) => position(a) - position(b) || a.number - b.number);
  }
}

/** What a request is called on the page. @param {Row | undefined} row @param {number} number */
export function nameOf(row, number) {
  if (!row) return `request ${number}`;
  return row.id ?? `request ${number} of another tenant`;
}

/** The phase of a request that runs: its prompt, or its answer. @param {Row} row */
export function phaseOf(row) {
  if (row.state !== "running") return row.state;
  return row.computed_tokens < row.prompt_tokens ? "prompt" : "decode";
}
