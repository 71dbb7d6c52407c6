// The lanes: a row for each request, a column for each step, and a mark at the step that is shown. By time, a column is
// as wide as its step was long. Only what is in sight is drawn, so that a long run scrolls as a short one.

import {colours, make, ownerColour, penOf} from "./dom.js";

/** @typedef {import("./requests.js").Request} Request */
/** @typedef {import("./requests.js").Segment} Segment */

const ROW = 24, LEAST = 5; // pixels: of a row, of a step at least
const MOST_LETTERS = 80; // of a name: more are never in sight
const LOW = new Set(["waiting", "preempted", "transfer"]);
const ENDS = new Set(["finished", "failed"]);
const WORDS = /** @type {Record<string, string>} */ ({
  waiting: "waiting", prompt: "prompt", answer: "answer", preempted: "preempted", transfer: "KV on its way", finished: "finished", failed: "failed or aborted",
  cached: "prompt found in the cache", accepted: "accepted guess", rejected: "rejected guess",
});

export class LanesView {
  /** @param {HTMLElement} box @param {HTMLElement} legend @param {import("./trace.js").Trace} trace
      @param {(id: string|null) => void} select @param {(place: number) => void} go */
  constructor(box, legend, trace, select, go) {
    this.box = box; this.trace = trace; this.place = 0; this.byTime = false;
    this.names = this.width = this.asked = 0; // pixels of the names, and of a step or a second
    this.requests = [...trace.requests.values()].filter(request => request.segments.length);
    this.numbers = new Map([...trace.requests.keys()].map((id, number) => [id, number]));
    this.work = Object.entries(trace.work());
    this.above = 0; // rows above the requests: by time, when the host and the device worked
    this.hasPages = trace.events.some(event => event.event === "kv_sized");
    /** @type {Set<string>|null} */
    this.related = null;
    this.spacer = make("div", {class: "spacer"});
    this.canvas = make("canvas", {"aria-hidden": "true"});
    box.replaceChildren(this.spacer, this.canvas);
    legend.replaceChildren(...this.kinds().map(kind => make("span", {class: `key ${kind}`}, WORDS[kind])));
    this.resized = new ResizeObserver(() => this.layout());
    this.resized.observe(box);
    box.addEventListener("scroll", () => this.soon(), {passive: true});
    this.canvas.addEventListener("click", event => {
      const {request, place} = this.at(event);
      if (event.offsetX >= this.names) go(place);
      select(request && !(event.offsetX < this.names && this.related?.has(request.id)) ? request.id : null);
    });
    this.canvas.addEventListener("pointermove", event => { this.canvas.title = this.titleAt(event); });
  }

  /** Kinds of lanes and marks in this run, for the legend. */
  kinds() {
    const kinds = new Set(this.requests.flatMap(({segments}) => segments.map(part => part.kind)));
    const has = (/** @type {(request: Request) => boolean} */ test) => this.requests.some(test);
    if (has(({segments}) => segments.some(part => part.cached > 0))) kinds.add("cached");
    if (has(({guesses}) => guesses.size > 0)) { kinds.add("accepted"); kinds.add("rejected"); }
    return Object.keys(WORDS).filter(kind => kinds.has(kind));
  }

  /** The request and the place under the pointer. @param {MouseEvent} event */
  at(event) {
    const row = Math.floor((event.offsetY + this.box.scrollTop) / ROW) - this.above, x = event.offsetX - this.names + this.box.scrollLeft;
    const place = this.byTime ? this.trace.placeAt(x / this.width) : Math.floor(x / this.width);
    return {request: this.requests[row] ?? null, place: Math.min(Math.max(place, 0), this.trace.places.length - 1)};
  }

  /** @param {MouseEvent} event */
  titleAt(event) {
    const {request, place} = this.at(event), part = request?.segmentAt(place);
    if (!request || event.offsetX < this.names) return request?.id ?? "";
    if (!part || part.to < place) return `${request.id}: step ${this.trace.places[place].step}`;
    const guesses = request.guesses.get(place);
    const count = part.kind === "prompt" ? `, ${part.count} tokens${part.cached ? `, ${part.cached} more from the cache` : ""}` : "";
    return `${request.id}: ${WORDS[part.kind]}${count}${guesses ? `, ${guesses[0]} of ${guesses[1]} guesses accepted` : ""}`;
  }

  layout() {
    const {clientWidth} = this.box;
    if (!clientWidth) return;
    this.above = this.byTime ? this.work.length : 0;
    this.names = clientWidth < 500 ? 84 : 132;
    const room = clientWidth - this.names - 8, {places} = this.trace;
    const seconds = this.trace.endTime - this.trace.startTime;
    this.width = this.byTime ? Math.max(room, LEAST * places.length) / seconds : Math.max(LEAST, room / places.length);
    const length = this.byTime ? this.width * seconds : this.width * places.length;
    this.spacer.style.width = `${this.names + length}px`;
    this.spacer.style.height = `${ROW * (this.above + this.requests.length)}px`;
    this.draw();
  }

