// The pool as a grid with one cell per block. Only cells whose look has changed are drawn again: scrubbing stays smooth.

import { blend, cssColor, inkOn, ownerColor } from "./colors.js";
import { describeBlock, SpokenBlock } from "./details.js";
import { describeGroup, hasGroups } from "./groups.js";
import { tablesOf } from "./replay.js";
import { StateSlots } from "./slots.js";
import { Motion } from "./story.js";
import { fitCanvas, html, useEffect, useLayoutEffect, useMemo, useRef, useState, useView, useWidth } from "./ui.js";

const GAP = 1;
const LABELLED = 15; // pixels; a larger cell has its owner's label

// Return {size, columns, height} with the largest cells for which the grid is not too high.
export function layOut(numCells, width) {
  const most = Math.max(260, Math.min(480, width * 0.75));
  for (let size = 44; size > 3; size--) {
    const columns = Math.max(1, Math.floor(width / size));
    const height = Math.ceil(numCells / columns) * size;
    if (height <= most) return { size, columns, height };
  }
  const columns = Math.max(1, Math.floor(width / 4));
  return { size: 4, columns, height: Math.ceil(numCells / columns) * 4 };
}

// The look of each block as numbers, which are fast to compare: up to three owners, the number of owners, the sequence
// that wrote a free block, the group of layers, and in one number (bits): filled slots, the rank among the free blocks (1 … 9), and flags for
// cached, chosen, dimmed, lit up, next to be evicted, loaded, and with a snapshot of a state at its end.
const FIELDS = ["own1", "own2", "own3", "count", "writer", "group", "bits"];

export function looksOf(state, numCells, choice, lit = []) {
  const looks = Object.fromEntries(FIELDS.map((name) => [name, new Int32Array(numCells + 1)]));
  const isChosen = new Uint8Array(numCells + 1);
  for (const seq of state.seqs.values()) {
    for (const b of tablesOf(seq).flat()) {
      const count = ++looks.count[b];
      if (count <= 3) looks[FIELDS[count - 1]][b] = seq.number;
      if (seq.number === choice.seq) isChosen[b] = 1;
    }
  }
  const ranks = new Map(state.firstFree(9).map((b, i) => [b, i + 1]));
  const evicted = state.nextEvicted();
  const kept = new Set([...state.slots.values()].map((one) => one.block));
  for (let b = 1; b <= numCells; b++) {
    const holds = looks.count[b] || state.serial[b];
    if (!looks.count[b]) looks.writer[b] = state.writer[b];
    if (holds) looks.group[b] = state.group[b];
    const flags = (state.serial[b] ? 1 : 0) | (choice.block === b ? 2 : 0) | (choice.seq != null && !isChosen[b] ? 4 : 0) | (lit.includes(b) ? 8 : 0) | (b === evicted ? 16 : 0) | (holds && state.loaded[b] ? 32 : 0) | (kept.has(b) ? 64 : 0);
    looks.bits[b] = (((holds ? state.filled[b] : 0) << 4) | (ranks.get(b) ?? 0)) * 128 + flags;
  }
  return looks;
}

function lookAt(looks, b, blockSize) {
  const bits = looks.bits[b];
  return {
    owners: [looks.own1[b], looks.own2[b], looks.own3[b]].filter(Boolean),
    count: looks.count[b],
    filled: (bits >> 11) / blockSize,
    rank: (bits >> 7) & 15,
    cached: (bits & 1) > 0,
    chosen: (bits & 2) > 0,
    dimmed: (bits & 4) > 0,
    lit: (bits & 8) > 0,
    isNext: (bits & 16) > 0,
    loaded: (bits & 32) > 0,
    kept: (bits & 64) > 0,
    writer: looks.writer[b],
    group: looks.group[b],
  };
}

// Return the colours that drawCell needs: {theme, surface, empty, soft, text, …}. The caller sets isSharp: whether the
// edges of cells fall on the edges of pixels.
function inkOf(theme) {
  const names = ["surface", "empty", "soft", "text", "accent", "bad", "loaded"];
  return { theme, ...Object.fromEntries(names.map((name) => [name, cssColor(name)])) };
}

