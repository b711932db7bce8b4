// Where the time of a step goes: the parts of each step in a chart, and the median decode step in words.

import { cssColor } from "./colors.js";
import { formatTime, html, useMemo, useRef, useLayoutEffect, useView, useWidth, fitCanvas } from "./ui.js";

const PARTS = ["schedule", "build", "run", "update", "output"];
const PART_COLORS = ["line3", "line2", "line1", "soft", "text"];
const TALL = 90;

const sumOf = (times) => PARTS.reduce((sum, part) => sum + (times[part] ?? 0), 0);

// Return {count, sum, times}: the number of steps that only decode, the median of their times, and the median of each
// part; null if there is no such step.
export function medianDecode(run) {
  const decodes = run.frames.filter((at) => !at.isEnd && at.decodes.length > 0 && at.events.at(-1)[4].length === 0);
  const timed = decodes.map((at) => run.times.get(at.step)).filter(Boolean);
  if (!timed.length) return null;
  const parts = PARTS.filter((part) => timed.some((times) => times[part] !== undefined));
  const times = Object.fromEntries(parts.map((part) => [part, middleOf(timed.map((one) => one[part] ?? 0))]));
  return { count: timed.length, sum: middleOf(timed.map(sumOf)), times };
}

// Return the median; for an even number of values, the lower of the two in the middle.
const middleOf = (values) => Float64Array.from(values).sort()[Math.floor((values.length - 1) / 2)];

export const Times = (shared) => (shared.run.times.size ? html`<${TimesCard} ...${shared} />` : null);

function TimesCard({ run, frame, goTo, columns }) {
  const { t, theme } = useView();
  const [ref, width] = useWidth();
  const canvas = useRef(null);
  const numSteps = run.frames.length;
  const median = useMemo(() => medianDecode(run), [run, run.times.size]);
  const scale = width / Math.max(1, columns ?? numSteps);
  useLayoutEffect(() => {
    if (!width) return;
    const { context } = fitCanvas(canvas.current, width, TALL);
    context.clearRect(0, 0, width, TALL);
    const colors = PART_COLORS.map(cssColor); // read once: each colour is a query to the browser
    const sums = run.frames.map((at) => sumOf(run.times.get(at.step) ?? {}));
    const most = Math.max(1, [...sums].sort((a, b) => a - b)[Math.floor(0.98 * (sums.length - 1))] * 1.15); // one slow step would flatten the others
    run.frames.forEach((at, i) => {
      let y = TALL;
      PARTS.forEach((part, k) => {
        const high = (TALL * (run.times.get(at.step)?.[part] ?? 0)) / most;
        context.fillStyle = colors[k];
        context.fillRect(i * scale, (y -= high), Math.max(1, scale - (scale > 3 ? 1 : 0)), high);
      });
      if (y >= 0) return;
      context.fillStyle = colors.at(-1); // the bar is taller than the chart
      context.fillText("↑", i * scale, 10);
    });
    if (!median) return;
    context.fillStyle = cssColor("bad");
    for (let x = 0; x < width; x += 8) context.fillRect(x, TALL - (TALL * median.sum) / most, 4, 1.5);
  }, [run, numSteps, run.times.size, scale, theme]);
  const jump = (event) => goTo(Math.floor((event.clientX - canvas.current.getBoundingClientRect().left) / scale));
  const of = run.times.get(run.frames[frame].step);
  const split = (times) => PARTS.filter((part) => times[part] !== undefined).map((part) => `${t(`part.${part}`)} ${formatTime(times[part])}`).join(t("comma"));
  return html`<section class="card times"><h2>${t("timesOfSteps")}</h2>
    <div class="wide" ref=${ref}><div class="plot"><canvas ref=${canvas} style=${{ width: `${width}px`, height: `${TALL}px` }} onClick=${jump} role="img" aria-label=${t("timesOfSteps")}></canvas>
      <div class="now" style=${{ transform: `translateX(${frame * scale}px)`, width: `${Math.max(2, scale)}px` }}></div></div></div>
    <div class="legend">${PARTS.map((part, k) => html`<span><i style=${{ background: `var(--${PART_COLORS[k]})` }}></i>${t(`part.${part}`)}</span>`)}<span>┄ ${t("medianLine")}</span></div>
    <p class="line">${of ? t("timesOfThis", { time: formatTime(sumOf(of)), split: split(of) }) : t("timesUnknown")}</p>
    ${median && html`<p><b>${t("timesOfDecode", { count: median.count, time: formatTime(median.sum), split: split(median.times) })}</b></p>`}
  </section>`;
}
