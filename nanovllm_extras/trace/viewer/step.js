// The card of a step: how its budget was split, which sequences wait and why, and each event since the step before, with
// the code that decided it.

import { ownerColor } from "./colors.js";
import { describeEvent, freeBefore, sourceOf, subjectOf, waitsOf } from "./events.js";
import { formatTime, html, useState, useView } from "./ui.js";

const FEW = 12;

// A button with a sequence's colour and name; a click chooses the sequence.
export function Seq({ run, number }) {
  const { theme, choose, choice } = useView();
  return html`<button class=${`seq ${choice.seq === number ? "on" : ""}`} title=${run.longName(number)} onClick=${() => choose({ seq: number })}>
    <i style=${{ background: ownerColor(number, theme) }}></i>${run.label(number)}</button>`;
}

// Return [{number, start, numNew, code}] for the step's chunks, decodes first. `state` is the state after the step.
export function chunksOf(at, state) {
  if (at.isEnd) return [];
  const decodes = at.decodes.map((number) => { // a chunk of one token may also be a part of a prompt, cut by the budget
    const { computed, known } = state.seqs.get(number);
    return { number, start: computed - 1, numNew: 1, code: computed < known ? "budget" : "decode" };
  });
  return [...decodes, ...at.events.at(-1)[4].map(([number, start, numNew, code]) => ({ number, start, numNew, code }))];
}

function Budget({ run, at, chunks }) {
  const { t, theme } = useView();
  const used = chunks.reduce((sum, one) => sum + one.numNew, 0);
  const all = run.header.config.max_num_batched_tokens;
  const scale = all && used * 20 > all ? all : Math.max(1, used); // if little of the budget is used, its parts would be too narrow to see
  const parts = chunks.filter((one) => one.code !== "decode");
  const numDecodes = chunks.length - parts.length;
  const split = [t("decodeCount", { count: numDecodes }), t("chunkCount", { count: parts.length, tokens: used - numDecodes })];
  if (all) split.push(t("unused", { count: all - used }));
  return html`<div>
    <p>${all ? t("budget", { used, all }) : t("budgetUnknown", { used })}${t("colon")}${split.join(t("comma"))}</p>
    <div class="budget" role="img" aria-label=${`${used} / ${all ?? "?"}`}>
      ${numDecodes > 0 && html`<span class="decodes" style=${{ width: `${(100 * numDecodes) / scale}%` }}>${numDecodes > scale / 12 ? numDecodes : ""}</span>`}
      ${parts.map((one) => html`<span style=${{ width: `${(100 * one.numNew) / scale}%`, background: ownerColor(one.number, theme) }} title=${`${run.longName(one.number) ?? run.label(one.number)}: ${one.numNew}`}></span>`)}
    </div>
  </div>`;
}

function Chunks({ run, state, chunks }) {
  const { t } = useView();
  const [isOpen, setOpen] = useState(false);
  const isDecode = (one) => one.code === "decode";
  const sorted = [...chunks.filter((one) => !isDecode(one)), ...chunks.filter(isDecode)]; // prefill chunks first: many decodes would hide them
  const shown = isOpen ? sorted : sorted.slice(0, FEW);
  return html`<table class="rows"><tbody>
    ${shown.map(({ number, start, numNew, code }) => html`<tr>
      <td><${Seq} run=${run} number=${number} /></td>
      <td class="number">${numNew}</td>
      <td>${t(numNew === 1 ? "tokenOf" : "tokensOf", { start, stop: start + numNew - 1, all: Math.max(state.seqs.get(number).known, start + numNew) })}</td>
      <td class="soft">${t(`chunk.${code}`)}</td>
    </tr>`)}
    ${chunks.length > shown.length && html`<tr><td colspan="4"><button onClick=${() => setOpen(true)}>${t("more", { count: chunks.length - FEW })}</button></td></tr>`}
  </tbody></table>`;
}

