// A text field with the scheduler's method `schedule`, which the reader can change and run.

import { html, useEffect, useLayoutEffect, useRef, useState, useView } from "./ui.js";

// schedule: the text that runs, or null for the engine's own. error: why it has failed, and in which line, from 1
export function ScheduleEditor({ schedule, setSchedule, error, line }) {
  const { t } = useView();
  const own = window.SOURCES.schedule;
  const [text, setText] = useState(schedule ?? own.text);
  const field = useRef(null);
  useLayoutEffect(() => { if (schedule === null) setText(own.text); }, [schedule]);
  useEffect(() => { if (line) selectLine(field.current, line); }, [line, schedule]);
  const numbers = text.split("\n").map((_, i) => i + 1).join("\n");
  return html`<details class="schedule"><summary>${t("scheduleEdit")}</summary>
    <p class="soft">${t("scheduleHelp", { path: own.path })}</p>
    <div class="editor"><pre aria-hidden="true">${numbers}</pre><textarea ref=${field} name="schedule" spellcheck="false" autocapitalize="off" autocomplete="off" wrap="off" aria-label=${t("scheduleLabel")}
      rows=${text.split("\n").length} aria-invalid=${line ? "true" : "false"} value=${text} onInput=${(event) => setText(event.target.value)}></textarea></div>
    ${error && html`<p class="bad" role="alert">${error}</p>`}
    <p><button onClick=${() => setSchedule(text)}>${t("scheduleRun")}</button> <button disabled=${text === own.text && schedule === null} onClick=${() => { setText(own.text); setSchedule(null); }}>${t("scheduleRestore")}</button></p>
  </details>`;
}

// Select a line of a text field, and scroll to it.
function selectLine(field, line) {
  const lines = field.value.split("\n");
  const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
  field.focus();
  field.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
}
