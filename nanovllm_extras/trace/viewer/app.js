// The page: one or two recordings, scrubbed together, and what the reader has chosen. The address has the step: #step=17.

import { BlockCard, SequenceCard } from "./details.js";
import { Counters } from "./counters.js";
import { Groups } from "./groups.js";
import { Highlights, isOfNote } from "./highlights.js";
import { Invariants } from "./invariants.js";
import { LANGUAGES, translator } from "./i18n.js";
import { Live } from "./live.js";
import { Mask } from "./mask.js";
import { Boundary, Notices } from "./notices.js";
import { Pool } from "./pool.js";
import { Replay } from "./replay.js";
import { Run } from "./run.js";
import { Step } from "./step.js";
import { momentAt, Story, useMoments } from "./story.js";
import { Timeline } from "./timeline.js";
import { Times } from "./times.js";
import { formatTime, html, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useSettled, useState, View, useView } from "./ui.js";
import { WhatIf } from "./what_if.js";
import { PyodideClient } from "./what_if_pyodide.js";
import { Requests } from "./what_if_requests.js";
import { askServer } from "./what_if_server.js";

function readHash(hash = location.hash) {
  const values = new URLSearchParams(hash.slice(1));
  const number = (name) => (values.has(name) && Number.isFinite(Number(values.get(name))) ? Number(values.get(name)) : null);
  return { step: number("step"), seq: number("seq"), block: number("block"), story: values.get("story"), recording: values.get("recording"), lang: values.get("lang"), theme: values.get("theme") };
}

function hashOf(step, story, recording, choice, lang, theme, wasSet) {
  const values = new URLSearchParams(step === null ? {} : { step });
  if (story) values.set("story", story);
  if (recording) values.set("recording", recording);
  for (const name of ["seq", "block"]) if (choice[name] != null) values.set(name, choice[name]);
  if (wasSet.lang) values.set("lang", lang);
  if (wasSet.theme) values.set("theme", theme);
  return `#${values}`;
}

const asked = readHash();
const preferred = {
  lang: LANGUAGES.includes(asked.lang) ? asked.lang : navigator.language?.startsWith("zh") ? "zh" : "en",
  theme: ["light", "dark"].includes(asked.theme) ? asked.theme : matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
};

