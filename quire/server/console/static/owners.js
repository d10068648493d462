// The colour of a request: the same on the block map, in tables and in charts.

const HUES = 64;
const dark = matchMedia("(prefers-color-scheme: dark)");

/** @param {number} number of a request */
export function ownerColor(number) {
  return `oklch(${dark.matches ? 0.72 : 0.66} 0.135 ${Math.round(((number % HUES) * 137.508) % 360)})`;
}

/** Colours as 32-bit pixels. */
const pen = /** @type {CanvasRenderingContext2D} */ (
  Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true })
);

/** A colour of CSS as a pixel of an image. @param {string} color @param {number} [opacity] */
export function toPixel(color, opacity = 1) {
  pen.clearRect(0, 0, 1, 1);
  pen.fillStyle = color;
  pen.fillRect(0, 0, 1, 1);
  const [red, green, blue] = pen.getImageData(0, 0, 1, 1).data;
  return ((Math.round(255 * opacity) << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/**
 * The pixels of all owners; other requests than `highlighted` are faint. @param {number | null} highlighted
 * @param {(number: number) => boolean} isOwn
 */
export function ownerPixels(highlighted, isOwn) {
  const strong = Array.from({ length: HUES }, (_, number) => toPixel(ownerColor(number)));
  const faint = Array.from({ length: HUES }, (_, number) => toPixel(ownerColor(number), 0.22));
  const others = toPixel(dark.matches ? "oklch(0.62 0.02 260)" : "oklch(0.6 0.02 260)");
  return (/** @type {number} */ number) => {
    if (highlighted !== null && number !== highlighted) return faint[number % HUES];
    return isOwn(number) ? strong[number % HUES] : others;
  };
}
