// A colour for each owner of blocks. Colour-blind readers can tell them apart (after Okabe and Ito, in two lightnesses).
// The colours repeat when there are more sequences than colours, so a label is always shown too.

const OWNERS = {
  light: ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7a00", "#5b4ea1", "#7fbf9a", "#a0522d", "#f0b6d5", "#34657f"],
  dark: ["#3d9fdc", "#f0ad1e", "#1fbf92", "#f0742e", "#dc8fbb", "#8fd0f7", "#cdbb3c", "#9d90e6", "#a6dcbd", "#cf8a63", "#f5c8df", "#7fb0c8"],
};

export function ownerColor(number, theme) {
  const colors = OWNERS[theme];
  return colors[(((number - 1) % colors.length) + colors.length) % colors.length];
}

export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Mix `share` of `color` into `ground` and return an opaque colour, which browsers draw faster than a transparent one.
export function blend(color, ground, share) {
  const name = `${color} ${ground} ${share}`;
  if (!blended.has(name)) {
    const mixed = [1, 3, 5].map((i) => Math.round(share * parseInt(color.slice(i, i + 2), 16) + (1 - share) * parseInt(ground.slice(i, i + 2), 16)));
    blended.set(name, `#${mixed.map((one) => one.toString(16).padStart(2, "0")).join("")}`);
  }
  return blended.get(name);
}
const blended = new Map();

// Return black or white, whichever is readable on `color`.
export function inkOn(color) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111418" : "#ffffff";
}