function App({ read, unread, live, ask, client, choices }) {
  const [runs, setRuns] = useState(read);
  const [, setVersion] = useState(0); // a live run grows in place
  const [lang, setLang] = useState(preferred.lang);
  const [theme, setTheme] = useState(preferred.theme);
  const [wasSet, setWasSet] = useState({ lang: !!asked.lang, theme: !!asked.theme });
  const [place, setPlace] = useState(() => ({ frame: runs[0] ? runs[0].frameOf(asked.step ?? 0) : asked.step ?? 0, follows: live && asked.step === null }));
  const [choice, setChoice] = useState({ seq: asked.seq, block: asked.block });
  const [isPlaying, setPlaying] = useState(false);
  const [source, setSource] = useState(null);
  const [bad, setBad] = useState(unread); // files: [{name, error}]
  const [story, setStory] = useState(asked.story);
  const t = useMemo(() => translator(lang), [lang]);
  const last = Math.max(0, ...runs.map((run) => run.lastFrame));
  const newest = live ? Math.max(0, (runs[0]?.lastFrame ?? 0) - 1) : last; // a live run's last frame is not a step yet
  const { follows } = place;
  const frame = follows ? newest : place.frame;
  const ends = useRef(null);
  ends.current = { last, newest };
  const goTo = useCallback((to) => setPlace((before) => { // going to a step ends following the newest one
    const from = before.follows ? ends.current.newest : before.frame;
    return { frame: Math.min(ends.current.last, Math.max(0, typeof to === "function" ? to(from) : to)), follows: false };
  }), []);
  const moments = useMoments(follows ? null : runs[0]); // a live run that is followed grows too fast
  const moment = follows ? null : momentAt(moments, story, frame);
  const tell = useCallback((one) => { setStory(one.kind); goTo(one.frame); setChoice({ seq: null, block: null }); }, [goTo]);
  const stay = () => goTo((at) => at);
  const follow = () => { setPlaying(false); setPlace((before) => ({ ...before, follows: true })); };
  const choose = useCallback((one) => setChoice((before) => ({ ...before, ...one })), []);

  const address = () => hashOf(follows ? null : runs[0].firstStep + frame, moment?.kind, choices.includes(runs[0]) ? runs[0].name : null, choice, lang, theme, wasSet);
  useMemo(() => { document.documentElement.dataset.theme = theme; }, [theme]); // before anything is drawn in its colours
  useEffect(() => { window.nanovllm.runs = runs; }, [runs]);
  useEffect(() => { [document.title, document.documentElement.lang] = [t("title"), lang]; }, [t]);
  useEffect(() => { // delayed: browsers refuse an address that changes too often
    const timer = setTimeout(() => runs[0] && history.replaceState(null, "", address()), 150);
    return () => clearTimeout(timer);
  }, [frame, follows, moment, choice, lang, theme, runs]);
  useEffect(() => { // only for a link that names a story and no step; a step next to a story is the story's own
    const one = asked.step === null && moments?.find(({ kind }) => kind === asked.story);
    if (one) tell(one);
  }, []);
  useLayoutEffect(() => {
    const onHash = ({ newURL }) => { // not location.hash: the timer above may have changed it since
      const now = readHash(new URL(newURL).hash);
      const told = now.step === null && moments?.find(({ kind }) => kind === now.story);
      if (told) return tell(told);
      setStory(now.story);
      if (now.step !== null && runs[0]) goTo(runs[0].frameOf(now.step));
      if (now.seq !== null || now.block !== null) choose({ seq: now.seq, block: now.block });
      if (LANGUAGES.includes(now.lang)) setLang(now.lang);
      if (["light", "dark"].includes(now.theme)) setTheme(now.theme);
    };
    addEventListener("hashchange", onHash);
    return () => removeEventListener("hashchange", onHash);
  }, [runs, moments, goTo]);
  useEffect(() => {
    if (!isPlaying) return undefined;
    const timer = setInterval(() => goTo((at) => at + 1), 400);
    return () => clearInterval(timer);
  }, [isPlaying, goTo]);
  useEffect(() => { if (isPlaying && frame >= newest) live ? follow() : setPlaying(false); }, [frame, newest]);

  const changeLang = () => { setLang(lang === "en" ? "zh" : "en"); setWasSet({ ...wasSet, lang: true }); };
  const changeTheme = () => { setTheme(theme === "light" ? "dark" : "light"); setWasSet({ ...wasSet, theme: true }); };
  const play = (is) => (follows ? stay() : setPlaying(is)); // following the newest step counts as playing
  useKeys({ run: runs[0], frame, goTo, choice, choose, setChoice, setPlaying: play, changeLang, changeTheme, setSource });
  useDrop((file) => openFile(file, (run) => setRuns((before) => (before[0] ? beside(before[0], run) : [run])), setBad));

  const firstStep = useRef(0);
  useLayoutEffect(() => { // a live run may begin again, at a later step
    if (!live || !runs[0]) return;
    const passed = runs[0].firstStep - firstStep.current;
    firstStep.current = runs[0].firstStep;
    setPlace((before) => ({ ...before, frame: Math.max(0, before.frame - passed) }));
  }, [runs]);
  const grow = useCallback((run) => {
    setRuns((before) => (before[0] === run ? before : [run]));
    setVersion((version) => version + 1);
  }, []);
  const canAsk = ask && runs[0] && !runs[0].isEmpty && (!runs[1] || runs[1].isSimulated);
  const showOther = useCallback((other) => setRuns((before) => (other ? beside(before[0], other) : before.slice(0, 1))), []);
  const turnTo = (run) => { setRuns([run]); setBad([]); goTo(0); setPlaying(false); setStory(null); setChoice({ seq: null, block: null }); };
  const view = useMemo(() => ({ t, theme, choice, choose, showSource: setSource }), [t, theme, choice, choose]);
  return html`<${View.Provider} value=${view}>
    <${Head} ...${{ runs, frame, last, goTo, isPlaying: isPlaying || follows, setPlaying: play, changeLang, changeTheme, live, address, follows, setFollows: (is) => (is ? follow() : stay()) }}
      openSecond=${(file) => openFile(file, (run) => setRuns(runs[0] ? beside(runs[0], run) : [run]), setBad)} closeSecond=${() => setRuns([runs[0]])} />
    <${Notices} bad=${bad} runs=${runs} frame=${frame} />
    <main class=${runs.length > 1 ? "two" : "one"}>
      ${live && html`<${Live} grow=${grow} />`}
      ${client && html`<${Requests} recordings=${choices} run=${runs[0]} choose=${turnTo} client=${client} />`}
      ${canAsk && html`<${WhatIf} key=${runs[0].name} run=${runs[0]} other=${runs[1]} show=${showOther} ask=${ask} client=${client} />`}
      ${runs.length > 1 && !canAsk && html`<${Difference} runs=${runs} />`}
      ${runs.map((run, i) => html`<${Boundary} key=${run.name} name=${run.name} frame=${frame}><${Recording} run=${run} moments=${i ? [] : moments} moment=${i ? null : moment} tell=${tell} frame=${Math.min(frame, run.lastFrame)} goTo=${goTo} isAlone=${runs.length === 1} columns=${runs.length > 1 ? last + 1 : undefined} /></${Boundary}>`)}
    </main>
    <footer class="soft">${t("keys")}${t("colon")}${t("keysText")} ${!live && t("dropHint")}</footer>
    ${source && html`<${Source} code=${source} close=${() => setSource(null)} />`}
  </${View.Provider}>`;
}

