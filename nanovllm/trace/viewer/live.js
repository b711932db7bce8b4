// A server's run as it happens: lines come as server-sent events, read by fetch, because that can send a key; and a chat
// box that submits requests as any client does.

import { Run } from "./run.js";
import { html, useEffect, useRef, useState, useView } from "./ui.js";

const headersOf = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

// The `data:` of each server-sent event of a response, as it arrives.
async function* readEvents(response) {
  if (!response.ok) throw new Error(`${response.status} ${(await response.json().catch(() => null))?.error?.message ?? response.statusText}`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

const MAX_FRAMES = 10000; // then the page begins anew, with the next header

// Read the recording until it breaks off; a header begins a run anew.
async function follow(key, signal, grow) {
  let run = null;
  for await (const data of readEvents(await fetch("ui/events", { headers: headersOf(key), signal }))) {
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

export function Live({ grow }) {
  const { t } = useView();
  const [key, setKey] = useState(sessionStorage.getItem("nanovllm-key") ?? "");
  const [error, setError] = useState(null);
  useEffect(() => {
    const controller = new AbortController();
    let timer = 0;
    const connect = async () => {
      try {
        setError(null);
        await follow(key, controller.signal, grow);
        throw new Error("the server has closed the stream");
      } catch (problem) {
        if (controller.signal.aborted) return;
        setError(problem.message);
        timer = setTimeout(connect, 2000);
      }
    };
    connect();
    return () => { controller.abort(); clearTimeout(timer); };
  }, [key]);
  const changeKey = (event) => { sessionStorage.setItem("nanovllm-key", event.target.value); setKey(event.target.value); };
  return html`<section class="card chat">
    <h2>${t("chat")}</h2>
    <p class="soft">${error ? t("disconnected", { error }) : t("connected")}. ${t("chatHelp")}</p>
    <label>${t("apiKey")} <input type="password" id="key" value=${key} autocomplete="off" onChange=${changeKey} /></label>
    <${Chat} apiKey=${key} />
  </section>`;
}

function Chat({ apiKey }) {
  const { t } = useView();
  const [messages, setMessages] = useState([]);
  const [text, setText] = useState("");
  const controller = useRef(null);
  const [isBusy, setBusy] = useState(false);
  const send = async (event) => {
    event.preventDefault();
    if (!text.trim() || isBusy) return;
    const asked = [...messages, { role: "user", content: text }];
    setText("");
    setBusy(true);
    setMessages([...asked, { role: "assistant", content: "" }]);
    controller.current = new AbortController();
    let answer = "";
    try {
      const body = JSON.stringify({ messages: asked, stream: true });
      const options = { method: "POST", headers: { "Content-Type": "application/json", ...headersOf(apiKey) }, body, signal: controller.current.signal };
      for await (const data of readEvents(await fetch("v1/chat/completions", options))) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        answer += chunk.choices[0]?.delta?.content ?? "";
        setMessages([...asked, { role: "assistant", content: answer }]);
      }
    } catch (problem) {
      if (!controller.current.signal.aborted) setMessages([...asked, { role: "assistant", content: `${answer} [${problem.message}]` }]);
    }
    setBusy(false);
  };
  return html`<div class="messages" aria-live="polite">${messages.map((one) => html`<p class=${one.role}>${one.content}</p>`)}</div>
    <form onSubmit=${send}>
      <input id="message" value=${text} onInput=${(event) => setText(event.target.value)} aria-label=${t("yourMessage")} placeholder=${t("yourMessage")} autocomplete="off" />
      ${isBusy ? html`<button type="button" onClick=${() => controller.current.abort()}>${t("stop")}</button>` : html`<button>${t("send")}</button>`}
    </form>`;
}
