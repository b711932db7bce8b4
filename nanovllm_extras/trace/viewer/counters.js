// Counters over the steps, in three small uPlot charts with one scale each. A click goes to the step.

import { cssColor } from "./colors.js";
import { html, useEffect, useLayoutEffect, useRef, useView, useWidth } from "./ui.js";

const CHARTS = [
  { unit: "sequences", series: [["running", "line1"], ["waiting", "line2"]] },
  { unit: "blocks", series: [["owned", "line1"], ["cachedFree", "line3"], ["shared", "line2"]] },
  { unit: "share", series: [["hitRate", "line3"], ["waste", "line2"]], factor: 100 },
];
const SPECULATION = ["keptRate", "line1"];
const NAMES = { hitRate: "hitRateShort", keptRate: "keptRateShort", waste: "wasteShort", shared: "ofThemShared" };
const DASHES = [[], [6, 3], [2, 2]]; // the lines differ not only in colour

function chartsOf(run) {
  if (!run.proposed) return CHARTS;
  return CHARTS.map((chart) => (chart.unit === "share" ? { ...chart, series: [...chart.series, SPECULATION] } : chart));
}

function dataOf(run, chart) {
  const factor = chart.factor ?? 1;
  return [run.frames.map((one) => one.step), ...chart.series.map(([name]) => run.frames.map((one) => factor * one[name]))];
}

function optionsOf(chart, width, place, columns) {
  const axis = { stroke: cssColor("soft"), grid: { stroke: cssColor("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width,
    height: 130,
    scales: { x: { time: false, range: (_, low, high) => [low, columns ? low + columns - 1 : high] }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.05)] } },
    axes: [{ ...axis, size: 24 }, { ...axis, size: 44 }],
    legend: { show: false },
    cursor: { drag: { setScale: false, x: false, y: false } },
    series: [
      {},
      ...chart.series.map(([, color], i) => ({ stroke: cssColor(color), width: 2, dash: DASHES[i], points: { show: false } })),
    ],
    hooks: { draw: [place] }, // the scale is not known earlier
  };
}

function Chart({ run, frame, goTo, chart, columns }) {
  const { t, theme } = useView();
  const [ref, width] = useWidth();
  const plot = useRef(null);
  const line = useRef(null); // marks the current step: it is moved, which is faster than drawing the chart again
  useEffect(() => {
    if (!width) return undefined;
    plot.current = new uPlot(optionsOf(chart, width, (one) => placeLine(one), columns), dataOf(run, chart), ref.current);
    const over = plot.current.over;
    const click = () => plot.current.cursor.idx != null && goTo(plot.current.cursor.idx);
    over.addEventListener("click", click);
    return () => plot.current.destroy();
  }, [run, width, theme, columns, chart.series.length]);
  useEffect(() => plot.current?.setData(dataOf(run, chart)), [run.frames.length]);
  const at = useRef(0);
  at.current = run.frames[frame].step;
  const placeLine = (one) => { // uses the plot's own numbers: asking the browser for positions would force a layout of the page
    const { left, top, height } = one.bbox;
    const ratio = window.devicePixelRatio || 1;
    line.current.style.transform = `translate(${left / ratio + one.valToPos(at.current, "x")}px, ${top / ratio}px)`;
    line.current.style.height = `${height / ratio}px`;
  };
  useLayoutEffect(() => plot.current && placeLine(plot.current));
  const value = (name) => ((chart.factor ?? 1) * run.frames[frame][name]).toFixed(chart.factor ? 1 : 0);
  return html`<div><h3>${t(chart.unit)}</h3><div class="wide plot" ref=${ref}><div class="now" ref=${line}></div></div>
    <p class="legend">${chart.series.map(([name, color], i) => html`<span>
      <svg width="26" height="8"><line x1="0" x2="26" y1="4" y2="4" stroke=${`var(--${color})`} stroke-width="2.5" stroke-dasharray=${DASHES[i].join(" ")} /></svg>
      ${t(NAMES[name] ?? name)} <b>${value(name)}</b></span>`)}</p></div>`;
}

export function Counters({ run, frame, goTo, columns }) {
  const { t } = useView();
  return html`<section class="card counters"><h2>${t("counters")}</h2><div class="charts">
    ${chartsOf(run).map((chart) => html`<${Chart} key=${chart.unit} run=${run} frame=${frame} goTo=${goTo} chart=${chart} columns=${columns} />`)}
  </div></section>`;
}