function Head({ runs, frame, last, goTo, isPlaying, setPlaying, changeLang, changeTheme, openSecond, closeSecond, live, follows, setFollows, address }) {
  const { t } = useView();
  const longest = runs.find((one) => one.lastFrame === last) ?? runs[0];
  const at = longest?.frames[Math.min(frame, longest.lastFrame)];
  const lasts = new Set(runs.map((one) => one.firstStep + one.lastFrame - 1));
  const words = at && (longest.isEmpty ? t("noSteps") : at.isEnd ? t("atEnd", { last: at.step - 1 }) : t("stepOf", { step: at.step, last: [...lasts].join(" | ") }));
  const button = (label, text, onClick, extra = {}) => html`<button aria-label=${t(label)} title=${t(label)} onClick=${onClick} ...${extra}>${text}</button>`;
  return html`<header>
    <h1>nanovllm <small>${live ? t("live") : runs.map((one) => one.name).join(" | ")}</small></h1>
    ${at && html`<div class="scrub">
      ${button("first", "|◀", () => goTo(0))}${button("previous", "◀", () => goTo((i) => i - 1))}
      ${button(isPlaying ? "pause" : "play", t(isPlaying ? "pause" : "play"), () => setPlaying(!isPlaying), { id: "play" })}
      ${button("next", "▶", () => goTo((i) => i + 1))}${button("last", "▶|", () => goTo(last))}
      <input type="range" min="0" max=${last} value=${frame} aria-label=${t("step")} aria-valuetext=${words} onInput=${(event) => goTo(Number(event.target.value))} />
      <output id="step">${words}</output>
    </div>`}
    <div class="tools">
      ${live && html`<label><input type="checkbox" checked=${follows} onChange=${(event) => setFollows(event.target.checked)} /> ${t("follow")}</label>`}
      ${!live && runs.length < 2 && html`<label class="button" title=${t("openSecondLabel")}>${t("openSecond")}<input type="file" accept=".jsonl,.json" class="hidden" aria-label=${t("openSecondLabel")} onChange=${(event) => event.target.files[0] && openSecond(event.target.files[0])} /></label>`}
      ${runs.length > 1 && html`<button onClick=${closeSecond}>${t("closeSecond")}</button>`}
      ${at && html`<${CopyLink} address=${address} />`}
      ${button("languageLabel", t("language"), changeLang, { id: "language" })}${button("theme", "◐", changeTheme, { id: "theme" })}
    </div>
  </header>`;
}

