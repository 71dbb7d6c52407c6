// The pages of the KV memory (blocks, in m3), each in the colour of a request that holds it. A page that only the cache
// holds is grey; one that several requests hold has a mark.

import {colours, make, ownerColour, penOf} from "./dom.js";

/** @typedef {import("./dom.js").Related} Related */
/** @typedef {import("./state.js").State} State */

const LARGEST = 22, SMALLEST = 4, TALLEST = 260; // pixels

export class PagesView {
  /** @param {HTMLElement} box @param {Map<string, number>} order Requests, in the order of arrival. @param {(page: number) => void} select */
  constructor(box, order, select) {
    this.box = box; this.order = order;
    this.canvas = make("canvas", {role: "img"});
    box.replaceChildren(this.canvas);
    /** @type {[State, Related|null]|null} */
    this.shown = null;
    /** @type {ReturnType<State["holders"]>} */
    this.held = new Map();
    this.columns = this.size = 1;
    this.resized = new ResizeObserver(() => { if (this.shown) this.show(...this.shown); });
    this.resized.observe(box);
    const pageAt = (/** @type {MouseEvent} */ event) => Math.floor(event.offsetY / this.size) * this.columns + Math.floor(event.offsetX / this.size);
    this.canvas.addEventListener("click", event => select(pageAt(event)));
    this.canvas.addEventListener("pointermove", event => { this.canvas.title = this.titleOf(pageAt(event)); });
  }

  /** @param {number} page */
  titleOf(page) {
    const holders = this.held.get(page);
    const noun = this.shown?.[0].hasSlots ? "slot" : "page";
    if (!holders) return `${noun} ${page}: free`;
    const names = [...(holders.node === null ? [] : [`node ${holders.node} of the cache`]), ...holders.requests];
    return `${noun} ${page}: ${names.join(", ")}`;
  }

  /** @param {State} state @param {Related|null} related */
  show(state, related) {
    this.shown = [state, related];
    const width = this.box.clientWidth;
    if (!width) return;
    const held = this.held = state.holders(), first = state.hasSlots ? 0 : 1; // page 0 is never handed out
    const count = Math.max(state.numPages + first, ...[...held.keys()].map(page => page + 1));
    this.size = Math.min(LARGEST, Math.max(SMALLEST, Math.floor(Math.sqrt(width * TALLEST / count))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const colour = colours(this.box), gap = this.size > 6 ? 2 : 1, side = this.size - gap;
    const pen = penOf(this.canvas, this.columns * this.size, Math.ceil(count / this.columns) * this.size);
    for (let page = 0; page < count; page++) {
      const x = page % this.columns * this.size, y = Math.floor(page / this.columns) * this.size, holders = held.get(page);
      pen.globalAlpha = related && !related.pages.has(page) ? 0.22 : 1;
      pen.fillStyle = colour.soft;
      if (holders) pen.fillStyle = holders.requests.length ? ownerColour(this.order.get(holders.requests[0]) ?? 0) : colour.waiting;
      pen.fillRect(x, y, side, side);
      pen.strokeStyle = colour.line;
      if (!holders) pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      if (holders && holders.requests.length > 1 && side > 4) { pen.fillStyle = colour.back; pen.fillRect(x + side / 2 - 2, y + side / 2 - 2, 4, 4); }
    }
    this.canvas.setAttribute("aria-label", `${held.size} of ${state.numPages} ${state.hasSlots ? "slots" : "pages"} are in use`);
  }

  close() { this.resized.disconnect(); }
}
