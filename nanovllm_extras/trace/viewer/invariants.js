// The invariants of every state. The first check is about the whole recording, the others about the state that is shown.

import { blocksOf } from "./replay.js";
import { html, useMemo, useView } from "./ui.js";

export function brokenInvariants(state) {
  const found = [];
  const size = state.blockSize;
  const [numOwners, timesFree] = [new Int32Array(state.numBlocks + 1), new Int32Array(state.numBlocks + 1)];
  for (const seq of state.seqs.values()) for (const b of blocksOf(seq)) numOwners[b] += 1;
  for (let b = state.next[0], i = 0; b !== 0 && i <= state.numBlocks; b = state.next[b], i++) timesFree[b] += 1;
  for (let b = 1; b <= state.numBlocks; b++) {
    if (state.refs[b] !== numOwners[b]) found.push(["refs", b]);
    if (timesFree[b] !== (state.refs[b] ? 0 : 1)) found.push(["free", b]);
    if (state.serial[b] && state.filled[b] !== size) found.push(["full", b]);
  }
  for (const [slot, { seq, block }] of state.slots) {
    if (seq ? state.seqs.get(seq).slot !== slot : !state.serial[block]) found.push(["slots", slot]);
  }
  for (const seq of state.living) {
    if (seq.status === "running" && seq.table.length < Math.ceil(seq.computed / size)) found.push(["tables", seq.number]);
    const firstSeen = Math.floor(Math.max(0, seq.computed - state.groupWindow + 1) / size); // block that the next token sees
    const lacksOne = (table) => Array.from({ length: Math.ceil(seq.computed / size) - firstSeen }).some((_, i) => !table[firstSeen + i]);
    if (seq.status === "running" && seq.windows.some(lacksOne)) found.push(["windows", seq.number]);
    const isThere = seq.slot > 0 && state.slots.get(seq.slot)?.seq === seq.number; // not in host memory
    if (state.numSlots && isThere !== (seq.status === "running")) found.push(["slots", seq.slot]);
  }
  return found;
}

// Return [name, places where the check fails] for each check. `replay` is about the whole recording.
export function failedChecks(run, state) {
  const found = brokenInvariants(state);
  const broken = run.replay.broken.map((one) => `step ${one.step}: ${one.message}`);
  const names = ["refs", "free", "full", "tables", ...(state.numSlots ? ["slots"] : []), ...(state.numGroups > 1 ? ["windows"] : [])];
  return [["replay", broken], ...names.map((name) => [name, found.filter((one) => one[0] === name).map((one) => one[1])])];
}

export function Invariants({ run, state, frame }) {
  const { t } = useView();
  const checks = useMemo(() => failedChecks(run, state), [run, frame, run.frames.length]);
  const line = (name, where, values) => html`<li class=${where.length ? "bad" : "good"}><b aria-hidden="true">${where.length ? "✗" : "✓"}</b> ${t(`inv.${name}`, values)}
    ${where.slice(0, 3).map((one) => html`<code>${one}</code> `)}</li>`;
  const held = checks.filter(([, where]) => !where.length).length;
  return html`<section class="card invariants drawer" id=${`checks-${run.name}`} tabindex="-1">
    <details open=${held < checks.length}><summary>${t("invariants", { held, all: checks.length })}</summary>
      <ul class="plain">
        ${checks.map(([name, where]) => line(name, where, { count: run.frames.length - 1 }))}
      </ul>
      <p class="soft">${t("invariantsHelp")}</p></details>
  </section>`;
}
