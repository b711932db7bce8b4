// What stands above the recordings: files that cannot be read, checks that have failed, a recording that was cut; and what
// stands in the place of a part that cannot be drawn, so that the page is never blank.

import { failedChecks } from "./invariants.js";
import { html, useEffect, useErrorBoundary, useMemo, useSettled, useView } from "./ui.js";

// `children`, or why they cannot be drawn; another frame is tried again. If `isQuiet`, nothing stands in their place.
export function Boundary({ name, frame, isQuiet, children }) {
  const { t } = useView();
  const [error, retry] = useErrorBoundary();
  useEffect(() => { if (error) retry(); }, [frame]);
  if (!error) return children;
  return isQuiet ? null : html`<p class="notice error" role="alert">${t("cannotShow", { name, error: error.message })}</p>`;
}

// bad: [{name, error}] of files that cannot be read
export function Notices({ bad, runs, frame }) {
  const { t } = useView();
  return html`${bad.map((one) => html`<p class="notice error" role="alert">${t("badFile", one)}</p>`)}
    ${runs.map((run) => html`<${Boundary} key=${run.name} frame=${frame} isQuiet><${FailedChecks} run=${run} frame=${Math.min(frame, run.lastFrame)} /></${Boundary}>`)}
    ${runs.map((run) => run.isCut && html`<p class="notice soft" role="status">${t("wasCut", { name: run.name })}</p>`)}`;
}

// A banner if a check has failed: of the whole recording, or of the state that is shown once the scrubbing rests.
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
