// The story of a recording: the first moment of each kind, explained in one sentence, with the blocks concerned.
//
// A moment is {kind, frame, values, blocks, slots, moves}. `values` fills in its sentence; `blocks` light up in the pool,
// and `slots` in the row of recurrent states; a move {from, to, seq} shows that block `from` is copied to `to`, or, without
// `from`, that `seq` becomes the owner of `to`.

import { blocksOf } from "./replay.js";
import { html, useEffect, useMemo, useRef, useView } from "./ui.js";

export const MOMENTS = ["chunked-prefill", "snapshot", "prefix-hit", "snapshot-hit", "no-snapshot", "load", "fork", "copy", "window", "preemption", "swap", "eviction", "admission"];

export function momentsOf(run) {
  const found = new Map();
  const meet = (kind, frame, moment) => {
    const one = !found.has(kind) && moment();
    if (one) found.set(kind, { kind, frame, blocks: [], slots: [], moves: [], ...one });
  };
  const hasWaited = new Set();
  run.frames.forEach((at, frame) => {
    const { events } = at;
    const ended = events.find(([code, , reason]) => code === "finish" && reason !== "abort");
    const namedIn = (number, code) => events.filter((event) => event[0] === code && event[1] === number && event[2]).map((event) => event[2]);
    for (const event of events) {
      const [code, number, ...rest] = event;
      if (code === "wait" && number) hasWaited.add(number);
      const count = code === "admit" && rest[0] === "new" ? rest[1] - (run.loadedTokens.get(event) ?? 0) : 0;
      if (count) {
        const [, , slot, source] = events.find((one) => one[0] === "slot" && one[1] === number && one[3] > 0) ?? []; // of a recurrent state
        const copied = slot ? { source, slot } : {};
        const isItself = slot && slot === source; // no other slot is free: the sequence takes over that of the snapshot
        meet(slot ? "snapshot-hit" : "prefix-hit", frame, () => ({ values: { seq: number, count, ...copied }, isItself, blocks: namedIn(number, "share"), slots: Object.values(copied) }));
      }
      if (code === "snapshot") meet("snapshot", frame, () => ({ values: { seq: number, slot: rest[0], block: rest[1], count: rest[2] }, blocks: [rest[1]], slots: [rest[0]] }));
      const useless = code === "miss" && rest[0].find((one) => one.cause === "no_snapshot");
      if (useless) {
        meet("no-snapshot", frame, () => {
          const [first, stop] = [useless.start, useless.end].map((position) => position / run.header.block_size);
          return { values: { seq: number, count: useless.end - useless.start }, blocks: blocksOf(run.stateAt(frame).seqs.get(number)).slice(first, stop) };
        });
      }
      if (code === "load") {
        meet("load", frame, () => {
          const blocks = Object.values(rest[1]).flat();
          return { values: { seq: number, count: rest[0] }, blocks, moves: blocks.map((to) => ({ to, seq: number })) };
        });
      }
      if (code === "fork") meet("fork", frame, () => ({ values: { seq: number, other: rest[0] }, blocks: namedIn(rest[0], "share") }));
      if (code === "copy") meet("copy", frame, () => ({ values: { seq: number, block: rest[0], to: rest[1] }, blocks: rest.slice(0, 2), moves: [{ from: rest[0], to: rest[1], seq: number }] }));
      if (code === "take" && rest[1]) meet("eviction", frame, () => ({ values: { seq: number, block: rest[0] }, blocks: [rest[0]], moves: [{ to: rest[0], seq: number }] }));
      if (code === "give_back" && run.replay.numGroups > 1) {
        const values = { seq: number, blocks: rest[0].join(", "), last: run.replay.numGroups - 1, window: run.replay.groupWindow };
        meet("window", frame, () => ({ values, blocks: rest[0] }));
      }
      if (code === "preempt") {
        meet(rest[2].length ? "swap" : "preemption", frame, () => {
          const taken = namedIn(rest[0], "take");
          const owner = frame ? run.stateAt(frame - 1).seqs.get(number) : null;
          const lost = owner ? blocksOf(owner) : [];
          return { values: { seq: number, other: rest[0], count: rest[2].length }, isItself: rest[0] === number, blocks: [...lost, ...taken], moves: taken.map((to) => ({ to, seq: rest[0] })) };
        });
      }
      if (code === "admit" && ended && hasWaited.has(number) && events.indexOf(event) > events.indexOf(ended)) {
        meet("admission", frame, () => {
          const blocks = namedIn(number, "take");
          return { values: { seq: ended[1], other: number }, blocks, moves: blocks.map((to) => ({ to, seq: number })) };
        });
      }
    }
    const chunk = !at.isEnd && at.decodes.length > 0 && events.at(-1)[4].find(([, , numNew, code]) => numNew > 1 && !["all", "drafts", "snapshot"].includes(code));
    if (chunk) meet("chunked-prefill", frame, () => ({ values: { seq: chunk[0], count: chunk[2], decodes: at.decodes.length }, blocks: blocksOf(run.stateAt(frame).seqs.get(chunk[0])) }));
  });
  return [...found.values()].sort((a, b) => a.frame - b.frame || MOMENTS.indexOf(a.kind) - MOMENTS.indexOf(b.kind));
}

