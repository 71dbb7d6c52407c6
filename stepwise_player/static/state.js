// The state of one engine after some events: batches, KV memory, who holds which page, the radix tree.
//
// Handlers are keyed by the name of an event; an event without one changes nothing. The values of the maps are never
// changed but replaced, so that a copy of the state is a copy of its maps.

import {isPrompt} from "./requests.js";

/** @typedef {import("./trace.js").TraceEvent} TraceEvent */
/** @typedef {{id: string, count: number, kind: string, guesses: number}} Part Tokens of a request in a batch. */
/** @typedef {{step: number, budget: number, parts: Part[], guesses: Map<string, [number, number]>, padding: number}} Batch */
/** @typedef {"device"|"writing"|"both"|"loading"|"host"} Tier Where the KV of a node is, or between which two it is copied. */
/** @typedef {{parent: number, tokens: number, pages: number[], locked: number, step: number, tier: Tier}} Node `pages`: on the device. `step`: of the last change. */
/** @typedef {{list: number[], length: number}} Table The first `length` pages of a list that later states may lengthen. */

const KEPT_BATCHES = 4; // overlapped steps: the batch of the next step comes before the end of this one

export class State {
  constructor() {
    /** @type {Batch[]} */
    this.batches = [];
    this.numPages = 0; this.pageSize = 1; this.tokenBytes = 1;
    this.hasSlots = false; // m2: a slot for each running request, and no pages
    /** Tokens by use, where there are no pages. @type {Record<string, number>} */
    this.memory = {};
    /** Pages of the requests, in the order of their tokens. @type {Map<string, Table>} */
    this.tables = new Map();
    /** The node at which the cached part of a request ends. @type {Map<string, number>} */
    this.ends = new Map();
    /** @type {Map<number, Node>} */
    this.nodes = new Map();
    /** Pages of a request that another engine will fill. @type {Map<string, number>} */
    this.awaited = new Map();
    /** Tokens of the prompts. @type {Map<string, number>} */
    this.lengths = new Map();
    /** Totals since the start. */
    this.totals = {computed: 0, cached: 0, guesses: 0, accepted: 0};
  }

  copy() {
    const {batches, memory, totals, tables, ends, nodes, awaited, lengths} = this;
    return Object.assign(new State(), this, {
      batches: batches.slice(), memory: {...memory}, totals: {...totals}, tables: new Map(tables), ends: new Map(ends), nodes: new Map(nodes),
      awaited: new Map(awaited), lengths: new Map(lengths),
    });
  }

  /** @param {TraceEvent} event */
  apply(event) { if (Object.hasOwn(HANDLERS, event.event)) HANDLERS[event.event](this, event); }

  /** The batch of a step. @param {number} step */
  batchOf(step) { return this.batches.find(batch => batch.step === step) ?? null; }

  /** @param {string} id @returns {number[]} */
  pagesOf(id) {
    const table = this.tables.get(id);
    return table ? table.list.slice(0, table.length).filter(page => page !== undefined) : [];
  }

  /** Nodes from below the root to this one. @param {number|undefined} id @returns {number[]} */
  path(id) {
    const path = [];
    for (let node = this.nodes.get(id ?? -1); node; id = node.parent, node = this.nodes.get(id)) path.unshift(/** @type {number} */ (id));
    return path;
  }

  /** Requests and nodes that hold each page. @returns {Map<number, {requests: string[], node: number|null}>} */
  holders() {
    /** @type {Map<number, {requests: string[], node: number|null}>} */
    const held = new Map();
    const of = (/** @type {number} */ page) => held.get(page) ?? held.set(page, {requests: [], node: null}).get(page);
    for (const [id, node] of this.nodes) for (const page of node.pages) /** @type {any} */ (of(page)).node = id;
    for (const id of this.tables.keys()) for (const page of this.pagesOf(id)) of(page)?.requests.push(id);
    return held;
  }

  /** The tokens of the KV memory by use. @returns {Record<string, number>} */
  memoryByUse() {
    if (!this.numPages || this.hasSlots) return this.memory;
    const sizes = {protected: 0, owned: 0, evictable: 0, free: 0};
    for (const {locked, tokens, tier} of this.nodes.values()) if (tier !== "host") sizes[locked > 0 ? "protected" : "evictable"] += tokens;
    for (const {node} of this.holders().values()) if (node === null) sizes.owned += this.pageSize;
    for (const count of this.awaited.values()) sizes.owned += count * this.pageSize;
    sizes.free = this.numPages * this.pageSize - sizes.protected - sizes.evictable - sizes.owned;
    return sizes;
  }