// Draw a cell, except for the gap next to it, over its old contents, with as few rectangles as possible.
function drawCell(context, look, x, y, size, ink) {
  const inner = size - GAP;
  if (!ink.isSharp || look.owners.length > 1) { // otherwise the old contents would show through at the edges
    context.fillStyle = ink.surface;
    context.fillRect(x, y, size, size);
  }
  if (look.owners.length) {
    drawOwned(context, look, x, y, inner, ink);
  } else if (look.cached) {
    drawCached(context, look, x, y, inner, ink);
  } else {
    context.fillStyle = ink.empty;
    context.fillRect(x, y, inner, inner);
  }
  if (look.rank && size >= 16) {
    context.fillStyle = ink.soft;
    context.font = `${Math.min(11, size * 0.4)}px system-ui, sans-serif`;
    context.fillText(`${look.rank}.`, x + inner / 2, y + inner / 2);
  }
  if (look.lit) {
    context.strokeStyle = ink.bad;
    context.lineWidth = ringOf(inner);
    context.strokeRect(x + context.lineWidth / 2, y + context.lineWidth / 2, inner - context.lineWidth, inner - context.lineWidth);
  }
  if (look.block && size >= 28) drawNumber(context, look, x, y, inner, ink);
  if (look.group && size >= 28) drawGroup(context, look, x, y, inner, ink);
  if (look.loaded && inner > 5) drawLoaded(context, x + inner, y + inner, Math.min(14, inner * 0.45), ink);
  if (look.kept && inner > 5) drawKept(context, x, y + inner, Math.min(6, inner * 0.2), ink);
  if (look.isNext && inner > 5) {
    context.fillStyle = ink.bad; // a corner is turned down
    const turned = Math.min(9, inner * 0.4);
    context.beginPath();
    context.moveTo(x + inner - turned, y);
    context.lineTo(x + inner, y);
    context.lineTo(x + inner, y + turned);
    context.fill();
  }
  if (look.chosen) {
    context.strokeStyle = ink.text;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, inner - 2, inner - 2);
  }
}

// Draw a triangle in the lower right corner, with a line around it that is seen on every owner's colour.
function drawLoaded(context, right, bottom, side, ink) {
  context.beginPath();
  context.moveTo(right - side, bottom);
  context.lineTo(right, bottom - side);
  [context.strokeStyle, context.lineWidth] = [ink.surface, 3];
  context.stroke();
  context.lineTo(right, bottom);
  context.fillStyle = ink.loaded;
  context.fill();
}

// Draw a disc in the lower left corner: a snapshot of a recurrent state is at the end of the block.
function drawKept(context, left, bottom, radius, ink) {
  context.beginPath();
  context.arc(left + radius + 2, bottom - radius - 2, radius, 0, 2 * Math.PI);
  [context.strokeStyle, context.lineWidth] = [ink.surface, 3];
  context.stroke();
  context.fillStyle = ink.text;
  context.fill();
}

// Draw a frame: the block serves a group of layers with a window.
function drawFrame(context, left, top, inner, ink) {
  const gap = inner < 20 ? 2 : 4;
  [context.strokeStyle, context.lineWidth] = [ink.surface, inner < 20 ? 1 : 2];
  context.strokeRect(left + gap, top + gap, inner - 2 * gap, inner - 2 * gap);
}

// Draw the number of the block's group, small, in the lower left corner.
function drawGroup(context, look, x, y, inner, ink) {
  const isOnColor = look.owners.length && !look.dimmed;
  context.fillStyle = isOnColor ? inkOn(colorOf(look, look.owners[0], ink)) : ink.text;
  context.font = `${Math.min(9, inner * 0.24)}px system-ui, sans-serif`;
  [context.textAlign, context.textBaseline] = ["left", "bottom"];
  context.fillText(`g${look.group}`, x + 7, y + inner - 6);
  [context.textAlign, context.textBaseline] = ["center", "middle"];
}

// Return the colour of a block: that of its owner, or of its group if the reader has chosen so.
const colorOf = (look, number, ink) => ownerColor(ink.byGroup ? look.group + 1 : number, ink.theme);

