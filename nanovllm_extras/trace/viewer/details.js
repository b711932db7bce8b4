// The cards of the chosen sequence (its block table and this step's slots) and of the chosen block (tokens, hash, owners).

import { ownerColor } from "./colors.js";
import { tierName } from "./events.js";
import { describeGroup, GroupSlots, GroupTables, hasGroups } from "./groups.js";
import { explainMisses } from "./misses.js";
import { chunksOf, Seq } from "./step.js";
import { html, useMemo, useView, visible } from "./ui.js";

const MANY = 64;

export function SequenceCard({ run, frame, state }) {
  const { t, theme, choice, choose } = useView();
  if (choice.seq === null || choice.seq === undefined) return null;
  const seq = state.seqs.get(choice.seq);
  const name = run.label(choice.seq);
  if (!seq) return html`<section class="card"><h2>${t("sequence", { seq: name })}</h2><p class="soft">${t("status.unborn")}</p></section>`;
  const chunk = chunksOf(run.frames[frame], state).find((one) => one.number === seq.number);
  const isOver = seq.status === "finished"; // its blocks are freed, so its number of computed tokens is 0
  return html`<section class="card sequence">
    <h2 title=${run.longName(seq.number)}><i style=${{ background: ownerColor(seq.number, theme) }}></i> ${t("sequence", { seq: name })}</h2>
    <p>${t("status")}${t("colon")}<b>${t(isOver && run.isAborted(seq.number) ? "status.aborted" : `status.${seq.status}`)}</b>${t("statusEnds")}${t(isOver ? "tokensKnown" : "tokensComputed", { computed: seq.computed, known: seq.known })}${t("inBrackets", { words: t("promptAndOutput", { prompt: seq.numPrompt, output: seq.known - seq.numPrompt }) })}${t("statusEnds")}
      ${seq.host.length > 0 && t("onHost", { blocks: seq.host.join(", ") })}</p>
    ${seq.slot !== 0 && html`<p>${t(seq.slot > 0 ? "stateIn" : "stateOnHost", { slot: seq.slot, count: seq.computed })}</p>`}
    ${seq.misses.length > 0 && html`<p class="misses">${explainMisses(run, seq.misses, t)}</p>`}
    ${hasGroups(run) ? html`<h3>${t("groupTables")}</h3><${GroupTables} run=${run} seq=${seq} most=${MANY} />` : html`<h3>${t("blockTable")}</h3>
    ${seq.table.length === 0 && html`<p class="soft">${t("noBlocks")}</p>`}
    <div class="table">${seq.table.slice(0, MANY).map((block, i) => html`<button disabled=${!block} class=${block && choice.block === block ? "on" : ""} onClick=${() => choose({ block })} aria-label=${`${i} → ${block}`}>
      <small>${i}</small><b>${block}</b></button>`)}${seq.table.length > MANY && html`<span class="soft">${t("more", { count: seq.table.length - MANY })}</span>`}</div>`}
    ${chunk && html`<h3>${t("slotMapping")}</h3><${hasGroups(run) ? GroupSlots : Slots} run=${run} seq=${seq} chunk=${chunk} most=${MANY} />`}
    <${Tokens} run=${run} seq=${seq} first=${0} stop=${seq.known} numComputed=${seq.computed} drafts=${seq.drafts} />
  </section>`;
}

function Slots({ run, seq, chunk }) {
  const { t } = useView();
  const size = run.header.block_size;
  const positions = Array.from({ length: Math.min(chunk.numNew, MANY) }, (_, i) => chunk.start + i);
  const slotOf = (position) => seq.table[Math.floor(position / size)] * size + (position % size);
  return html`<p class="soft">${t("slotHelp", { size })}</p>
    <div class="table slots">${positions.map((position) => html`<span><small>${position}</small><b>${slotOf(position)}</b></span>`)}
    ${chunk.numNew > MANY && html`<span class="soft">${t("more", { count: chunk.numNew - MANY })}</span>`}</div>`;
}

function Tokens({ run, seq, first, stop, numComputed, drafts = [] }) {
  const ids = seq.tokens.slice(first, Math.min(stop, first + 400));
  return html`<p class="tokens">${ids.map((id, i) => html`<span class=${`${first + i < numComputed ? "done" : "todo"} ${first + i < seq.numPrompt ? "" : "output"}`} title=${`${first + i}: ${id}`}>${visible(run.text(id))}</span>`)}
    ${stop > first + 400 && html`<span class="soft"> …</span>`}${drafts.map((id, i) => html`<span class="todo draft" title=${`${stop + i}: ${id}`}>${visible(run.text(id))}</span>`)}</p>`;
}