// The differences between two recordings, in one line.
function Difference({ runs }) {
  const { t } = useView();
  const about = (of) => runs.map(of).join(" → ");
  const count = (run, code) => run.highlights.filter(({ event }) => event[0] === code).length;
  const ends = runs.map((run) => run.frames.at(-1));
  return html`<p class="card difference">${t("difference", {
    steps: about((run) => run.frames.length - 1),
    hits: ends.map((at) => `${(100 * at.hitRate).toFixed(0)} %`).join(" → "),
    preemptions: about((run) => count(run, "preempt")),
    time: about((run) => formatTime(run.hasTimes ? run.endTime - run.header.t : null)),
  })}</p>`;
}

function CopyLink({ address }) {
  const { t } = useView();
  const [isDone, setDone] = useState(false);
  const copy = () => navigator.clipboard.writeText(location.href.split("#")[0] + address()).then(() => { setDone(true); setTimeout(() => setDone(false), 1500); });
  return html`<button id="link" onClick=${copy}>${t(isDone ? "linkCopied" : "copyLink")}</button>`;
}

function Recording({ run, frame, goTo, isAlone, moments, moment, tell, columns }) {
  const { t } = useView();
  if (run.isEmpty) return html`<p class="card">${t("noSteps")}</p>`;
  const state = run.stateAt(frame);
  const shared = { run, frame, state, goTo, moment, columns };
  return html`<div class=${`recording ${isAlone ? "alone" : ""}`} role="group" aria-label=${run.name}>
    ${!isAlone && html`<h2 class="name">${run.name}</h2>`}
    ${isAlone && moments && html`<${Story} ...${shared} moments=${moments} tell=${tell} />`}
    <div class="columns first">
      <${Pool} ...${shared} />
      <div class="beside"><${Step} ...${shared} /></div>
    </div>
    <${Groups} ...${shared} />
    <${Timeline} ...${shared} />
    <div class="columns"><${SequenceCard} ...${shared} /><${BlockCard} ...${shared} /></div>
    <${Times} ...${shared} />
    <${Counters} ...${shared} />
    <div class="columns">
      <${Below} ...${shared} />
    </div>
  </div>`;
}

// The cards that are drawn only when the scrubbing pauses, so that scrubbing stays smooth.
function Below(shared) {
  const { run, frame } = shared;
  return useMemo(
    () => html`<div class="column"><${Mask} ...${shared} /><${Invariants} ...${shared} /></div>
      <div class="column"><${Highlights} ...${shared} /><${Configuration} run=${run} /></div>`,
    [run, run.frames.length, run.endTime, useSettled(frame), useView()],
  );
}

function Configuration({ run }) {
  const { t } = useView();
  const rows = { num_blocks: run.header.num_blocks, block_size: run.header.block_size, ...run.header.config };
  return html`<section class="card config drawer"><details><summary>${t("config")}</summary>
    <dl>${Object.entries(rows).map(([name, value]) => html`<dt><code>${name}</code></dt><dd>${String(value)}</dd>`)}</dl></details></section>`;
}

function Source({ code, close }) {
  const { t } = useView();
  const one = window.SOURCES[code];
  return html`<div class="dialog" role="dialog" aria-modal="true" aria-label=${one.symbol}>
    <h2>${t("sourceOf", { symbol: one.symbol })}</h2><p class="soft">${one.path}:${one.line}</p>
    <pre tabindex="0"><code>${one.text}</code></pre>
    <button ref=${(button) => button?.focus()} onClick=${close}>${t("closeIt")}</button>
  </div>`;
}