const ringOf = (inner) => Math.min(4, inner / 4);

// Draw the block's number, small, in the upper left corner.
function drawNumber(context, look, x, y, inner, ink) {
  const edge = look.group ? 6 : look.lit ? ringOf(inner) : 1;
  const isOnColor = look.owners.length && look.filled > 0.85 && !look.dimmed;
  context.fillStyle = isOnColor ? inkOn(colorOf(look, look.owners[0], ink)) : ink.text;
  context.font = `${Math.min(9, inner * 0.24)}px system-ui, sans-serif`;
  [context.textAlign, context.textBaseline] = ["left", "top"];
  context.fillText(look.block, x + edge + 1, y + edge + 1);
  [context.textAlign, context.textBaseline] = ["center", "middle"];
}

function drawOwned(context, look, left, top, inner, ink) {
  const shown = look.owners;
  const width = inner / shown.length;
  const tall = look.filled * inner;
  shown.forEach((number, i) => {
    const color = colorOf(look, number, ink);
    if (tall < inner) {
      context.fillStyle = blend(color, ink.surface, look.dimmed ? 0.12 : 0.28);
      context.fillRect(left + i * width, top, width, inner);
    }
    context.fillStyle = look.dimmed ? blend(color, ink.surface, 0.42) : color;
    context.fillRect(left + i * width, top + inner - tall, width, tall);
  });
  if (look.group && inner > 7) drawFrame(context, left, top, inner, ink);
  const several = look.count > 1;
  if (several && inner < LABELLED) {
    context.fillStyle = ink.text;
    const dot = Math.max(1.5, inner / 4);
    context.fillRect(left + inner - dot, top, dot, dot);
  }
  if (inner >= LABELLED) drawLabel(context, look, left, top, inner, ink, several);
}

function drawLabel(context, look, left, top, inner, ink, several) {
  const font = Math.min(12, inner * 0.42);
  context.font = `600 ${font}px system-ui, sans-serif`;
  const isOnColor = look.filled > 0.7 && !look.dimmed;
  context.fillStyle = isOnColor ? inkOn(colorOf(look, look.owners[0], ink)) : ink.text;
  if (!several && !isOnColor && look.filled > 0.3) { // the letters are partly on the colour
    [context.strokeStyle, context.lineWidth] = [ink.surface, 3];
    context.strokeText(look.label, left + inner / 2, top + inner / 2 + 0.5, inner - 2);
  }
  if (!several) context.fillText(look.label, left + inner / 2, top + inner / 2 + 0.5, inner - 2);
  if (!several) return;
  const badge = Math.max(9, inner * 0.42); // the number of owners
  if (look.lit) [left, top] = [left - ringOf(inner), top + ringOf(inner)];
  context.fillStyle = ink.text;
  context.fillRect(left + inner - badge, top, badge, badge);
  context.fillStyle = ink.surface;
  context.font = `700 ${badge * 0.85}px system-ui, sans-serif`;
  context.fillText(look.count, left + inner - badge / 2, top + badge / 2 + 0.5);
}

function drawCached(context, look, left, top, inner, ink) {
  const color = look.writer > 0 || ink.byGroup ? colorOf(look, look.writer, ink) : ink.soft;
  context.fillStyle = blend(color, ink.empty, look.dimmed ? 0.15 : 0.3);
  context.fillRect(left, top, inner, inner);
  if (look.group && inner > 7) drawFrame(context, left, top, inner, ink);
  if (inner < 10) return;
  context.strokeStyle = ink.soft;
  context.lineWidth = 1;
  context.setLineDash([2, 2]);
  context.strokeRect(left + 0.5, top + 0.5, inner - 1, inner - 1);
  context.setLineDash([]);
}