  /** Put pages into the table of a request, from a place of it on. @param {string} id @param {number} from @param {number[]} pages */
  put(id, from, pages) {
    const old = this.tables.get(id) ?? {list: [], length: 0};
    if (from + pages.length <= old.length && pages.every((page, i) => page === old.list[from + i])) return;
    const isLonger = from === old.length && old.list.length === old.length; // then nobody else reads the list behind its end
    const list = isLonger ? old.list : old.list.slice(0, old.length);
    pages.forEach((page, i) => { list[from + i] = page; });
    this.tables.set(id, {list, length: Math.max(old.length, from + pages.length)});
  }

  /** Drop the pages of a request from a place of its table on. @param {string} id @param {number} from */
  cut(id, from) {
    const table = this.tables.get(id);
    if (table && from < table.length) this.tables.set(id, {list: table.list, length: from});
  }

  /** @param {string} id */
  drop(id) { this.tables.delete(id); this.ends.delete(id); this.awaited.delete(id); }

  /** @param {number} id @param {Partial<Node>} change */
  change(id, change) {
    const node = this.nodes.get(id);
    if (node) this.nodes.set(id, {...node, ...change});
  }

  /** Change all nodes of an event. @param {TraceEvent} e @param {Partial<Node>} change */
  move(e, change) { e.nodes?.forEach((/** @type {number} */ id) => this.change(id, {...change, step: e.step})); }

  /** The nodes of an event get its pages on the device. @param {TraceEvent} e @param {Tier} tier */
  arrive(e, tier) {
    let end = 0;
    e.nodes?.forEach((/** @type {number} */ id, /** @type {number} */ i) => {
      const start = end;
      end += (e.token_counts?.[i] ?? 0) / this.pageSize;
      this.change(id, {tier, pages: e.pages?.slice(start, end) ?? [], step: e.step});
    });
  }

  /** @param {number[]} ids */
  remove(ids) { for (const id of ids) this.nodes.delete(id); }

  /** The cached part of a request ends at a node now. @param {string} id @param {number} node */
  attach(id, node) {
    this.ends.set(id, node);
    this.put(id, 0, this.path(node).flatMap(each => this.nodes.get(each)?.pages ?? []));
  }
}

