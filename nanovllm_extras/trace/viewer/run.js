// One whole recording: its steps with their events, counters over time, and the timeline of each request.
//
// A frame is a step: it begins after the previous step was scheduled and ends when the step itself is scheduled. The last
// frame, after the last step, is the end of the recording. `stateAt(i)` is the state of the pool at the end of frame i.

import { waitsOf } from "./events.js";
import { Replay } from "./replay.js";

const KEYFRAME_BYTES = 64e6;

export class Run {
  constructor(name, header) {
    this.name = name;
    this.header = header;
    this.recording = null; // its text, if it was parsed from one
    this.texts = {};
    this.isCut = false; // whether its last line is incomplete
    this.frames = []; // {step, events, time, sizes…}; frames[i].step is frames[0].step + i
    this.requests = new Map(); // request -> its times, tokens, sequences and rows
    this.rows = []; // rows of the timeline; the rows of a request are adjacent
    this.rowOf = new Map(); // sequence -> row
    this.highlights = []; // {frame, event} of notable events; all evictions of a step are one entry
    this.times = new Map(); // step -> microseconds of each of its parts
    this.replay = new Replay(header);
    this.keyframes = [{ frame: -1, state: this.replay.clone() }];
    this.cache = null; // the state that `stateAt` returned last
    this.pending = []; // events since the last step
    this.queried = 0;
    this.hit = 0;
    this.proposed = 0; // drafts that were verified
    this.accepted = 0;
    this.loadedTokens = new Map(); // admit event -> number of tokens that were loaded right before it
    this.waitsFor = new Map();
    for (const seq of this.replay.living) this.meet(seq, header.t);
  }

  // Parse a recording. Throws an Error with the line's number if the text is not a recording or cannot be replayed.
  static parse(name, text) {
    const lines = text.split("\n");
    let run = null;
    lines.forEach((line, i) => {
      try {
        if (!run) run = new Run(name, checkHeader(JSON.parse(line)));
        else if (line.trim()) run.append(JSON.parse(line));
      } catch (error) {
        const isLast = run && i === lines.length - 1; // without a newline: a crash has cut it
        if (!isLast || !(error instanceof SyntaxError)) throw new Error(`line ${i + 1}: ${error.message}`);
        run.isCut = true;
      }
    });
    run.recording = text;
    run.end();
    return run;
  }

  get firstStep() {
    return this.header.num_steps_before + 1;
  }

  get isEmpty() {
    return this.frames.length < 2 && this.firstStep === 1;
  }

  // Whether `nanovllm what-if` has made this run.
  get isSimulated() {
    return this.header.config?.has_times !== undefined;
  }

  // Whether its times may be shown: those of a simulated run follow a clock, which may be too wrong.
  get hasTimes() {
    return this.header.config?.has_times !== false;
  }

  get lastFrame() {
    return Math.max(0, this.frames.length - 1);
  }

  frameOf(step) {
    return Math.min(this.lastFrame, Math.max(0, step - this.firstStep));
  }

  // Append a line of the recording. A live page calls `end` after each line; the next `append` removes `end`'s frame.
  append(line) {
    if (this.ended) {
      this.frames.pop();
      this.ended = false;
    }
    Object.assign(this.texts, line.texts ?? {});
    for (const event of line.events) this.take(event);
    if (line.times) this.times.set((this.lastEnded = (this.lastEnded ?? this.firstStep - 1) + 1), line.times);
    this.endTime = line.t;
  }

  // Add the last frame, with the events since the last step.
  end() {
    this.frames.push({ step: this.replay.step + 1, events: this.pending.slice(), time: this.endTime ?? this.header.t, isEnd: true, ...this.count() });
    this.ended = true;
    this.cache = null;
  }

  take(event) {
    const before = this.replay.numFree;
    this.replay.apply(event);
    this.pending.push(event);
    this.follow(event, before);
    if (event[0] !== "schedule") return;
    const frame = this.frames.length;
    this.frames.push({ step: event[1], events: this.pending, time: event[2], ...this.count() });
    this.followRequests(frame);
    this.pending = [];
    const every = Math.max(16, Math.ceil((32 * this.replay.numBlocks * this.frames.length) / KEYFRAME_BYTES));
    if (frame - this.keyframes.at(-1).frame >= every) this.keyframes.push({ frame, state: this.replay.clone() });
  }

  count() {
    let [running, waiting] = [0, 0];
    for (const seq of this.replay.living) seq.status === "running" ? running++ : waiting++;
    const hitRate = this.queried ? this.hit / this.queried : 0;
    const keptRate = this.proposed ? this.accepted / this.proposed : 0;
    return { running, waiting, hitRate, hit: this.hit, queried: this.queried, keptRate, accepted: this.accepted, proposed: this.proposed, ...this.replay.counts() };
  }

