// Requests to the server that this page comes from. The API key is kept in this tab and is sent as a header only.

const ROOT = new URL("../../", import.meta.url);
const KEY = "quire-api-key";

/** The server refused, or could not be reached (status 0). */
export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  /** @param {string} value */
  set(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
  /** Called when the server refuses the key, or that there is none. @type {() => void} */
  ask: () => {},
};

/**
 * The response of a route. Raises ApiError with the server's own message.
 * @param {string} path
 * @param {{body?: unknown, signal?: AbortSignal}} [options]
 */
export async function request(path, { body, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    const method = body === undefined ? "GET" : "POST";
    response = await fetch(new URL(path, ROOT), { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const message = await errorMessage(response);
  if (response.status === 401) key.ask();
  throw new ApiError(response.status, message);
}

/** @param {string} path @param {{body?: unknown, signal?: AbortSignal}} [options] */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/** @param {Response} response */
async function errorMessage(response) {
  try {
    const document = await response.json();
    return String(document.error?.message ?? document.error ?? response.statusText);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** The lines of a response while they arrive. @param {Response} response @returns {AsyncGenerator<string>} */
export async function* lines(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      text += decoder.decode(value, { stream: true });
      const parts = text.split("\n");
      text = /** @type {string} */ (parts.pop());
      yield* parts;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
  if (text) yield text;
}

/** The documents of server-sent events. Raises ApiError for an event that is an error. @param {Response} response */
export async function* events(response) {
  for await (const line of lines(response)) {
    if (!line.startsWith("data: ")) continue;
    const data = line.slice(6);
    if (data === "[DONE]") return;
    const document = JSON.parse(data);
    if (document.error) throw new ApiError(Number(document.error.code) || 500, String(document.error.message ?? document.error));
    yield document;
  }
}

/** The documents of JSON lines. @param {Response} response */
export async function* documents(response) {
  for await (const line of lines(response)) if (line) yield JSON.parse(line);
}
