// Which requests the page asks about: one of the site's recordings, or a form of one's own requests.

import { Run } from "./run.js";
import { html, useRef, useState, useView } from "./ui.js";

const NUMBERS = { prompt: 1, answer: 1, arrival: 0, n: 1, shared: 0 }; // field -> its smallest value
const FIRST_REQUESTS = [
  { prompt: 120, answer: 40, arrival: 0, n: 1, shared: 64 },
  { prompt: 100, answer: 60, arrival: 0, n: 1, shared: 64 },
  { prompt: 40, answer: 30, arrival: 0.02, n: 2, shared: 0 },
  { prompt: 200, answer: 20, arrival: 0.05, n: 1, shared: 64 },
];

// recordings: runs to choose from. run: the one that is shown. choose: shows another one. client: computes
export function Requests({ recordings, run, choose, client }) {
  const { t } = useView();
  return html`<section class="card requests" aria-label=${t("requestsOf")}>
    <h2>${t("requestsOf")}</h2>
    <div class="filters" role="group" aria-label=${t("requestsRecorded")}>${recordings.map((one) => {
      const name = one.name.replace(".jsonl", "");
      return html`<button aria-pressed=${one === run} class=${one === run ? "on" : ""} onClick=${() => choose(one)}>${t(`requests.${name}`)}</button>`;
    })}</div>
    <details><summary>${t("requestsOwn")}</summary><${RequestsForm} choose=${choose} client=${client} /></details>
  </section>`;
}

const numbersOf = (row) => Object.fromEntries(Object.entries(row).map(([name, text]) => [name, Number(text)]));

function RequestsForm({ choose, client }) {
  const { t } = useView();
  const [rows, setRows] = useState(FIRST_REQUESTS); // with texts in place of numbers once they are typed: "0." becomes "0.5"
  const [state, setState] = useState({}); // {isRunning, words} or {error}
  const count = useRef(0);
  const change = (i, name, value) => setRows(rows.map((row, k) => (k === i ? { ...row, [name]: value } : row)));
  const submit = async (event) => {
    event.preventDefault();
    setState({ isRunning: true, words: t("whatIfRuns") });
    const { recording, error } = await client.record(rows.map(numbersOf), { t, progress: (words) => setState({ isRunning: true, words }) });
    setState(error ? { error } : {});
    if (!error) choose(Run.parse(`${t("requestsOwn")} ${++count.current}`, recording));
  };
  const field = (row, i, name) => html`<td><input type="number" required name=${name} min=${NUMBERS[name]} step=${name === "arrival" ? "any" : 1} value=${row[name]}
    aria-label=${t("requestField", { number: i + 1, field: t(`request.${name}`) })} onInput=${(event) => change(i, name, event.target.value)} /></td>`;
  const remove = (i) => html`<td><button type="button" aria-label=${t("requestRemove", { number: i + 1 })} disabled=${rows.length === 1} onClick=${() => setRows(rows.filter((_, k) => k !== i))}>×</button></td>`;
  return html`<form class="own" onSubmit=${submit} aria-busy=${!!state.isRunning}>
    <p class="soft">${t("requestsHelp")}</p>
    <div class="wide"><table>
      <thead><tr><td></td>${Object.keys(NUMBERS).map((name) => html`<th scope="col">${t(`request.${name}`)}</th>`)}<td></td></tr></thead>
      <tbody>${rows.map((row, i) => html`<tr><th scope="row">${i + 1}</th>${Object.keys(NUMBERS).map((name) => field(row, i, name))}${remove(i)}</tr>`)}</tbody>
    </table></div>
    <p><button type="button" onClick=${() => setRows([...rows, rows.at(-1)])}>${t("requestAdd")}</button>
      ${" "}<button type="submit" disabled=${state.isRunning}>${t("requestsRun")}</button>
      ${state.isRunning && html` <button type="button" onClick=${() => client.stop()}>${t("whatIfStop")}</button>`} <span role="status">${state.words}</span></p>
    ${state.error && html`<p class="bad" role="alert">${state.error}</p>`}
  </form>`;
}
