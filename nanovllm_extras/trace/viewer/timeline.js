// A row for each sample, a column for each step. The rows are drawn once; the line of the current step moves over them.

import { cssColor, ownerColor } from "./colors.js";
import { fitCanvas, formatTime, html, useEffect, useMemo, useRef, useSettled, useState, useView, useWidth } from "./ui.js";

const ROW = 24; // pixels: the least height for touch
const LABEL = 150;
const ROWS = 22; // drawn at once: more than fit into the box
const WHY_COLORS = { blocks: "bad", max_num_seqs: "accent" }; // by the reason for waiting; grey for other reasons
const WHY_DASHES = { blocks: [6, 2], max_num_seqs: [3, 3] }; // dashes of the line: [drawn, left out], otherwise [1, 3]
const KINDS = ["queued", "prefill", "decode", "idle", "preempted", "swapped"];

function drawRow(context, run, row, y, scale, theme, width) {
  const color = ownerColor(row.number, theme);
  for (const { kind, why, start, stop } of row.spans) {
    const [x, w] = [start * scale, Math.max(1, (stop - start) * scale)];
    drawSpan(context, kind, color, x, y + 3, w, ROW - 6, why);
  }
  context.fillStyle = cssColor("text");
  for (const { frame } of row.marks) {
    const x = frame * scale; // a preemption: a triangle that points down
    context.beginPath();
    context.moveTo(x - 4, y);
    context.lineTo(x + 4, y);
    context.lineTo(x, y + 7);
    context.fill();
  }
  if (row.isAborted) drawCross(context, Math.max(5, Math.min(width - 5, row.end * scale)), y + ROW / 2);
  else if (row.isOver) context.fillRect(Math.min(width - 2, row.end * scale), y + 3, 2, ROW - 6);
}

function drawCross(context, x, y) {
  context.strokeStyle = cssColor("text");
  context.lineWidth = 2;
  context.beginPath();
  for (const side of [-4, 4]) {
    context.moveTo(x - side, y - 4);
    context.lineTo(x + side, y + 4);
  }
  context.stroke();
}

// Draw a span. Each kind has its own shape (full, half, hatched, a line, …), so kinds differ not only in colour.
export function drawSpan(context, kind, color, x, y, w, height, why) {
  context.fillStyle = color;
  if (kind === "prefill") context.fillRect(x, y, w, height);
  else if (kind === "decode") {
    context.globalAlpha = 0.45;
    context.fillRect(x, y + height / 4, w, height / 2);
    context.globalAlpha = 1;
  } else if (kind === "idle") context.fillRect(x, y + height / 2 - 1, w, 2);
  else if (kind === "queued") {
    const [dash, gap] = WHY_DASHES[why] ?? [1, 3];
    context.fillStyle = cssColor(WHY_COLORS[why] ?? "soft");
    for (let i = 0; i < w; i += dash + gap) context.fillRect(x + i, y + height / 2 - 1, Math.min(dash, w - i), 2);
  } else {
    context.fillStyle = cssColor(WHY_COLORS[why] ?? "soft");
    context.globalAlpha = 0.25;
    context.fillRect(x, y, w, height);
    context.globalAlpha = 1;
    const gap = kind === "swapped" ? 8 : 4; // vertical strokes: close together for preempted, further apart for swapped
    for (let i = 0; i < w; i += gap) context.fillRect(x + i, y, 1, height);
  }
}

const inTime = (seconds) => formatTime(seconds === null ? null : 1e6 * seconds);

// Return the frames whose step numbers are shown, at least 60 pixels apart.
function ticksOf(run, scale) {
  let by = 1;
  for (let i = 0; by * scale < 60; i++) by *= i % 3 === 1 ? 2.5 : 2; // 1, 2, 5, 10, …
  return run.frames.map((_, frame) => frame).filter((frame) => !run.frames[frame].isEnd && run.frames[frame].step % by === 0);
}