/** @type {Record<string, (s: State, e: TraceEvent) => void>} */
const HANDLERS = {
  engine_started: (s, e) => { Object.assign(s, new State(), {totals: s.totals, tokenBytes: e.kv_bytes_per_token}); },
  request_added: (s, e) => s.lengths.set(e.rid, e.len),
  kv_sized(s, e) { s.numPages = e.num_blocks; s.pageSize = e.block_size; },
  admit(s, e) {
    s.totals.cached += e.prefix ?? 0;
    if (e.node) s.attach(e.rid, e.node);
    if (!e.block_ids) return;
    s.hasSlots = true; s.numPages = e.max_num_seqs;
    s.put(e.rid, 0, e.block_ids);
  },
  batch(s, e) {
    const parts = e.rids.map((/** @type {string} */ id, /** @type {number} */ i) => (
      {id, count: e.extend_lens?.[i] ?? 1, guesses: e.draft_lens?.[i] ?? 0, kind: isPrompt(e, i, s.lengths) ? "prompt" : "answer"}));
    s.batches = [{step: e.step, budget: e.budget ?? 0, parts, guesses: new Map(), padding: 0}, ...s.batches].slice(0, KEPT_BATCHES);
    let first = 0;
    for (const [i, {id, count}] of parts.entries()) {
      s.totals.computed += count;
      if (!e.out_slots) continue;
      const from = Math.floor(e.prefix_lens[i] / s.pageSize), slots = e.out_slots.slice(first, first += count);
      s.put(id, from, [...new Set(slots.map((/** @type {number} */ slot) => Math.floor(slot / s.pageSize)))]);
    }
  },
  verified(s, e) {
    s.batches = s.batches.map(one => one.step === e.step ? {...one, guesses: new Map(one.guesses).set(e.rid, [e.accepted, e.drafted.length])} : one);
    s.totals.guesses += e.drafted.length; s.totals.accepted += e.accepted;
  },
  finish: (s, e) => s.drop(e.rid),
  abort: (s, e) => { if (e.state !== "running") s.drop(e.rid); },
  // m1 to m3
  blocks_allocated: (s, e) => s.put(e.owner, s.tables.get(e.owner)?.length ?? 0, e.block_ids),
  blocks_forked: (s, e) => { s.drop(e.owner); s.put(e.owner, 0, e.block_ids); },
  block_copied: (s, e) => s.put(e.owner, s.pagesOf(e.owner).indexOf(e.source), [e.target]),
  blocks_freed: (s, e) => { if (!e.on_host) s.drop(e.owner); },
  blocks_swapped: (s, e) => { s.drop(e.owner); if (e.direction === "in") s.put(e.owner, 0, e.block_ids); },
  kv_usage(s, e) {
    const used = e.kv_bytes_used / s.tokenBytes;
    s.memory = {used, reserved: e.kv_bytes_reserved / s.tokenBytes - used};
    s.batches = s.batches.map(one => one.step === e.step ? {...one, padding: e.padded_tokens} : one);
  },
  alloc(s, e) { s.memory = {used: e.total_tokens}; },
  free(s, e) { s.memory.used -= e.tokens; if (s.memory.reserved) s.memory.reserved += e.tokens; },
  // m4 and later
  inserted(s, e) { // an insertion that adds nothing names the node that has it all
    const tokens = e.insert_len - e.existing;
    if (e.last_access_time != null) { if (tokens) s.nodes.set(e.node, {parent: e.parent, tokens, pages: e.pages ?? [], locked: 0, step: e.step, tier: "device"}); }
    else e.pages?.forEach((/** @type {number} */ id, /** @type {number} */ i) => // in a table of hashes, each page is a node
      s.nodes.set(id, {parent: i ? e.pages[i - 1] : e.parent, tokens: s.pageSize, pages: [id], locked: 0, step: e.step, tier: "device"}));
  },
  split(s, e) {
    const lower = s.nodes.get(e.node);
    if (!lower) return;
    const share = Math.round(lower.pages.length * e.head / (e.head + e.tail));
    s.nodes.set(e.upper, {...lower, tokens: e.head, pages: lower.pages.slice(0, share), locked: e.lock_ref, step: e.step});
    s.change(e.node, {parent: e.upper, tokens: e.tail, pages: lower.pages.slice(share), step: e.step});
  },
  locked(s, e) {
    for (const id of s.path(e.node)) s.change(id, {locked: (s.nodes.get(id)?.locked ?? 0) + e.delta, step: e.step});
    if (!e.rid) return;
    if (e.delta < 0) { if (!s.tables.has(e.rid)) s.ends.delete(e.rid); }
    else if (s.tables.has(e.rid)) s.attach(e.rid, e.node);
    else s.ends.set(e.rid, e.node);
  },
  evicted: (s, e) => s.remove(e.nodes ?? []),
  write_started: (s, e) => s.move(e, {tier: "writing"}),
  acknowledged: (s, e) => s.move(e, {tier: e.error == null ? "both" : "device"}),
  demoted: (s, e) => s.move(e, {tier: "host", pages: []}),
  host_flushed: (s, e) => s.move(e, {tier: "device"}),
  host_evicted: (s, e) => s.remove(e.nodes ?? []),
  load_back: (s, e) => s.arrive(e, "loading"),
  reattached: (s, e) => s.arrive(e, "both"),
  prefetched(s, e) { if (e.node != null) s.nodes.set(e.node, {parent: e.parent, tokens: e.token_ids?.length ?? 0, pages: [], locked: 0, step: e.step, tier: "host"}); },
  cache_flushed: s => s.nodes.clear(),
  rolled_back: (s, e) => s.cut(e.rid, Math.ceil(e.committed / s.pageSize)),
  released: (s, e) => s.cut(e.rid, Math.ceil(e.start / s.pageSize)),
  retract: (s, e) => s.drop(e.rid),
  preempt: (s, e) => e.rids?.slice(1).forEach((/** @type {string} */ id) => s.drop(id)),
  // m6: KV from another engine
  room_taken(s, e) { s.attach(e.rid, s.ends.get(e.rid) ?? 0); s.awaited.set(e.rid, e.num_pages); },
  chunk_received(s, e) {
    if (!e.pages) return;
    s.put(e.rid, s.tables.get(e.rid)?.length ?? 0, e.pages);
    s.awaited.set(e.rid, (s.awaited.get(e.rid) ?? 0) - e.pages.length);
  },
};
