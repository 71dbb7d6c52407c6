// Requests over the whole run: the state of each at each place, its text as it grows, and its history.

/** @typedef {import("./trace.js").TraceEvent} TraceEvent */
/** @typedef {{kind: string, from: number, to: number, count: number, cached: number}} Segment Part of a lane, in places. */

/** The requests that an event is about. @param {TraceEvent} event @returns {string[]} */
export function idsOf(event) { return event.rids ?? [event.rid ?? event.owner].filter(id => typeof id === "string"); }

/** Return whether row i of a batch computes a part of a prompt. @param {TraceEvent} event @param {number} i @param {Map<string, number>} lengths Of the prompts. */
export function isPrompt(event, i, lengths) {
  if (event.num_prompts !== undefined) return i < event.num_prompts;
  return event.mode !== "decode" && !(event.prefix_lens?.[i] >= (lengths.get(event.rids[i]) ?? Infinity));
}

export class Request {
  /** @param {string} id @param {number} place */
  constructor(id, place) {
    this.id = id; this.arrived = place;
    /** @type {Segment[]} */
    this.segments = [];
    /** Indices of its events. @type {number[]} */
    this.history = [];
    /** Text after each place at which it grew. @type {[number, string][]} */
    this.texts = [];
    /** Guesses that were accepted, and all, by place. @type {Map<number, [number, number]>} */
    this.guesses = new Map();
    /** @type {string|null} */
    this.reason = null;
  }

  /** Be in a state from a place on. A state without an end of its own lasts until the next one.
      @param {string} kind @param {number} place */
  enter(kind, place, count = 0, cached = 0) {
    const last = this.segments.at(-1);
    if (last?.kind === kind && kind !== "prompt") { last.to = place; last.count += count; return; }
    if (last && last.kind !== "prompt" && last.kind !== "answer") last.to = Math.max(last.from, place);
    this.segments.push({kind, from: place, to: place, count, cached});
  }

  /** @param {number} place */
  textAt(place) {
    let low = 0, high = this.texts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.texts[middle][0] <= place) low = middle + 1; else high = middle;
    }
    return low ? this.texts[low - 1][1] : "";
  }

  /** Its state at a place. @param {number} place */
  segmentAt(place) { return this.segments.findLast(part => part.from <= place) ?? null; }
}

export class Lanes {
  /** @param {string} home Engine whose events are about whole requests. */
  constructor(home) {
    this.home = home;
    /** @type {Map<string, Request>} */
    this.requests = new Map();
    /** Tokens of the prompts. @type {Map<string, number>} */
    this.lengths = new Map();
    /** Tokens found in the cache, by request, until its next piece. @type {Map<string, number>} */
    this.cached = new Map();
  }

  /** @param {string} id @param {number} place */
  of(id, place) {
    let request = this.requests.get(id);
    if (!request) this.requests.set(id, request = new Request(id, place));
    return request;
  }

  /** @param {TraceEvent} event @param {number} place @param {number} index */
  apply(event, place, index) {
    for (const id of new Set(idsOf(event))) this.of(id, place).history.push(index);
    const handler = Object.hasOwn(HANDLERS, event.event) ? HANDLERS[event.event] : null;
    if (handler && (event.engine === this.home || !WHOLE.has(event.event))) handler(this, event, place);
  }

  /** A state that no other ended lasts until the end. @param {number} place */
  close(place) {
    for (const {segments, reason} of this.requests.values()) {
      const last = segments.at(-1);
      if (last && reason === null && last.kind !== "prompt" && last.kind !== "answer") last.to = place;
    }
  }
}

const WHOLE = new Set(["request_added", "result", "finish"]); // an engine of several reports these of its own part only

/** @type {Record<string, (lanes: Lanes, e: TraceEvent, place: number) => void>} */
const HANDLERS = {
  request_added(lanes, e, place) { lanes.lengths.set(e.rid, e.len); lanes.of(e.rid, place).enter("waiting", place); },
  request_routed: (lanes, e, place) => lanes.of(e.rid, place).enter("waiting", place),
  media_awaited: (lanes, e, place) => lanes.of(e.rid, place).enter("waiting", place),
  admit: (lanes, e) => { if (e.prefix) lanes.cached.set(e.rid, e.prefix); },
  batch(lanes, e, place) {
    e.rids.forEach((/** @type {string} */ rid, /** @type {number} */ i) => {
      const kind = isPrompt(e, i, lanes.lengths) ? "prompt" : "answer", cached = lanes.cached.get(rid) ?? 0;
      lanes.cached.delete(rid);
      lanes.of(rid, place).enter(e.mode === "prebuilt" ? "transfer" : kind, place, e.extend_lens?.[i] ?? 1, cached);
    });
  },
  verified: (lanes, e, place) => { lanes.of(e.rid, place).guesses.set(place, [e.accepted, e.drafted.length]); },
  result(lanes, e, place) {
    const {texts} = lanes.of(e.rid, place);
    texts.push([place, (texts.at(-1)?.[1] ?? "") + e.new_text]);
  },
  chunk_sent: (lanes, e, place) => { if (e.is_last) lanes.of(e.rid, place).enter("transfer", place); },
  preempted: (lanes, e, place) => lanes.of(e.rid, place).enter("preempted", place),
  retract: (lanes, e, place) => lanes.of(e.rid, place).enter("preempted", place),
  preempt: (lanes, e, place) => e.rids.slice(1).forEach((/** @type {string} */ id) => lanes.of(id, place).enter("preempted", place)),
  finish(lanes, e, place) {
    const request = lanes.of(e.rid, place);
    request.reason = e.reason;
    request.enter(e.reason === "abort" || e.reason === "error" ? "failed" : "finished", place);
  },
};