  /** Show a place. @param {number} place @param {Set<string>|null} related Requests that are not dimmed; null: all. @param {boolean} byTime */
  show(place, related, byTime) {
    this.place = place; this.related = related;
    if (byTime !== this.byTime) { this.byTime = byTime; this.layout(); }
    if (this.width) {
      const x = this.begin(place), sight = this.box.clientWidth - this.names;
      if (x < this.box.scrollLeft || x > this.box.scrollLeft + sight - 40) this.box.scrollLeft = x - sight / 2;
    }
    this.soon();
  }

  /** Draw once before the next frame. */
  soon() {
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => { this.asked = 0; this.draw(); });
  }

  /** Pixels from the beginning of the lanes to that of a place. @param {number} place */
  begin(place) {
    if (!this.byTime) return place * this.width;
    return place ? this.trace.secondsAt(place - 1) * this.width : 0;
  }

  draw() {
    if (!this.width) return;
    const {box, names} = this, width = box.clientWidth, height = box.clientHeight;
    const colour = colours(box), pen = penOf(this.canvas, width, height);
    const top = box.scrollTop - this.above * ROW, first = Math.max(0, Math.floor(top / ROW)), last = Math.min(this.requests.length, Math.ceil((top + height) / ROW));
    const x = (/** @type {number} */ place) => names + this.begin(place) - box.scrollLeft;
    pen.save();
    pen.beginPath(); pen.rect(names, 0, width - names, height); pen.clip();
    for (let row = first; row < last; row++) this.drawRow(pen, colour, this.requests[row], row * ROW - top, x, width);
    for (let row = 0; row < this.above; row++) {
      pen.fillStyle = colour.cached;
      for (const [from, to] of this.work[row][1]) pen.fillRect(names + from * this.width - box.scrollLeft, row * ROW - box.scrollTop + 4, (to - from) * this.width, ROW - 8);
    }
    pen.globalAlpha = 0.85; pen.fillStyle = colour.mark;
    pen.fillRect(x(this.place + 1) - 1, 0, 2, height);
    pen.restore();
    for (let row = first; row < last; row++) {
      const request = this.requests[row];
      const y = row * ROW - top, left = this.hasPages ? 18 : 4;
      pen.globalAlpha = request.arrived > this.place || (this.related && !this.related.has(request.id)) ? 0.35 : 1;
      pen.fillStyle = ownerColour(this.numbers.get(request.id) ?? 0);
      if (this.hasPages) pen.fillRect(4, y + 7, 10, 10); // as its pages
      pen.fillStyle = colour.text;
      pen.fillText(shortened(request.id, names - left - 8, pen), left, y + ROW / 2);
    }
    pen.globalAlpha = 1; pen.fillStyle = colour.text;
    for (let row = 0; row < this.above; row++) pen.fillText(this.work[row][0], 4, row * ROW - box.scrollTop + ROW / 2);
  }

  /** @param {CanvasRenderingContext2D} pen @param {Record<string, string>} colour @param {Request} request @param {number} y
      @param {(place: number) => number} x @param {number} width */
  drawRow(pen, colour, request, y, x, width) {
    pen.globalAlpha = this.related && !this.related.has(request.id) ? 0.25 : 1;
    const end = request.segments[request.segments.length - 1], line = x(request.arrived);
    pen.fillStyle = colour.line;
    pen.fillRect(line, y + ROW / 2 - 0.5, x(end.to + 1) - line, 1); // also where it is in no batch
    for (const part of request.segments) {
      const from = x(part.from), to = x(part.to + 1);
      if (to < this.names || from > width) continue;
      pen.fillStyle = colour[part.kind];
      if (ENDS.has(part.kind)) { pen.fillRect(to - 2, y + 4, 3, ROW - 8); continue; }
      const low = LOW.has(part.kind);
      pen.fillRect(from, low ? y + ROW / 2 - 2 : y + 4, Math.max(1.5, to - from - (this.width > 8 && !low ? 1 : 0)), low ? 4 : ROW - 8);
      if (part.cached) { pen.fillStyle = colour.cached; pen.fillRect(from, y + ROW - 8, to - from, 4); }
      if (part.kind === "prompt" && to - from > 22) { pen.fillStyle = colour.back; pen.fillText(`${part.count}`, from + 4, y + ROW / 2 - (part.cached ? 1 : 0)); }
    }
    for (const [place, [accepted, all]] of request.guesses) {
      const from = x(place), size = (x(place + 1) - from - 1) / all;
      if (size < 1 || from > width || from + size * all < this.names) continue;
      pen.fillStyle = colour.accepted; pen.fillRect(from, y + 4, size * accepted, 5);
      pen.fillStyle = colour.rejected; pen.fillRect(from + size * accepted, y + 4, size * (all - accepted), 5);
    }
  }

  close() { this.resized.disconnect(); }
}

/** A text that fits. @param {string} text @param {number} room @param {CanvasRenderingContext2D} pen */
function shortened(text, room, pen) {
  text = text.slice(0, MOST_LETTERS);
  if (pen.measureText(text).width <= room) return text;
  let length = text.length - 1;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}
