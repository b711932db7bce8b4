// A list of notable events to jump to: preemptions, aborts, copies, waits, prefix hits, loads; all of them, or one kind.
// A full pool has many evictions, and each request a sentence on its prompt: these are shown only when they are chosen.

import { describeEvent, subjectOf } from "./events.js";
import { html, useState, useView } from "./ui.js";

const MOST = 40;

export const isOfNote = ({ event }) => !["evictions", "miss"].includes(event[0]);

export function Highlights({ run, frame, goTo }) {
  const { t, choose } = useView();
  const [kind, setKind] = useState(null);
  const counts = new Map();
  for (const { event } of run.highlights) counts.set(event[0], (counts.get(event[0]) ?? 0) + 1);
  const all = kind ? run.highlights.filter((one) => one.event[0] === kind) : run.highlights.filter(isOfNote);
  const near = all.findIndex((one) => one.frame >= frame);
  const start = Math.max(0, Math.min((near < 0 ? all.length : near) - 3, all.length - MOST));
  const shown = all.slice(start, start + MOST);
  const filter = (name) => html`<button aria-pressed=${kind === name} class=${kind === name ? "on" : ""} onClick=${() => setKind(kind === name ? null : name)}>${t(`note.${name}`)} <b>${counts.get(name)}</b></button>`;
  return html`<section class="card highlights">
    <h2>${t("highlights")}</h2>
    ${!run.highlights.some(isOfNote) && html`<p class="soft">${t("noHighlights")}</p>`}
    <p class="filters">${[...counts.keys()].map(filter)}</p>
    <ul class="plain">${shown.map((one) => html`<li><button class=${one.frame === frame ? "on" : ""} title=${run.longName(subjectOf(one.event).seq)} onClick=${() => { goTo(one.frame); choose(subjectOf(one.event)); }}>
      <b>${run.frames[Math.min(one.frame, run.lastFrame)].step}</b> ${describeEvent(run, one.event, t, one.numFree)}</button></li>`)}</ul>
    ${all.length > shown.length && html`<p class="soft">${t("more", { count: all.length - shown.length })}</p>`}
  </section>`;
}
