// The state of the pool after each event, as in replay.py. It is in typed arrays, which are fast to copy.
//
// Block b has refs[b] owners, holds filled[b] tokens, and was written by sequence writer[b] as its place[b]-th block.
// serial[b] is not 0 while the prefix cache can find the block. loaded[b] is 0 if the contents were computed; otherwise they
// came from the K/V store, from the tier tiers[loaded[b] - 1]. The free blocks are a linked ring in the order in which they
// are handed out: next[0] is the first one, previous[0] the last one. In a block table, 0 is the null block: it has no owners
// and replaces blocks behind the window of all layers. `broken` collects contradictions; no method throws for them.
//
// If the model's layers form groups 0 … numGroups - 1, block b serves group[b]. Each group has block tables of its own:
// seq.table is that of group 0, which sees all tokens, and seq.windows are those of the others, which see groupWindow tokens.
// In them, 0 replaces blocks behind the window. Most models have one group, and seq.windows is empty.
//
// Models with recurrent states also have slots 1 … numSlots: slots.get(s) is {seq}, the number of its owner, or
// {block, tokens} of a snapshot: the block at whose end the state was, and the number of tokens before. `due` are copies
// of states that are decided and not done, `copied` those that the newest step did: [{source, to, kind, seq, tokens}].
// Negative numbers are slots in host memory, which sequences own while they are swapped out.

const ARRAYS = ["refs", "filled", "writer", "place", "group", "serial", "loaded"];

// Return the block tables of a sequence, one for each group of layers.
export const tablesOf = (seq) => [seq.table, ...seq.windows];

// Return the blocks that a sequence owns in all groups, without null blocks.
export const blocksOf = (seq) => tablesOf(seq).flat().filter(Boolean);

export class Replay {
  constructor(header) {
    this.blockSize = header.block_size;
    this.hasOwnBlocks = header.config?.has_own_blocks;
    this.step = header.num_steps_before;
    this.seqs = new Map(); // number -> sequence, including finished ones
    this.hashes = new Map(); // serial number -> hash
    this.inFlight = new Map(header.in_flight);
    this.decodes = [];
    this.tiers = []; // names
    this.broken = [];
    this.numSlots = header.num_slots ?? 0;
    this.numGroups = header.num_groups ?? 1;
    this.groupWindow = header.group_window ?? Infinity;
    this.topSlot = 0; // no larger slot has ever been used
    [this.slots, this.due, this.copied] = [new Map(), [], []];
    this.emptyPool(header.num_blocks);
    if (header.state) this.loadState(header.state);
  }

  // Copy the state. The copy shares tokens and hashes, because these only grow.
  clone() {
    const copy = Object.create(Replay.prototype);
    Object.assign(copy, this);
    for (const name of [...ARRAYS, "next", "previous"]) copy[name] = this[name].slice();
    copy.seqs = new Map();
    for (const [number, seq] of this.seqs) {
      copy.seqs.set(number, seq.status === "finished" ? seq : { ...seq, table: seq.table.slice(), windows: seq.windows.map((table) => table.slice()) });
    }
    copy.inFlight = new Map(this.inFlight);
    copy.broken = this.broken.slice();
    copy.slots = new Map(this.slots);
    copy.due = this.due.slice();
    return copy;
  }

  apply(event) {
    const [code, ...values] = event;
    if (!EVENTS.has(code)) return this.check(false, `unknown event ${code}`);
    this[code](...values);
  }

  check(holds, message) {
    if (!holds && this.broken.length < 100) this.broken.push({ step: this.step, message });
  }

  start(numBlocks) {
    this.emptyPool(numBlocks);
    this.inFlight = new Map();
    for (const [number, seq] of this.seqs) this.seqs.set(number, { ...seq, status: "finished", table: [], windows: this.emptyWindows(), host: [], computed: 0, slot: 0 });
    [this.slots, this.due, this.copied] = [new Map(), [], []];
  }