  stateAt(frame) {
    if (this.cache?.frame === frame) return this.cache.state;
    let base = this.keyframes.findLast((one) => one.frame <= frame);
    if (this.cache && this.cache.frame < frame && this.cache.frame > base.frame) base = this.cache;
    const state = base === this.cache ? base.state : base.state.clone();
    for (let i = base.frame + 1; i <= frame; i++) for (const event of this.frames[i].events) state.apply(event);
    this.cache = { frame, state };
    return state;
  }

  // ---- requests

  meet(seq, time) {
    if (!this.requests.has(seq.request) || this.requests.get(seq.request).isOver) {
      this.requests.set(seq.request, { name: nameOf(seq.request, seq.number) + (seq.adapter ? ` · ${seq.adapter}` : ""), number: seq.number, arrival: time, first: null, last: null, numTokens: 0, numPrompt: seq.numPrompt, living: new Set(), seqs: [], rows: [] });
    }
    const request = this.requests.get(seq.request);
    request.living.add(seq.number);
    request.seqs.push(seq.number);
    this.giveRow(request, seq.number);
  }

  // Give a sequence a row. A new beam continues in the row of a finished one, so that a beam search has few rows.
  giveRow(request, number) {
    let row = request.rows.find((one) => one.isOver);
    if (!row) {
      row = { request, spans: [], marks: [], isFirst: !request.rows.length };
      const above = row.isFirst ? this.rows.length : this.rows.lastIndexOf(request.rows.at(-1)) + 1;
      this.rows = [...this.rows.slice(0, above), row, ...this.rows.slice(above)];
      request.rows.push(row);
    }
    Object.assign(row, { number, isOver: false });
    this.rowOf.set(number, row);
  }

  endRow(number, frame, reason) {
    Object.assign(this.rowOf.get(number), { isOver: true, isAborted: this.isAborted(number), end: frame, reason });
  }

  requestOf(number) {
    return this.requests.get(this.replay.seqs.get(number)?.request);
  }

  follow(event, numFree) {
    const [code, number, ...rest] = event;
    const frame = this.frames.length;
    if (code === "add") this.meet(this.replay.seqs.get(number), rest[0]);
    else if (code === "fork") this.meet(this.replay.seqs.get(rest[0]), rest[4]);
    else if (code === "admit") this.followAdmission(event);
    else if (code === "load") this.followLoad(frame, event);
    else if (code === "free") this.numFreeBefore = numFree;
    else if (code === "finish") this.followEnd(number, rest);
    else if (code === "update") this.followTokens(number, rest[0]);
    else if (code === "start") this.followStart(frame);
    else if (code === "verify") this.followDrafts(rest);
    if (code === "preempt") this.rowOf.get(number).marks.push({ frame, code });
    if (["preempt", "copy", "roll_back", "start"].includes(code) || (code === "finish" && this.isAborted(number))) this.highlights.push({ frame, event, numFree: this.numFreeBefore });
    if (code === "miss") this.highlights.push({ frame, event });
    if (code === "take" && rest[1]) this.followEviction(frame, rest[0]);
    if (code === "wait" && number && this.waitsFor.get(number) !== rest[0]) {
      this.waitsFor.set(number, rest[0]);
      this.highlights.push({ frame, event });
    }
  }

  followAdmission(event) {
    const [, number, code, computed] = event;
    this.waitsFor.delete(number);
    const loaded = this.justLoaded?.[0] === number ? this.justLoaded[1] : 0; // no other event is between them
    this.justLoaded = null;
    if (loaded) this.loadedTokens.set(event, loaded);
    if (code !== "new") return;
    this.queried += this.replay.seqs.get(number).numPrompt;
    this.hit += computed - loaded;
    if (computed > loaded) this.highlights.push({ frame: this.frames.length, event });
  }

  followLoad(frame, event) {
    this.justLoaded = event.slice(1, 3);
    this.highlights.push({ frame, event });
  }

  // Note an eviction. All evictions of a frame are one highlight.
  followEviction(frame, block) {
    const same = this.highlights.findLast((one) => one.frame !== frame || one.event[0] === "evictions");
    if (same?.frame === frame) same.event[1].push(block);
    else this.highlights.push({ frame, event: ["evictions", [block]] });
  }

  followEnd(number, [reason, , , time]) {
    const request = this.requestOf(number);
    request.living.delete(number);
    this.endRow(number, this.frames.length, reason);
    if (!request.living.size) Object.assign(request, { isOver: true, finished: time });
  }

