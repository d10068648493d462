// Numbers as people read them. Digits are tabular in the style sheet, so columns stay aligned.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {number} value */
export const count = (value) => whole.format(value);

/** Three significant digits, with thousands in words of one letter. @param {number} value */
export function short(value) {
  for (const [size, unit] of /** @type {[number, string][]} */ ([[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])) {
    if (value >= size) return `${precise(value / (unit === "k" ? 1e3 : size))} ${unit}`;
  }
  return value >= 100 ? count(value) : precise(value);
}

/** @param {number} value */
function precise(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** A duration. @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${(1e3 * seconds).toFixed(seconds < 0.00995 ? 2 : seconds < 0.0995 ? 1 : 0)} ms`;
  if (seconds < 99.95) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

/** Two durations of one unit. @param {number} low @param {number} high */
export function interval(low, high) {
  const [factor, unit] = high < 0.9995 ? [1e3, "ms"] : [1, "s"];
  return `${(factor * low).toFixed(1)}–${(factor * high).toFixed(1)} ${unit}`;
}

/** A duration on an axis: without digits that say nothing. @param {number} seconds */
export const tick = (seconds) => (seconds ? duration(seconds).replace(/\.0+ /, " ").replace(/(\.\d*?)0+ /, "$1 ") : "0");

/** @param {number | null | undefined} share */
export function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  return `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)}%`;
}

/** @param {number} number @param {string} noun @param {string} [many] */
export const counted = (number, noun, many) => `${count(number)} ${number === 1 ? noun : (many ?? `${noun}s`)}`;