  emptyPool(numBlocks) {
    this.numBlocks = numBlocks;
    this.numFree = numBlocks;
    this.top = 0; // no block with a larger id has ever been owned
    for (const name of ARRAYS) this[name] = new Int32Array(numBlocks + 1);
    this.next = Int32Array.from({ length: numBlocks + 1 }, (_, i) => (i + 1) % (numBlocks + 1));
    this.previous = Int32Array.from({ length: numBlocks + 1 }, (_, i) => (i + numBlocks) % (numBlocks + 1));
  }

  // The block tables of a sequence without blocks, for the groups with a window.
  emptyWindows() {
    return Array.from({ length: this.numGroups - 1 }, () => []);
  }

  loadState(state) {
    this.next.fill(-1);
    this.next[0] = this.previous[0] = 0;
    this.numFree = 0;
    for (const b of state.free) this.putLast(b);
    const windows = new Map(state.window_tables);
    for (const one of state.seqs) {
      const seq = { ...makeSequence(one.number, one), windows: windows.get(one.number)?.map((table) => table.slice()) ?? this.emptyWindows() };
      this.seqs.set(one.number, seq);
      tablesOf(seq).forEach((table, group) => table.forEach((b, i) => {
        if (!b) return;
        this.refs[b] += 1;
        this.top = Math.max(this.top, b);
        [this.writer[b], this.place[b], this.group[b]] = [one.number, i, group];
        this.filled[b] = Math.max(this.filled[b], Math.min(this.blockSize, seq.computed - i * this.blockSize));
      }));
    }
    for (const [b, tier] of state.loaded) this.noteLoaded(b, tier);
    for (const [number, slot] of state.slots ?? []) this.giveSlot(number, slot);
    for (const [slot, block, tokens] of state.snapshots ?? []) this.putSnapshot(slot, block, tokens);
    for (const [source, to] of state.state_copies ?? []) this.due.push(this.copyTo(source, to));
    const bySerial = new Map(state.cached.map((one) => [one[2], one]));
    for (const [serial, blocks] of state.window_cached ?? []) blocks.forEach((b, i) => (this.group[b] = i + 1));
    const ofWindows = (state.window_cached ?? []).flatMap(([serial, blocks]) => blocks.map((b) => [b, ...bySerial.get(serial).slice(1)]));
    [...state.cached, ...ofWindows].forEach(([b, hash, serial, tokens], i) => {
      this.serial[b] = serial;
      this.top = Math.max(this.top, b);
      this.hashes.set(serial, hash);
      if (this.refs[b]) return;
      const ghost = makeSequence(-1 - i, { request: "?", sample: 0, tokens, num_prompt_tokens: tokens.length });
      this.seqs.set(ghost.number, { ...ghost, status: "finished" }); // its owner is unknown
      [this.writer[b], this.place[b], this.filled[b]] = [ghost.number, 0, this.blockSize];
    });
  }

  // ---- sequences

  add(number, time, about) {
    this.seqs.set(number, { ...makeSequence(number, about), windows: this.emptyWindows() });
  }

  fork(parent, number, sample, numKnown, numComputed) {
    const one = this.seqs.get(parent);
    const child = { ...one, number, sample, tokens: one.tokens.slice(0, numKnown), table: [], windows: this.emptyWindows(), host: [], drafts: [], known: numKnown, slot: 0 };
    child.computed = numComputed;
    child.status = "waiting";
    child.parent = parent;
    this.seqs.set(number, child);
  }

  tokens(number, first, ids) {
    const seq = this.seqs.get(number);
    this.check(first <= seq.known, `sequence ${number} has a gap before token ${first}`);
    ids.forEach((id, i) => (seq.tokens[first + i] = id));
    seq.known = first + ids.length;
  }

