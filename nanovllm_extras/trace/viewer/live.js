// A server's live run, and a chat box that submits requests like any client. The lines come as server-sent events, which
// are read with fetch because it can send the API key. The conversation and the key last as long as the browser's tab.

import { Run } from "./run.js";
import { html, useEffect, useLayoutEffect, useRef, useState, useView } from "./ui.js";

// The reason for a missing answer. status: the HTTP status, or 0 if the server cannot be reached.
class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function reach(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refusal(0);
  }
}

async function submit(path, key, options) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await reach(fetch(path, { ...options, headers }));
  if (response.ok) return response;
  throw new Refusal(response.status, (await response.json().catch(() => null))?.error?.message ?? response.statusText);
}

// Yield the `data:` of each server-sent event of a response as it arrives.
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reach(reader.read());
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

function reasonOf(problem, t) {
  if (problem.status === 0) return t("unreachable");
  return problem.status ? `${problem.status} ${problem.message}` : problem.message;
}

const MAX_FRAMES = 10000; // after these, the page starts a new run at the next header

// Read the recording until the connection ends. A header starts a new run, unless it repeats the known state.
async function follow(response, grow) {
  let run = null;
  for await (const data of readEvents(response)) {
    const line = JSON.parse(data);
    if (line.format && (!run || line.num_steps_before !== run.replay.step || run.frames.length > MAX_FRAMES)) {
      run = new Run("live", line);
    } else if (!line.format) {
      run.append(line);
    } // else it repeats the state that is known
    run.end();
    window.nanovllm.runs = [run];
    grow(run);
  }
}

// Return a function that calls `draw` with the newest value, at most once per displayed picture: lines may come faster.
function atMostOncePerPicture(draw) {
  let [newest, isDue] = [null, false];
  return (value) => {
    newest = value;
    if (!isDue) requestAnimationFrame(() => { isDue = false; draw(newest); });
    isDue = true;
  };
}

export function Live({ grow }) {
  const { t } = useView();
  const [key, setKey] = useState(sessionStorage.getItem("nanovllm-key") ?? "");
  const [asksForKey, setAsksForKey] = useState(false);
  const [state, setState] = useState({ word: "connecting" });
  const note = (problem) => { if (problem.status === 401) setAsksForKey(true); };
  useEffect(() => {
    const controller = new AbortController();
    const draw = atMostOncePerPicture((run) => { if (!controller.signal.aborted) grow(run); });
    let timer = 0;
    const connect = async () => {
      let problem = null;
      try {
        const response = await submit("ui/events", key, { signal: controller.signal });
        setState({ word: "connected" });
        setAsksForKey(false);
        await follow(response, draw);
      } catch (error) {
        problem = error;
      }
      if (controller.signal.aborted) return;
      setState(problem ? { word: "disconnected", problem } : { word: "ended" });
      if (problem) note(problem);
      if (problem?.status !== 401) timer = setTimeout(connect, 2000); // retrying with the same key would fail again
    };
    connect();
    return () => { controller.abort(); clearTimeout(timer); };
  }, [key]);
  const changeKey = (event) => { sessionStorage.setItem("nanovllm-key", event.target.value); setKey(event.target.value); };
  return html`<section class="card chat">
    <h2>${t("chat")}</h2>
    <p class="soft">${t(state.word, { error: state.problem && reasonOf(state.problem, t) })}. ${t("chatHelp")}</p>
    ${asksForKey && html`<form onSubmit=${(event) => event.preventDefault()}>
      <label>${t("apiKey")} <input type="password" id="key" value=${key} autocomplete="off" onChange=${changeKey} /></label></form>`}
    <${Chat} apiKey=${key} note=${note} />
  </section>`;
}

// The conversation before a reload: {messages, text}
const readConversation = () => JSON.parse(sessionStorage.getItem("nanovllm-chat")) ?? { messages: [], text: "" };

function Chat({ apiKey, note }) {
  const { t } = useView();
  const [messages, setMessages] = useState(() => readConversation().messages); // the answered messages and their answers
  const [text, setText] = useState(() => readConversation().text);
  const [asking, setAsking] = useState(null); // {question, answer, controller}: the message that is being answered
  const [failure, setFailure] = useState(null); // {problem, answer} of the last message
  const [box, alarm] = [useRef(null), useRef(null)];
  const atEnd = useRef(true); // false while the reader has scrolled up
  const talk = asking ? [...messages, ...exchange(asking.question, asking.answer)] : messages;
  const isUnheard = asking?.answer === "";
  useLayoutEffect(() => { // at once: a reload may be next
    const kept = isUnheard ? { messages, text: [asking.question, text].filter(Boolean).join(" ") } : { messages: talk, text };
    sessionStorage.setItem("nanovllm-chat", JSON.stringify(kept));
  }, [messages, text, asking]);
  useLayoutEffect(() => { if (atEnd.current) box.current.scrollTop = box.current.scrollHeight; }, [messages, asking]);
  useLayoutEffect(() => alarm.current?.scrollIntoView({ block: "center" }), [failure]);

  const send = async (event) => {
    event.preventDefault();
    if (!text.trim() || asking) return;
    const [question, controller] = [text, new AbortController()];
    let [answer, problem] = ["", null];
    const show = () => setAsking({ question, answer, controller });
    setText("");
    setFailure(null);
    atEnd.current = true;
    show();
    try {
      const body = JSON.stringify({ messages: [...messages, { role: "user", content: question }], stream: true });
      const options = { method: "POST", headers: { "Content-Type": "application/json" }, body, signal: controller.signal };
      for await (const data of readEvents(await submit("v1/chat/completions", apiKey, options))) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        answer += chunk.choices[0]?.delta?.content ?? "";
        show();
      }
    } catch (error) {
      problem = error;
    }
    setAsking(null);
    if (problem && !answer) setText((now) => [question, now].filter(Boolean).join(" ")); // a refused message is not sent with the next one
    else setMessages([...messages, ...exchange(question, answer)]);
    if (!problem || controller.signal.aborted) return;
    setFailure({ problem, answer });
    note(problem);
  };
  const begin = () => { setMessages([]); setFailure(null); };
  const scrolled = ({ target }) => { atEnd.current = target.scrollTop + target.clientHeight > target.scrollHeight - 8; };
  return html`<div class="messages" aria-live="polite" ref=${box} onScroll=${scrolled}>${talk.map((one) => html`<p class=${one.role}>${one.content}</p>`)}</div>
    ${failure && html`<p class="bad" role="alert" ref=${alarm}>${t(failure.answer ? "cutShort" : "notAnswered", { error: reasonOf(failure.problem, t) })}</p>`}
    <form onSubmit=${send}>
      <input id="message" value=${text} onInput=${(event) => setText(event.target.value)} aria-label=${t("yourMessage")} placeholder=${t("yourMessage")} autocomplete="off" />
      ${asking ? html`<button type="button" onClick=${() => asking.controller.abort()}>${t("stop")}</button>` : html`<button>${t("send")}</button>`}
      ${messages.length > 0 && !asking && html`<button type="button" onClick=${begin}>${t("newChat")}</button>`}
    </form>`;
}

const exchange = (question, answer) => [{ role: "user", content: question }, { role: "assistant", content: answer }];
