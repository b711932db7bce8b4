// What if: fields for other options, and the figures of the same requests with them. The run with them is shown next to
// the recorded one.
//
// ask(request, run, { signal, progress }) runs the engine's scheduler again, where there is Python: `what_if_server.js` asks
// the server of `nanovllm view`. A page whose script has set `window.askWhatIf` before the program uses that function.
//   request   {options: {block_size: 32, …}}: the options that the reader has changed, with the names of the shell's JSON
//   run       the recorded run; run.name is its file's name, run.recording its text
//   signal    is aborted if the answer is no longer needed
//   progress  a function that shows a text until the answer is there, for example what is being loaded
//   t         translates
// It returns a promise of {figures, recording}, as `nanovllm_extras/what_if/answer.py` makes them, or of {error: text}.
//
// client, which only a page of the site has, can also run a scheduler that the reader has edited: the request has the text
// as `schedule`, and {error, line} is the answer if it fails.

import { Run } from "./run.js";
import { ScheduleEditor } from "./what_if_schedule.js";
import { html, useEffect, useMemo, useState, useView } from "./ui.js";

const SIZES = ["block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs"];
const CACHE = "enable_prefix_caching";
const FACTORS = [1 / 8, 1 / 4, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1, 9 / 8, 5 / 4, 3 / 2, 2, 4, 8];
const PAUSE = 300; // milliseconds without a change before the scheduler runs

const inPercent = (value) => `${(100 * value).toFixed(1)} %`;
const inMilliseconds = (value) => `${(1e3 * value).toFixed(1)} ms`;
const grouped = (value) => value.toLocaleString("en-US");
const COUNTS = { steps: grouped, tokens_per_step: (value) => value.toFixed(1), waste: inPercent, hit_rate: inPercent, preemptions: grouped, peak_blocks: grouped };
const LATENCIES = { ttft_p50_s: inMilliseconds, ttft_p99_s: inMilliseconds, tpot_p50_s: inMilliseconds, tpot_p99_s: inMilliseconds, time_s: (value) => `${value.toFixed(3)} s` };
const COUNTS_IF_ANY = ["refused_requests", "cut_answers", "unknown_answers"];

const recordedOptions = ({ header }) => ({ block_size: header.block_size, num_blocks: header.num_blocks, ...Object.fromEntries([...SIZES.slice(2), CACHE].map((name) => [name, header.config[name]])) });

// Return the value of an option. Without a number of blocks, another block size keeps the memory of the pool.
function valueOf(own, changes, name) {
  if (name in changes) return changes[name];
  if (name !== "num_blocks" || !(changes.block_size >= 1)) return own[name];
  return Math.max(1, Math.floor((own.num_blocks * own.block_size) / changes.block_size));
}

// Return `changes` with an option set. An option with the value that it has without a change is not a change.
function changed(own, changes, name, value) {
  const { [name]: _, ...others } = changes;
  return valueOf(own, others, name) === value ? others : { ...others, [name]: value };
}

// Return the values of an option's slider: powers of two for a block size, otherwise fractions and multiples of its own.
function choicesOf(own, name) {
  const all = name === "block_size" ? [1, 2, 4, 8, 16, 32, 64, 128, 256, own] : FACTORS.map((factor) => Math.max(1, Math.round(factor * own)));
  return [...new Set(all)].sort((a, b) => a - b);
}

// Return the place in `choices` that is nearest to `value`.
const nearest = (choices, value) => choices.reduce((best, one, i) => (Math.abs(one - value) < Math.abs(choices[best] - value) ? i : best), 0);

const nameOfChanges = (changes, options) => Object.entries("block_size" in changes ? { ...changes, num_blocks: options.num_blocks } : changes)
  .map(([name, value]) => `${name} ${value === true ? "on" : value === false ? "off" : value}`).join(", ");