export function Timeline({ run, frame, goTo, columns }) {
  const { t, theme, choice, choose } = useView();
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const [top, setTop] = useState(0); // the first row that is drawn; rows that are scrolled out of view are not drawn
  const { rows } = run;
  const shown = useMemo(() => rows.slice(top, top + ROWS), [rows, top]);
  const plot = Math.max(60, width - LABEL);
  const scale = plot / Math.max(1, columns ?? run.frames.length);
  const height = Math.max(1, shown.length) * ROW;
  const chosen = choice.seq === null || choice.seq === undefined ? null : run.rowOf.get(choice.seq);
  useEffect(() => {
    if (!width) return;
    const { context } = fitCanvas(canvas.current, plot, height);
    context.clearRect(0, 0, plot, height);
    shown.forEach((row, i) => drawRow(context, run, row, i * ROW, scale, theme, plot));
  }, [run, run.frames.length, width, theme, shown]);
  const bringIntoSight = (i) => {
    const box = ref.current;
    if (i >= 0 && (i * ROW < box.scrollTop || (i + 1) * ROW > box.scrollTop + box.clientHeight)) box.scrollTop = (i - 5) * ROW;
  };
  const settled = useSettled(frame);
  useEffect(() => bringIntoSight(rows.indexOf(chosen)), [chosen]);
  useEffect(() => { if (!chosen) bringIntoSight(rows.findIndex((one) => !(one.isOver && one.end < settled))); }, [settled]); // the oldest unfinished one
  const jump = (event) => {
    const box = canvas.current.getBoundingClientRect();
    goTo(Math.min(run.lastFrame, Math.max(0, Math.floor((event.clientX - box.left) / scale))));
    const row = shown[Math.floor((event.clientY - box.top) / ROW)];
    if (row) choose({ seq: row.number });
  };
  const labels = useMemo(() => html`<div class="labels">${shown.map((row) => html`<button class=${chosen === row ? "on" : ""} style=${{ height: `${ROW}px` }} title=${run.longName(row.number)} onClick=${() => choose({ seq: row.number })}>
    <i style=${{ background: ownerColor(row.number, theme) }}></i><b>${run.label(row.number)}</b>
    ${row.isFirst && html`<small>${inTime(run.ttft(row.request))} · ${inTime(run.tpot(row.request))}</small>`}</button>`)}</div>`, [run, run.frames.length, theme, chosen, shown]);
  const key = useMemo(() => html`<${Key} theme=${theme} />`, [theme, t]);
  return html`<section class="card timeline">
    <h2>${t("timeline")}</h2>
    <div class="axis" aria-hidden="true">${ticksOf(run, scale).map((at) => html`<span style=${{ left: `${LABEL + (at + 0.5) * scale}px` }}>${run.frames[at].step}</span>`)}</div>
    <div class="scroll" ref=${ref} tabindex="0" onScroll=${(event) => setTop(Math.max(0, Math.floor(event.target.scrollTop / ROW) - 2))}>
      <div style=${{ height: `${rows.length * ROW}px` }}><div class="chart" style=${{ transform: `translateY(${top * ROW}px)`, height: `${height}px` }}>
        ${labels}
        <div class="plot">
          <canvas ref=${canvas} style=${{ width: `${plot}px`, height: `${height}px` }} onClick=${jump} role="img" aria-label=${t("timeline")}></canvas>
          <div class="now" style=${{ transform: `translateX(${frame * scale}px)`, width: `${Math.max(2, scale)}px` }}></div>
        </div>
      </div></div>
    </div>
    ${key}
    <${Longest} run=${run} />
    ${chosen && html`<${Facts} run=${run} row=${chosen} goTo=${goTo} />`}
  </section>`;
}

// Return the rows that waited longest, at most three, with the reasons: {row, count, whys: Map of reason -> steps}.
export function longestWaits(run) {
  const found = run.rows.map((row) => {
    const whys = new Map();
    for (const { why, start, stop } of row.spans) if (why) whys.set(why, (whys.get(why) ?? 0) + stop - start);
    return { row, whys, count: [...whys.values()].reduce((a, b) => a + b, 0) };
  });
  return found.filter((one) => one.count).sort((a, b) => b.count - a.count).slice(0, 3);
}

function Longest({ run }) {
  const { t, choose } = useView();
  const longest = useMemo(() => longestWaits(run), [run, run.frames.length]);
  if (!longest.length) return null;
  const split = (whys) => [...whys].sort((a, b) => b[1] - a[1]).map(([why, count]) => `${t(`why.${why}`)} ${count}`).join(", ");
  return html`<p class="longest">${t("waitedLongest")}${t("colon")}${longest.map(({ row, count, whys }) => html`<button onClick=${() => choose({ seq: row.number })}><b>${run.label(row.number)}</b> ${t("waitedSteps", { count, split: split(whys) })}</button>`)}</p>`;
}

// The chosen row in words: its spans with their steps, and the latencies of its request.
function Facts({ run, row, goTo }) {
  const { t } = useView();
  return html`<p class="facts"><b title=${run.longName(row.number)}>${run.label(row.number)}</b>${t("colon")}
    ${row.spans.map(({ kind, why, start, stop }) => html`<button onClick=${() => goTo(start)}>${t(`kind.${kind}`)}${why && t("inBrackets", { words: t(`why.${why}`) })} ${run.frames[start].step}${stop - start > 1 ? `–${run.frames[stop - 1].step}` : ""}</button>`)}
    ${row.isOver && html`<button onClick=${() => goTo(row.end)}>${t(`reason.${row.reason}`)} ${run.frames[Math.min(row.end, run.lastFrame)].step - 1}</button>`}
    <span>${t("ttft")} ${inTime(run.ttft(row.request))}, ${t("tpot")} ${inTime(run.tpot(row.request))}</span></p>`;
}

function Key({ theme }) {
  const { t } = useView();
  const picture = (kind, why) => {
    const canvas = document.createElement("canvas");
    drawSpan(fitCanvas(canvas, 28, 12).context, kind, ownerColor(1, theme), 0, 0, 28, 12, why);
    return canvas.toDataURL();
  };
  const pictures = useMemo(() => KINDS.map((kind) => picture(kind)), [theme]);
  const lines = useMemo(() => Object.keys(WHY_COLORS).map((why) => picture("queued", why)), [theme]);
  return html`<div class="legend">
    ${KINDS.map((kind, i) => html`<span><img src=${pictures[i]} width="28" height="12" alt="" />${t(`kind.${kind}`)}</span>`)}
    ${Object.keys(WHY_COLORS).map((why, i) => html`<span><img src=${lines[i]} width="28" height="12" alt="" />${t(`why.${why}`)}</span>`)}
    <span>▼ ${t("kind.preempted")}</span><span>▏${t("kind.finished")}</span><span>✕ ${t("reason.abort")}</span>
  </div>`;
}