export function Pool({ run, frame, state, moment }) {
  const { t, theme, choice, choose } = useView();
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const drawn = useRef(null);
  const [under, setUnder] = useState(null); // {block, x, y} of the mouse
  const [byGroup, setByGroup] = useState(false);
  const numCells = Math.max(1, Math.min(run.replay.numBlocks, Math.max(24, run.replay.top)));
  const grid = useMemo(() => layOut(numCells, width || 300), [numCells, width]);

  const ink = useMemo(() => ({ ...inkOf(theme), byGroup }), [theme, byGroup]);
  useLayoutEffect(() => { // a layout effect: drawn in the same frame as the numbers
    if (!width) return;
    const { context, isNew } = fitCanvas(canvas.current, grid.columns * grid.size, grid.height);
    [context.textAlign, context.textBaseline] = ["center", "middle"];
    ink.isSharp = Number.isInteger(window.devicePixelRatio);
    const style = `${theme} ${grid.size} ${grid.columns} ${run.name} ${byGroup}`;
    const old = isNew || drawn.current?.style !== style ? null : drawn.current.looks;
    const owner = under && choice.seq == null ? state.ownerOf(under.block) : null; // all cells of this owner are highlighted
    const looks = looksOf(state, numCells, owner ? { ...choice, seq: owner } : choice, moment?.blocks);
    for (let b = 1; b <= numCells; b++) {
      if (old && FIELDS.every((name) => old[name][b] === looks[name][b])) continue;
      const look = { ...lookAt(looks, b, state.blockSize), block: b };
      if (look.owners.length && grid.size > LABELLED) look.label = run.label(look.owners[0]);
      drawCell(context, look, ((b - 1) % grid.columns) * grid.size, Math.floor((b - 1) / grid.columns) * grid.size, grid.size, ink);
    }
    drawn.current = { style, looks };
  });

  const blockAt = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / grid.size);
    const block = Math.floor((event.clientY - box.top) / grid.size) * grid.columns + column + 1;
    return column < grid.columns && block <= numCells ? block : null;
  };
  const pick = (event) => blockAt(event) && choose({ block: blockAt(event) });
  const point = (event) => {
    const block = blockAt(event);
    const box = canvas.current.getBoundingClientRect();
    if (block !== under?.block) setUnder(block && { block, x: event.clientX - box.left, y: event.clientY - box.top });
  };
  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns }[event.key];
    if (!by || event.shiftKey) return;
    event.preventDefault();
    event.stopPropagation();
    choose({ block: Math.min(numCells, Math.max(1, (choice.block ?? 1 - by) + by)) });
  };
  const rest = run.replay.numBlocks - numCells;
  return html`<section class="card pool">
    <h2>${t("pool")}</h2>
    ${hasGroups(run) && html`<${Colors} run=${run} byGroup=${byGroup} setByGroup=${setByGroup} />`}
    <div class="wide" ref=${ref}><div class="grid">
      <canvas ref=${canvas} tabindex="0" role="application" aria-label=${t("poolLabel")} data-size=${grid.size} data-columns=${grid.columns}
        style=${{ width: `${grid.columns * grid.size}px`, height: `${grid.height}px` }} onClick=${pick} onMouseMove=${point} onMouseLeave=${() => setUnder(null)} onKeyDown=${move}></canvas>
      <${Motion} moment=${moment} grid=${grid} colorOf=${(number) => ownerColor(number, theme)} />
      ${under && html`<div class="tip" style=${{ left: `${Math.max(0, Math.min(under.x, grid.columns * grid.size - 230))}px`, top: `${under.y + 18}px` }}>${describeBlock(run, state, under.block, t).join(" · ")}</div>`}
    </div></div>
    <${SpokenBlock} run=${run} state=${state} />
    ${rest > 0 && html`<p class="soft">${t("poolRest", { count: rest.toLocaleString() })}</p>`}
    <${Counts} run=${run} frame=${frame} />
    <${StateSlots} run=${run} frame=${frame} state=${state} moment=${moment} />
    <${Legend} hasLoads=${run.replay.tiers.length > 0} hasStates=${run.replay.numSlots > 0} hasGroups=${hasGroups(run)} />
    <p class="soft">${t(byGroup ? "poolHelp.groups" : "poolHelp", { size: run.header.block_size })}</p>
  </section>`;
}