  finish(number, reason, stop, numTokens) {
    const seq = this.seqs.get(number);
    this.check(!tablesOf(seq).flat().length, `sequence ${number} has finished and owns blocks`);
    Object.assign(seq, { status: "finished", reason, stop, final: numTokens, host: [] });
  }

  // ---- decisions

  wait(number) {
    this.check(!number || this.seqs.get(number).status === "waiting", `sequence ${number} waits and runs`);
  }

  idle(number) {
    this.check(this.seqs.get(number).status === "running", `sequence ${number} is idle, and does not run`);
  }

  admit(number, code, numComputed) {
    const seq = this.seqs.get(number);
    Object.assign(seq, { status: "running", computed: numComputed, host: [] });
    this.fill(seq, 0, numComputed);
  }

  // Keep why tokens of the prompt are computed. Together with the hits, the spans are the whole prompt.
  miss(number, misses) {
    const seq = this.seqs.get(number);
    const ends = [seq.computed, ...misses.map((one) => one.end)];
    this.check(misses.every((one, i) => one.start === ends[i]) && ends.at(-1) === seq.numPrompt, `the misses of sequence ${number} are not the rest of its prompt`);
    seq.misses = misses;
  }

  preempt(number, needy, numComputed, host) {
    Object.assign(this.seqs.get(number), { status: "waiting", computed: numComputed, host, preempted: true });
  }

  schedule(step, time, decodes, chunks, samples, moves, numFree, numStored) {
    this.check(step === this.step + 1, `step ${step} comes next`);
    this.step = step;
    if (decodes) this.decodes = decodes;
    for (const number of this.decodes) this.compute(number, this.seqs.get(number).computed, 1);
    for (const [number, start, numNew] of chunks) this.compute(number, start, numNew);
    this.inFlight.set(step, samples || this.decodes);
    this.copyStates(moves[2] ?? []);
    this.check(this.numFree === numFree, `${this.numFree} blocks are free, the engine says ${numFree}`);
    const stored = this.countStored();
    this.check(stored === numStored, `${stored} tokens are stored, the engine says ${numStored}`);
  }

  compute(number, start, numNew) {
    const seq = this.seqs.get(number);
    this.check(seq.computed === start, `the chunk of sequence ${number} begins elsewhere`);
    seq.computed = start + numNew;
    this.fill(seq, start, start + numNew);
  }

  // Note that the tokens [start, stop) of `seq` are in its blocks.
  fill(seq, start, stop) {
    const size = this.blockSize;
    for (const table of tablesOf(seq)) {
      for (let i = Math.floor(start / size); i * size < stop && i < table.length; i++) {
        const b = table[i];
        if (b === 0) continue;
        [this.filled[b], this.writer[b], this.place[b]] = [Math.min(size, stop - i * size), seq.number, i];
      }
    }
  }

  draft(number, ids) {
    this.seqs.get(number).drafts = ids;
  }

  // Apply the result of verification: the newest step samples one token more for each accepted draft.
  verify(number, numDrafts, numAccepted, blocks) {
    const seq = this.seqs.get(number);
    seq.drafts = [];
    seq.computed -= numDrafts - numAccepted;
    for (const b of blocks) {
      const table = tablesOf(seq).find((one) => one.at(-1) === b);
      this.check(table, `block ${b} is not the last of sequence ${number}`);
      (table ?? seq.table).pop();
      this.disown(b);
    }
    const last = Math.ceil(seq.computed / this.blockSize) - 1;
    for (const table of tablesOf(seq)) if (table[last]) this.filled[table[last]] = seq.computed - last * this.blockSize;
    const samples = this.inFlight.get(this.step);
    if (numAccepted && samples) this.inFlight.set(this.step, samples.flatMap((one) => Array(one === number ? numAccepted + 1 : 1).fill(one)));
  }

