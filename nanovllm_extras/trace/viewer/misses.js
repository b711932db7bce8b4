// Why a request computed tokens of its prompt, in one sentence. The engine's prefix_misses.py defines the causes.

import { hasWords } from "./i18n.js";
import { visible } from "./ui.js";

const textOf = (run, ids) => {
  const text = ids.map((id) => run.text(id)).join("");
  return visible(text.trim() || text);
};

// Return the sentence for `misses`, the spans of prompt tokens that were not in the prefix cache; "" if there are none.
export function explainMisses(run, misses, t) {
  if (!misses.length) return "";
  const named = misses.filter((one) => one.cause !== "partial_block"); // the rest of a block is a cause only by itself
  const evicted = named.filter((one) => one.cause === "evicted");
  const causes = named.filter((one) => one.cause !== "evicted" || one === evicted[0]).map((one) => {
    const isAll = one.cause === "evicted" && evicted.length > 1; // evicted blocks follow each other: one part of the sentence
    return explainMiss(run, isAll ? { ...one, end: evicted.at(-1).end, isAll } : one, misses[0].cause === "partial_block", t);
  });
  if (!named.length) causes.push(t("miss.partial_block", { count: misses[0].end - misses[0].start }));
  return t("misses", { hits: misses[0].start, all: misses.at(-1).end, causes: causes.join(t("miss.and")) });
}

function explainMiss(run, { start, end, cause, cached = [], prompt = [], step, request = "?", isAll }, hasPart, t) {
  const values = { start, stop: end - 1, step, cause };
  if (cause === "differs") {
    return t("miss.differs", { ...values, cached: textOf(run, cached), prompt: textOf(run, prompt) }) + (hasPart ? t("miss.wholeBlocks") : "");
  }
  if (cause === "evicted") return t(isAll ? "miss.evicted.several" : "miss.evicted", { ...values, request: run.requestName(request) });
  if (cause === "cache_off" && run.header.config.enable_prefix_caching) return t("miss.cache_off.request");
  return t(hasWords(`miss.${cause}`) ? `miss.${cause}` : "miss.other", values);
}