  // A new scheduler starts: all unfinished sequences end.
  followStart(frame) {
    for (const request of this.requests.values()) {
      for (const number of request.living) this.endRow(number, frame, "abort");
      request.living.clear();
      request.isOver = true;
    }
  }

  followTokens(step, time) {
    const frame = this.frames[step - this.firstStep];
    for (const number of frame?.samples ?? []) {
      const request = this.requestOf(number);
      if (!request || request.lastStep === step) continue;
      request.first ??= time;
      Object.assign(request, { last: time, lastStep: step, numTokens: request.numTokens + 1 });
    }
  }

  followDrafts([proposed, accepted]) {
    this.proposed += proposed;
    this.accepted += accepted;
  }

  // Note what each unfinished sequence does in this frame. Consecutive frames of the same kind are one span of its row.
  followRequests(frame) {
    const { decodes, inFlight, step } = this.replay;
    const schedule = this.frames[frame].events.at(-1);
    this.frames[frame].samples = inFlight.get(step);
    this.frames[frame].decodes = decodes;
    const kinds = new Map();
    for (const number of decodes) {
      const { computed, known } = this.replay.seqs.get(number);
      kinds.set(number, computed < known ? "prefill" : "decode"); // a chunk of one token need not be a decode
    }
    for (const [number, , , code] of schedule[4]) kinds.set(number, code === "drafts" ? "decode" : "prefill");
    const waitOf = waitsOf(this.frames[frame].events);
    const whyOf = (number) => {
      const [code, , why] = waitOf(number) ?? ["next"];
      return why ?? code; // or behind
    };
    for (const row of this.rows) {
      if (row.isOver) continue;
      const kind = kinds.get(row.number) ?? this.idleKind(row.number);
      const why = ["queued", "preempted", "swapped"].includes(kind) ? whyOf(row.number) : "";
      const span = row.spans.at(-1);
      if (span?.kind === kind && span.why === why && span.stop === frame) span.stop = frame + 1;
      else row.spans.push({ kind, why, start: frame, stop: frame + 1 });
    }
  }

  idleKind(number) {
    const seq = this.replay.seqs.get(number);
    if (seq.status === "running") return "idle";
    return seq.host.length ? "swapped" : seq.preempted ? "preempted" : "queued";
  }

  // Seconds to the first token (ttft) and for each token after it (tpot); null while they are not known.
  ttft(request) {
    return request.first === null || !this.hasTimes ? null : (request.first - request.arrival) / 1e6;
  }

  tpot(request) {
    if (request.numTokens < 2 || !this.hasTimes) return null;
    return (request.last - request.first) / 1e6 / (request.numTokens - 1);
  }

  isAborted(number) {
    return this.replay.seqs.get(number).reason === "abort";
  }

  // Return {places, most}: how many places of max_num_seqs the request needs (one for each sample), and max_num_seqs.
  placesFor(number) {
    return { places: this.requestOf(number)?.seqs.length ?? 1, most: this.header.config.max_num_seqs };
  }

  label(number) {
    const seq = this.replay.seqs.get(number);
    if (!seq || number < 0) return "?";
    const { name, seqs } = this.requests.get(seq.request);
    return seqs.length > 1 ? `${name}.${seq.sample}` : name;
  }

  // The full request id if the label shortens it: the text that is shown when the mouse points at the label.
  longName(number) {
    const request = number > 0 ? this.replay.seqs.get(number)?.request : undefined;
    return request?.length > MAX_NAME ? request : undefined;
  }

  // The name of a request, which may have ended before the recording began.
  requestName(request) {
    return this.requests.get(request)?.name ?? nameOf(request, "?");
  }

  text(id) {
    return this.texts[id] ?? `⟨${id}⟩`;
  }
}

const MAX_NAME = 12; // characters

// `LLM` numbers its requests; "r7" cannot be mistaken for a count. A server's ids are too long for cells and sentences:
// "#7" is the request whose first sequence has number 7, on every page that follows the run.
function nameOf(request, number) {
  if (request.length > MAX_NAME) return `#${number}`;
  return /^\d+$/.test(request) ? `r${request}` : request;
}

// Check the header as check.py does: a pool that is too large would freeze the page without a message.
function checkHeader(header) {
  if (header?.format !== "nanovllm-trace" || header.version !== 1) throw new Error('it must have the format "nanovllm-trace", version 1');
  for (const [name, most] of [["num_blocks", 1e7], ["block_size", 2 ** 20], ["num_slots", 1e6]]) {
    if (name === "num_slots" && header[name] === undefined) continue; // the model has no recurrent states
    if (!(Number.isInteger(header[name]) && header[name] >= 1 && header[name] <= most)) throw new Error(`${name} must be from 1 to ${most}, got ${header[name]}`);
  }
  return header;
}