export const momentAt = (moments, kind, frame) => moments?.find((one) => one.kind === kind && one.frame === frame) ?? null;

function sentence(run, { kind, values, isItself }, t) {
  const names = Object.fromEntries(["seq", "other"].filter((name) => name in values).map((name) => [name, run.label(values[name])]));
  return t(`story.${kind}${isItself ? ".itself" : ""}`, { ...values, ...names });
}

export function Story({ run, frame, moments, moment, tell }) {
  const { t } = useView();
  const steps = run.frames.length - 1;
  const at = moment ? moments.indexOf(moment) : moments.findLastIndex((one) => one.frame <= frame - 1);
  const [before, after] = moment ? [at - 1, at + 1] : [at, at + 1];
  const pick = (one, { detail, currentTarget }) => {
    if (detail) currentTarget.blur(); // after a mouse click the space bar must play, not click again
    tell(one);
  };
  const button = (label, text, to) => html`<button class="turn" disabled=${!moments[to]} aria-label=${t(label)} onClick=${(event) => pick(moments[to], event)}>${text}</button>`;
  return html`<section class="card story">
    <h2>${t("storyOf", { requests: run.requests.size, steps, blocks: run.header.num_blocks.toLocaleString(), size: run.header.block_size })}</h2>
    ${moments.length > 0 && html`<p class="moments">
      ${button("momentBefore", `◀ ${t("back")}`, before)}
      ${moments.map((one) => html`<button class=${one === moment ? "on" : ""} aria-pressed=${one === moment} onClick=${(event) => pick(one, event)}><small>${run.frames[one.frame].step}</small> ${t(`moment.${one.kind}`)}</button>`)}
      ${button("momentAfter", `${t("nextMoment")} ▶`, after)}
    </p>`}
    <p class="told" aria-live="polite">${moment ? sentence(run, moment, t) : t(moments.length ? "storyHint" : "storyNone")}</p>
  </section>`;
}

// The animation over the pool's canvas for a moment. With reduced motion there is none: the cells light up anyway.
export function Motion({ moment, grid, colorOf }) {
  const layer = useRef(null);
  useEffect(() => {
    const box = layer.current;
    box.replaceChildren();
    if (!moment || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const place = (block) => [((block - 1) % grid.columns) * grid.size, Math.floor((block - 1) / grid.columns) * grid.size];
    moment.moves.slice(0, 32).forEach(({ from, to, seq }, i) => {
      const cell = document.createElement("i");
      Object.assign(cell.style, { width: `${grid.size - 1}px`, height: `${grid.size - 1}px`, background: colorOf(seq) });
      box.append(cell);
      const [[x, y], [fromX, fromY]] = [place(to), place(from ?? to)];
      const begin = from ? `translate(${fromX}px, ${fromY}px)` : `translate(${x}px, ${y}px) scale(2.2)`;
      const frames = [{ transform: begin, opacity: 0.2 }, { transform: begin, opacity: 1, offset: 0.3 }, { transform: `translate(${x}px, ${y}px)`, opacity: 1, offset: 0.9 }, { transform: `translate(${x}px, ${y}px)`, opacity: 0 }];
      cell.animate(frames, { duration: 1600, delay: 60 * i, easing: "ease-in-out", fill: "both" }).onfinish = () => cell.remove();
    });
  }, [moment, grid]);
  return html`<div class="motion" ref=${layer} aria-hidden="true"></div>`;
}

export const useMoments = (run) => useMemo(() => run && momentsOf(run), [run, run?.frames.length]);