// other: the run that is shown next to `run`, or undefined. show: shows another one, or none.
export function WhatIf({ run, other, show, ask, client }) {
  const { t } = useView();
  const own = useMemo(() => recordedOptions(run), [run]);
  const [changes, setChanges] = useState({});
  const [schedule, setSchedule] = useState(null); // the text of an edited method, in an array: to run it again is a change
  const [state, setState] = useState({}); // {isRunning, progress}, {figures, shown: the run of these figures} or {error, line}
  const isChanged = !!schedule || Object.keys(changes).length > 0;
  const reset = () => { setChanges({}); setSchedule(null); };
  const isClosed = state.shown && other !== state.shown; // with the page's own button, or a file is shown in its place
  useEffect(() => { if (isClosed) { reset(); setState({}); } }, [isClosed]);
  useEffect(() => {
    if (!isChanged) {
      if (state.shown) show(null);
      setState({});
      return undefined;
    }
    const controller = new AbortController();
    const timer = setTimeout(() => follow(controller.signal), PAUSE);
    return () => { clearTimeout(timer); controller.abort(); };
  }, [changes, schedule]);
  const follow = async (signal) => {
    const note = (next) => { if (!signal.aborted) setState(next); };
    setState((before) => ({ ...before, error: null, progress: null, isRunning: true }));
    const progress = (text) => note((before) => ({ ...before, progress: text }));
    try {
      const answer = await ask(schedule ? { options: changes, schedule: schedule[0] } : { options: changes }, run, { signal, progress, t });
      if (signal.aborted) return undefined;
      if (answer.error) {
        show(null);
        return setState({ error: answer.line ? t("scheduleError", { line: answer.line, error: answer.error }) : answer.error, line: answer.line });
      }
      const name = [nameOfChanges(changes, answer.figures.runs.at(-1).options), schedule && t("scheduleName")].filter(Boolean).join(", ");
      const shown = Run.parse(name, answer.recording);
      show(shown);
      return setState({ figures: answer.figures, shown });
    } catch (error) {
      if (signal.aborted) return undefined;
      show(null);
      return setState({ error: error.message });
    }
  };
  const set = (name, value) => setChanges((before) => changed(own, before, name, value));
  const words = state.isRunning ? state.progress ?? t("whatIfRuns") : "";
  return html`<section class="card what-if" aria-busy=${!!state.isRunning}><details open=${matchMedia("(min-width: 700px)").matches}>
    <summary>${t("whatIf")}</summary>
    <p class="soft">${t("whatIfHelp")}</p>
    <div class="options">
      ${SIZES.map((name) => html`<${SizeField} key=${name} name=${name} own=${own[name]} value=${valueOf(own, changes, name)} set=${set} />`)}
      <label class="option"><span><code>${CACHE}</code> <small>${t("whatIf.enable_prefix_caching")}</small></span>
        <input type="checkbox" name=${CACHE} checked=${valueOf(own, changes, CACHE)} onChange=${(event) => set(CACHE, event.target.checked)} /></label>
    </div>
    <p><button disabled=${!isChanged} onClick=${reset}>${t("whatIfReset")}</button> ${client && state.isRunning && html`<button onClick=${() => client.stop()}>${t("whatIfStop")}</button>`} <span role="status">${words}</span></p>
    ${state.error && !state.line && html`<p class="bad" role="alert">${state.error}</p>`}
    ${client && html`<${ScheduleEditor} schedule=${schedule && schedule[0]} setSchedule=${(text) => setSchedule(text === null ? null : [text])} error=${state.line && state.error} line=${state.line} />`}
    ${state.figures && html`<${Figures} found=${state.figures} name=${state.shown.name} />`}
  </details></section>`;
}

function SizeField({ name, own, value, set }) {
  const { t } = useView();
  const [text, setText] = useState(null); // while it is typed
  const choices = useMemo(() => choicesOf(own, name), [own, name]);
  const words = t(`whatIf.${name}`);
  const typed = (event) => { setText(null); set(name, event.target.value === "" ? own : Number(event.target.value)); };
  return html`<div class="option"><span><code>${name}</code> <small>${words}</small></span>
    <span class="size"><input type="range" min="0" max=${choices.length - 1} value=${nearest(choices, value)} aria-label=${`${name}${t("colon")}${words}`} aria-valuetext=${value} onInput=${(event) => set(name, choices[Number(event.target.value)])} />
      <input type="number" min="1" name=${name} value=${text ?? value} aria-label=${`${name}${t("colon")}${words}`} onInput=${(event) => setText(event.target.value)} onChange=${typed} /></span></div>`;
}

// The figures of the recording, of its own options by the clock, and of the changed options. found: the dict of `compare`
function Figures({ found, name }) {
  const { t } = useView();
  const simulated = found.runs.map((one) => one.figures);
  const columns = [found.recorded, ...simulated];
  const [own, last] = [simulated[0], simulated.at(-1)];
  const hasTimes = found.clock === null || found.clock.is_good !== false;
  const title = (figure) => html`<th scope="row">${t(`figure.${figure}`)}</th>`;
  const cell = (figures, figure, write) => html`<td class=${figures === last && last !== own && own[figure] !== last[figure] ? "other" : ""}>${figures[figure] === null ? "–" : write(figures[figure])}</td>`;
  const rowOf = (figure, write) => html`<tr>${title(figure)}${columns.map((figures) => cell(figures, figure, write))}</tr>`;
  const untimed = (figure, write, i) => html`<tr>${title(figure)}${cell(found.recorded, figure, write)}
    ${i === 0 && html`<td class="untimed" colspan=${simulated.length} rowspan=${Object.keys(LATENCIES).length}>${t("whatIfNoTimes", { error: inPercent(found.clock.mean_error) })}</td>`}</tr>`;
  const names = [t("whatIfRecorded"), ...found.runs.map((one) => (one.kind === "simulated" ? name : t("whatIfOwn")))];
  return html`<div class="wide" tabindex="0" role="region" aria-label=${t("whatIfFigures")}><table class="figures">
    <thead><tr><td></td>${names.map((one) => html`<th scope="col">${one}</th>`)}</tr></thead>
    <tbody>
      ${Object.entries(COUNTS).map(([figure, write]) => rowOf(figure, write))}
      ${Object.entries(LATENCIES).map(([figure, write], i) => (hasTimes ? rowOf(figure, write) : untimed(figure, write, i)))}
      ${COUNTS_IF_ANY.filter((figure) => columns.some((one) => one[figure])).map((figure) => rowOf(figure, grouped))}
    </tbody></table></div>
    <p class="soft">${t("whatIfColumns")} ${hasTimes && found.clock?.kind === "fitted" && t("whatIfClock", { error: inPercent(found.clock.mean_error), total: inPercent(found.clock.total_error), count: found.clock.num_steps })}
      ${columns.some((one) => one.unknown_answers) && ` ${t("whatIfUnknown")}`}</p>`;
}