  update(step, time, ids) {
    const samples = this.inFlight.get(step);
    this.check(samples?.length === ids.length, `step ${step} draws another number of tokens`);
    this.inFlight.delete(step);
    (samples ?? []).forEach((number, row) => {
      const seq = this.seqs.get(number);
      if (!seq || seq.known === seq.final) return;
      seq.tokens[seq.known] = ids[row];
      seq.known += 1;
    });
  }

  roll_back() {
    this.inFlight.clear();
    this.due = [];
  }

  // ---- blocks

  take(number, b, isEvicted, group, place) {
    this.check(this.hasOwnBlocks ? !this.refs[b] : this.next[0] === b, `block ${b} is taken, and block ${this.next[0]} is the first free one`);
    this.check(!!this.serial[b] === !!isEvicted, `block ${b} is evicted: ${!!isEvicted}`);
    this.unlink(b);
    this.filled[b] = this.loaded[b] = 0;
    [this.writer[b], this.place[b]] = [number, this.own(number, b, group, place)];
  }

  share(number, b, group, place) {
    if (b && !this.refs[b]) this.unlink(b);
    this.own(number, b, group, place);
  }

  // Append a block to a block table, and return its place. In a group with a window, 0 fills the entries before `place`.
  own(number, b, group = 0, place = 0) {
    const seq = this.seqs.get(number);
    if (b > this.top) this.top = b;
    const table = tablesOf(seq)[group];
    this.check(!group || table.length <= place, `sequence ${number} has an entry ${place} in group ${group} already`);
    while (table.length < place) table.push(0);
    table.push(b);
    this.group[b] = group;
    if (b) this.refs[b] += 1;
    if (seq.status === "waiting") seq.status = "running";
    return table.length - 1;
  }

  copy(number, source, destination, group = 0) {
    const seq = this.seqs.get(number);
    const table = tablesOf(seq)[group];
    const i = Math.floor(seq.computed / this.blockSize);
    this.check(table.pop() === destination, `block ${destination} is a copy, and was not taken`);
    this.check(table[i] === source, `sequence ${number} does not write to block ${source}`);
    table[i] = destination;
    [this.filled[destination], this.place[destination]] = [this.filled[source], i];
    this.disown(source);
  }

  // The K/V store fills these blocks before the step: {name of a tier: its blocks}. `take` has put them in the tables.
  load(number, numTokens, byTier) {
    const tables = tablesOf(this.seqs.get(number));
    for (const [tier, blocks] of Object.entries(byTier)) {
      for (const b of blocks) {
        const table = tables[this.group[b]];
        this.check(table.includes(b), `block ${b} is loaded for sequence ${number}, which does not own it`);
        this.noteLoaded(b, tier);
      }
    }
  }

  noteLoaded(b, tier) {
    if (!this.tiers.includes(tier)) this.tiers.push(tier);
    this.loaded[b] = this.tiers.indexOf(tier) + 1;
  }

  // Return the name of the tier whose contents are in the block, or undefined if they were computed.
  tierOf(b) {
    return this.tiers[this.loaded[b] - 1];
  }

  give_back(number, blocks) {
    const seq = this.seqs.get(number);
    for (const b of blocks) {
      const table = tablesOf(seq)[this.group[b]];
      const i = table.indexOf(b);
      this.check(i >= 0, `sequence ${number} gives back block ${b}, and does not own it`);
      if (i < 0) continue;
      table[i] = 0;
      this.disown(b);
    }
  }

  free(number) {
    const seq = this.seqs.get(number);
    for (let i = seq.table.length - 1; i >= 0; i--) this.disown(seq.table[i]);
    for (let i = Math.max(0, ...seq.windows.map((table) => table.length)) - 1; i >= 0; i--) {
      for (let w = seq.windows.length - 1; w >= 0; w--) this.disown(seq.windows[w][i]);
    }
    if (seq.slot > 0 || seq.status === "waiting") this.leaveSlot(seq); // else it is being preempted: it keeps its slot in host memory
    Object.assign(seq, { table: [], windows: this.emptyWindows(), computed: 0, status: "waiting", host: [], drafts: [] });
  }