// Return {owners, rank among the free blocks or -1, writer, holds: whether the block holds tokens of `writer`}.
export function lookInto(state, block) {
  const owners = state.owners().get(block) ?? [];
  const rank = owners.length ? -1 : state.freeOrder.indexOf(block);
  const writer = state.seqs.get(state.writer[block]);
  return { owners, rank, writer, holds: (owners.length > 0 || state.serial[block] > 0) && writer && state.filled[block] > 0 };
}

// Describe a block in a few words: its owners or its rank among the free blocks, and its contents.
export function describeBlock(run, state, block, t) {
  const { owners, rank, writer, holds } = lookInto(state, block);
  const first = state.place[block] * run.header.block_size;
  const text = holds ? writer.tokens.slice(first, first + state.filled[block]).map((id) => run.text(id)).join("") : "";
  const parts = [t("block", { block }), ...(hasGroups(run) && (owners.length || holds) ? [t("ofGroup", { group: state.group[block] })] : []), owners.map((number) => run.label(number)).join(", ") || t("freeRank", { count: rank })];
  if (holds && state.loaded[block]) parts.push(t("loadedFrom", { tier: tierName(state.tierOf(block), t) }));
  if (block === state.nextEvicted()) parts.push(t("nextEvicted"));
  parts.push(holds ? `${t("filled", { filled: state.filled[block], size: run.header.block_size })}: “${text.trim().slice(0, 80)}”` : t("neverWritten"));
  return parts;
}

// For screen readers: announce the block that the arrow keys choose in the pool. A change of step does not repeat it.
export function SpokenBlock({ run, state }) {
  const { t, choice } = useView();
  const { block } = choice;
  const text = useMemo(() => (block && block <= state.numBlocks ? describeBlock(run, state, block, t).join(". ") : ""), [run, block, t]);
  return html`<p class="spoken" aria-live="polite">${text}</p>`;
}

export function BlockCard({ run, state }) {
  const { t, choice, choose } = useView();
  const block = choice.block;
  if (!block || block > state.numBlocks) return null;
  const size = run.header.block_size;
  const { owners, rank, writer, holds } = lookInto(state, block);
  const serial = state.serial[block];
  const [slot] = [...state.slots].find(([, one]) => one.block === block) ?? [];
  const first = state.place[block] * size;
  const pick = ({ target }) => choose({ block: Math.min(state.numBlocks, Math.max(1, Math.round(target.valueAsNumber) || block)) });
  return html`<section class="card block">
    <h2>${t("block", { block })}</h2>
    <label class="soft">${t("goToBlock")} <input type="number" min="1" max=${state.numBlocks} value=${block} aria-label=${t("goToBlock")} onChange=${pick} /></label>
    <dl>
      <dt>${t("references")}</dt><dd>${state.refs[block]}</dd>
      <dt>${t("owners")}</dt><dd>${owners.length ? owners.map((number) => html`<${Seq} run=${run} number=${number} /> `) : t("freeRank", { count: rank })}</dd>
      ${hasGroups(run) && (owners.length > 0 || holds) && html`<dt>${t("group")}</dt><dd>${describeGroup(run, state.group[block], t)}</dd>`}
      <dt>${t("hash")}</dt><dd>${serial ? html`<code>${state.hashes.get(serial)}</code>` : t("notCached")}</dd>
      ${slot && html`<dt>${t("snapshot")}</dt><dd>${t("snapshotIn", { slot, count: state.slots.get(slot).tokens })}</dd>`}
      ${holds && state.loaded[block] > 0 && html`<dt>${t("contents")}</dt><dd>${t("loadedFrom", { tier: tierName(state.tierOf(block), t) })}</dd>`}
      <dt>${t("tokens")}</dt><dd>${holds ? t("filled", { filled: state.filled[block], size }) : t("neverWritten")}</dd>
    </dl>
    ${holds && html`<${Tokens} run=${run} seq=${writer} first=${first} stop=${Math.min(first + state.filled[block], writer.tokens.length)} numComputed=${Infinity} />`}
  </section>`;
}
