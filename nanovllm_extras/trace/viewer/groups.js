// Models whose layers form groups, each with block tables of its own: one row for each group of a sequence.

import { blend, cssColor, ownerColor } from "./colors.js";
import { tablesOf } from "./replay.js";
import { Seq } from "./step.js";
import { html, useLayoutEffect, useRef, useView } from "./ui.js";

const MOST_SEQS = 8;
const MOST_BLOCKS = 32; // of a sequence, the newest ones
const ROW_HEIGHT = 27; // pixels

export const hasGroups = (run) => run.replay.numGroups > 1;

// Return what the layers of a group see, and how many layers it has, if the recording says so.
export function describeGroup(run, group, t) {
  const layers = run.header.config.layers_of_groups?.[group];
  const name = t(group ? "groupWindow" : "groupAll", { group, window: run.replay.groupWindow });
  return layers ? `${name}, ${t("groupLayers", { layers })}` : name;
}

// The block tables of one sequence: a row for each group, a column for each block of its tokens. Gaps are null blocks.
export function GroupTables({ run, seq, most = MOST_BLOCKS }) {
  const { t, theme, choice, choose } = useView();
  const count = seq.table.length;
  const first = Math.max(0, count - most);
  const places = Array.from({ length: count - first }, (_, i) => first + i);
  const color = blend(ownerColor(seq.number, theme), cssColor("surface"), 0.25);
  const cell = (block, group, i) => (block
    ? html`<td><button class=${choice.block === block ? "on" : ""} style=${{ background: color }} aria-label=${t("groupCell", { group, place: i, block })} onClick=${() => choose({ block })}>${block}</button></td>`
    : html`<td class="gap" title=${t("groupGap", { place: i })}>·</td>`);
  if (!count) return html`<p class="soft">${t("noBlocks")}</p>`;
  const corner = first ? t("groupEarlier", { count: first }) : t("groupPlace");
  return html`<${Rows} run=${run} seq=${seq} label=${t("groupTables")} corner=${corner} columns=${places} cell=${(table, group, i) => cell(table[i], group, i)} />`;
}

// A table with a row for each group. cell(block table, group, column) returns a <td>. A table that is too wide shows its end,
// where the blocks inside the window are.
function Rows({ run, seq, label, corner, columns, cell }) {
  const { t } = useView();
  const box = useRef(null);
  useLayoutEffect(() => { box.current.scrollLeft = box.current.scrollWidth; }, [seq.number, columns.length]);
  return html`<div class="wide" ref=${box} tabindex="0" role="group" aria-label=${label}><table class="groups">
    <tr><th scope="row">${corner}</th>${columns.map((i) => html`<th scope="col">${i}</th>`)}</tr>
    ${tablesOf(seq).map((table, group) => html`<tr><th scope="row" title=${describeGroup(run, group, t)}>${t(group ? "groupSeesWindow" : "groupSeesAll", { group, window: run.replay.groupWindow })}</th>
      ${columns.map((i) => cell(table, group, i))}</tr>`)}
  </table></div>`;
}

// The slots that a chunk writes to, in the blocks of each group.
export function GroupSlots({ run, seq, chunk, most }) {
  const { t } = useView();
  const size = run.header.block_size;
  const positions = Array.from({ length: Math.min(chunk.numNew, most) }, (_, i) => chunk.start + i);
  const cell = (table, group, position) => html`<td>${table[Math.floor(position / size)] * size + (position % size)}</td>`;
  return html`<p class="soft">${t("slotHelp", { size })}</p>
    <${Rows} run=${run} seq=${seq} label=${t("slotMapping")} corner=${t("groupPosition")} columns=${positions} cell=${cell} />
    ${chunk.numNew > most && html`<p class="soft">${t("more", { count: chunk.numNew - most })}</p>`}`;
}

// The tables of the running sequences, and a sentence that explains groups. The height is that of the whole recording, so
// that scrubbing moves nothing below.
export function Groups({ run, state }) {
  const { t } = useView();
  if (!hasGroups(run)) return null;
  const owners = state.living.filter((seq) => seq.table.length);
  const numSeqs = run.frames.some((one) => one.running > 1) ? 2 : 1; // below each other; the box scrolls
  const height = Math.min(320, numSeqs * (ROW_HEIGHT * (run.replay.numGroups + 1) + 44));
  const last = run.replay.numGroups - 1;
  const numWindows = owners.map((seq) => seq.windows[0].filter(Boolean).length);
  const held = owners.map((seq, i) => t("groupHolds", { all: seq.table.length, each: numWindows[i], last }));
  return html`<section class="card of-groups">
    <h2>${t("groups")}</h2>
    <p>${t(last > 1 ? "groupsHelp" : "groupsHelp.two", { last, window: run.replay.groupWindow, size: run.header.block_size })}</p>
    <div class="scroll" style=${{ height: `${height}px` }} tabindex="0" role="region" aria-label=${t("groups")}>
      ${owners.length === 0 && html`<p class="soft">${t("groupsNone")}</p>`}
      ${owners.slice(0, MOST_SEQS).map((seq, i) => html`<div key=${seq.number}><p><${Seq} run=${run} number=${seq.number} /> <span class="soft">${held[i]}</span></p>
        <${GroupTables} run=${run} seq=${seq} /></div>`)}
      ${owners.length > MOST_SEQS && html`<p class="soft">${t("groupsMore", { count: owners.length - MOST_SEQS })}</p>`}
    </div>
  </section>`;
}