// Buttons that choose what the colours of blocks mean, and the colour of each group.
function Colors({ run, byGroup, setByGroup }) {
  const { t, theme } = useView();
  const button = (is, key) => html`<button class=${byGroup === is ? "on" : ""} aria-pressed=${byGroup === is} onClick=${() => setByGroup(is)}>${t(key)}</button>`;
  const groups = Array.from({ length: run.replay.numGroups }, (_, group) => html`<span><i style=${{ background: ownerColor(group + 1, theme) }}></i>${describeGroup(run, group, t)}</span>`);
  return html`<p class="filters">${t("colorsBy")} ${button(false, "colorsBySequence")}${button(true, "colorsByGroup")}</p>
    ${byGroup && html`<p class="legend of-colors">${groups}</p>`}`;
}

function Counts({ run, frame }) {
  const { t } = useView();
  const at = run.frames[frame];
  const slots = at.owned * run.header.block_size;
  const local = (value) => value.toLocaleString();
  const one = (name, value, title, rest) => html`<div title=${title}><b>${value}</b><span>${name}</span>${rest && html`<small>${rest}</small>`}</div>`;
  return html`<div class="counts">
    ${one(t("owned"), local(at.owned), "", t("ofBlocks", { count: run.replay.numBlocks.toLocaleString() }))}
    ${one(t("ofThemShared"), local(at.shared))}
    ${one(t("cachedFree"), local(at.cachedFree))}
    ${one(t("freeInAll"), local(at.free))}
    ${one(t("wasteShort"), `${(100 * at.waste).toFixed(1)} %`, t("waste"), t("ofSlots", { empty: local(slots - at.stored), slots: local(slots) }))}
    ${one(t("hitRateShort"), `${(100 * at.hitRate).toFixed(0)} %`, t("hitRate"), t("ofTokens", { count: local(at.hit), all: local(at.queried) }))}
    ${run.proposed > 0 && one(t("keptRateShort"), `${(100 * at.keptRate).toFixed(0)} %`, t("keptRate"), t("ofTokens", { count: local(at.accepted), all: local(at.proposed) }))}
    ${one(t("running"), at.running)}
    ${one(t("waiting"), at.waiting)}
  </div>`;
}

function Legend({ hasLoads, hasStates, hasGroups }) {
  const { t, theme } = useView();
  const canvas = useRef(null);
  const size = 24;
  const looks = [
    ["legendOwned", { owners: [1], count: 1, filled: 0.75, label: "a" }],
    ["legendShared", { owners: [1, 2], count: 2, filled: 1 }],
    ["legendCached", { owners: [], filled: 1, cached: true, writer: 1 }],
    ...(hasLoads ? [["legendLoaded", { owners: [1], count: 1, filled: 1, label: "a", loaded: true }]] : []),
    ...(hasStates ? [["legendKept", { owners: [1], count: 1, filled: 1, label: "", kept: true }]] : []),
    ...(hasGroups ? [["legendWindow", { owners: [1], count: 1, filled: 1, label: "a", group: 1 }]] : []),
    ["legendNext", { owners: [], filled: 0, rank: 1 }],
    ["legendLit", { owners: [], filled: 0, lit: true }],
    ["legendEvicted", { owners: [], filled: 1, cached: true, writer: 2, isNext: true }],
  ];
  useEffect(() => {
    const { context } = fitCanvas(canvas.current, looks.length * size, size);
    const ink = inkOf(theme);
    [context.textAlign, context.textBaseline] = ["center", "middle"];
    looks.forEach(([, look], i) => drawCell(context, look, i * size, 0, size, ink));
    canvas.current.parentNode.querySelectorAll("i").forEach((one, i) => {
      one.style.backgroundImage = `url(${canvas.current.toDataURL()})`;
      one.style.backgroundPosition = `-${i * size}px 0`;
      one.style.backgroundSize = `${looks.length * size}px ${size}px`;
    });
  }, [theme, hasLoads, hasStates, hasGroups]);
  return html`<div class="legend" role="group" aria-label=${t("legend")}>
    <canvas ref=${canvas} hidden></canvas>
    ${looks.map(([key]) => html`<span><i class="cell"></i>${t(key)}</span>`)}
  </div>`;
}
