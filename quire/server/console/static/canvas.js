// A canvas that has the size of its place in device pixels, and is drawn again when size or colours change.

const dark = matchMedia("(prefers-color-scheme: dark)");

/**
 * @typedef {object} Drawing
 * @property {CanvasRenderingContext2D} pen scaled to CSS pixels
 * @property {number} width
 * @property {number} height
 * @property {number} ratio device pixels in a CSS pixel
 * @property {(name: string) => string} color a colour of the style sheet
 */

/**
 * @param {{label: string, draw: (drawing: Drawing) => void, height?: (width: number) => number, class?: string}} options
 */
export function makeCanvas(options) {
  const canvas = document.createElement("canvas");
  canvas.className = `drawing ${options.class ?? ""}`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", options.label);
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  let due = false;
  /** @type {Map<string, string>} */
  let colors = new Map();

  function color(/** @type {string} */ name) {
    let value = colors.get(name);
    if (value === undefined) {
      value = getComputedStyle(canvas).getPropertyValue(`--${name}`).trim();
      colors.set(name, value);
    }
    return value;
  }

  function paint() {
    due = false;
    const width = canvas.clientWidth;
    if (!width || !canvas.isConnected) return;
    if (options.height) {
      const wanted = `${Math.max(1, Math.round(options.height(width)))}px`;
      if (canvas.style.height !== wanted) canvas.style.height = wanted;
    }
    const height = canvas.clientHeight, ratio = devicePixelRatio || 1;
    const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down];
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    options.draw({ pen, width, height, ratio, color });
  }

  function redraw() {
    if (due) return;
    due = true;
    requestAnimationFrame(paint);
  }

  new ResizeObserver(redraw).observe(canvas);
  dark.addEventListener("change", () => {
    colors = new Map();
    redraw();
  });
  return { element: canvas, redraw, paint };
}

/**
 * Let a pointer and the arrow keys move a cursor over the items of a drawing; a screen reader reads each as a value.
 * @param {HTMLCanvasElement} canvas
 * @param {{label: string, find: (x: number, y: number) => number | null, move: (key: string, from: number) => number | null,
 *   size: () => number, describe: (index: number) => string, start?: () => number, select: (index: number | null) => void,
 *   open?: (index: number) => void}} cursor
 */
export function addCursor(canvas, cursor) {
  let at = /** @type {number | null} */ (null);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "slider");
  canvas.setAttribute("aria-label", cursor.label);
  canvas.setAttribute("aria-valuemin", "0");
  canvas.setAttribute("aria-valuenow", "0");
  canvas.setAttribute("aria-valuetext", "nothing chosen; the arrow keys choose");

  function go(/** @type {number | null} */ index) {
    at = index;
    canvas.setAttribute("aria-valuemax", String(Math.max(0, cursor.size() - 1)));
    canvas.setAttribute("aria-valuenow", String(index ?? 0));
    canvas.setAttribute("aria-valuetext", index === null ? "nothing chosen" : cursor.describe(index));
    cursor.select(index);
  }
  canvas.addEventListener("pointermove", (event) => go(cursor.find(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointerdown", (event) => go(cursor.find(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointerleave", () => go(null));
  canvas.addEventListener("blur", () => go(null));
  canvas.addEventListener("click", () => at !== null && cursor.open?.(at));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && at !== null) return cursor.open?.(at);
    if (event.key === "Escape") return go(null);
    const next = cursor.size() ? cursor.move(event.key, at ?? 0) : null;
    if (next === null) return;
    event.preventDefault();
    const isFirst = at === null && event.key.startsWith("Arrow");
    go(isFirst ? (cursor.start?.() ?? 0) : Math.min(cursor.size() - 1, Math.max(0, next)));
  });
}

/**
 * The next item of a row of items. @param {string} key @param {number} from @param {number} size
 * @param {number} [page]
 */
export function step(key, from, size, page = 10) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: -1, ArrowDown: 1, PageDown: page, PageUp: -page };
  if (key === "Home") return 0;
  if (key === "End") return size - 1;
  return key in steps ? from + steps[/** @type {keyof typeof steps} */ (key)] : null;
}

/** Round numbers that divide a range into at most `most` parts. @param {number} top @param {number} most */
export function ticks(top, most) {
  if (!(top > 0)) return [0];
  const raw = top / most, unit = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= raw) ?? 10 * unit;
  return Array.from({ length: Math.floor(top / size + 1e-9) + 1 }, (_, index) => index * size);
}