  disown(b) {
    if (!b) return;
    this.refs[b] -= 1;
    this.check(this.refs[b] >= 0, `block ${b} loses an owner that it did not have`);
    if (this.refs[b]) return;
    if (this.serial[b]) this.putLast(b);
    else this.putFirst(b);
  }

  register(number, b, hash, serial, group = 0) {
    this.check(tablesOf(this.seqs.get(number))[group].includes(b), `sequence ${number} does not own block ${b}`);
    this.serial[b] = serial;
    this.hashes.set(serial, hash);
  }

  forget(b) {
    this.serial[b] = 0;
  }

  // A `forget` follows for each block of a group with a window.
  reset() {
    for (let b = 1; b <= this.top; b++) if (!this.group[b]) this.serial[b] = 0;
  }

  // ---- slots of recurrent states

  slot(number, slot, source) {
    this.check(!this.slots.has(slot), `sequence ${number} takes slot ${slot}, which is in use`);
    const seq = this.seqs.get(number);
    this.check(seq.slot === Math.min(0, source), `sequence ${number} takes a slot and owns slot ${seq.slot}`);
    this.leaveSlot(seq); // in host memory
    const isHit = source > 0 && !this.slots.get(source)?.seq; // the slot of a snapshot that was just dropped is empty
    this.giveSlot(number, slot);
    const copy = this.copyTo(source, slot);
    if (source) this.due.push(isHit ? { ...copy, kind: "hit" } : copy);
  }

  // Replace the slot of a sequence by that of its last accepted draft, or by one in host memory.
  move(number, slot) {
    const seq = this.seqs.get(number);
    this.check(seq.slot > 0, `sequence ${number} moves to slot ${slot}, and owns no slot of the pool`);
    this.check(!this.slots.has(slot), `sequence ${number} moves to slot ${slot}, which is in use`);
    const source = seq.slot;
    this.leaveSlot(seq);
    this.giveSlot(number, slot);
    if (slot < 0) this.due.push(this.copyTo(source, slot));
  }

  snapshot(number, slot, block, tokens) {
    this.check(!this.slots.has(slot), `a snapshot takes slot ${slot}, which is in use`);
    this.check(this.serial[block] > 0, `a snapshot is at the end of block ${block}, which is not cached`);
    this.putSnapshot(slot, block, tokens);
    this.due.push({ ...this.copyTo(this.seqs.get(number).slot, slot), seq: number });
  }

  drop(slot) {
    this.check(this.slots.get(slot)?.block > 0, `slot ${slot} holds no snapshot that could be dropped`);
    this.slots.delete(slot);
  }

  giveSlot(number, slot) {
    this.slots.set(slot, { seq: number });
    this.seqs.get(number).slot = slot;
    this.topSlot = Math.max(this.topSlot, slot);
  }

  leaveSlot(seq) {
    this.slots.delete(seq.slot);
    seq.slot = 0;
  }

  putSnapshot(slot, block, tokens) {
    this.slots.set(slot, { block, tokens });
    this.topSlot = Math.max(this.topSlot, slot);
  }

  // A copy that is due from now on. The slots and what the slot `to` is for say what the copy is for.
  copyTo(source, to) {
    const { seq, tokens } = this.slots.get(to) ?? {};
    const kind = source < 0 ? "in" : to < 0 ? "out" : tokens === undefined ? "fork" : "snapshot";
    return { source, to, kind, seq, tokens, step: this.step };
  }

  // Do the copies of the newest step. Only copies that it has decided itself may wait for the next step.
  copyStates(copies) {
    this.copied = copies.map(([source, to]) => {
      const i = this.due.findIndex((one) => one.source === source && one.to === to);
      this.check(i >= 0, `the state in slot ${source} is copied to slot ${to}, and nothing has asked for it`);
      return i < 0 ? this.copyTo(source, to) : this.due.splice(i, 1)[0];
    });
    const left = this.due.filter((one) => one.step < this.step - 1);
    this.check(!left.length, `the state in slot ${left[0]?.source} was to be copied to slot ${left[0]?.to}`);
  }

