// Notices above the recordings: files that cannot be read, failed checks, a recording whose last line was cut. And the
// error message that replaces a part of the page that cannot be drawn, so that the page is never blank.

import { failedChecks } from "./invariants.js";
import { html, useEffect, useErrorBoundary, useMemo, useSettled, useView } from "./ui.js";

// Show `children`, or the reason why they cannot be drawn (nothing if `isQuiet`). Another frame tries to draw them again.
export function Boundary({ name, frame, isQuiet, children }) {
  const { t } = useView();
  const [error, retry] = useErrorBoundary();
  useEffect(() => { if (error) retry(); }, [frame]);
  if (!error) return children;
  return isQuiet ? null : html`<p class="notice error" role="alert">${t("cannotShow", { name, error: error.message })}</p>`;
}

// bad: [{name, error}] for each file that cannot be read
export function Notices({ bad, runs, frame }) {
  const { t } = useView();
  return html`${bad.map((one) => html`<p class="notice error" role="alert">${t("badFile", one)}</p>`)}
    ${runs.map((run) => html`<${Boundary} key=${run.name} frame=${frame} isQuiet><${FailedChecks} run=${run} frame=${Math.min(frame, run.lastFrame)} /></${Boundary}>`)}
    ${runs.map((run) => run.isCut && html`<p class="notice soft" role="status">${t("wasCut", { name: run.name })}</p>`)}`;
}

// A banner for failed checks: those of the whole recording, and those of the shown state once the scrubbing pauses.
function FailedChecks({ run, frame }) {
  const { t } = useView();
  const checks = useMemo(() => failedChecks(run, run.stateAt(frame)), [run, run.frames.length, useSettled(frame)]);
  const failed = checks.filter(([, where]) => where.length);
  if (!failed.length) return null;
  const show = () => {
    const card = document.getElementById(`checks-${run.name}`);
    card.querySelector("details").open = true;
    card.scrollIntoView({ block: "center" });
    card.focus();
  };
  return html`<p class="notice alarm" role="alert"><b>${t("checksFailed", { name: run.name, count: failed.length, all: checks.length })}</b> <code>${failed[0][1][0]}</code>${" "}
    <button onClick=${show}>${t("showChecks")}</button></p>`;
}
