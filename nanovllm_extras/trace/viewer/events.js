// Each event as a sentence, and its subject. SOURCES, made by page.py, has the engine's code that decided each event.

import { hasWords } from "./i18n.js";
import { explainMisses } from "./misses.js";

export function describeEvent(run, event, t, numFree) {
  const [code, number, ...rest] = event;
  const seq = run.label(number);
  switch (code) {
    case "add": return t("event.add", { seq, count: rest[1].tokens.length });
    case "fork": return t("event.fork", { seq, other: run.label(rest[0]) });
    case "tokens": return t("event.tokens", { seq, text: rest[1].map((id) => run.text(id)).join("") });
    case "finish": return t("event.finish", { seq, reason: t(`reason.${rest[0]}`) + (rest[1] === null ? "" : ` (${rest[1]})`) });
    case "wait": return t(`event.wait.${rest[0]}`, { seq, needed: rest[1], free: rest[2], ...run.placesFor(number) });
    case "idle": return t(`event.idle.${rest[0]}`, { seq });
    case "admit": {
      const loaded = run.loadedTokens.get(event);
      return t(loaded ? "event.admit.loaded" : `event.admit.${rest[0]}`, { seq, count: rest[1] - (loaded ?? 0), loaded });
    }
    case "miss": return t("event.miss", { seq, sentence: explainMisses(run, rest[0], t) });
    case "preempt": {
      const host = rest[2];
      return t(host.length ? "event.preempt.swap" : "event.preempt", { seq, other: rest[0] === number ? t("itself") : run.label(rest[0]), free: numFree ?? 0, count: host.length });
    }
    case "schedule": return t("event.schedule", { step: number, count: scheduledTokens(run, event) });
    case "draft": return t("event.draft", { seq, text: rest[0].map((id) => run.text(id)).join("") });
    case "verify": return t("event.verify", { seq, count: rest[1], all: rest[0] }) + (rest[2].length ? t("event.verify.blocks", { blocks: rest[2].join(", ") }) : "");
    case "update": return t("event.update", { step: number, count: rest[1].length });
    case "take": return t(rest[1] ? "event.take.evict" : "event.take", { seq, block: rest[0] }) + inGroup(run, event, t);
    case "evictions": return t("event.evictions", { blocks: number.join(", ") });
    case "share": return t(rest[0] ? "event.share" : "event.share.null", { seq, block: rest[0] }) + inGroup(run, event, t);
    case "copy": return t("event.copy", { seq, block: rest[0], other: rest[1] }) + inGroup(run, event, t);
    case "load": return t("event.load", { seq, tokens: rest[0], blocks: describeLoaded(rest[1], t) });
    case "give_back": return t(run.replay.numGroups > 1 ? "event.give_back.groups" : "event.give_back", { seq, blocks: rest[0].join(", ") });
    case "free": return t("event.free", { seq });
    case "register": return t("event.register", { seq, block: rest[0] }) + inGroup(run, event, t);
    case "forget": return t("event.forget", { block: number });
    case "slot": return t(rest[1] > 0 ? "event.slot.copy" : `event.${sourceOf(run, event)}`, { seq, slot: rest[0], source: rest[1] });
    case "move": return t(`event.${sourceOf(run, event)}`, { seq, slot: rest[0] });
    case "snapshot": return t("event.snapshot", { seq, slot: rest[0], block: rest[1], count: rest[2] });
    case "drop": return t(`event.drop.${rest[0]}`, { slot: number });
    default: return t(`event.${code}`); // start, roll_back, reset
  }
}

const GROUP_AT = { take: 4, share: 3, copy: 4, register: 5 }; // where an event names its group, if that is not group 0

// Return words for the group of an event, if there are several groups.
const inGroup = (run, event, t) => (run.replay.numGroups > 1 ? t("event.inGroup", { group: event[GROUP_AT[event[0]]] ?? 0 }) : "");

// Return the name in SOURCES of the code that decided an event. Swaps of states and groups of layers have names of their own.
export function sourceOf(run, event) {
  const [code, , ...rest] = event;
  const isGrouped = run.replay.numGroups > 1 && (code === "give_back" || code === "admit");
  if (isGrouped || event[GROUP_AT[code]]) return `${code}.group`;
  if (code === "slot" && rest[1] < 0) return "slot.in";
  return code === "move" && rest[0] < 0 ? "move.out" : code;
}

// Return how many blocks came from each tier, and which ones.
function describeLoaded(byTier, t) {
  return Object.entries(byTier).map(([tier, blocks]) => t("loadedBlocks", { count: blocks.length, tier: tierName(tier, t), blocks: blocks.join(", ") })).join("; ");
}

// A tier of the user's own has only the name that the user gave it.
export const tierName = (tier, t) => (hasWords(`tier.${tier}`) ? t(`tier.${tier}`) : tier);

function scheduledTokens(run, [, step, , , chunks]) {
  const frame = run.frames[step - run.firstStep];
  return (frame?.decodes?.length ?? 0) + chunks.reduce((sum, chunk) => sum + chunk[2], 0);
}

// Return a map from notable events to the number of free blocks. For `preempt`, that is the number before the sequence
// freed its blocks.
export function freeBefore(run, frame) {
  const found = new Map();
  for (const { frame: at, event, numFree } of run.highlights) if (at === frame) found.set(event, numFree);
  return found;
}

// Return the sequence and block that an event is about: {seq, block}.
export function subjectOf([code, number, ...rest]) {
  if (["take", "share", "register"].includes(code) && rest[0]) return { seq: number, block: rest[0] };
  if (code === "load") return { seq: number, block: Object.values(rest[1])[0]?.[0] };
  if (code === "copy") return { seq: number, block: rest[1] };
  if (code === "evictions") return { block: number[0] };
  if (code === "forget") return { block: number };
  if (code === "snapshot") return { seq: number, block: rest[1] };
  if (["drop", "schedule", "update", "start", "roll_back", "reset"].includes(code) || !number) return {};
  return { seq: number };
}

// Return a function that tells why a sequence waits, from a step's events: the sequence's own `wait` event; or ["behind",
// first], where `first` is the first waiting sequence; or the event for all sequences; or undefined if it arrived later.
export function waitsOf(events) {
  const own = new Map();
  let all;
  for (const event of events) if (event[0] === "wait") event[1] ? own.set(event[1], event) : (all = event);
  const [first] = own.keys();
  return (number) => own.get(number) ?? (first ? ["behind", first] : all);
}