  // ---- the ring of free blocks

  unlink(b) {
    this.next[this.previous[b]] = this.next[b];
    this.previous[this.next[b]] = this.previous[b];
    this.numFree -= 1;
  }

  link(b, before) {
    const last = this.previous[before];
    [this.next[last], this.previous[b], this.next[b], this.previous[before]] = [b, last, before, b];
    this.numFree += 1;
  }

  putLast(b) {
    this.link(b, 0);
  }

  putFirst(b) {
    this.link(b, this.next[0]);
  }

  // ---- counts

  // Return the free block whose cached contents are evicted next; 0 if no free block is cached.
  nextEvicted() {
    let b = this.next[0];
    while (b > 0 && !this.serial[b]) b = this.next[b];
    return Math.max(0, b);
  }

  // Return the number of one owner of `block`, or null.
  ownerOf(block) {
    for (const seq of this.seqs.values()) if (tablesOf(seq)[this.group[block]].includes(block)) return seq.number;
    return null;
  }

  get freeOrder() {
    return this.firstFree(this.numBlocks + 1);
  }

  firstFree(count) {
    const order = [];
    for (let b = this.next[0]; b !== 0 && order.length < count; b = this.next[b]) order.push(b);
    return order;
  }

  countStored() {
    let sum = 0;
    for (let b = 1; b <= this.top; b++) if (this.refs[b]) sum += this.filled[b];
    return sum;
  }

  // {owned, shared, cachedFree, free, stored, waste}
  counts() {
    let shared = 0;
    let cachedFree = 0;
    for (let b = 1; b <= this.top; b++) {
      if (this.refs[b] > 1) shared += 1;
      else if (!this.refs[b] && this.serial[b]) cachedFree += 1;
    }
    const owned = this.numBlocks - this.numFree;
    const stored = this.countStored();
    const waste = owned ? 1 - stored / (owned * this.blockSize) : 0;
    return { owned, shared, cachedFree, free: this.numFree, stored, waste };
  }

  // The unfinished sequences, in the order of their arrival.
  get living() {
    return [...this.seqs.values()].filter((seq) => seq.status !== "finished");
  }

  // Return the owners of each block; their number must be the block's reference count.
  owners() {
    const owners = new Map();
    for (const seq of this.seqs.values()) {
      for (const b of tablesOf(seq).flat()) owners.has(b) ? owners.get(b).push(seq.number) : owners.set(b, [seq.number]);
    }
    return owners;
  }
}

const EVENTS = new Set([
  "start", "add", "fork", "tokens", "finish", "wait", "idle", "admit", "miss", "preempt", "draft", "schedule", "verify", "update", "roll_back",
  "take", "share", "copy", "load", "give_back", "free", "register", "forget", "reset",
  "slot", "move", "snapshot", "drop",
]);

function makeSequence(number, about) {
  return {
    number,
    request: about.request,
    adapter: about.adapter, // the name of its LoRA adapter, if it has one
    sample: about.sample,
    tokens: about.tokens.slice(),
    known: about.tokens.length,
    numPrompt: about.num_prompt_tokens,
    maxTokens: about.max_num_tokens,
    status: about.status ?? "waiting",
    computed: about.num_computed_tokens ?? 0,
    table: about.block_table?.slice() ?? [],
    windows: [], // the block tables of groups with a window
    host: about.host_block_ids ?? [],
    slot: 0, // of its recurrent state; 0 if it does not own one, negative if it is in host memory
    drafts: [], // draft tokens after the known tokens, while a step verifies them
    misses: about.misses ?? [], // why it computes tokens of its prompt
    final: null,
    preempted: false,
  };
}