// Return why each waiting or idle sequence got no token: [{seq, event}].
function reasonsOf(events, state) {
  const waitOf = waitsOf(events);
  const idle = new Map(events.filter(([code]) => code === "idle").map((event) => [event[1], event]));
  return state.living
    .filter((seq) => idle.has(seq.number) || seq.status === "waiting")
    .map((seq) => ({ seq, event: idle.get(seq.number) ?? waitOf(seq.number) }))
    .sort((a, b) => (a.event?.[0] === "behind") - (b.event?.[0] === "behind")); // the first of the queue before those behind it
}

// Return the reasons at the end of the recording: those of `before`, the last step, for the sequences that still wait.
function reasonsAtEnd(before, state) {
  const isWaiting = (number) => state.seqs.get(number)?.status === "waiting";
  const events = (before?.events ?? []).filter((event) => event[0] === "wait" && isWaiting(event[1]));
  return reasonsOf(events, state).map(({ seq, event }) => ({ seq, event: event ?? ["end"] }));
}

function reasonText(run, seq, event, t) {
  if (!event) return t("wait.next");
  if (event[0] === "end") return t("wait.end");
  if (event[0] === "behind") return t("wait.behind", { other: run.label(event[1]) });
  return t(`${event[0]}.${event[2]}`, { needed: event[3], free: event[4], ...run.placesFor(seq.number) });
}

function Waiting({ run, at, state, before }) {
  const { t } = useView();
  const reasons = at.isEnd ? reasonsAtEnd(before, state) : reasonsOf(at.events, state);
  return html`<h3>${t("waits")}</h3>
    ${reasons.length === 0 && html`<p class="soft">${t("nobodyWaits")}</p>`}
    <ul class="plain">${reasons.slice(0, FEW).map(({ seq, event }) => html`<li><${Seq} run=${run} number=${seq.number} /> ${reasonText(run, seq, event, t)}</li>`)}
    ${reasons.length > FEW && html`<li class="soft">${t("more", { count: reasons.length - FEW })}</li>`}</ul>`;
}

function Events({ run, frame, at, goTo }) {
  const { t, choose, showSource } = useView();
  const [isOpen, setOpen] = useState(false);
  const before = freeBefore(run, frame);
  const shown = isOpen ? at.events : at.events.slice(0, FEW);
  return html`<h3>${t("whatHappened")}</h3>
    ${at.events.length === 0 && html`<p class="soft">${t("nothing")}</p>`}
    <ol class="events">
      ${shown.map((event) => html`<li class=${`is-${event[0]}`}>
        <button class="text" title=${run.longName(subjectOf(event).seq)} onClick=${() => { goTo((here) => here); choose(subjectOf(event)); }}>${describeEvent(run, event, t, before.get(event))}</button>
        <button class="source" title=${t("showSourceLong")} disabled=${!window.SOURCES[sourceOf(run, event)]} onClick=${() => showSource(sourceOf(run, event))} aria-label=${`${t("showSource")}: ${event[0]}`}>{ } ${event[0]}</button>
      </li>`)}
    </ol>
    ${at.events.length > shown.length && html`<button onClick=${() => setOpen(true)}>${t("more", { count: at.events.length - shown.length })}</button>`}`;
}

export function Step({ run, frame, state, goTo }) {
  const { t } = useView();
  const at = run.frames[frame];
  const chunks = chunksOf(at, state);
  const times = run.times.get(at.step);
  const sum = times && Object.values(times).reduce((a, b) => a + b, 0);
  return html`<section class="card step">
    <h2>${t("theStep")}${t("colon")}${at.isEnd ? t("atEnd", { last: at.step - 1 }) : at.step}</h2>
    ${times && !at.isEnd && html`<p class="soft">${t("times", { time: formatTime(sum) })}${t("inBrackets", { words: Object.entries(times).map(([name, value]) => `${t(`part.${name}`)} ${formatTime(value)}`).join(t("comma")) })}</p>`}
    ${!at.isEnd && html`<${Budget} run=${run} at=${at} chunks=${chunks} /><${Chunks} run=${run} state=${state} chunks=${chunks} />`}
    <${Waiting} run=${run} at=${at} state=${state} before=${run.frames[frame - 1]} />
    <${Events} run=${run} frame=${frame} at=${at} goTo=${goTo} />
  </section>`;
}
