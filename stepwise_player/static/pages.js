// The pages of the KV memory (blocks, in m3), each in the colour of a request that holds it. A page that only the cache
// holds is grey; one that several requests hold has a mark. Only what is in sight is drawn: a GPU has millions of pages.

import {colours, make, ownerColour, penOf} from "./dom.js";

/** @typedef {import("./dom.js").Related} Related */
/** @typedef {import("./state.js").State} State */

const LARGEST = 22, SMALLEST = 4, TALLEST = 260; // pixels

export class PagesView {
  /** @param {HTMLElement} box @param {Map<string, number>} order Requests, in the order of arrival. @param {(page: number) => void} select */
  constructor(box, order, select) {
    this.box = box; this.order = order;
    this.canvas = make("canvas", {role: "img"});
    this.all = make("div", {}, this.canvas);
    box.replaceChildren(this.all);
    /** @type {[State, Related|null]|null} */
    this.shown = null;
    /** @type {ReturnType<State["holders"]>} */
    this.held = new Map();
    this.columns = this.size = 1;
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(box);
    const pageAt = (/** @type {MouseEvent} */ event) => Math.floor((event.offsetY + box.scrollTop) / this.size) * this.columns + Math.floor(event.offsetX / this.size);
    box.addEventListener("scroll", () => this.draw(), {passive: true});
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
    this.held = state.holders();
    this.canvas.setAttribute("aria-label", `${this.held.size} of ${state.numPages} ${state.hasSlots ? "slots" : "pages"} are in use`);
    this.draw();
  }

  draw() {
    const {box, held} = this, width = box.clientWidth;
    if (!width || !this.shown) return;
    const [{numPages, hasSlots}, related] = this.shown, count = numPages + (hasSlots ? 0 : 1); // page 0 is never handed out
    this.size = Math.min(LARGEST, Math.max(SMALLEST, Math.floor(Math.sqrt(width * TALLEST / count))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const height = Math.ceil(count / this.columns) * this.size;
    this.all.style.height = `${height}px`;
    const colour = colours(box), gap = this.size > 6 ? 2 : 1, side = this.size - gap, top = box.scrollTop, sight = Math.min(height, box.clientHeight);
    const pen = penOf(this.canvas, this.columns * this.size, sight);
    const first = Math.floor(top / this.size) * this.columns, end = Math.min(count, Math.ceil((top + sight) / this.size) * this.columns);
    for (let page = first; page < end; page++) {
      const x = page % this.columns * this.size, y = Math.floor(page / this.columns) * this.size - top, holders = held.get(page);
      pen.globalAlpha = related && !related.pages.has(page) ? 0.22 : 1;
      pen.fillStyle = colour.soft;
      if (holders) pen.fillStyle = holders.requests.length ? ownerColour(this.order.get(holders.requests[0]) ?? 0) : colour.waiting;
      pen.fillRect(x, y, side, side);
      pen.strokeStyle = colour.line;
      if (!holders) pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      if (holders && holders.requests.length > 1 && side > 4) { pen.fillStyle = colour.back; pen.fillRect(x + side / 2 - 2, y + side / 2 - 2, 4, 4); }
    }
  }

  close() { this.resized.disconnect(); }
}
