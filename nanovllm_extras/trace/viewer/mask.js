// The step's attention mask, if it is small enough to draw: a row for each new token shows the tokens that it attends to.

import { ownerColor } from "./colors.js";
import { chunksOf, Seq } from "./step.js";
import { html, useView } from "./ui.js";

const MAX_ROWS = 48;
const MAX_COLUMNS = 256;

export function Mask({ run, frame, state }) {
  const { t, theme } = useView();
  const chunks = chunksOf(run.frames[frame], state);
  const numRows = chunks.reduce((sum, one) => sum + one.numNew, 0);
  const columns = Math.max(1, ...chunks.map((one) => one.start + one.numNew));
  const isSmall = numRows <= MAX_ROWS && columns <= MAX_COLUMNS;
  const rows = isSmall ? chunks.flatMap(({ number, start, numNew }) => Array.from({ length: numNew }, (_, i) => ({ number, position: start + i }))) : [];
  const cell = Math.max(2, Math.min(12, Math.floor(560 / columns)));
  const high = Math.max(4, Math.min(12, cell * 2));
  const size = run.header.block_size;
  const window = run.header.config.sliding_window ?? Infinity; // of all layers
  const isGrouped = run.replay.numGroups > 1; // some layers see all tokens, others a window
  const firstOfWindow = (position) => Math.max(0, position - run.replay.groupWindow + 1);
  const firstSeen = (position) => Math.max(0, position - window + 1);
  const borders = Array.from({ length: Math.floor(columns / size) }, (_, i) => (i + 1) * size * cell);
  return html`<section class="card mask">
    <h2>${t("mask")}</h2>
    ${!isSmall && html`<p class="soft">${t("maskTooLarge", { rows: numRows, columns })}</p>`}
    ${isSmall && rows.length > 0 && html`<div class="wide"><svg width=${columns * cell + 1} height=${rows.length * high + 1} role="img" aria-label=${t("maskHelp")}>
      ${rows.map(({ number, position }, i) => html`<g fill=${ownerColor(number, theme)}>
        <rect x=${firstSeen(position) * cell} y=${i * high} width=${(position - firstSeen(position)) * cell} height=${high - 1} opacity=${isGrouped ? 0.15 : 0.4} />
        ${isGrouped && html`<rect x=${firstOfWindow(position) * cell} y=${i * high} width=${(position - firstOfWindow(position)) * cell} height=${high - 1} opacity="0.4" />`}
        <rect x=${position * cell} y=${i * high} width=${cell} height=${high - 1} />
        <title>${`${run.label(number)}: ${position}`}</title>
      </g>`)}
      ${borders.map((x) => html`<line x1=${x} x2=${x} y1="0" y2=${rows.length * high} class="border" />`)}
    </svg></div>
    <p>${[...new Set(rows.map((row) => row.number))].map((number) => html`<${Seq} run=${run} number=${number} /> `)}</p>`}
    <p class="soft">${t("maskHelp")}${isGrouped && t("maskOfGroups", { window: run.replay.groupWindow })}</p>
  </section>`;
}
