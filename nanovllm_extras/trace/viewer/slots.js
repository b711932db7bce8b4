// The slots of recurrent states: which sequence owns which slot, which slots hold snapshots, and what the step copies.

import { blend, cssColor, ownerColor } from "./colors.js";
import { html, useView } from "./ui.js";

const MANY_SLOTS = 96;

// Return a copy of a state as words.
function describeCopy(run, { source, to, kind, seq, tokens }, t) {
  return t(`copied.${kind}`, { source, to, seq: run.label(seq), count: tokens });
}

// Return what a slot holds, as words.
function describeSlot(run, slot, use, copy, t) {
  const parts = [t("slotNumber", { slot })];
  if (use?.seq) parts.push(t("slotOf", { seq: run.label(use.seq) }));
  else parts.push(use ? t("snapshotAt", { count: use.tokens, block: use.block }) : t("free"));
  if (copy) parts.push(describeCopy(run, copy, t));
  return parts.join(", ");
}

// One slot: its number, its sequence or snapshot, and the slot from which this step copies a state to it.
function StateSlot({ run, state, slot, isLit }) {
  const { t, theme, choice, choose } = useView();
  const use = state.slots.get(slot);
  const copy = state.copied.findLast((one) => one.to === slot);
  const lines = (name) => html`<small>${slot}</small><b>${name}</b><small>${copy ? `← ${copy.source}` : ""}</small>`;
  const words = describeSlot(run, slot, use, copy, t);
  const lit = isLit ? "lit" : "";
  if (!use) return html`<span class=${`unused ${lit}`} title=${words}>${lines("–")}</span>`;
  const color = ownerColor(use.seq ?? state.writer[use.block], theme);
  if (use.seq) {
    const isOn = choice.seq === use.seq;
    return html`<button class=${`${isOn ? "on" : ""} ${lit}`} aria-label=${words} title=${words} onClick=${() => choose({ seq: use.seq })}>${lines(html`<i style=${{ background: color }}></i> ${run.label(use.seq)}`)}</button>`;
  }
  const ground = blend(color, cssColor("surface"), 0.2); // pale and dashed, as blocks that are free but still cached
  return html`<button class=${`kept ${choice.block === use.block ? "on" : ""} ${lit}`} style=${{ background: ground }} aria-label=${words} title=${words} onClick=${() => choose({ block: use.block })}>${lines(`(${use.tokens})`)}</button>`;
}

export function StateSlots({ run, frame, state, moment }) {
  const { t } = useView();
  if (!state.numSlots) return null;
  const uses = [...state.slots].filter(([slot]) => slot > 0).map(([, use]) => use); // without slots in host memory
  const numOwned = uses.filter((one) => one.seq).length;
  const shown = Math.min(state.numSlots, MANY_SLOTS, Math.max(run.replay.topSlot, 4)); // of the whole recording: scrubbing moves nothing
  const dropped = run.frames[frame].events.filter(([code]) => code === "drop");
  const moves = [...state.copied.map((copy) => describeCopy(run, copy, t)), ...dropped.map(([, slot, why]) => t(`event.drop.${why}`, { slot }))];
  return html`<div class="states">
    <h3>${t("slots", { owned: numOwned, snapshots: uses.length - numOwned, free: state.numSlots - uses.length })}</h3>
    <div class="table">${Array.from({ length: shown }, (_, i) => html`<${StateSlot} key=${i} run=${run} state=${state} slot=${i + 1} isLit=${moment?.slots.includes(i + 1)} />`)}
      ${state.numSlots > shown && html`<span class="soft">${t("slotRest", { count: (state.numSlots - shown).toLocaleString() })}</span>`}</div>
    <p class="soft moves" tabindex="0">${moves.length ? `${t("slotMoves")}${t("colon")}${moves.join(" · ")}` : t("slotNoMoves")}</p>
    <p class="soft">${t("slotsHelp")}</p>
  </div>`;
}