function useKeys({ run, frame, goTo, choice, choose, setChoice, setPlaying, changeLang, changeTheme, setSource }) {
  useLayoutEffect(() => { // a layout effect: a key pressed right after a frame must act on that frame
    const onKey = (event) => {
      const isTyping = ["INPUT", "TEXTAREA"].includes(event.target.tagName) && (!["range", "checkbox"].includes(event.target.type) || event.target.closest(".what-if"));
      const isPool = event.target.getAttribute?.("role") === "application"; // there, arrows choose a block
      if (event.key === "Escape" && (isTyping || isPool)) return event.target.blur();
      if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !run) return;
      const by = event.shiftKey ? 10 : 1;
      const numbers = run.rows.map((row) => row.number);
      const turn = (d) => choose({ seq: numbers[(numbers.indexOf(choice.seq) + d + numbers.length + (choice.seq == null && d < 0 ? 1 : 0)) % numbers.length] });
      const marked = run.highlights.filter(isOfNote).map((one) => one.frame);
      const actions = {
        ArrowLeft: () => goTo((at) => at - by), ArrowRight: () => goTo((at) => at + by),
        ArrowUp: () => turn(-1), ArrowDown: () => turn(1),
        Home: () => goTo(0), End: () => goTo(Infinity),
        " ": () => setPlaying((is) => !is), l: changeLang, d: changeTheme,
        n: () => goTo(marked.find((at) => at > frame) ?? frame), p: () => goTo(marked.findLast((at) => at < frame) ?? frame),
        Escape: () => { setSource(null); setChoice({ seq: null, block: null }); },
      };
      const action = actions[event.key];
      if (!action || (event.key === " " && (event.target.tagName === "BUTTON" || event.target.type === "checkbox"))) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });
}

function useDrop(open) {
  useEffect(() => {
    const over = (event) => event.preventDefault();
    const drop = (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) open(event.dataTransfer.files[0]); };
    addEventListener("dragover", over);
    addEventListener("drop", drop);
    return () => { removeEventListener("dragover", over); removeEventListener("drop", drop); };
  });
}

async function openFile(file, add, setBad) {
  try {
    add(Run.parse(file.name, await file.text()));
    setBad([]);
  } catch (error) {
    setBad([{ name: file.name, error: error.message }]);
  }
}

// Return both recordings, with different names.
function beside(first, second) {
  if (second.name === first.name) second.name += " (2)";
  return [first, second];
}

// Read the recordings in the page, which are base64 of gzip to keep the file small: {read: runs, unread: [{name, error}]}
// type: `trace` of those that are shown, `choice` of others
async function readEmbedded(type) {
  const [read, unread] = [[], []];
  for (const element of document.querySelectorAll(`script[type='application/x-nanovllm-${type}']`)) {
    try {
      const bytes = Uint8Array.from(atob(element.textContent.trim()), (letter) => letter.charCodeAt(0));
      const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
      read.push(Run.parse(element.dataset.name, text));
    } catch (error) {
      unread.push({ name: element.dataset.name, error: error.message });
    }
  }
  return { read, unread };
}

async function main() {
  const { read, unread } = await readEmbedded("trace");
  if (read.length > 1) beside(...read);
  const site = document.body.dataset.site; // only a page of the site has it
  const client = site ? new PyodideClient(JSON.parse(site)) : null;
  const choices = client ? [...read, ...(await readEmbedded("choice")).read] : [];
  const chosen = choices.filter((one) => one.name === asked.recording);
  const runs = chosen.length ? chosen : read;
  const live = document.body.dataset.live !== undefined;
  window.nanovllm = { runs, Run, Replay, client, choices }; // for tests and for the browser's console
  const ask = window.askWhatIf ?? client?.ask ?? (document.body.dataset.whatIf === undefined ? null : askServer);
  render(html`<${App} read=${runs} unread=${unread} live=${live} ask=${ask} client=${client} choices=${choices} />`, document.getElementById("app"));
  document.body.dataset.ready = "";
}

main().catch((error) => {
  document.getElementById("app").textContent = translator(preferred.lang)("cannotShow", { name: document.title, error: error.message });
});
